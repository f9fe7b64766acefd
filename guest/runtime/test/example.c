// SPDX-License-Identifier: Apache-2.0
/* Built as a program outside of this tree is: by pkg-config, from what is installed. */
#include <stdio.h>
#include <string.h>
#include <vnuma/vnuma.h>

int main(void)
{
	struct vnuma *v;
	int err = vnuma_open(&v);

	if (err) {
		fprintf(stderr, "no topology: %s\n", strerror(-err));
		return 1;
	}
	if (vnuma_source(v) == VNUMA_SOURCE_SYSFS)
		fprintf(stderr, "from sysfs: %s\n", vnuma_device_problem(v));
	printf("generation %llu, this thread is on node %d\n",
	       (unsigned long long)vnuma_generation(v), vnuma_current_node(v));
	vnuma_close(v);
	return 0;
}

// SPDX-License-Identifier: GPL-2.0
/*
 * channel.c as it is, over a file that is mapped: for tests of what writes it.
 * host/channel/tests/driver.rs builds and runs it.
 *
 *	channel-read FILE
 *
 * It executes lines of standard input and answers each with one line:
 *
 *	read		-> topology GENERATION DISTANCES APIC:NODE,... [ADDRESS:NODE,...]
 *			   | error ERROR REASON
 *	announce MODE	-> ok
 *	acknowledge	the topology that was read last -> ok
 *	refuse ERROR	likewise -> ok
 *	devices COUNT	that came or went -> ok
 *	leave		-> ok
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "../channel.c"

static struct vnuma_model topology;

/* The writer does nothing while this program executes a line. */
void usleep_range(unsigned long least, unsigned long most)
{
	(void)least;
	(void)most;
}

static void print_read(struct vnuma_channel *channel)
{
	struct vnuma_reason why = { .text = "" };
	int err = vnuma_channel_read(channel, &topology, &why);
	u32 i, j;

	if (err) {
		printf("error %d %s\n", err, why.text);
		return;
	}
	printf("topology %llu ", topology.generation);
	for (i = 0; i < topology.nr_nodes; i++)
		for (j = 0; j < topology.nr_nodes; j++)
			printf("%s%u", i || j ? "," : "", topology.distance[i][j]);
	for (i = 0; i < topology.nr_vcpus; i++)
		printf("%s%u:%u", i ? "," : " ", topology.vcpu[i].apic_id,
		       topology.vcpu[i].node);
	for (i = 0; i < topology.nr_devices; i++)
		printf("%s%08x:%u", i ? "," : " ",
		       vnuma_device_address(&topology.device[i]),
		       topology.device[i].node);
	printf("\n");
}

int main(int argc, char **argv)
{
	int fd = argc == 2 ? open(argv[1], O_RDWR) : -1;
	struct vnuma_channel channel = { 0 };
	struct stat status;
	char line[64];

	if (fd < 0 || fstat(fd, &status))
		return 2;
	channel.size = status.st_size;
	channel.base = mmap(NULL, channel.size, PROT_READ | PROT_WRITE,
			    MAP_SHARED, fd, 0);
	if (channel.base == MAP_FAILED)
		return 2;
	setvbuf(stdout, NULL, _IOLBF, 0);
	while (fgets(line, sizeof(line), stdin)) {
		if (!strncmp(line, "read", 4)) {
			print_read(&channel);
			continue;
		}
		if (!strncmp(line, "announce ", 9))
			vnuma_channel_announce(&channel, atoi(line + 9));
		else if (!strncmp(line, "acknowledge", 11))
			vnuma_channel_acknowledge(&channel, topology.generation);
		else if (!strncmp(line, "refuse ", 7))
			vnuma_channel_refuse(&channel, topology.generation,
					     atoi(line + 7));
		else if (!strncmp(line, "devices ", 8))
			vnuma_channel_count_devices(&channel, atoi(line + 8));
		else if (!strncmp(line, "leave", 5))
			vnuma_channel_leave(&channel);
		else
			return 2;
		printf("ok\n");
	}
	return 0;
}

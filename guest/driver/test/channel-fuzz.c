// SPDX-License-Identifier: GPL-2.0
/*
 * The reader of the topology channel, channel.c as it is, fed by libFuzzer. `make fuzz`
 * builds it, `cargo xtask fuzz driver-channel` runs it, and `make check` feeds it
 * what is in fuzz/corpus/driver-channel.
 *
 * An input is a list of patches of eleven bytes, a word each: when, which word, its
 * value. Those of time 0 are there before the reader starts, others appear when it
 * waits for the n-th time. The region is its own allocation, so that a read outside of
 * it is caught.
 */
#include "../channel.c"
#include "publication.h"

#define PATCH_SIZE	11
#define MAX_PATCHES	512

static const u8 *patches;
static size_t nr_patches;
static unsigned int waits;

static void apply_patches(void)
{
	size_t i;

	for (i = 0; i < nr_patches; i++) {
		const u8 *patch = patches + i * PATCH_SIZE;
		u16 word;

		if (patch[0] != waits)
			continue;
		memcpy(&word, patch + 1, sizeof(word));
		memcpy(region + word % (VNUMA_TC_REGION_SIZE / 8) * 8, patch + 3,
		       sizeof(u64));
	}
}

void usleep_range(unsigned long least, unsigned long most)
{
	(void)least;
	(void)most;
	waits++;
	apply_patches();
}

/* What the kernel log would get: one line that says why. */
static void expect_reason(int err, const struct vnuma_reason *why)
{
	size_t length = strnlen(why->text, sizeof(why->text)), i;

	expect(err == -ENODATA || err == -EAGAIN || err == -EPROTO ||
	       err == -EPROTONOSUPPORT || err == -EBADMSG);
	expect(length < sizeof(why->text));
	expect(length > 0 || err == -ENODATA);
	for (i = 0; i < length; i++)
		expect(why->text[i] >= ' ' && why->text[i] < 127);
}

int LLVMFuzzerTestOneInput(const u8 *data, size_t size);

int LLVMFuzzerTestOneInput(const u8 *data, size_t size)
{
	static struct vnuma_model topology;
	struct vnuma_reason why = { .text = "" };
	struct vnuma_channel channel;
	int err;

	if (!region)
		new_region();
	channel = (struct vnuma_channel){
		.base = region, .size = VNUMA_TC_REGION_SIZE,
	};
	patches = data;
	nr_patches = min(size / PATCH_SIZE, (size_t)MAX_PATCHES);
	waits = 0;
	reset_region();
	publish(1);
	apply_patches();
	err = vnuma_channel_read(&channel, &topology, &why);
	expect(waits <= VNUMA_TC_READ_RETRIES);
	if (err)
		expect_reason(err, &why);
	else
		expect_valid(&topology);
	expect(err == 0 || nr_patches);
	/* Answers lie within the region, wherever the header says. */
	vnuma_channel_announce(&channel, VNUMA_TC_MODE_FAST);
	vnuma_channel_acknowledge(&channel, topology.generation);
	vnuma_channel_refuse(&channel, topology.generation, err);
	vnuma_channel_count_devices(&channel, 1);
	vnuma_channel_leave(&channel);
	return 0;
}

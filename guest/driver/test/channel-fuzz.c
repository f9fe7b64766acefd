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

#define NR_NODES	4
#define NR_VCPUS	32
#define GENERATION	((7ULL << 32) | 1)
#define PATCH_SIZE	11
#define MAX_PATCHES	512

#define expect(condition)						\
do {									\
	if (!(condition)) {						\
		fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__,	\
			#condition);					\
		abort();						\
	}								\
} while (0)

static const u8 *patches;
static size_t nr_patches;
static unsigned int waits;
static u8 *region;

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

/* A header, and one publication. */
static void publish(void)
{
	struct vnuma_tc_header *header = (void *)region;
	struct vnuma_tc_slot *slot = (void *)(region + VNUMA_TC_SLOT1_OFFSET);
	int i, j;

	memset(region, 0, VNUMA_TC_REGION_SIZE);
	*header = (struct vnuma_tc_header){
		.magic = VNUMA_TC_MAGIC,
		.version_major = VNUMA_TC_VERSION_MAJOR,
		.header_size = sizeof(struct vnuma_tc_header),
		.region_size = VNUMA_TC_REGION_SIZE,
		.slot_size = sizeof(struct vnuma_tc_slot),
		.slot_offset = { VNUMA_TC_SLOT0_OFFSET, VNUMA_TC_SLOT1_OFFSET },
		.max_nodes = VNUMA_TC_MAX_NODES,
		.max_vcpus = VNUMA_TC_MAX_VCPUS,
		.published = GENERATION,
	};
	slot->generation = GENERATION;
	slot->nr_nodes = NR_NODES;
	slot->nr_vcpus = NR_VCPUS;
	for (i = 0; i < NR_NODES; i++)
		for (j = 0; j < NR_NODES; j++)
			slot->distance[i][j] = i == j ? 10 : 21;
	for (i = 0; i < NR_VCPUS; i++) {
		slot->vcpu[i].apic_id = 2 * (NR_VCPUS - i);
		slot->vcpu[i].node = i % NR_NODES;
	}
}

/* What the rest of the driver relies on. */
static void expect_valid(const struct vnuma_topology *topology)
{
	u32 i, j;

	expect(topology->generation);
	expect(topology->nr_nodes >= 1 &&
	       topology->nr_nodes <= VNUMA_TC_MAX_NODES);
	expect(topology->nr_vcpus >= 1 &&
	       topology->nr_vcpus <= VNUMA_TC_MAX_VCPUS);
	for (i = 0; i < topology->nr_vcpus; i++) {
		expect(topology->vcpu[i].node < topology->nr_nodes);
		expect(!i || topology->vcpu[i - 1].apic_id <
				     topology->vcpu[i].apic_id);
	}
	for (i = 0; i < topology->nr_nodes; i++)
		for (j = 0; j < topology->nr_nodes; j++)
			expect(i == j ? topology->distance[i][j] == 10 :
					topology->distance[i][j] >= 10);
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
	static struct vnuma_topology topology;
	struct vnuma_reason why = { .text = "" };
	struct vnuma_channel channel;
	int err;

	if (!region)
		region = aligned_alloc(4096, VNUMA_TC_REGION_SIZE);
	expect(region);
	channel = (struct vnuma_channel){
		.base = region, .size = VNUMA_TC_REGION_SIZE,
	};
	patches = data;
	nr_patches = min(size / PATCH_SIZE, (size_t)MAX_PATCHES);
	waits = 0;
	publish();
	apply_patches();
	err = vnuma_channel_read(&channel, &topology, &why);
	expect(waits <= VNUMA_TC_READ_RETRIES);
	if (err)
		expect_reason(err, &why);
	else
		expect_valid(&topology);
	expect(err == 0 || nr_patches);
	return 0;
}

// SPDX-License-Identifier: GPL-2.0
/*
 * The reader of the topology channel, channel.c as it is, in user space: every
 * refusal, tearing, random damage, and a writer at full speed. Built with the address
 * and undefined behaviour sanitizers by `make check`; the region is its own
 * allocation, so that a read outside of it is caught.
 */
#include <pthread.h>
#include <time.h>

#include "../channel.c"

#define NR_NODES	4
#define NR_VCPUS	32
#define EPOCH		7ULL

#define expect(condition)						\
do {									\
	if (!(condition)) {						\
		fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__,	\
			#condition);					\
		exit(1);						\
	}								\
} while (0)

static u8 *region;
static struct vnuma_channel channel;
static struct vnuma_topology topology;
static struct vnuma_reason why;

static unsigned int waits;
static void (*while_waiting)(void);

void usleep_range(unsigned long least, unsigned long most)
{
	(void)least;
	(void)most;
	waits++;
	if (while_waiting)
		while_waiting();
}

static struct vnuma_tc_header *header(void)
{
	return (void *)region;
}

static struct vnuma_tc_slot *slot(u64 generation)
{
	return (void *)(region + (generation & 1 ? VNUMA_TC_SLOT1_OFFSET :
						   VNUMA_TC_SLOT0_OFFSET));
}

/* As vnuma/topology_channel.h tells a writer; all vCPUs on one node. */
static void publish(u32 counter)
{
	u64 generation = EPOCH << 32 | counter;
	struct vnuma_tc_slot *s = slot(generation);
	int i, j;

	__atomic_store_n(&s->generation, 0, __ATOMIC_SEQ_CST);
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	s->nr_nodes = NR_NODES;
	s->nr_vcpus = NR_VCPUS;
	for (i = 0; i < NR_NODES; i++)
		for (j = 0; j < NR_NODES; j++)
			s->distance[i][j] = i == j ? 10 : 11 + counter % 200;
	for (i = 0; i < NR_VCPUS; i++) {
		s->vcpu[i].apic_id = 2 * (NR_VCPUS - i);
		s->vcpu[i].node = counter % NR_NODES;
	}
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	__atomic_store_n(&s->generation, generation, __ATOMIC_SEQ_CST);
	__atomic_store_n(&header()->published, generation, __ATOMIC_SEQ_CST);
}

static void reset(void)
{
	memset(region, 0, VNUMA_TC_REGION_SIZE);
	*header() = (struct vnuma_tc_header){
		.magic = VNUMA_TC_MAGIC,
		.version_major = VNUMA_TC_VERSION_MAJOR,
		.header_size = sizeof(struct vnuma_tc_header),
		.region_size = VNUMA_TC_REGION_SIZE,
		.slot_size = sizeof(struct vnuma_tc_slot),
		.slot_offset = { VNUMA_TC_SLOT0_OFFSET, VNUMA_TC_SLOT1_OFFSET },
		.max_nodes = VNUMA_TC_MAX_NODES,
		.max_vcpus = VNUMA_TC_MAX_VCPUS,
	};
	waits = 0;
	while_waiting = NULL;
}

static int read_channel(void)
{
	why.text[0] = 0;
	return vnuma_channel_read(&channel, &topology, &why);
}

/* What the rest of the driver relies on. */
static void expect_valid(void)
{
	u32 i, j;

	expect(topology.generation);
	expect(topology.nr_nodes >= 1 &&
	       topology.nr_nodes <= VNUMA_TC_MAX_NODES);
	expect(topology.nr_vcpus >= 1 &&
	       topology.nr_vcpus <= VNUMA_TC_MAX_VCPUS);
	for (i = 0; i < topology.nr_vcpus; i++) {
		expect(topology.vcpu[i].node < topology.nr_nodes);
		expect(!i || topology.vcpu[i - 1].apic_id <
				     topology.vcpu[i].apic_id);
	}
	for (i = 0; i < topology.nr_nodes; i++)
		for (j = 0; j < topology.nr_nodes; j++)
			expect(i == j ? topology.distance[i][j] == 10 :
					topology.distance[i][j] >= 10);
}

static void test_good(void)
{
	reset();
	expect(read_channel() == -ENODATA);
	publish(1);
	expect(read_channel() == 0);
	expect_valid();
	expect(topology.generation == (EPOCH << 32 | 1));
	expect(topology.nr_vcpus == NR_VCPUS);
	expect(topology.vcpu[0].apic_id == 2);
	publish(2);
	expect(read_channel() == 0);
	expect(topology.vcpu[0].node == 2);
	/* A newer minor version and unknown flags are of no concern. */
	header()->version_minor = 9;
	slot(2)->vcpu[0].flags = 0x8000;
	expect(read_channel() == 0);
}

static void test_limits(void)
{
	u32 i;

	reset();
	publish(1);
	slot(1)->nr_nodes = VNUMA_TC_MAX_NODES;
	slot(1)->nr_vcpus = VNUMA_TC_MAX_VCPUS;
	memset(slot(1)->distance, 255, sizeof(slot(1)->distance));
	for (i = 0; i < VNUMA_TC_MAX_NODES; i++)
		slot(1)->distance[i][i] = 10;
	for (i = 0; i < VNUMA_TC_MAX_VCPUS; i++) {
		slot(1)->vcpu[i].apic_id = 0xffffffff - i;
		slot(1)->vcpu[i].node = i % VNUMA_TC_MAX_NODES;
	}
	expect(read_channel() == 0);
	expect_valid();
}

/* @size bytes at @at become @value; the reader must say so with @field. */
static void refuse(void *at, size_t size, u64 value, int error,
		   const char *field)
{
	int err;

	memcpy(at, &value, size);
	err = read_channel();
	if (err != error || !strstr(why.text, field)) {
		fprintf(stderr, "%s = %#llx: %d \"%s\"\n", field,
			(unsigned long long)value, err, why.text);
		exit(1);
	}
	reset();
	publish(1);
}

static void test_refusals(void)
{
	struct vnuma_tc_header *h = header();
	struct vnuma_tc_slot *s = slot(1);

	reset();
	publish(1);
	refuse(&h->magic, 8, 1, -EPROTO, "magic");
	refuse(&h->version_major, 2, 2, -EPROTONOSUPPORT, "version");
	refuse(&h->header_size, 4, 127, -EPROTO, "header_size");
	refuse(&h->region_size, 4, ~0u, -EPROTO, "region_size");
	refuse(&h->slot_size, 4, 0, -EPROTO, "slot_size");
	refuse(&h->max_nodes, 4, 65, -EPROTO, "max_nodes");
	refuse(&h->max_vcpus, 4, 4097, -EPROTO, "max_vcpus");
	refuse(&h->slot_offset[0], 4, 120, -EPROTO, "slot_offset[0]");
	refuse(&h->slot_offset[0], 4, 4097, -EPROTO, "slot_offset[0]");
	refuse(&h->slot_offset[1], 4, VNUMA_TC_REGION_SIZE, -EPROTO,
	       "slot_offset[1]");
	refuse(&h->slot_offset[1], 4, 0xfffffff8, -EPROTO, "slot_offset[1]");
	refuse(&h->slot_offset[1], 4, VNUMA_TC_SLOT0_OFFSET, -EPROTO,
	       "overlap");
	refuse(&s->nr_nodes, 4, 0, -EBADMSG, "nr_nodes");
	refuse(&s->nr_nodes, 4, 65, -EBADMSG, "nr_nodes");
	refuse(&s->nr_vcpus, 4, 0, -EBADMSG, "nr_vcpus");
	refuse(&s->nr_vcpus, 4, 4097, -EBADMSG, "nr_vcpus");
	refuse(&s->nr_vcpus, 4, ~0u, -EBADMSG, "nr_vcpus");
	refuse(&s->vcpu[3].node, 2, NR_NODES, -EBADMSG, "vcpu[3]");
	refuse(&s->vcpu[3].apic_id, 4, s->vcpu[9].apic_id, -EBADMSG, "twice");
	refuse(&s->distance[1][1], 1, 11, -EBADMSG, "distance[1][1]");
	refuse(&s->distance[2][0], 1, 9, -EBADMSG, "distance[2][0]");
}

static void finish_writing(void)
{
	if (waits == 3)
		publish(2);
}

static void test_torn(void)
{
	reset();
	publish(1);
	slot(1)->generation = 0;
	expect(read_channel() == -EAGAIN);
	expect(waits == VNUMA_TC_READ_RETRIES);
	expect(strstr(why.text, "torn"));

	waits = 0;
	while_waiting = finish_writing;
	expect(read_channel() == 0);
	expect(waits == 3);
	expect(topology.generation == (EPOCH << 32 | 2));
}

/* Whatever is in the region: an error, or a topology that is valid. */
static void test_damage(unsigned int seed)
{
	unsigned int round, hits, accepted = 0;

	srandom(seed);
	for (round = 0; round < 20000; round++) {
		reset();
		publish(1);
		for (hits = random() % 4; hits; hits--) {
			/* The header, or the slot's start and first vCPUs. */
			size_t at = random() % sizeof(struct vnuma_tc_header);

			if (random() % 2)
				at = VNUMA_TC_SLOT1_OFFSET + random() % 128;
			else if (random() % 2)
				at = VNUMA_TC_SLOT1_OFFSET + 4160 +
				     random() % (8 * NR_VCPUS);
			region[at] = random();
		}
		if (!read_channel()) {
			expect_valid();
			accepted++;
		}
	}
	expect(accepted && accepted < round);
}

static bool stop;

static void *write_without_pause(void *unused)
{
	u32 counter = 1;

	(void)unused;
	while (!__atomic_load_n(&stop, __ATOMIC_RELAXED))
		publish(++counter);
	return NULL;
}

/* Every topology that is read is one that was published, never a mixture. */
static void test_race(void)
{
	unsigned int reads = 0, good = 0, i;
	time_t end = time(NULL) + 2;
	pthread_t writer;

	reset();
	publish(1);
	expect(!pthread_create(&writer, NULL, write_without_pause, NULL));
	while (time(NULL) <= end) {
		u32 counter;
		int err = read_channel();

		reads++;
		expect(!err || err == -EAGAIN);
		if (err)
			continue;
		good++;
		counter = topology.generation;
		expect(topology.distance[0][1] == 11 + counter % 200);
		for (i = 0; i < topology.nr_vcpus; i++)
			expect(topology.vcpu[i].node == counter % NR_NODES);
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
	pthread_join(writer, NULL);
	expect(good);
	printf("race: %u of %u reads whole\n", good, reads);
}

int main(int argc, char **argv)
{
	unsigned int seed = argc > 1 ? atoi(argv[1]) : time(NULL);

	region = aligned_alloc(4096, VNUMA_TC_REGION_SIZE);
	expect(region);
	channel.base = region;
	channel.size = VNUMA_TC_REGION_SIZE;
	printf("seed %u\n", seed);
	expect(!vnuma_channel_has_magic(&(struct vnuma_channel){
		.base = (u8[4096]){ 0 }, .size = 4096 }));
	test_good();
	test_limits();
	test_refusals();
	test_torn();
	test_damage(seed);
	test_race();
	free(region);
	printf("ok\n");
	return 0;
}

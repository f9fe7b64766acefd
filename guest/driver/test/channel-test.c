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
#include "publication.h"

static struct vnuma_channel channel;
static struct vnuma_model topology;
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

static void reset(void)
{
	reset_region();
	channel.guest_offset = 0;
	waits = 0;
	while_waiting = NULL;
}

static int read_channel(void)
{
	why.text[0] = 0;
	return vnuma_channel_read(&channel, &topology, &why);
}

static void test_good(void)
{
	reset();
	expect(read_channel() == -ENODATA);
	publish(1);
	expect(read_channel() == 0);
	expect_valid(&topology);
	expect(topology.generation == (EPOCH << 32 | 1));
	expect(topology.nr_vcpus == NR_VCPUS);
	expect(topology.vcpu[0].apic_id == 2);
	expect(topology.nr_devices == NR_DEVICES && topology.device[0].bus == 1);
	expect(topology.device[0].devfn == 0x11 && topology.device[0].node == 1);
	publish(2);
	expect(read_channel() == 0);
	expect(topology.vcpu[0].node == 2);
}

/* The largest topology, written by hand behind the counts. */
static void test_limits(void)
{
	const u32 matrix = VNUMA_TC_MAX_NODES * VNUMA_TC_MAX_NODES;
	struct publication *p = publication(1);
	struct vnuma_tc_vcpus *vcpus;
	struct vnuma_tc_vcpu *vcpu;
	struct vnuma_tc_devices *devices;
	struct vnuma_tc_device *device;
	u32 i;

	reset();
	publish(1);
	p->nodes.nr_nodes = VNUMA_TC_MAX_NODES;
	p->nodes.section.length = sizeof(p->nodes) + matrix;
	memset(&p->nodes + 1, 255, matrix);
	for (i = 0; i < VNUMA_TC_MAX_NODES; i++)
		((u8 *)(&p->nodes + 1))[i * (VNUMA_TC_MAX_NODES + 1)] = 10;
	vcpus = (void *)&p->nodes + p->nodes.section.length;
	vcpu = (void *)(vcpus + 1);
	*vcpus = (struct vnuma_tc_vcpus){
		.section = { .kind = VNUMA_TC_SECTION_VCPUS, .version = 1, .compatible = 1,
			     .length = sizeof(*vcpus) + VNUMA_TC_MAX_VCPUS * sizeof(*vcpu) },
		.nr_vcpus = VNUMA_TC_MAX_VCPUS,
		.vcpu_offset = sizeof(*vcpus),
		.vcpu_size = sizeof(*vcpu),
	};
	for (i = 0; i < VNUMA_TC_MAX_VCPUS; i++) {
		vcpu[i].apic_id = 0xffffffff - i;
		vcpu[i].node = i % VNUMA_TC_MAX_NODES;
	}
	devices = (void *)(vcpu + VNUMA_TC_MAX_VCPUS);
	device = (void *)(devices + 1);
	*devices = (struct vnuma_tc_devices){
		.section = { .kind = VNUMA_TC_SECTION_DEVICES, .version = 1, .compatible = 1,
			     .length = sizeof(*devices) + VNUMA_TC_MAX_DEVICES * sizeof(*device) },
		.nr_devices = VNUMA_TC_MAX_DEVICES,
		.device_offset = sizeof(*devices),
		.device_size = sizeof(*device),
	};
	for (i = 0; i < VNUMA_TC_MAX_DEVICES; i++)
		device[i] = (struct vnuma_tc_device){
			.segment = 0xffff, .bus = 0xff - i, .devfn = i,
			.node = VNUMA_TC_MAX_NODES - 1,
		};
	p->slot.length = (u8 *)(device + VNUMA_TC_MAX_DEVICES) - (u8 *)p;
	expect(read_channel() == 0);
	expect_valid(&topology);
	expect(topology.nr_devices == VNUMA_TC_MAX_DEVICES);
	expect(topology.nr_nodes == VNUMA_TC_MAX_NODES);
	expect(topology.nr_vcpus == VNUMA_TC_MAX_VCPUS);
}

/* A section that no driver of today knows, of 24 bytes, before the others. */
static struct vnuma_tc_section *insert_section(u16 compatible, u16 flags)
{
	struct publication *p = publication(1);
	struct vnuma_tc_section *section = (void *)&p->nodes;

	reset();
	publish(1);
	memmove((u8 *)section + 24, section, sizeof(*p) - sizeof(p->slot));
	*section = (struct vnuma_tc_section){
		.kind = 0x7001, .version = 3, .compatible = compatible,
		.flags = flags, .length = 24,
	};
	p->slot.length += 24;
	p->slot.nr_sections++;
	return section;
}

static void test_newer_host(void)
{
	struct publication *p = publication(1);
	struct { struct vnuma_tc_vcpu vcpu; u64 later; } large[NR_VCPUS];
	int i;

	insert_section(1, 0);
	expect(read_channel() == 0 && topology.nr_vcpus == NR_VCPUS);
	insert_section(1, VNUMA_TC_SECTION_REQUIRED);
	expect(read_channel() == -EPROTONOSUPPORT);
	expect(strstr(why.text, "kind 28673, version 3"));

	/* A longer header, and flags and fields that are reserved. */
	reset();
	publish(1);
	header()->header_size = VNUMA_TC_GUEST_OFFSET;
	header()->reserved2[0] = ~0ULL;
	p->nodes.section.flags = 0x8000;
	expect(read_channel() == 0);

	/* Version 2 of a section that is supported: with a field more, then with larger elements. */
	reset();
	publish(1);
	p->nodes.section.version = 2;
	p->nodes.distance_offset += 8;
	p->nodes.section.length += 8;
	memmove((u8 *)(&p->nodes + 1) + 8, &p->nodes + 1,
		sizeof(*p) - offsetof(struct publication, distance));
	p->slot.length += 8;
	expect(read_channel() == 0);
	expect(topology.distance[1][1] == 10 && topology.distance[1][2] == 12);

	reset();
	publish(1);
	for (i = 0; i < NR_VCPUS; i++) {
		large[i].vcpu = p->vcpu[i];
		large[i].later = ~0ULL;
	}
	memcpy(p->vcpu, large, sizeof(large));
	p->vcpus.section.version = 2;
	p->vcpus.vcpu_size = sizeof(large[0]);
	p->vcpus.section.length = sizeof(p->vcpus) + sizeof(large);
	p->slot.length = offsetof(struct publication, vcpu) + sizeof(large);
	p->slot.nr_sections = 2;
	expect(read_channel() == 0);
	expect_valid(&topology);
	expect(topology.vcpu[0].apic_id == 2 && topology.vcpu[0].node == 1);

	/* One that no older reader may read. */
	reset();
	publish(1);
	p->vcpus.section.version = 2;
	p->vcpus.section.compatible = 2;
	expect(read_channel() == -EBADMSG && strstr(why.text, "no section vcpus"));
	p->vcpus.section.flags = VNUMA_TC_SECTION_REQUIRED;
	expect(read_channel() == -EPROTONOSUPPORT && strstr(why.text, "kind 2"));
}

/* Such a host says nothing of devices. */
static void test_host_without_devices(void)
{
	struct publication *p = publication(1);

	reset();
	publish(1);
	p->slot.nr_sections = 2;
	p->slot.length = offsetof(struct publication, devices);
	expect(read_channel() == 0);
	expect(!topology.has_devices && !topology.nr_devices);
	/* A host that knows of none. */
	reset();
	publish(1);
	p->devices.nr_devices = 0;
	expect(read_channel() == 0);
	expect(topology.has_devices && !topology.nr_devices);
}

/* What a later driver does with a section: its struct has a field that an older host lacks. */
static void test_older_host(void)
{
	struct { struct vnuma_tc_section head; u64 first, later; } newer;
	struct section section = { .channel = &channel };

	insert_section(1, 0);
	section.at = offsetof(struct publication, nodes) + VNUMA_TC_SLOT1_OFFSET;
	memcpy(region + section.at + 16, &(u64){ 5 }, 8);
	copy_in(&channel, &section.head, section.at, sizeof(section.head));
	memset(&newer, 0xff, sizeof(newer));
	copy_struct(&section, &newer, sizeof(newer));
	expect(newer.first == 5 && newer.later == 0);
}

static struct vnuma_tc_guest *guest(void)
{
	return (void *)(region + VNUMA_TC_GUEST_OFFSET);
}

static void test_answers(void)
{
	struct vnuma_tc_guest *g = guest();

	reset();
	expect(!vnuma_channel_announce(&channel, VNUMA_TC_MODE_FAST));
	vnuma_channel_acknowledge(&channel, 1);
	vnuma_channel_refuse(&channel, 1, -EINVAL);
	vnuma_channel_leave(&channel);
	expect(!g->magic && !g->acknowledged && !g->refused);

	publish(1);
	expect(read_channel() == 0);
	expect(vnuma_channel_announce(&channel, VNUMA_TC_MODE_SAFE));
	expect(g->magic == VNUMA_TC_GUEST_MAGIC && g->mode == VNUMA_TC_MODE_SAFE);
	expect(g->driver_version == VNUMA_DRIVER_VERSION && g->nr_supported == 3);
	expect(g->supported[0].kind == VNUMA_TC_SECTION_NODES && g->supported[0].version == 1);
	expect(g->supported[1].kind == VNUMA_TC_SECTION_VCPUS);
	expect(g->supported[2].kind == VNUMA_TC_SECTION_DEVICES && g->supported[3].kind == 0);
	expect(!g->device_changes);
	vnuma_channel_count_devices(&channel, 5);
	expect(g->device_changes == 5);
	vnuma_channel_acknowledge(&channel, topology.generation);
	vnuma_channel_refuse(&channel, EPOCH << 32 | 2, -EOPNOTSUPP);
	expect(g->acknowledged == (EPOCH << 32 | 1));
	expect(g->refused == (EPOCH << 32 | 2) && g->refused_error == -EOPNOTSUPP);
	/* A driver that comes later has done nothing yet. */
	expect(vnuma_channel_announce(&channel, VNUMA_TC_MODE_FAST));
	expect(!g->acknowledged && !g->refused && g->mode == VNUMA_TC_MODE_FAST);
	vnuma_channel_leave(&channel);
	expect(!g->magic);
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
	struct publication *p = publication(1);

	reset();
	publish(1);
	refuse(&h->magic, 8, 1, -EPROTO, "magic");
	refuse(&h->layout, 2, 3, -EPROTONOSUPPORT, "layout is 3");
	refuse(&h->header_size, 4, 191, -EPROTO, "header_size");
	refuse(&h->header_size, 4, ~0u, -EPROTO, "guest_offset");
	refuse(&h->region_size, 4, ~0u, -EPROTO, "region_size");
	refuse(&h->region_size, 4, 0x41000, -EPROTO, "slot_offset[1]");
	refuse(&h->slot_size, 4, 15, -EPROTO, "slot_offset[0] has 15");
	refuse(&h->slot_size, 4, ~0u, -EPROTO, "slot_offset[0]");
	refuse(&h->guest_size, 4, 191, -EPROTO, "guest_offset has 191");
	refuse(&h->guest_offset, 4, 0, -EPROTO, "guest_offset");
	refuse(&h->guest_offset, 4, VNUMA_TC_SLOT1_OFFSET, -EPROTO, "overlap");
	refuse(&h->slot_offset[0], 4, 120, -EPROTO, "slot_offset[0]");
	refuse(&h->slot_offset[0], 4, 0x2001, -EPROTO, "slot_offset[0]");
	refuse(&h->slot_offset[1], 4, VNUMA_TC_REGION_SIZE, -EPROTO,
	       "slot_offset[1]");
	refuse(&h->slot_offset[1], 4, 0xfffffff8, -EPROTO, "slot_offset[1]");
	refuse(&h->slot_offset[1], 4, VNUMA_TC_SLOT0_OFFSET, -EPROTO,
	       "overlap");
	refuse(&p->slot.length, 4, 15, -EBADMSG, "slot length is 15");
	refuse(&p->slot.length, 4, VNUMA_TC_SLOT_SIZE + 8, -EBADMSG, "slot length");
	refuse(&p->slot.length, 4, sizeof(*p) - 8, -EBADMSG, "section[2]");
	refuse(&p->slot.length, 4, sizeof(p->slot), -EBADMSG, "section[0] of 3");
	refuse(&p->slot.nr_sections, 4, 65, -EBADMSG, "nr_sections is 65");
	refuse(&p->slot.nr_sections, 4, 4, -EBADMSG, "section[3] of 4");
	refuse(&p->slot.nr_sections, 4, 1, -EBADMSG, "no section vcpus");
	refuse(&p->slot.nr_sections, 4, 0, -EBADMSG, "no section nodes");
	refuse(&p->nodes.section.length, 4, 0, -EBADMSG, "has length 0");
	refuse(&p->nodes.section.length, 4, 44, -EBADMSG, "has length 44");
	refuse(&p->nodes.section.length, 4, ~7u, -EBADMSG, "has length");
	refuse(&p->nodes.section.length, 4, 16, -EBADMSG, "nr_nodes is 0");
	refuse(&p->nodes.section.length, 4, 24, -EBADMSG, "distance_offset is 24");
	refuse(&p->nodes.distance_offset, 4, 15, -EBADMSG, "distance_offset is 15");
	refuse(&p->nodes.distance_offset, 4, 25, -EBADMSG, "distance_offset is 25");
	refuse(&p->nodes.distance_offset, 4, ~0u, -EBADMSG, "distance_offset");
	refuse(&p->nodes.nr_nodes, 4, 0, -EBADMSG, "nr_nodes");
	refuse(&p->nodes.nr_nodes, 4, 65, -EBADMSG, "nr_nodes");
	refuse(&p->nodes.nr_nodes, 4, 5, -EBADMSG, "distance_offset");
	refuse(&p->vcpus.section.kind, 2, VNUMA_TC_SECTION_NODES, -EBADMSG, "twice");
	refuse(&p->vcpus.section.kind, 2, 0x7001, -EBADMSG, "no section vcpus");
	refuse(&p->vcpus.nr_vcpus, 4, 0, -EBADMSG, "nr_vcpus");
	refuse(&p->vcpus.nr_vcpus, 4, 4097, -EBADMSG, "nr_vcpus");
	refuse(&p->vcpus.nr_vcpus, 4, ~0u, -EBADMSG, "nr_vcpus");
	refuse(&p->vcpus.nr_vcpus, 4, NR_VCPUS + 1, -EBADMSG, "vcpu_offset");
	refuse(&p->vcpus.vcpu_offset, 4, 8, -EBADMSG, "vcpu_offset is 8");
	refuse(&p->vcpus.vcpu_offset, 4, 36, -EBADMSG, "vcpu_offset is 36");
	refuse(&p->vcpus.vcpu_offset, 4, ~7u, -EBADMSG, "vcpu_offset");
	refuse(&p->vcpus.vcpu_size, 4, 0, -EBADMSG, "vcpu_size is 0");
	refuse(&p->vcpus.vcpu_size, 4, 12, -EBADMSG, "vcpu_size is 12");
	refuse(&p->vcpus.vcpu_size, 4, 16, -EBADMSG, "32 of 16 bytes");
	refuse(&p->vcpus.vcpu_size, 4, ~7u, -EBADMSG, "vcpu_offset");
	refuse(&p->vcpu[3].node, 4, NR_NODES, -EBADMSG, "vcpu[3]");
	refuse(&p->vcpu[3].node, 4, 0x10000, -EBADMSG, "vcpu[3]");
	refuse(&p->vcpu[3].apic_id, 4, p->vcpu[9].apic_id, -EBADMSG, "APIC id");
	refuse(&p->vcpus.section.kind, 2, VNUMA_TC_SECTION_DEVICES, -EBADMSG, "devices occurs twice");
	refuse(&p->devices.section.kind, 2, VNUMA_TC_SECTION_VCPUS, -EBADMSG, "vcpus occurs twice");
	refuse(&p->devices.section.length, 4, 16, -EBADMSG, "device_size is 0");
	refuse(&p->devices.nr_devices, 4, 257, -EBADMSG, "nr_devices is 257");
	refuse(&p->devices.nr_devices, 4, ~0u, -EBADMSG, "nr_devices");
	refuse(&p->devices.nr_devices, 4, NR_DEVICES + 1, -EBADMSG, "device_offset");
	refuse(&p->devices.device_offset, 4, 8, -EBADMSG, "device_offset is 8");
	refuse(&p->devices.device_offset, 4, 36, -EBADMSG, "device_offset is 36");
	refuse(&p->devices.device_offset, 4, ~7u, -EBADMSG, "device_offset");
	refuse(&p->devices.device_size, 4, 0, -EBADMSG, "device_size is 0");
	refuse(&p->devices.device_size, 4, 12, -EBADMSG, "device_size is 12");
	refuse(&p->devices.device_size, 4, 16, -EBADMSG, "3 of 16 bytes");
	refuse(&p->devices.device_size, 4, ~7u, -EBADMSG, "device_offset");
	refuse(&p->device[1].node, 4, NR_NODES, -EBADMSG, "device[1] (0000:02:02.1)");
	refuse(&p->device[1].bus, 1, p->device[0].bus, -EBADMSG, "0000:03:02.1 is named twice");
	refuse(&p->distance[1][1], 1, 11, -EBADMSG, "distance[1][1]");
	refuse(&p->distance[2][0], 1, 9, -EBADMSG, "distance[2][0]");
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
	publication(1)->slot.generation = 0;
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
			/* The header, the start of the slot, or all of the publication. */
			size_t at = random() % sizeof(struct vnuma_tc_header);

			if (random() % 2)
				at = VNUMA_TC_SLOT1_OFFSET + random() % 128;
			else if (random() % 2)
				at = VNUMA_TC_SLOT1_OFFSET +
				     random() % sizeof(struct publication);
			region[at] = random();
		}
		if (!read_channel()) {
			expect_valid(&topology);
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
		for (i = 0; i < topology.nr_devices; i++)
			expect(topology.device[i].node == counter % NR_NODES);
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
	pthread_join(writer, NULL);
	expect(good);
	printf("race: %u of %u reads whole\n", good, reads);
}

int main(int argc, char **argv)
{
	unsigned int seed = argc > 1 ? atoi(argv[1]) : time(NULL);

	new_region();
	channel.base = region;
	channel.size = VNUMA_TC_REGION_SIZE;
	printf("seed %u\n", seed);
	expect(!vnuma_channel_has_magic(&(struct vnuma_channel){
		.base = (u8[4096]){ 0 }, .size = 4096 }));
	test_good();
	test_limits();
	test_newer_host();
	test_older_host();
	test_host_without_devices();
	test_answers();
	test_refusals();
	test_torn();
	test_damage(seed);
	test_race();
	free(region);
	printf("ok\n");
	return 0;
}

/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A region of the topology channel with its header, and one publication, for the
 * tests of channel.c. Include it after channel.c.
 */
#ifndef VNUMA_TEST_PUBLICATION_H
#define VNUMA_TEST_PUBLICATION_H

#define NR_NODES	4
#define NR_VCPUS	32
#define NR_DEVICES	3
#define EPOCH		7ULL

#define expect(condition)						\
do {									\
	if (!(condition)) {						\
		fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__,	\
			#condition);					\
		abort();						\
	}								\
} while (0)

/* Sections of the largest size, one behind the other. */
struct publication {
	struct vnuma_tc_slot slot;
	struct vnuma_tc_nodes nodes;
	u8 distance[NR_NODES][NR_NODES];
	struct vnuma_tc_vcpus vcpus;
	struct vnuma_tc_vcpu vcpu[NR_VCPUS];
	struct vnuma_tc_devices devices;
	struct vnuma_tc_device device[NR_DEVICES];
};

static u8 *region;

static struct vnuma_tc_header *header(void)
{
	return (void *)region;
}

static struct publication *publication(u64 generation)
{
	return (void *)(region + (generation & 1 ? VNUMA_TC_SLOT1_OFFSET :
						   VNUMA_TC_SLOT0_OFFSET));
}

static void new_region(void)
{
	region = aligned_alloc(4096, VNUMA_TC_REGION_SIZE);
	expect(region);
}

static void reset_region(void)
{
	memset(region, 0, VNUMA_TC_REGION_SIZE);
	*header() = (struct vnuma_tc_header){
		.magic = VNUMA_TC_MAGIC,
		.layout = VNUMA_TC_LAYOUT,
		.header_size = sizeof(struct vnuma_tc_header),
		.region_size = VNUMA_TC_REGION_SIZE,
		.slot_size = VNUMA_TC_SLOT_SIZE,
		.slot_offset = { VNUMA_TC_SLOT0_OFFSET, VNUMA_TC_SLOT1_OFFSET },
		.guest_offset = VNUMA_TC_GUEST_OFFSET,
		.guest_size = VNUMA_TC_GUEST_SIZE,
	};
}

/* As vnuma/topology_channel.h describes a writer; all vCPUs on one node. */
static void publish(u32 counter)
{
	u64 generation = EPOCH << 32 | counter;
	struct publication *p = publication(generation);
	int i, j;

	__atomic_store_n(&p->slot.generation, 0, __ATOMIC_SEQ_CST);
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	p->slot.length = sizeof(*p);
	p->slot.nr_sections = 3;
	p->nodes = (struct vnuma_tc_nodes){
		.section = { .kind = VNUMA_TC_SECTION_NODES, .version = 1, .compatible = 1,
			     .length = sizeof(p->nodes) + sizeof(p->distance) },
		.nr_nodes = NR_NODES,
		.distance_offset = sizeof(p->nodes),
	};
	p->vcpus = (struct vnuma_tc_vcpus){
		.section = { .kind = VNUMA_TC_SECTION_VCPUS, .version = 1, .compatible = 1,
			     .length = sizeof(p->vcpus) + sizeof(p->vcpu) },
		.nr_vcpus = NR_VCPUS,
		.vcpu_offset = sizeof(p->vcpus),
		.vcpu_size = sizeof(p->vcpu[0]),
	};
	p->devices = (struct vnuma_tc_devices){
		.section = { .kind = VNUMA_TC_SECTION_DEVICES, .version = 1, .compatible = 1,
			     .length = sizeof(p->devices) + sizeof(p->device) },
		.nr_devices = NR_DEVICES,
		.device_offset = sizeof(p->devices),
		.device_size = sizeof(p->device[0]),
	};
	for (i = 0; i < NR_DEVICES; i++)
		p->device[i] = (struct vnuma_tc_device){
			.bus = NR_DEVICES - i,
			.devfn = 2 << 3 | 1,
			.node = counter % NR_NODES,
		};
	for (i = 0; i < NR_NODES; i++)
		for (j = 0; j < NR_NODES; j++)
			p->distance[i][j] = i == j ? 10 : 11 + counter % 200;
	for (i = 0; i < NR_VCPUS; i++) {
		p->vcpu[i].apic_id = 2 * (NR_VCPUS - i);
		p->vcpu[i].node = counter % NR_NODES;
	}
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	__atomic_store_n(&p->slot.generation, generation, __ATOMIC_SEQ_CST);
	__atomic_store_n(&header()->published, generation, __ATOMIC_SEQ_CST);
}

/* What the rest of the driver relies on. */
static void expect_valid(const struct vnuma_model *topology)
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
	expect(topology->nr_devices <= VNUMA_TC_MAX_DEVICES);
	expect(topology->has_devices || !topology->nr_devices);
	for (i = 0; i < topology->nr_devices; i++) {
		expect(topology->device[i].node < topology->nr_nodes);
		expect(!i || vnuma_device_address(&topology->device[i - 1]) <
				     vnuma_device_address(&topology->device[i]));
	}
	for (i = 0; i < topology->nr_nodes; i++)
		for (j = 0; j < topology->nr_nodes; j++)
			expect(i == j ? topology->distance[i][j] == 10 :
					topology->distance[i][j] >= 10);
}

#endif /* VNUMA_TEST_PUBLICATION_H */

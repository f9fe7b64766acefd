// SPDX-License-Identifier: GPL-2.0
/*
 * The reader of the topology channel.
 *
 * The host can change the shared memory at any time, also between two loads of
 * the same field. So everything is copied first and only the copy is looked at; a
 * value of the copy is an index or a size only after it was compared with its
 * bound. See vnuma/topology_channel.h for the layout and the protocol.
 */
#include <linux/delay.h>
#include <linux/errno.h>
#include <linux/sort.h>
#include <linux/string.h>

#include "vnuma.h"

/* Longer than a writer takes to fill a slot, so that few tries are enough. */
#define RETRY_DELAY_US	50

static u64 load_u64(const struct vnuma_channel *channel, size_t offset)
{
	/* Pairs with the release of the host: what it announces is visible. */
	return smp_load_acquire((const u64 *)(channel->base + offset));
}

/**
 * vnuma_channel_has_magic - is this memory a topology channel?
 * @channel: mapped memory of a device whose id other uses of ivshmem share
 */
bool vnuma_channel_has_magic(const struct vnuma_channel *channel)
{
	return load_u64(channel, offsetof(struct vnuma_tc_header, magic)) ==
	       VNUMA_TC_MAGIC;
}

/**
 * vnuma_channel_generation - the generation that is published now, 0 if none
 * @channel: the shared memory
 */
u64 vnuma_channel_generation(const struct vnuma_channel *channel)
{
	return load_u64(channel, offsetof(struct vnuma_tc_header, published));
}

static int check_u32(const char *field, u32 value, u32 expected,
		     struct vnuma_reason *why)
{
	if (value == expected)
		return 0;
	return vnuma_fail(why, -EPROTO, "header %s is %u, not %u", field,
			  value, expected);
}

static int check_slot_offsets(const struct vnuma_tc_header *header,
			      size_t mapped, struct vnuma_reason *why)
{
	const u32 size = sizeof(struct vnuma_tc_slot);
	u32 low = min(header->slot_offset[0], header->slot_offset[1]);
	u32 high = max(header->slot_offset[0], header->slot_offset[1]);
	int i;

	for (i = 0; i < 2; i++) {
		u32 offset = header->slot_offset[i];

		if (offset < sizeof(*header) || offset % 8 ||
		    offset > mapped - size)
			return vnuma_fail(why, -EPROTO,
					  "header slot_offset[%d] is %#x, outside of the region or not aligned",
					  i, offset);
	}
	if (high - low < size)
		return vnuma_fail(why, -EPROTO,
				  "header slots at %#x and %#x overlap",
				  low, high);
	return 0;
}

/* A major version fixes every size, so that each has one right value. */
static int check_header(const struct vnuma_tc_header *header, size_t mapped,
			struct vnuma_reason *why)
{
	int err;

	if (header->magic != VNUMA_TC_MAGIC)
		return vnuma_fail(why, -EPROTO, "header magic is %#llx",
				  header->magic);
	if (header->version_major != VNUMA_TC_VERSION_MAJOR)
		return vnuma_fail(why, -EPROTONOSUPPORT,
				  "header version is %u.%u, this driver knows %u",
				  header->version_major,
				  header->version_minor,
				  VNUMA_TC_VERSION_MAJOR);
	err = check_u32("header_size", header->header_size, sizeof(*header),
			why);
	if (!err)
		err = check_u32("region_size", header->region_size,
				VNUMA_TC_REGION_SIZE, why);
	if (!err)
		err = check_u32("slot_size", header->slot_size,
				sizeof(struct vnuma_tc_slot), why);
	if (!err)
		err = check_u32("max_nodes", header->max_nodes,
				VNUMA_TC_MAX_NODES, why);
	if (!err)
		err = check_u32("max_vcpus", header->max_vcpus,
				VNUMA_TC_MAX_VCPUS, why);
	if (!err)
		err = check_slot_offsets(header, mapped, why);
	return err;
}

static int compare_vcpus(const void *a, const void *b)
{
	u32 left = ((const struct vnuma_tc_vcpu *)a)->apic_id;
	u32 right = ((const struct vnuma_tc_vcpu *)b)->apic_id;

	return left < right ? -1 : left > right;
}

static int check_vcpus(struct vnuma_topology *topology,
		       struct vnuma_reason *why)
{
	struct vnuma_tc_vcpu *vcpu = topology->vcpu;
	u32 i;

	for (i = 0; i < topology->nr_vcpus; i++)
		if (vcpu[i].node >= topology->nr_nodes)
			return vnuma_fail(why, -EBADMSG,
					  "vcpu[%u] (APIC id %u) is on node %u of %u",
					  i, vcpu[i].apic_id, vcpu[i].node,
					  topology->nr_nodes);

	sort(vcpu, topology->nr_vcpus, sizeof(*vcpu), compare_vcpus, NULL);
	for (i = 1; i < topology->nr_vcpus; i++)
		if (vcpu[i].apic_id == vcpu[i - 1].apic_id)
			return vnuma_fail(why, -EBADMSG,
					  "APIC id %u is named twice",
					  vcpu[i].apic_id);
	return 0;
}

/*
 * Two guest nodes can have one home, so 10 is valid between different nodes. The
 * kernel has narrower needs, see obstacle() of distances.c.
 */
static int check_distances(const struct vnuma_topology *topology,
			   struct vnuma_reason *why)
{
	u32 from, to;

	for (from = 0; from < topology->nr_nodes; from++) {
		for (to = 0; to < topology->nr_nodes; to++) {
			u8 distance = topology->distance[from][to];

			if (from == to ? distance == VNUMA_TC_DISTANCE_LOCAL :
					 distance >= VNUMA_TC_DISTANCE_LOCAL)
				continue;
			return vnuma_fail(why, -EBADMSG,
					  "distance[%u][%u] is %u", from, to,
					  distance);
		}
	}
	return 0;
}

static int check_counts(const struct vnuma_topology *topology,
			struct vnuma_reason *why)
{
	if (!topology->nr_nodes || topology->nr_nodes > VNUMA_TC_MAX_NODES)
		return vnuma_fail(why, -EBADMSG, "nr_nodes is %u, not 1 to %u",
				  topology->nr_nodes, VNUMA_TC_MAX_NODES);
	if (!topology->nr_vcpus || topology->nr_vcpus > VNUMA_TC_MAX_VCPUS)
		return vnuma_fail(why, -EBADMSG, "nr_vcpus is %u, not 1 to %u",
				  topology->nr_vcpus, VNUMA_TC_MAX_VCPUS);
	return 0;
}

/*
 * Copies the slot at @offset. -EAGAIN: the host was writing. The counts bound the
 * copy, so they are checked here, but a wrong one counts only when the slot did
 * not change meanwhile: the caller asks again after any error.
 */
static int copy_slot(const struct vnuma_channel *channel, u32 offset,
		     struct vnuma_topology *topology, struct vnuma_reason *why)
{
	const void *slot = channel->base + offset;
	const size_t generation_at =
		offset + offsetof(struct vnuma_tc_slot, generation);
	int err;

	if (load_u64(channel, generation_at) != topology->generation)
		return -EAGAIN;

	memcpy(&topology->nr_nodes,
	       slot + offsetof(struct vnuma_tc_slot, nr_nodes), sizeof(u32));
	memcpy(&topology->nr_vcpus,
	       slot + offsetof(struct vnuma_tc_slot, nr_vcpus), sizeof(u32));
	/* From here on the copy is looked at, which the host cannot change. */
	barrier();
	err = check_counts(topology, why);
	if (!err) {
		memcpy(topology->distance,
		       slot + offsetof(struct vnuma_tc_slot, distance),
		       sizeof(topology->distance));
		memcpy(topology->vcpu,
		       slot + offsetof(struct vnuma_tc_slot, vcpu),
		       topology->nr_vcpus * sizeof(topology->vcpu[0]));
	}
	/* Orders the copy before the two loads that say whether it is whole. */
	smp_rmb();
	if (load_u64(channel, generation_at) != topology->generation ||
	    vnuma_channel_generation(channel) != topology->generation)
		return -EAGAIN;
	return err;
}

static int copy_published(const struct vnuma_channel *channel,
			  const struct vnuma_tc_header *header,
			  struct vnuma_topology *topology,
			  struct vnuma_reason *why)
{
	int try, err;

	for (try = 0; try < VNUMA_TC_READ_RETRIES; try++) {
		topology->generation = vnuma_channel_generation(channel);
		if (!topology->generation)
			return -ENODATA;
		err = copy_slot(channel,
				header->slot_offset[topology->generation & 1],
				topology, why);
		if (err != -EAGAIN)
			return err;
		usleep_range(RETRY_DELAY_US, 2 * RETRY_DELAY_US);
	}
	return vnuma_fail(why, -EAGAIN,
			  "generation %#llx is torn: its slot did not match in %u tries",
			  topology->generation, VNUMA_TC_READ_RETRIES);
}

/**
 * vnuma_channel_read - copy the current publication and check the copy
 * @channel: the shared memory
 * @topology: filled on success; undefined after an error
 * @why: the field and the value that were refused, after an error but -ENODATA
 *
 * Sleeps. Return: 0, -ENODATA if nothing is published yet, -EAGAIN if no whole
 * slot could be read, -EPROTO or -EPROTONOSUPPORT for the header, -EBADMSG for
 * the slot.
 */
int vnuma_channel_read(const struct vnuma_channel *channel,
		       struct vnuma_topology *topology,
		       struct vnuma_reason *why)
{
	struct vnuma_tc_header header;
	int err;

	memcpy(&header, channel->base, sizeof(header));
	barrier();
	err = check_header(&header, channel->size, why);
	if (!err)
		err = copy_published(channel, &header, topology, why);
	if (!err)
		err = check_vcpus(topology, why);
	if (!err)
		err = check_distances(topology, why);
	return err;
}

// SPDX-License-Identifier: GPL-2.0
/*
 * The guest's side of the topology channel.
 *
 * The host can change the shared memory at any time, also between two loads of
 * the same field. So each part is copied first and only the copy is looked at; a
 * value of the copy is an index or a size only after it was compared with its
 * bound. See vnuma/topology_channel.h for the layout and the protocol.
 */
#include <linux/delay.h>
#include <linux/errno.h>
#include <linux/kernel.h>
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

static void copy_in(const struct vnuma_channel *channel, void *to,
		    size_t offset, size_t size)
{
	memcpy(to, channel->base + offset, size);
	/* From here on the copy is looked at, which the host cannot change. */
	barrier();
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

/**
 * struct area - a part of the region
 * @name: of its field in the header
 * @offset: from the start of the region
 * @size: bytes
 * @least: bytes that it must have
 */
struct area {
	const char *name;
	u32 offset;
	u32 size;
	size_t least;
};

static int check_area(const struct vnuma_tc_header *header,
		      const struct area *area, struct vnuma_reason *why)
{
	if (area->size < area->least)
		return vnuma_fail(why, -EPROTO,
				  "header %s has %u bytes, fewer than %zu",
				  area->name, area->size, area->least);
	if (area->offset < header->header_size || area->offset % 8 ||
	    area->offset > header->region_size ||
	    area->size > header->region_size - area->offset)
		return vnuma_fail(why, -EPROTO,
				  "header %s is %#x, outside of the region or not aligned",
				  area->name, area->offset);
	return 0;
}

static int check_areas(const struct vnuma_tc_header *header,
		       struct vnuma_reason *why)
{
	const struct area areas[] = {
		{ "guest_offset", header->guest_offset, header->guest_size,
		  sizeof(struct vnuma_tc_guest) },
		{ "slot_offset[0]", header->slot_offset[0], header->slot_size,
		  sizeof(struct vnuma_tc_slot) },
		{ "slot_offset[1]", header->slot_offset[1], header->slot_size,
		  sizeof(struct vnuma_tc_slot) },
	};
	unsigned int i, j;

	for (i = 0; i < 3; i++) {
		int err = check_area(header, &areas[i], why);

		if (err)
			return err;
		for (j = 0; j < i; j++)
			if (areas[i].offset < areas[j].offset + areas[j].size &&
			    areas[j].offset < areas[i].offset + areas[i].size)
				return vnuma_fail(why, -EPROTO,
						  "header %s %#x and %s %#x overlap",
						  areas[j].name, areas[j].offset,
						  areas[i].name, areas[i].offset);
	}
	return 0;
}

static int check_header(const struct vnuma_tc_header *header, size_t mapped,
			struct vnuma_reason *why)
{
	if (header->magic != VNUMA_TC_MAGIC)
		return vnuma_fail(why, -EPROTO, "header magic is %#llx",
				  header->magic);
	if (header->layout != VNUMA_TC_LAYOUT)
		return vnuma_fail(why, -EPROTONOSUPPORT,
				  "header layout is %u, this driver knows %u",
				  header->layout, VNUMA_TC_LAYOUT);
	if (header->region_size > mapped)
		return vnuma_fail(why, -EPROTO,
				  "header region_size is %u, the device has %zu bytes",
				  header->region_size, mapped);
	if (header->header_size < sizeof(*header))
		return vnuma_fail(why, -EPROTO,
				  "header header_size is %u, less than %zu",
				  header->header_size, sizeof(*header));
	return check_areas(header, why);
}

/**
 * struct section - a section that lies within its slot
 * @channel: the shared memory
 * @at: where it begins
 * @head: a copy of its start; its length was checked
 */
struct section {
	const struct vnuma_channel *channel;
	size_t at;
	struct vnuma_tc_section head;
};

/* A longer one has fields of a later version, a shorter one lacks some: zero. */
static void copy_struct(const struct section *section, void *to, size_t size)
{
	size_t known = min_t(size_t, size, section->head.length);

	memset(to + known, 0, size - known);
	copy_in(section->channel, to, section->at, known);
}

static bool is_inside(const struct section *section, u32 offset, u64 size)
{
	u32 length = section->head.length;

	return offset >= sizeof(section->head) && offset <= length &&
	       size <= length - offset;
}

static int copy_nodes(const struct section *section,
		      struct vnuma_model *topology, struct vnuma_reason *why)
{
	struct vnuma_tc_nodes nodes;
	u32 nr, from;

	copy_struct(section, &nodes, sizeof(nodes));
	nr = nodes.nr_nodes;
	if (topology->nr_nodes)
		return vnuma_fail(why, -EBADMSG, "section nodes occurs twice");
	if (!nr || nr > VNUMA_TC_MAX_NODES)
		return vnuma_fail(why, -EBADMSG, "nr_nodes is %u, not 1 to %u",
				  nr, VNUMA_TC_MAX_NODES);
	if (!is_inside(section, nodes.distance_offset, nr * nr))
		return vnuma_fail(why, -EBADMSG,
				  "distance_offset is %u, outside of %u bytes",
				  nodes.distance_offset, section->head.length);
	for (from = 0; from < nr; from++)
		copy_in(section->channel, topology->distance[from],
			section->at + nodes.distance_offset + from * nr, nr);
	topology->nr_nodes = nr;
	return 0;
}

static int copy_vcpus(const struct section *section,
		      struct vnuma_model *topology, struct vnuma_reason *why)
{
	struct vnuma_tc_vcpus vcpus;
	u32 nr, size, i;

	copy_struct(section, &vcpus, sizeof(vcpus));
	nr = vcpus.nr_vcpus;
	size = vcpus.vcpu_size;
	if (topology->nr_vcpus)
		return vnuma_fail(why, -EBADMSG, "section vcpus occurs twice");
	if (!nr || nr > VNUMA_TC_MAX_VCPUS)
		return vnuma_fail(why, -EBADMSG, "nr_vcpus is %u, not 1 to %u",
				  nr, VNUMA_TC_MAX_VCPUS);
	if (size < sizeof(struct vnuma_tc_vcpu) || size % 8)
		return vnuma_fail(why, -EBADMSG,
				  "vcpu_size is %u, not a multiple of 8 from %zu",
				  size, sizeof(struct vnuma_tc_vcpu));
	if (vcpus.vcpu_offset % 8 ||
	    !is_inside(section, vcpus.vcpu_offset, (u64)nr * size))
		return vnuma_fail(why, -EBADMSG,
				  "vcpu_offset is %u, with %u of %u bytes outside of %u or not aligned",
				  vcpus.vcpu_offset, nr, size,
				  section->head.length);
	for (i = 0; i < nr; i++)
		copy_in(section->channel, &topology->vcpu[i],
			section->at + vcpus.vcpu_offset + (size_t)i * size,
			sizeof(topology->vcpu[i]));
	topology->nr_vcpus = nr;
	return 0;
}

static int copy_devices(const struct section *section,
			struct vnuma_model *topology,
			struct vnuma_reason *why)
{
	struct vnuma_tc_devices devices;
	u32 nr, size, i;

	copy_struct(section, &devices, sizeof(devices));
	nr = devices.nr_devices;
	size = devices.device_size;
	if (topology->has_devices)
		return vnuma_fail(why, -EBADMSG,
				  "section devices occurs twice");
	if (nr > VNUMA_TC_MAX_DEVICES)
		return vnuma_fail(why, -EBADMSG,
				  "nr_devices is %u, more than %u", nr,
				  VNUMA_TC_MAX_DEVICES);
	if (size < sizeof(topology->device[0]) || size % 8)
		return vnuma_fail(why, -EBADMSG,
				  "device_size is %u, less than %zu or not a multiple of 8",
				  size, sizeof(topology->device[0]));
	if (devices.device_offset % 8 ||
	    !is_inside(section, devices.device_offset, (u64)nr * size))
		return vnuma_fail(why, -EBADMSG,
				  "device_offset is %u, with %u of %u bytes outside of %u or not aligned",
				  devices.device_offset, nr, size,
				  section->head.length);
	for (i = 0; i < nr; i++)
		copy_in(section->channel, &topology->device[i],
			section->at + devices.device_offset + (size_t)i * size,
			sizeof(topology->device[i]));
	topology->nr_devices = nr;
	topology->has_devices = true;
	return 0;
}

/* The sections that this driver understands. */
static const struct {
	struct vnuma_tc_supported_section section;
	int (*copy)(const struct section *section,
		    struct vnuma_model *topology, struct vnuma_reason *why);
} readers[] = {
	{ { VNUMA_TC_SECTION_NODES, VNUMA_TC_NODES_VERSION }, copy_nodes },
	{ { VNUMA_TC_SECTION_VCPUS, VNUMA_TC_VCPUS_VERSION }, copy_vcpus },
	{ { VNUMA_TC_SECTION_DEVICES, VNUMA_TC_DEVICES_VERSION }, copy_devices },
};

static int copy_section(const struct section *section,
			struct vnuma_model *topology,
			struct vnuma_reason *why)
{
	const struct vnuma_tc_section *head = &section->head;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(readers); i++)
		if (readers[i].section.kind == head->kind &&
		    readers[i].section.version >= head->compatible)
			return readers[i].copy(section, topology, why);
	if (head->flags & VNUMA_TC_SECTION_REQUIRED)
		return vnuma_fail(why, -EPROTONOSUPPORT,
				  "section of kind %u, version %u (compatible with %u) is required and not supported",
				  head->kind, head->version, head->compatible);
	return 0;
}

static int copy_sections(const struct vnuma_channel *channel, size_t at,
			 const struct vnuma_tc_slot *slot,
			 struct vnuma_model *topology,
			 struct vnuma_reason *why)
{
	size_t end = at + slot->length;
	u32 i;

	at += sizeof(*slot);
	for (i = 0; i < slot->nr_sections; i++) {
		struct section section = { .channel = channel, .at = at };
		int err;

		if (end - at < sizeof(section.head))
			return vnuma_fail(why, -EBADMSG,
					  "section[%u] of %u begins at the end of %u bytes",
					  i, slot->nr_sections, slot->length);
		copy_in(channel, &section.head, at, sizeof(section.head));
		if (section.head.length < sizeof(section.head) ||
		    section.head.length % 8 || section.head.length > end - at)
			return vnuma_fail(why, -EBADMSG,
					  "section[%u] (kind %u) has length %u, of %zu bytes left",
					  i, section.head.kind,
					  section.head.length, end - at);
		err = copy_section(&section, topology, why);
		if (err)
			return err;
		at += section.head.length;
	}
	if (!topology->nr_nodes || !topology->nr_vcpus)
		return vnuma_fail(why, -EBADMSG,
				  "no section %s that this driver can read",
				  topology->nr_nodes ? "vcpus" : "nodes");
	return 0;
}

/*
 * Copies the current slot. -EAGAIN: the host was writing. A wrong value counts only
 * if the slot did not change meanwhile: the caller asks again after any error.
 */
static int copy_slot(const struct vnuma_channel *channel,
		     const struct vnuma_tc_header *header,
		     struct vnuma_model *topology, struct vnuma_reason *why)
{
	const size_t at = header->slot_offset[topology->generation & 1];
	struct vnuma_tc_slot slot;
	int err;

	if (load_u64(channel, at) != topology->generation)
		return -EAGAIN;

	topology->nr_nodes = 0;
	topology->nr_vcpus = 0;
	topology->nr_devices = 0;
	topology->has_devices = false;
	copy_in(channel, &slot, at, sizeof(slot));
	if (slot.length < sizeof(slot) || slot.length > header->slot_size)
		err = vnuma_fail(why, -EBADMSG,
				 "slot length is %u, not %zu to %u",
				 slot.length, sizeof(slot), header->slot_size);
	else if (slot.nr_sections > VNUMA_TC_MAX_SECTIONS)
		err = vnuma_fail(why, -EBADMSG,
				 "slot nr_sections is %u, more than %u",
				 slot.nr_sections, VNUMA_TC_MAX_SECTIONS);
	else
		err = copy_sections(channel, at, &slot, topology, why);
	/* Orders the copy before the two loads that say whether it is whole. */
	smp_rmb();
	if (load_u64(channel, at) != topology->generation ||
	    vnuma_channel_generation(channel) != topology->generation)
		return -EAGAIN;
	return err;
}

static int copy_published(const struct vnuma_channel *channel,
			  const struct vnuma_tc_header *header,
			  struct vnuma_model *topology,
			  struct vnuma_reason *why)
{
	int try, err;

	for (try = 0; try < VNUMA_TC_READ_RETRIES; try++) {
		topology->generation = vnuma_channel_generation(channel);
		if (!topology->generation)
			return -ENODATA;
		err = copy_slot(channel, header, topology, why);
		if (err != -EAGAIN)
			return err;
		usleep_range(RETRY_DELAY_US, 2 * RETRY_DELAY_US);
	}
	return vnuma_fail(why, -EAGAIN,
			  "generation %#llx is torn: its slot did not match in %u tries",
			  topology->generation, VNUMA_TC_READ_RETRIES);
}

static int compare_vcpus(const void *a, const void *b)
{
	u32 left = ((const struct vnuma_tc_vcpu *)a)->apic_id;
	u32 right = ((const struct vnuma_tc_vcpu *)b)->apic_id;

	return left < right ? -1 : left > right;
}

static int check_vcpus(struct vnuma_model *topology,
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

static int compare_devices(const void *a, const void *b)
{
	u32 left = vnuma_device_address(a), right = vnuma_device_address(b);

	return left < right ? -1 : left > right;
}

static int check_devices(struct vnuma_model *topology,
			 struct vnuma_reason *why)
{
	struct vnuma_tc_device *device = topology->device;
	u32 i;

	for (i = 0; i < topology->nr_devices; i++)
		if (device[i].node >= topology->nr_nodes)
			return vnuma_fail(why, -EBADMSG,
					  "device[%u] (%04x:%02x:%02x.%u) is on node %u of %u",
					  i, device[i].segment, device[i].bus,
					  device[i].devfn >> 3,
					  device[i].devfn & 7, device[i].node,
					  topology->nr_nodes);

	sort(device, topology->nr_devices, sizeof(*device), compare_devices,
	     NULL);
	for (i = 1; i < topology->nr_devices; i++)
		if (!compare_devices(&device[i - 1], &device[i]))
			return vnuma_fail(why, -EBADMSG,
					  "device %04x:%02x:%02x.%u is named twice",
					  device[i].segment, device[i].bus,
					  device[i].devfn >> 3,
					  device[i].devfn & 7);
	return 0;
}

/*
 * Two guest nodes can have one home, so 10 is valid between different nodes. The
 * kernel has narrower needs, see obstacle() of distances.c.
 */
static int check_distances(const struct vnuma_model *topology,
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

/**
 * vnuma_channel_read - copy the current publication and check the copy
 * @channel: the shared memory
 * @topology: filled on success; after an error only its generation counts
 * @why: the field and the value that were refused, after an error but -ENODATA
 *
 * Sleeps. Return: 0, -ENODATA if nothing is published yet, -EAGAIN if no whole
 * slot could be read, -EPROTO for the header, -EPROTONOSUPPORT for what this driver
 * is too old for, -EBADMSG for the slot.
 */
int vnuma_channel_read(struct vnuma_channel *channel,
		       struct vnuma_model *topology,
		       struct vnuma_reason *why)
{
	struct vnuma_tc_header header;
	int err;

	topology->generation = vnuma_channel_generation(channel);
	copy_in(channel, &header, 0, sizeof(header));
	err = check_header(&header, channel->size, why);
	if (err)
		return err;
	channel->guest_offset = header.guest_offset;
	err = copy_published(channel, &header, topology, why);
	if (!err)
		err = check_vcpus(topology, why);
	if (!err)
		err = check_devices(topology, why);
	if (!err)
		err = check_distances(topology, why);
	return err;
}

static void store_guest(const struct vnuma_channel *channel, size_t field,
			u64 value)
{
	/* The host loads what was stored before as well. */
	smp_store_release((u64 *)(channel->base + channel->guest_offset + field),
			  value);
}

/**
 * vnuma_channel_announce - say that a driver is here, and what it understands
 * @channel: the shared memory; nothing is written before a header was accepted
 * @mode: VNUMA_TC_MODE_*
 *
 * Return: whether the host can know now.
 */
bool vnuma_channel_announce(const struct vnuma_channel *channel, u32 mode)
{
	struct vnuma_tc_guest guest = {
		.nr_supported = ARRAY_SIZE(readers),
		.mode = mode,
		.driver_version = VNUMA_DRIVER_VERSION,
	};
	const size_t rest = sizeof(guest.magic);
	unsigned int i;

	if (!channel->guest_offset)
		return false;
	for (i = 0; i < ARRAY_SIZE(readers); i++)
		guest.supported[i] = readers[i].section;
	store_guest(channel, offsetof(struct vnuma_tc_guest, magic), 0);
	smp_wmb(); /* no magic while the rest changes */
	memcpy(channel->base + channel->guest_offset + rest,
	       (const void *)&guest + rest, sizeof(guest) - rest);
	store_guest(channel, offsetof(struct vnuma_tc_guest, magic),
		    VNUMA_TC_GUEST_MAGIC);
	return true;
}

/**
 * vnuma_channel_leave - say that no driver is here any more
 * @channel: the shared memory
 */
void vnuma_channel_leave(const struct vnuma_channel *channel)
{
	if (channel->guest_offset)
		store_guest(channel, offsetof(struct vnuma_tc_guest, magic), 0);
}

/**
 * vnuma_channel_acknowledge - say that all maps agree with a publication
 * @channel: the shared memory
 * @generation: of the publication
 */
void vnuma_channel_acknowledge(const struct vnuma_channel *channel,
			       u64 generation)
{
	if (channel->guest_offset)
		store_guest(channel,
			    offsetof(struct vnuma_tc_guest, acknowledged),
			    generation);
}

/**
 * vnuma_channel_refuse - say that a publication was not applied, or in part only
 * @channel: the shared memory
 * @generation: of the publication
 * @error: why, -errno
 */
void vnuma_channel_refuse(const struct vnuma_channel *channel, u64 generation,
			  int error)
{
	if (!channel->guest_offset)
		return;
	store_guest(channel, offsetof(struct vnuma_tc_guest, refused_error),
		    (s64)error);
	store_guest(channel, offsetof(struct vnuma_tc_guest, refused),
		    generation);
}

/**
 * vnuma_channel_count_devices - say that PCI devices came or went
 * @channel: the shared memory
 * @changes: how many did so far
 */
void vnuma_channel_count_devices(const struct vnuma_channel *channel,
				 u64 changes)
{
	if (channel->guest_offset)
		store_guest(channel,
			    offsetof(struct vnuma_tc_guest, device_changes),
			    changes);
}

// SPDX-License-Identifier: GPL-2.0
/*
 * The counters of the lab's emulated server as its CPUs' PMU.
 *
 * QEMU's TCG emulates no PMU; its counter plugin writes what each CPU did into
 * the BAR of an ivshmem-plain device (see lab_counters.h). This driver registers them
 * as the PMU "cpu" of type PERF_TYPE_RAW, where perf looks for the generic
 * hardware events: perf_event_open() and unmodified tools count a thread, and so
 * the vCPU of a VM, as they would on hardware.
 *
 * A counter only ever grows and belongs to one CPU, so an event is the sum of
 * differences taken on the CPU where it runs, at each context switch, as for the
 * MSR PMU (arch/x86/events/msr.c). There are no interrupts, hence no sampling. Kernel and
 * programs can be distinguished (:k, :u), server and VMs cannot.
 *
 * The driver also informs the plugin which node each PCI device is on, as only the
 * firmware and the kernel know where their BARs are.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/io.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/perf_event.h>

#include <vnuma/lab_counters.h>

#define IVSHMEM_VENDOR	0x1af4
#define IVSHMEM_DEVICE	0x1110
#define IVSHMEM_BAR	2

#define WORDS		(sizeof(struct vnuma_lc_cpu) / sizeof(u64))
#define WORD(field)	(offsetof(struct vnuma_lc_cpu, field) / sizeof(u64))

/* A copy of the header, checked; the page itself is not read again. */
static struct vnuma_lc_header config;
static u8 *region;

static const struct vnuma_lc_page *this_page(void)
{
	return (void *)(region + VNUMA_LC_CPUS_OFFSET +
			(size_t)smp_processor_id() * VNUMA_LC_PAGE_SIZE);
}

static u64 sum_of_class(const u64 *counters, u32 class)
{
	const u8 *class_of = config.class_of[config.cpu_node[smp_processor_id()]];
	u64 sum = 0;
	u32 node;

	for (node = 0; node < config.nr_nodes; node++)
		if (class_of[node] == class)
			sum += READ_ONCE(counters[node]);
	return sum;
}

/*
 * Modelled cycles in the units of the costs. Linear in counters that only grow,
 * so the differences that perf takes are exact.
 */
static u64 modelled_cost(const struct vnuma_lc_cpu *page)
{
	u64 hits = READ_ONCE(page->llc_references) - READ_ONCE(page->llc_misses);
	u64 streamed = READ_ONCE(page->llc_streamed) -
		       READ_ONCE(page->llc_misses_streamed);
	u64 cost = READ_ONCE(page->base_cycles) * VNUMA_LC_COST_ONE;
	u32 class;

	cost += (hits - streamed) * config.llc_hit_cost;
	for (class = 0; class < config.nr_classes; class++)
		cost += sum_of_class(page->dram, class) * config.dram_cost[class] +
			sum_of_class(page->dram_streamed, class) *
			config.streamed_cost[class] +
			sum_of_class(page->mmio_read, class) * config.mmio_read_cost[class] +
			sum_of_class(page->mmio_write, class) * config.mmio_write_cost[class];
	return cost;
}

/* Cycles in the units of the costs, everything else as it is. */
static u64 counter_of_mode(const struct vnuma_lc_cpu *page, u64 event)
{
	if (event < WORDS)
		return READ_ONCE(((const u64 *)page)[event]);
	if (event == VNUMA_LC_EVENT_CYCLES)
		return modelled_cost(page);
	if (event >= VNUMA_LC_EVENT_MMIO_WRITE)
		return sum_of_class(page->mmio_write, event - VNUMA_LC_EVENT_MMIO_WRITE);
	if (event >= VNUMA_LC_EVENT_MMIO_READ)
		return sum_of_class(page->mmio_read, event - VNUMA_LC_EVENT_MMIO_READ);
	if (event >= VNUMA_LC_EVENT_SECOND_STREAMED)
		return sum_of_class(page->second_dram_streamed,
				    event - VNUMA_LC_EVENT_SECOND_STREAMED);
	if (event >= VNUMA_LC_EVENT_SECOND_DRAM)
		return sum_of_class(page->second_dram, event - VNUMA_LC_EVENT_SECOND_DRAM);
	if (event >= VNUMA_LC_EVENT_STREAMED)
		return sum_of_class(page->dram_streamed, event - VNUMA_LC_EVENT_STREAMED);
	return sum_of_class(page->dram, event - VNUMA_LC_EVENT_DRAM);
}

static u64 counter(const struct perf_event *event)
{
	const struct vnuma_lc_page *page = this_page();
	u64 which = event->hw.config, sum = 0;

	if (!event->attr.exclude_kernel)
		sum += counter_of_mode(&page->mode[VNUMA_LC_KERNEL], which);
	if (!event->attr.exclude_user)
		sum += counter_of_mode(&page->mode[VNUMA_LC_USER], which);
	return which == VNUMA_LC_EVENT_CYCLES ? sum / VNUMA_LC_COST_ONE : sum;
}

static bool of_class(u64 event, u64 first)
{
	return event >= first && event < first + VNUMA_LC_MAX_CLASSES;
}

static bool event_exists(u64 event)
{
	return event < WORDS || event == VNUMA_LC_EVENT_CYCLES ||
	       of_class(event, VNUMA_LC_EVENT_DRAM) ||
	       of_class(event, VNUMA_LC_EVENT_STREAMED) ||
	       of_class(event, VNUMA_LC_EVENT_SECOND_DRAM) ||
	       of_class(event, VNUMA_LC_EVENT_SECOND_STREAMED) ||
	       of_class(event, VNUMA_LC_EVENT_MMIO_READ) ||
	       of_class(event, VNUMA_LC_EVENT_MMIO_WRITE);
}

static int generic_event(u64 generic, u64 *event)
{
	switch (generic) {
	case PERF_COUNT_HW_CPU_CYCLES:
		*event = VNUMA_LC_EVENT_CYCLES;
		return 0;
	case PERF_COUNT_HW_INSTRUCTIONS:
		*event = WORD(instructions);
		return 0;
	case PERF_COUNT_HW_CACHE_REFERENCES:
		*event = WORD(llc_references);
		return 0;
	case PERF_COUNT_HW_CACHE_MISSES:
		*event = WORD(llc_misses);
		return 0;
	default:
		return -ENOENT;
	}
}

static int lab_event_init(struct perf_event *event)
{
	u64 which = event->attr.config;
	int error;

	/* There is no hypervisor below, so leaving it out is fine (perf's :u does). */
	if (event->attr.exclude_idle || event->attr.exclude_host || event->attr.exclude_guest)
		return -EINVAL;
	switch (event->attr.type) {
	case PERF_TYPE_RAW:
		if (!event_exists(which))
			return -EINVAL;
		break;
	case PERF_TYPE_HARDWARE:
		error = generic_event(which, &which);
		if (error)
			return error;
		break;
	default:
		return -ENOENT;
	}
	event->hw.config = which;
	return 0;
}

static void lab_event_read(struct perf_event *event)
{
	u64 now = counter(event);
	u64 before = local64_xchg(&event->hw.prev_count, now);

	local64_add(now - before, &event->count);
}

static void lab_event_start(struct perf_event *event, int flags)
{
	local64_set(&event->hw.prev_count, counter(event));
	event->hw.state = 0;
}

static void lab_event_stop(struct perf_event *event, int flags)
{
	if (event->hw.state & PERF_HES_STOPPED)
		return;
	event->hw.state |= PERF_HES_STOPPED;
	lab_event_read(event);
	event->hw.state |= PERF_HES_UPTODATE;
}

static int lab_event_add(struct perf_event *event, int flags)
{
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	if (flags & PERF_EF_START)
		lab_event_start(event, flags);
	return 0;
}

static void lab_event_del(struct perf_event *event, int flags)
{
	lab_event_stop(event, PERF_EF_UPDATE);
}

PMU_FORMAT_ATTR(event, "config:0-15");

static struct attribute *format_attrs[] = {
	&format_attr_event.attr,
	NULL,
};

static const struct attribute_group format_group = {
	.name = "format",
	.attrs = format_attrs,
};

/* The events that sysfs shows: eleven, four per node and six per class of distance. */
#define MAX_EVENTS	(11 + 4 * VNUMA_LC_MAX_NODES + 6 * VNUMA_LC_MAX_CLASSES)

struct lab_event {
	struct device_attribute attr;
	char name[32];
	u64 event;
};

static struct lab_event events[MAX_EVENTS];
static struct attribute *event_attrs[MAX_EVENTS + 1];
static unsigned int nr_events;

static ssize_t lab_event_show(struct device *dev, struct device_attribute *attr, char *page)
{
	return sysfs_emit(page, "event=%#llx\n",
			  container_of(attr, struct lab_event, attr)->event);
}

static __printf(2, 3) void show_event(u64 number, const char *format, ...)
{
	struct lab_event *event = &events[nr_events];
	va_list arguments;

	va_start(arguments, format);
	vscnprintf(event->name, sizeof(event->name), format, arguments);
	va_end(arguments);
	event->event = number;
	sysfs_attr_init(&event->attr.attr);
	event->attr.attr.name = event->name;
	event->attr.attr.mode = 0444;
	event->attr.show = lab_event_show;
	event_attrs[nr_events++] = &event->attr.attr;
	event_attrs[nr_events] = NULL;
}

/* Only the nodes, classes and caches that the server has are shown. */
static void show_events(void)
{
	u32 i;

	nr_events = 0;
	show_event(WORD(base_cycles), "base-cycles");
	show_event(WORD(loads), "loads");
	show_event(WORD(stores), "stores");
	show_event(WORD(llc_references), "llc-references");
	show_event(WORD(llc_streamed), "llc-references-streamed");
	show_event(WORD(llc_misses), "llc-misses");
	show_event(WORD(llc_misses_streamed), "llc-misses-streamed");
	show_event(WORD(mmio_other), "mmio-other");
	show_event(VNUMA_LC_EVENT_CYCLES, "modelled-cycles");
	for (i = 0; i < config.nr_nodes; i++) {
		show_event(WORD(dram) + i, "dram-node%u", i);
		show_event(WORD(dram_streamed) + i, "dram-streamed-node%u", i);
		show_event(WORD(mmio_read) + i, "mmio-reads-node%u", i);
		show_event(WORD(mmio_write) + i, "mmio-writes-node%u", i);
	}
	for (i = 0; i < config.nr_classes; i++) {
		show_event(VNUMA_LC_EVENT_DRAM + i, "dram-class%u", i);
		show_event(VNUMA_LC_EVENT_STREAMED + i, "dram-streamed-class%u", i);
		show_event(VNUMA_LC_EVENT_MMIO_READ + i, "mmio-reads-class%u", i);
		show_event(VNUMA_LC_EVENT_MMIO_WRITE + i, "mmio-writes-class%u", i);
	}
	if (!config.second_sets)
		return;
	show_event(WORD(second_misses), "second-llc-misses");
	show_event(WORD(second_misses_streamed), "second-llc-misses-streamed");
	for (i = 0; i < config.nr_classes; i++) {
		show_event(VNUMA_LC_EVENT_SECOND_DRAM + i, "second-dram-class%u", i);
		show_event(VNUMA_LC_EVENT_SECOND_STREAMED + i, "second-dram-streamed-class%u", i);
	}
}

static const struct attribute_group events_group = {
	.name = "events",
	.attrs = event_attrs,
};

/* The header as it is now, for lab-count; a BAR cannot be mapped twice, here and there. */
static ssize_t header_read(struct file *file, struct kobject *kobj,
			   const struct bin_attribute *attr, char *to,
			   loff_t offset, size_t count)
{
	return memory_read_from_buffer(to, count, &offset, region,
				       sizeof(struct vnuma_lc_header));
}

static const BIN_ATTR_RO(header, sizeof(struct vnuma_lc_header));

static const struct bin_attribute *const lab_bin_attrs[] = {
	&bin_attr_header,
	NULL,
};

static const struct attribute_group lab_group = {
	.name = "vnuma",
	.bin_attrs = lab_bin_attrs,
};

static const struct attribute_group *lab_groups[] = {
	&format_group,
	&events_group,
	&lab_group,
	NULL,
};

static struct pmu lab_pmu = {
	.module = THIS_MODULE,
	.task_ctx_nr = perf_sw_context,
	.capabilities = PERF_PMU_CAP_NO_INTERRUPT,
	.attr_groups = lab_groups,
	.event_init = lab_event_init,
	.add = lab_event_add,
	.del = lab_event_del,
	.start = lab_event_start,
	.stop = lab_event_stop,
	.read = lab_event_read,
};

/* What is indexed with, or believed, later on. */
static int check_header(struct device *dev, size_t size)
{
	int cpu;

	if (config.version_major != VNUMA_LC_VERSION_MAJOR)
		return dev_err_probe(dev, -EINVAL, "version_major: %u\n",
				     config.version_major);
	if (config.region_size != size || config.nr_cpus > VNUMA_LC_MAX_CPUS ||
	    VNUMA_LC_CPUS_OFFSET + config.nr_cpus * VNUMA_LC_PAGE_SIZE > size)
		return dev_err_probe(dev, -EINVAL,
				     "region_size: %u with %u CPUs, BAR of %zu\n",
				     config.region_size, config.nr_cpus, size);
	if (config.nr_nodes > VNUMA_LC_MAX_NODES ||
	    config.nr_classes > VNUMA_LC_MAX_CLASSES)
		return dev_err_probe(dev, -EINVAL, "nr_nodes %u, nr_classes %u\n",
				     config.nr_nodes, config.nr_classes);
	if (config.status == VNUMA_LC_STATUS_OFF)
		return dev_err_probe(dev, -ENODEV, "status: no plugin counts\n");
	for_each_possible_cpu(cpu)
		if (cpu >= config.nr_cpus ||
		    cpu_to_node(cpu) != config.cpu_node[cpu])
			return dev_err_probe(dev, -EINVAL,
					     "cpu_node: CPU %d is on node %d here\n",
					     cpu, cpu_to_node(cpu));
	return 0;
}

/*
 * Informs the plugin where the memory BARs of PCI devices are. Virtual functions may
 * come later: theirs are within a range of the physical function.
 */
static void tell_devices(void)
{
	struct vnuma_lc_devices *devices = (void *)(region + VNUMA_LC_DEVICES_OFFSET);
	struct pci_dev *pdev = NULL;
	u32 count = 0;
	int bar;

	WRITE_ONCE(devices->count, 0);
	for_each_pci_dev(pdev) {
		int node = dev_to_node(&pdev->dev);

		for (bar = 0; bar < PCI_BRIDGE_RESOURCES; bar++) {
			if (node < 0 || count == VNUMA_LC_MAX_DEVICES ||
			    !(pci_resource_flags(pdev, bar) & IORESOURCE_MEM) ||
			    !pci_resource_start(pdev, bar))
				continue;
			devices->ranges[count].start = pci_resource_start(pdev, bar);
			devices->ranges[count].end = pci_resource_end(pdev, bar) + 1;
			devices->ranges[count].node = node;
			count++;
		}
	}
	/* The plugin reads the ranges after it has seen their count. */
	smp_store_release(&devices->count, count);
}

static int lab_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	size_t size = pci_resource_len(pdev, IVSHMEM_BAR);
	int error;

	if (region)
		return -EBUSY;
	error = pcim_enable_device(pdev);
	if (error)
		return error;
	if (size < VNUMA_LC_CPUS_OFFSET || size > SZ_1M)
		return -ENODEV;
	region = memremap(pci_resource_start(pdev, IVSHMEM_BAR), size, MEMREMAP_WB);
	if (!region)
		return -ENOMEM;
	memcpy(&config, region, sizeof(config));
	/* The device id serves many purposes: another magic is another's. */
	error = config.magic == VNUMA_LC_MAGIC ? check_header(&pdev->dev, size) : -ENODEV;
	if (!error) {
		show_events();
		error = perf_pmu_register(&lab_pmu, "cpu", PERF_TYPE_RAW);
	}
	if (error) {
		memunmap(region);
		region = NULL;
		return error;
	}
	tell_devices();
	config.profile[VNUMA_LC_NAME_SIZE - 1] = 0;
	dev_info(&pdev->dev, "counters of %u CPUs on %u nodes, profile %s\n",
		 config.nr_cpus, config.nr_nodes, config.profile);
	return 0;
}

static void lab_remove(struct pci_dev *pdev)
{
	perf_pmu_unregister(&lab_pmu);
	memunmap(region);
	region = NULL;
}

static const struct pci_device_id lab_ids[] = {
	{ PCI_DEVICE(IVSHMEM_VENDOR, IVSHMEM_DEVICE) },
	{ }
};
MODULE_DEVICE_TABLE(pci, lab_ids);

static struct pci_driver lab_driver = {
	.name = KBUILD_MODNAME,
	.id_table = lab_ids,
	.probe = lab_probe,
	.remove = lab_remove,
	.driver = {
		/* The PMU must not go away with events on it. */
		.suppress_bind_attrs = true,
	},
};
module_pci_driver(lab_driver);

MODULE_DESCRIPTION("Counters of the vnuma lab's emulated server as a perf PMU");
MODULE_LICENSE("GPL");

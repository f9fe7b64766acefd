// SPDX-License-Identifier: GPL-2.0
/*
 * vnuma: a guest kernel that follows the NUMA topology of its virtual machine.
 *
 * The host publishes the present topology in the memory of an ivshmem-doorbell
 * device and raises an interrupt. Its thread reads the newest publication, moves
 * CPUs between the kernel's nodes, informs user space through /dev/vnuma, and
 * acknowledges:
 *
 *	interrupt -> read and check -> apply -> /dev/vnuma -> doorbell
 *
 * Interrupts that come meanwhile run the thread once more; the latest publication
 * wins, those in between were never current. In safe mode a work does what the thread
 * does otherwise, as nobody may wait for it (apply_safe.c).
 */
#include <linux/atomic.h>
#include <linux/cpu.h>
#include <linux/interrupt.h>
#include <linux/io.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/pm.h>
#include <linux/slab.h>
#include <linux/smp.h>
#include <linux/workqueue.h>

#include "vnuma.h"

#define REGISTERS_BAR	0
#define CHANNEL_BAR	2

/* Until CPUs that did not come up again are tried once more. */
#define SAFE_RETRY	HZ

static char *mode = "auto";
module_param(mode, charp, 0444);
MODULE_PARM_DESC(mode, "fast: in place, needs kernel symbols that are not exported; safe: by CPU hotplug; auto (default): fast if possible, else safe; none: change nothing");

/**
 * struct vnuma - the one device that is the topology channel
 * @pdev: its PCI function
 * @registers: BAR 0
 * @channel: BAR 2
 * @announced: the host can know that the driver is here
 * @interrupt_ns: CLOCK_MONOTONIC of the last interrupt
 * @refused_generation: so that a publication is refused in one log line
 * @refused_error: likewise
 */
struct vnuma {
	struct pci_dev *pdev;
	void __iomem *registers;
	struct vnuma_channel channel;
	bool announced;
	u64 interrupt_ns;
	u64 refused_generation;
	int refused_error;
};

/* Protects the bound device and the results; in safe mode not held while CPUs move. */
static DEFINE_MUTEX(update_mutex);
static struct vnuma *bound;
/* Counts bindings and resumes, so that an update notices that the channel may be another one. */
static unsigned int bindings;
static u64 applied_generation;
/* The last one that was applied in part only, and how many CPUs it did not move. */
static u64 partial_generation;
static u32 partial_cpus;
/* What is read into; becomes current when it is accepted. One update at a time uses it. */
static struct vnuma_model *next;
/* PCI devices that came or went since the module was loaded. */
static atomic64_t device_changes;
/* Safe mode only. */
static struct workqueue_struct *safe_queue;

u32 vnuma_mode = VNUMA_GD_MODE_NONE;

/* What the host finds in its memory is visible before the doorbell. */
static void ring(struct vnuma *vnuma)
{
	writel(VNUMA_IVSHMEM_HOST_PEER << 16 | VNUMA_IVSHMEM_ACKNOWLEDGE_VECTOR,
	       vnuma->registers + VNUMA_IVSHMEM_REG_DOORBELL);
}

static void acknowledge(struct vnuma *vnuma, u64 generation)
{
	vnuma_channel_acknowledge(&vnuma->channel, generation);
	ring(vnuma);
}

static u32 channel_mode(void)
{
	switch (vnuma_mode) {
	case VNUMA_GD_MODE_FAST:
		return VNUMA_TC_MODE_FAST;
	case VNUMA_GD_MODE_SAFE:
		return VNUMA_TC_MODE_SAFE;
	default:
		return VNUMA_TC_MODE_NONE;
	}
}

static void announce(struct vnuma *vnuma)
{
	if (vnuma->announced)
		return;
	vnuma->announced = vnuma_channel_announce(&vnuma->channel,
						  channel_mode());
	if (vnuma->announced)
		ring(vnuma);
}

/* Drops update_mutex while CPUs move, so that the device can go meanwhile. */
static int apply_safely(struct vnuma_model **old,
			struct vnuma_report *report, struct vnuma_reason *why)
{
	int err;

	mutex_unlock(&update_mutex);
	err = vnuma_safe_apply(safe_queue, next, old, &report->unapplied, why);
	mutex_lock(&update_mutex);
	return err;
}

static int read_and_apply(struct vnuma *vnuma, struct vnuma_model **old,
			  struct vnuma_report *report,
			  struct vnuma_reason *why)
{
	int err = vnuma_channel_read(&vnuma->channel, next, why);

	announce(vnuma);
	if (err)
		return err;
	if (next->generation == applied_generation)
		return -EALREADY;
	vnuma_topology_number(next);
	switch (vnuma_mode) {
	case VNUMA_GD_MODE_FAST:
		return vnuma_fast_apply(next, old, why);
	case VNUMA_GD_MODE_SAFE:
		return apply_safely(old, report, why);
	default:
		return vnuma_fail(why, -EOPNOTSUPP,
				  "no mode to apply it with");
	}
}

/* The same publication may come again and again; it is logged once. */
static void refuse(struct vnuma *vnuma, u64 generation,
		   const struct vnuma_report *report,
		   const struct vnuma_reason *why)
{
	vnuma_device_report(report);
	vnuma_channel_refuse(&vnuma->channel, generation, report->error);
	ring(vnuma);
	if (generation == vnuma->refused_generation &&
	    report->error == vnuma->refused_error)
		return;
	vnuma->refused_generation = generation;
	vnuma->refused_error = report->error;
	dev_warn_ratelimited(&vnuma->pdev->dev,
			     "publication refused: %s (%d)\n", why->text,
			     report->error);
}

/*
 * It is not acknowledged: that would say that all of it is applied. If the same one is
 * published again, it is tried again, and logged only if the outcome differs.
 */
static void accept_in_part(struct vnuma *vnuma, struct vnuma_report *report)
{
	const struct vnuma_unapplied *unapplied = &report->unapplied;

	applied_generation = 0;
	report->error = unapplied->error;
	vnuma_channel_refuse(&vnuma->channel, report->topology->generation,
			     report->error);
	ring(vnuma);
	if (partial_generation == report->topology->generation &&
	    partial_cpus == unapplied->cpus)
		return;
	partial_generation = report->topology->generation;
	partial_cpus = unapplied->cpus;
	vnuma_device_report(report);
	dev_warn_ratelimited(&vnuma->pdev->dev,
			     "%u CPUs are not on their published node, among them CPU %d (%d)\n",
			     unapplied->cpus, unapplied->cpu, unapplied->error);
}

static void accept(struct vnuma *vnuma, struct vnuma_report *report)
{
	vnuma_pci_nodes_apply(report->topology);
	vnuma_autonuma_tell();
	if (!applied_generation && !partial_generation)
		dev_info(&vnuma->pdev->dev,
			 "following the host's topology, generation %016llx\n",
			 report->topology->generation);
	if (report->unapplied.cpus) {
		accept_in_part(vnuma, report);
		return;
	}
	applied_generation = report->topology->generation;
	partial_generation = 0;
	vnuma_device_report(report);
	acknowledge(vnuma, applied_generation);
}

static void update(void)
{
	struct vnuma_report report = { };
	struct vnuma_model *old = NULL;
	struct vnuma_reason why;
	unsigned int binding;

	mutex_lock(&update_mutex);
	if (!bound)
		goto unlock;
	binding = bindings;
	report.interrupt = ns_to_ktime(READ_ONCE(bound->interrupt_ns));
	report.error = read_and_apply(bound, &old, &report, &why);
	if (old) {
		report.topology = next;
		next = old;
	}
	/* Another channel, if there is one, has another topology. */
	if (!bound || binding != bindings)
		goto resume;
	if (!report.error)
		accept(bound, &report);
	else if (report.error == -EALREADY)
		/* A host that was restarted may not know of the first one. */
		acknowledge(bound, applied_generation);
	else if (report.error != -ENODATA)
		refuse(bound, next->generation, &report, &why);
resume:
	vnuma_debug_files_resume();
unlock:
	mutex_unlock(&update_mutex);
}

static void update_safely(struct work_struct *work);
static DECLARE_DELAYED_WORK(safe_work, update_safely);

/* A CPU that is kept offline comes up as soon as it may, whether or not the host publishes. */
static void update_safely(struct work_struct *work)
{
	vnuma_safe_bring_up();
	update();
	if (vnuma_safe_has_offline())
		queue_delayed_work(safe_queue, &safe_work, SAFE_RETRY);
}

static void start_update(void)
{
	if (vnuma_mode == VNUMA_GD_MODE_SAFE)
		mod_delayed_work(safe_queue, &safe_work, 0);
	else
		update();
}

/* The host does not see when a device appears in the guest, or where. */
static void report_devices(struct work_struct *work)
{
	mutex_lock(&update_mutex);
	if (bound) {
		vnuma_channel_count_devices(&bound->channel,
					    atomic64_read(&device_changes));
		ring(bound);
	}
	mutex_unlock(&update_mutex);
}

static DECLARE_WORK(devices_work, report_devices);

/* Several that come together are reported together. */
static void devices_changed(void)
{
	atomic64_inc(&device_changes);
	schedule_work(&devices_work);
}

static irqreturn_t on_interrupt(int irq, void *data)
{
	struct vnuma *vnuma = data;

	WRITE_ONCE(vnuma->interrupt_ns, ktime_get_ns());
	return IRQ_WAKE_THREAD;
}

static irqreturn_t interrupt_thread(int irq, void *data)
{
	start_update();
	return IRQ_HANDLED;
}

/* The id belongs to any use of ivshmem: other ones are not an error. */
static int map_channel(struct vnuma *vnuma)
{
	struct pci_dev *pdev = vnuma->pdev;
	resource_size_t size = min_t(resource_size_t, VNUMA_TC_MAX_REGION_SIZE,
				     pci_resource_len(pdev, CHANNEL_BAR));
	void *base;

	if (size < sizeof(struct vnuma_tc_header) ||
	    pci_resource_len(pdev, REGISTERS_BAR) <
		    VNUMA_IVSHMEM_REG_DOORBELL + sizeof(u32))
		return -ENODEV;
	/* The memory behind this BAR is plain memory of the host. */
	base = devm_memremap(&pdev->dev, pci_resource_start(pdev, CHANNEL_BAR),
			     size, MEMREMAP_WB);
	if (IS_ERR(base))
		return PTR_ERR(base);
	vnuma->channel.base = base;
	vnuma->channel.size = size;
	return vnuma_channel_has_magic(&vnuma->channel) ? 0 : -ENODEV;
}

static int claim(struct vnuma *vnuma)
{
	int err = 0;

	mutex_lock(&update_mutex);
	if (bound)
		err = -EBUSY;
	else
		bound = vnuma;
	/* One that was refused ends no update of the other. */
	if (!err)
		bindings++;
	mutex_unlock(&update_mutex);
	return err;
}

static void release(void *data)
{
	struct vnuma *vnuma = data;

	mutex_lock(&update_mutex);
	/* Nobody says any more where they are. */
	vnuma_pci_nodes_restore();
	vnuma_channel_leave(&vnuma->channel);
	ring(vnuma);
	bound = NULL;
	/* Another channel may count from the same start. */
	applied_generation = 0;
	partial_generation = 0;
	mutex_unlock(&update_mutex);
}

static int request_interrupt(struct vnuma *vnuma)
{
	struct pci_dev *pdev = vnuma->pdev;
	int err;

	pci_set_master(pdev);
	/* pcim_enable_device() frees the vectors, after devm the handler. */
	err = pci_alloc_irq_vectors(pdev, 1, 1, PCI_IRQ_MSIX);
	if (err < 0)
		return err;
	return devm_request_threaded_irq(&pdev->dev,
					 pci_irq_vector(pdev, VNUMA_IVSHMEM_PUBLISH_VECTOR),
					 on_interrupt, interrupt_thread,
					 IRQF_ONESHOT, "vnuma", vnuma);
}

static int vnuma_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct vnuma *vnuma;
	int err;

	vnuma = devm_kzalloc(&pdev->dev, sizeof(*vnuma), GFP_KERNEL);
	if (!vnuma)
		return -ENOMEM;
	vnuma->pdev = pdev;
	pci_set_drvdata(pdev, vnuma);

	err = pcim_enable_device(pdev);
	if (err)
		return err;
	err = map_channel(vnuma);
	if (err)
		return err;
	vnuma->registers = pcim_iomap(pdev, REGISTERS_BAR, 0);
	if (!vnuma->registers)
		return -ENOMEM;
	err = claim(vnuma);
	if (err)
		return dev_err_probe(&pdev->dev, err,
				     "another topology channel is in use\n");
	err = devm_add_action_or_reset(&pdev->dev, release, vnuma);
	if (err)
		return err;
	err = request_interrupt(vnuma);
	if (err)
		return dev_err_probe(&pdev->dev, err, "no MSI-X vector\n");

	/* What was published before there was a handler. */
	WRITE_ONCE(vnuma->interrupt_ns, ktime_get_ns());
	start_update();
	return 0;
}

static void switch_cpu(void *unused)
{
	vnuma_maps_switch();
}

/*
 * The kernel leaves what getcpu reads on CPU 0 as the firmware, or the kernel that read the
 * image, has set it. The others are set up anew. And the host, its channel and what it knows
 * of this guest may be other ones: all of it is done as after a probe. An update that is under
 * way while CPUs move (safe mode) ends as if its device had gone.
 */
static int vnuma_resume(struct device *dev)
{
	struct vnuma *vnuma = dev_get_drvdata(dev);

	if (vnuma_mode != VNUMA_GD_MODE_NONE)
		on_each_cpu(switch_cpu, NULL, 1);
	mutex_lock(&update_mutex);
	vnuma->announced = false;
	bindings++;
	applied_generation = 0;
	partial_generation = 0;
	mutex_unlock(&update_mutex);
	WRITE_ONCE(vnuma->interrupt_ns, ktime_get_ns());
	start_update();
	return 0;
}

/* Also after hibernation, in the kernel that is restored and in one that goes on. */
static DEFINE_SIMPLE_DEV_PM_OPS(vnuma_pm, NULL, vnuma_resume);

static const struct pci_device_id vnuma_ids[] = {
	{ PCI_DEVICE(VNUMA_IVSHMEM_PCI_VENDOR, VNUMA_IVSHMEM_PCI_DEVICE) },
	{ }
};
MODULE_DEVICE_TABLE(pci, vnuma_ids);

/* Removal is devm's: interrupt first, then the claim, then the mappings. */
static struct pci_driver vnuma_driver = {
	.name = "vnuma",
	.id_table = vnuma_ids,
	.probe = vnuma_probe,
	.driver.pm = pm_sleep_ptr(&vnuma_pm),
};

static int choose_mode(void)
{
	bool spreads, complete;

	if (!strcmp(mode, "none"))
		return 0;
	if (strcmp(mode, "auto") && strcmp(mode, "fast") && strcmp(mode, "safe")) {
		pr_err("vnuma: mode=%s is none of auto, fast, safe, none\n",
		       mode);
		return -EINVAL;
	}
	/* Safe mode is CPU hotplug, and has no worse races than that. */
	spreads = !vnuma_spread_init();
	/* Nor does safe mode need one of the symbols, but it uses those of sched_ext.c. */
	complete = !vnuma_symbols_init();
	if (!strcmp(mode, "safe")) {
		vnuma_mode = VNUMA_GD_MODE_SAFE;
		return 0;
	}
	if (complete && spreads) {
		vnuma_mode = VNUMA_GD_MODE_FAST;
		if (vnuma_symbols_missing()[0])
			pr_info("vnuma: distances stay as they are, missing: %s\n",
				vnuma_symbols_missing());
		return 0;
	}
	if (!strcmp(mode, "fast")) {
		pr_err("vnuma: no fast mode, missing: %s\n",
		       spreads ? vnuma_symbols_missing() : "a probe");
		vnuma_spread_exit();
		return -EOPNOTSUPP;
	}
	pr_warn("vnuma: safe mode instead of fast mode, missing: %s\n",
		spreads ? vnuma_symbols_missing() : "a probe");
	vnuma_mode = VNUMA_GD_MODE_SAFE;
	return 0;
}

static struct vnuma_model *set_topology(struct vnuma_model *topology)
{
	struct vnuma_model *old;

	cpus_read_lock();
	old = vnuma_topology_set_current(topology);
	cpus_read_unlock();
	return old;
}

/* The driver is registered no more, so nothing is bound and no update comes after this. */
static void stop(void)
{
	struct vnuma_model *last;

	vnuma_pci_nodes_exit();
	cancel_work_sync(&devices_work);
	cancel_delayed_work_sync(&safe_work);
	vnuma_debug_files_finish();
	vnuma_autonuma_exit();
	last = set_topology(NULL);
	if (vnuma_mode == VNUMA_GD_MODE_SAFE)
		vnuma_safe_undo();
	vnuma_fast_finish();
	vnuma_device_unregister();
	vnuma_hotplug_exit();
	vnuma_device_exit();
	kvfree(last);
}

static int __init start(void)
{
	int err = vnuma_device_init();

	if (err)
		return err;
	err = vnuma_hotplug_init();
	if (err)
		goto device;
	err = vnuma_pci_nodes_init(devices_changed);
	if (err)
		goto hotplug;
	/*
	 * A file that is opened keeps a module, but not one that fails to load. After this
	 * only the driver core's few bytes can be refused: a probe that fails is no error here.
	 */
	err = vnuma_device_register();
	if (err)
		goto pci_nodes;
	err = pci_register_driver(&vnuma_driver);
	if (!err)
		return 0;

	/* The driver core may have probed before it failed, and a publication been applied. */
	stop();
	return err;
pci_nodes:
	vnuma_pci_nodes_exit();
	cancel_work_sync(&devices_work);
hotplug:
	vnuma_hotplug_exit();
device:
	vnuma_device_exit();
	return err;
}

static int __init vnuma_init(void)
{
	struct vnuma_model *first;
	int err = choose_mode();

	if (err)
		return err;
	vnuma_fast_init();
	next = kvzalloc(sizeof(*next), GFP_KERNEL);
	/* Names no vCPU, so that there always is a current one. */
	first = kvzalloc(sizeof(*first), GFP_KERNEL);
	safe_queue = alloc_ordered_workqueue("vnuma", 0);
	if (first)
		set_topology(first);
	err = next && first && safe_queue ? start() : -ENOMEM;
	if (!err)
		return 0;

	if (safe_queue)
		destroy_workqueue(safe_queue);
	/* None if it was stopped. */
	kvfree(set_topology(NULL));
	kvfree(next);
	vnuma_spread_exit();
	return err;
}

static void __exit vnuma_exit(void)
{
	pci_unregister_driver(&vnuma_driver);
	stop();
	destroy_workqueue(safe_queue);
	kvfree(next);
	vnuma_spread_exit();
}

module_init(vnuma_init);
module_exit(vnuma_exit);

MODULE_DESCRIPTION("Follows the NUMA topology that the host publishes");
MODULE_AUTHOR("The vnuma authors");
MODULE_LICENSE("GPL");

// SPDX-License-Identifier: GPL-2.0
/*
 * vnuma: a guest kernel that follows the NUMA topology of its virtual machine.
 *
 * The host publishes the present topology in the memory of an ivshmem-doorbell
 * device and raises an interrupt. Its thread reads the newest publication, moves
 * CPUs between the kernel's nodes, tells user space through /dev/vnuma, and
 * acknowledges:
 *
 *	interrupt -> read and check -> apply -> /dev/vnuma -> doorbell
 *
 * Interrupts that come meanwhile run the thread once more; the latest publication
 * wins, those in between were never current.
 */
#include <linux/interrupt.h>
#include <linux/io.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>

#include "vnuma.h"

#define REGISTERS_BAR	0
#define CHANNEL_BAR	2
#define TOLD_VECTOR	0

static char *mode = "auto";
module_param(mode, charp, 0444);
MODULE_PARM_DESC(mode, "auto (default) or fast: in place, needs kernel symbols that are not exported; none: change nothing");

/**
 * struct vnuma - the one device that is the topology channel
 * @pdev: its PCI function
 * @registers: BAR 0
 * @channel: BAR 2
 * @told_ns: CLOCK_MONOTONIC of the last interrupt
 * @refused_generation: so that a publication is refused in one log line
 * @refused_error: likewise
 */
struct vnuma {
	struct pci_dev *pdev;
	void __iomem *registers;
	struct vnuma_channel channel;
	u64 told_ns;
	u64 refused_generation;
	int refused_error;
};

/* Updates, and which device is bound. */
static DEFINE_MUTEX(update_mutex);
static struct vnuma *bound;
static u64 applied_generation;
/* What is read into; becomes current when it is accepted. */
static struct vnuma_topology *next;

static bool fast_mode;

static void acknowledge(struct vnuma *vnuma, u64 generation)
{
	u32 vector = (u32)generation % VNUMA_IVSHMEM_VECTORS;

	writel(VNUMA_IVSHMEM_HOST_PEER << 16 | vector,
	       vnuma->registers + VNUMA_IVSHMEM_REG_DOORBELL);
}

static int read_and_apply(struct vnuma *vnuma, struct vnuma_topology **old,
			  struct vnuma_reason *why)
{
	int err = vnuma_channel_read(&vnuma->channel, next, why);

	if (err)
		return err;
	if (next->generation == applied_generation)
		return -EALREADY;
	if (!fast_mode)
		return vnuma_because(why, -EOPNOTSUPP,
				     "no mode to apply it with");
	return vnuma_fast_apply(next, old, why);
}

/* The same publication may be told again and again; it is logged once. */
static void refuse(struct vnuma *vnuma, const struct vnuma_report *report,
		   const struct vnuma_reason *why)
{
	u64 generation = vnuma_channel_generation(&vnuma->channel);

	vnuma_device_report(report);
	if (generation == vnuma->refused_generation &&
	    report->error == vnuma->refused_error)
		return;
	vnuma->refused_generation = generation;
	vnuma->refused_error = report->error;
	dev_warn_ratelimited(&vnuma->pdev->dev,
			     "publication refused: %s (%d)\n", why->text,
			     report->error);
}

static void accept(struct vnuma *vnuma, struct vnuma_report *report,
		   struct vnuma_topology *old)
{
	if (!applied_generation)
		dev_info(&vnuma->pdev->dev,
			 "following the host's topology, generation %016llx\n",
			 next->generation);
	applied_generation = next->generation;
	report->topology = next;
	vnuma_device_report(report);
	acknowledge(vnuma, applied_generation);
	next = old;
}

static void update(struct vnuma *vnuma)
{
	struct vnuma_report report = {
		.told = ns_to_ktime(READ_ONCE(vnuma->told_ns)),
	};
	struct vnuma_topology *old;
	struct vnuma_reason why;

	mutex_lock(&update_mutex);
	report.error = read_and_apply(vnuma, &old, &why);
	if (!report.error)
		accept(vnuma, &report, old);
	else if (report.error == -EALREADY)
		/* A host that was restarted may not know of the first one. */
		acknowledge(vnuma, applied_generation);
	else if (report.error != -ENODATA)
		refuse(vnuma, &report, &why);
	mutex_unlock(&update_mutex);
}

static irqreturn_t told(int irq, void *data)
{
	struct vnuma *vnuma = data;

	WRITE_ONCE(vnuma->told_ns, ktime_get_ns());
	return IRQ_WAKE_THREAD;
}

static irqreturn_t told_thread(int irq, void *data)
{
	update(data);
	return IRQ_HANDLED;
}

/* The id belongs to any use of ivshmem: other ones are not an error. */
static int map_channel(struct vnuma *vnuma)
{
	struct pci_dev *pdev = vnuma->pdev;
	resource_size_t size = pci_resource_len(pdev, CHANNEL_BAR);
	void *base;

	if (size < VNUMA_TC_REGION_SIZE ||
	    pci_resource_len(pdev, REGISTERS_BAR) <
		    VNUMA_IVSHMEM_REG_DOORBELL + sizeof(u32))
		return -ENODEV;
	/* The memory behind this BAR is plain memory of the host. */
	base = devm_memremap(&pdev->dev, pci_resource_start(pdev, CHANNEL_BAR),
			     VNUMA_TC_REGION_SIZE, MEMREMAP_WB);
	if (IS_ERR(base))
		return PTR_ERR(base);
	vnuma->channel.base = base;
	vnuma->channel.size = VNUMA_TC_REGION_SIZE;
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
	mutex_unlock(&update_mutex);
	return err;
}

static void release(void *data)
{
	mutex_lock(&update_mutex);
	bound = NULL;
	/* Another channel may count from the same start. */
	applied_generation = 0;
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
					 pci_irq_vector(pdev, TOLD_VECTOR),
					 told, told_thread, IRQF_ONESHOT,
					 "vnuma", vnuma);
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
	err = devm_add_action_or_reset(&pdev->dev, release, NULL);
	if (err)
		return err;
	err = request_interrupt(vnuma);
	if (err)
		return dev_err_probe(&pdev->dev, err, "no MSI-X vector\n");

	/* What was published before there was a handler. */
	WRITE_ONCE(vnuma->told_ns, ktime_get_ns());
	update(vnuma);
	return 0;
}

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
};

static int choose_mode(void)
{
	if (!strcmp(mode, "none"))
		return 0;
	if (strcmp(mode, "auto") && strcmp(mode, "fast")) {
		pr_err("vnuma: mode=%s is none of auto, fast, none\n", mode);
		return -EINVAL;
	}
	fast_mode = !vnuma_symbols_init();
	if (fast_mode) {
		if (vnuma_symbols_missing()[0])
			pr_info("vnuma: distances stay as they are, missing: %s\n",
				vnuma_symbols_missing());
		return 0;
	}
	pr_warn("vnuma: fast mode is off, missing: %s\n",
		vnuma_symbols_missing());
	return strcmp(mode, "fast") ? 0 : -EOPNOTSUPP;
}

static int __init vnuma_init(void)
{
	struct vnuma_topology *first;
	int err = choose_mode();

	if (err)
		return err;
	next = kvzalloc(sizeof(*next), GFP_KERNEL);
	/* Names no vCPU, so that there always is a current one. */
	first = kvzalloc(sizeof(*first), GFP_KERNEL);
	if (!next || !first) {
		err = -ENOMEM;
		goto free;
	}
	err = vnuma_device_init(fast_mode ? VNUMA_GD_MODE_FAST :
					    VNUMA_GD_MODE_NONE);
	if (err)
		goto free;
	err = vnuma_hotplug_init(first);
	if (err)
		goto device;
	err = pci_register_driver(&vnuma_driver);
	if (!err)
		return 0;

	first = vnuma_hotplug_exit();
device:
	vnuma_device_exit();
free:
	kvfree(first);
	kvfree(next);
	return err;
}

static void __exit vnuma_exit(void)
{
	pci_unregister_driver(&vnuma_driver);
	kvfree(vnuma_hotplug_exit());
	vnuma_device_exit();
	kvfree(next);
}

module_init(vnuma_init);
module_exit(vnuma_exit);

MODULE_DESCRIPTION("Follows the NUMA topology that the host tells");
MODULE_AUTHOR("The vnuma authors");
MODULE_LICENSE("GPL");

// SPDX-License-Identifier: GPL-2.0
/*
 * Nodes of PCI devices.
 *
 * The kernel takes a device's node from the firmware, which says nothing of most devices
 * of a VM and cannot change. The host knows on which node a device really is. Its
 * drivers' memory, the default CPUs of its interrupts, and numa_node and local_cpulist in
 * sysfs follow from the node that is set here.
 *
 * A device that comes later gets its node before a driver is bound to it. One that is not
 * published any more gets back what was found, unless somebody has changed it since.
 */
#define pr_fmt(fmt) "vnuma: " fmt

#include <linux/device.h>
#include <linux/irq.h>
#include <linux/msi.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/rcupdate.h>

#include "vnuma.h"

/**
 * struct known - a device whose node was set
 * @pdev: held
 * @found: its node before
 * @set: its node as published
 */
struct known {
	struct pci_dev *pdev;
	int found;
	int set;
};

/* Protects all of this. Nothing that can wait for a device is done with it held. */
static DEFINE_MUTEX(nodes_mutex);
/* As published last, by address. */
static struct vnuma_tc_device told[VNUMA_TC_MAX_DEVICES];
static u32 nr_told;
static struct known known[VNUMA_TC_MAX_DEVICES];
static u32 nr_known;
/* Called after a device has come or gone. */
static void (*on_change)(void);

static int told_node(struct pci_dev *pdev)
{
	const struct vnuma_tc_device wanted = {
		.segment = pci_domain_nr(pdev->bus),
		.bus = pdev->bus->number,
		.devfn = pdev->devfn,
	};
	u32 i;

	for (i = 0; i < nr_told; i++)
		if (vnuma_device_address(&told[i]) ==
		    vnuma_device_address(&wanted))
			return told[i].node;
	return NUMA_NO_NODE;
}

/*
 * The CPUs that the kernel chooses for an interrupt follow from its node, which it has since
 * the driver has allocated it. The lock keeps the driver, and so its interrupts;
 * whoever has it binds a driver or unbinds one, and takes the device's node.
 */
static void set_interrupt_nodes(struct pci_dev *pdev, int node)
{
	struct irq_data *data;
	int i, irq;

	if (!device_trylock(&pdev->dev))
		return;
	if (pdev->msi_enabled || pdev->msix_enabled) {
		for (i = 0; (irq = pci_irq_vector(pdev, i)) >= 0; i++) {
			rcu_read_lock();
			data = irq_get_irq_data(irq);
			if (data)
				WRITE_ONCE(data->common->node, node);
			rcu_read_unlock();
		}
	}
	device_unlock(&pdev->dev);
}

static void change_node(struct pci_dev *pdev, int node)
{
	if (dev_to_node(&pdev->dev) == node)
		return;
	set_dev_node(&pdev->dev, node);
	set_interrupt_nodes(pdev, node);
}

static struct known *find_known(const struct pci_dev *pdev)
{
	u32 i;

	for (i = 0; i < nr_known; i++)
		if (known[i].pdev == pdev)
			return &known[i];
	return NULL;
}

static void forget(struct known *entry)
{
	pci_dev_put(entry->pdev);
	*entry = known[--nr_known];
}

static void restore(struct known *entry)
{
	if (dev_to_node(&entry->pdev->dev) == entry->set)
		change_node(entry->pdev, entry->found);
	forget(entry);
}

static void set_as_told(struct pci_dev *pdev)
{
	struct known *entry = find_known(pdev);
	int node = told_node(pdev);

	if (node == NUMA_NO_NODE) {
		if (entry)
			restore(entry);
		return;
	}
	if (!entry) {
		/* As many as can be published, and those of earlier ones are restored. */
		if (WARN_ON_ONCE(nr_known == ARRAY_SIZE(known)))
			return;
		entry = &known[nr_known++];
		entry->pdev = pci_dev_get(pdev);
		entry->found = dev_to_node(&pdev->dev);
	}
	entry->set = node;
	change_node(pdev, node);
}

/**
 * vnuma_pci_nodes_apply - set the nodes of all devices that are published
 * @topology: checked; its nodes are online
 */
void vnuma_pci_nodes_apply(const struct vnuma_model *topology)
{
	struct pci_dev *pdev = NULL;
	u32 i;

	mutex_lock(&nodes_mutex);
	nr_told = topology->nr_devices;
	memcpy(told, topology->device, nr_told * sizeof(told[0]));
	/* First those that are not named any more, so that there is room. */
	for (i = nr_known; i-- > 0;)
		if (told_node(known[i].pdev) == NUMA_NO_NODE)
			restore(&known[i]);
	for_each_pci_dev(pdev)
		set_as_told(pdev);
	mutex_unlock(&nodes_mutex);
}

/** vnuma_pci_nodes_restore - give all devices the nodes that were found */
void vnuma_pci_nodes_restore(void)
{
	mutex_lock(&nodes_mutex);
	nr_told = 0;
	while (nr_known)
		restore(&known[nr_known - 1]);
	mutex_unlock(&nodes_mutex);
}

/** vnuma_pci_nodes_count - how many devices are on the node that was published */
u32 vnuma_pci_nodes_count(void)
{
	u32 i, count = 0;

	mutex_lock(&nodes_mutex);
	for (i = 0; i < nr_known; i++)
		count += dev_to_node(&known[i].pdev->dev) == known[i].set;
	mutex_unlock(&nodes_mutex);
	return count;
}

static int on_bus_event(struct notifier_block *block, unsigned long action,
			void *data)
{
	struct pci_dev *pdev = to_pci_dev((struct device *)data);
	struct known *entry;

	/* Added: before any driver looks at it. */
	if (action != BUS_NOTIFY_ADD_DEVICE &&
	    action != BUS_NOTIFY_REMOVED_DEVICE)
		return NOTIFY_DONE;
	mutex_lock(&nodes_mutex);
	if (action == BUS_NOTIFY_ADD_DEVICE) {
		set_as_told(pdev);
	} else {
		entry = find_known(pdev);
		if (entry)
			forget(entry);
	}
	mutex_unlock(&nodes_mutex);
	on_change();
	return NOTIFY_OK;
}

static struct notifier_block bus_block = {
	.notifier_call = on_bus_event,
};

/**
 * vnuma_pci_nodes_init - follow devices that come and go
 * @changed: called after each; it must not wait
 */
int vnuma_pci_nodes_init(void (*changed)(void))
{
	on_change = changed;
	return bus_register_notifier(&pci_bus_type, &bus_block);
}

/** vnuma_pci_nodes_exit - follow no more; vnuma_pci_nodes_restore() came before */
void vnuma_pci_nodes_exit(void)
{
	bus_unregister_notifier(&pci_bus_type, &bus_block);
}

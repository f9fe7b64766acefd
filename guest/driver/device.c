// SPDX-License-Identifier: GPL-2.0
/*
 * /dev/vnuma: the driver's own page for the programs of the guest.
 *
 * See vnuma/guest_device.h for the contract. The page is written after the kernel's
 * maps agree with what it says, so a program that sees a new generation gets
 * the new node from every interface of the kernel.
 */
#include <linux/cpu.h>
#include <linux/fs.h>
#include <linux/kobject.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/sysfs.h>
#include <linux/topology.h>
#include <linux/uaccess.h>
#include <linux/vmalloc.h>
#include <linux/wait.h>

#include "compat.h"
#include "vnuma.h"

static struct vnuma_gd_page *page;
/* What the page will be. It is written here at leisure. */
static struct vnuma_gd_page draft;
/* Writers of both: updates and CPU hotplug. */
static DEFINE_MUTEX(page_mutex);
static DECLARE_WAIT_QUEUE_HEAD(changed);

/**
 * struct reader - an open file
 * @seen: generation at the last read(), 0 before the first
 */
struct reader {
	u64 seen;
};

/*
 * Readers wait while the sequence is odd, and one of SCHED_FIFO lets no other task have its
 * CPU for that. So the writer is not preempted then. Fields are whole numbers of aligned
 * words, or parts of one: none is ever seen half written.
 */
static void copy_draft(void)
{
	const u64 *from = (const u64 *)&draft;
	u64 *to = (u64 *)page;
	size_t i;

	preempt_disable();
	WRITE_ONCE(page->sequence, page->sequence + 1);
	smp_wmb(); /* the sequence is odd before any field changes */
	for (i = offsetof(struct vnuma_gd_page, updates) / sizeof(*to);
	     i < sizeof(*page) / sizeof(*to); i++)
		if (to[i] != from[i])
			WRITE_ONCE(to[i], from[i]);
	/* Some readers load this one alone, hence last. */
	smp_store_release(&page->generation, draft.generation);
	smp_wmb(); /* all fields are changed before the sequence is even */
	WRITE_ONCE(page->sequence, page->sequence + 1);
	preempt_enable();
}

/* With cpus_read_lock() held or in a hotplug callback, so before page_mutex. */
static void fill_cpus(void)
{
	int cpu, nr = min_t(int, nr_cpu_ids, VNUMA_GD_MAX_CPUS);

	for (cpu = 0; cpu < nr; cpu++) {
		int node = cpu_present(cpu) ? cpu_to_node(cpu) : NUMA_NO_NODE;

		draft.cpu_node[cpu] = node == NUMA_NO_NODE ? VNUMA_GD_NO_NODE :
							     node;
	}
	draft.nr_cpus = nr;
	draft.cpus_unapplied = vnuma_topology_count_unapplied();
}

/** vnuma_device_refresh_cpus - a CPU came online, the generation stays */
void vnuma_device_refresh_cpus(void)
{
	mutex_lock(&page_mutex);
	fill_cpus();
	copy_draft();
	mutex_unlock(&page_mutex);
}

static void send_uevent(u64 generation);

/**
 * vnuma_device_report - publish what the last publication came to
 * @report: accepted or refused
 *
 * An accepted one wakes the readers and sends a uevent.
 */
void vnuma_device_report(const struct vnuma_report *report)
{
	const struct vnuma_model *topology = report->topology;

	cpus_read_lock();
	mutex_lock(&page_mutex);
	draft.interrupt_ns = ktime_to_ns(report->interrupt);
	draft.last_error = report->error;
	if (topology) {
		fill_cpus();
		draft.nr_nodes = topology->nr_nodes;
		draft.distances = vnuma_distances_state(topology);
		draft.applied_ns = ktime_get_ns();
		draft.updates++;
		draft.generation = topology->generation;
	} else {
		draft.refused++;
	}
	copy_draft();
	mutex_unlock(&page_mutex);
	cpus_read_unlock();

	if (topology) {
		/*
		 * This thread sleeps soon: a program that wakes up on its CPU waits
		 * for that, and not for an idle vCPU to come back on the host.
		 */
		wake_up_interruptible_sync(&changed);
		send_uevent(topology->generation);
	}
}

static int vnuma_open(struct inode *inode, struct file *file)
{
	struct reader *reader = kzalloc(sizeof(*reader), GFP_KERNEL);

	if (!reader)
		return -ENOMEM;
	file->private_data = reader;
	return stream_open(inode, file);
}

static int vnuma_release(struct inode *inode, struct file *file)
{
	kfree(file->private_data);
	return 0;
}

static ssize_t vnuma_read(struct file *file, char __user *buf, size_t count,
			  loff_t *ppos)
{
	struct reader *reader = file->private_data;
	u64 generation = READ_ONCE(page->generation);

	if (count < sizeof(generation))
		return -EINVAL;
	if (copy_to_user(buf, &generation, sizeof(generation)))
		return -EFAULT;
	WRITE_ONCE(reader->seen, generation);
	return sizeof(generation);
}

static __poll_t vnuma_poll(struct file *file, poll_table *wait)
{
	struct reader *reader = file->private_data;

	poll_wait(file, &changed, wait);
	if (READ_ONCE(page->generation) == READ_ONCE(reader->seen))
		return 0;
	return EPOLLIN | EPOLLRDNORM | EPOLLPRI;
}

static int vnuma_mmap(struct file *file, struct vm_area_struct *vma)
{
	if (vma->vm_flags & VM_WRITE)
		return -EACCES;
	/* Not by mprotect() either. */
	vm_flags_clear(vma, VM_MAYWRITE);
	vm_flags_set(vma, VM_DONTEXPAND | VM_DONTDUMP);
	return remap_vmalloc_range(vma, page, vma->vm_pgoff);
}

static const struct file_operations vnuma_fops = {
	.owner = THIS_MODULE,
	.open = vnuma_open,
	.release = vnuma_release,
	.read = vnuma_read,
	.poll = vnuma_poll,
	.mmap = vnuma_mmap,
};

static const char *mode_name(void)
{
	switch (page->mode) {
	case VNUMA_GD_MODE_FAST:
		return "fast";
	case VNUMA_GD_MODE_SAFE:
		return "safe";
	default:
		return "none";
	}
}

static ssize_t mode_show(struct device *dev, struct device_attribute *attr,
			 char *buf)
{
	return sysfs_emit(buf, "%s\n", mode_name());
}
static DEVICE_ATTR_RO(mode);

static ssize_t missing_symbols_show(struct device *dev,
				    struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%s\n", vnuma_symbols_missing());
}
static DEVICE_ATTR_RO(missing_symbols);

static ssize_t generation_show(struct device *dev,
			       struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%016llx\n", READ_ONCE(page->generation));
}
static DEVICE_ATTR_RO(generation);

static ssize_t updates_show(struct device *dev, struct device_attribute *attr,
			    char *buf)
{
	return sysfs_emit(buf, "%llu\n", READ_ONCE(page->updates));
}
static DEVICE_ATTR_RO(updates);

static ssize_t refused_show(struct device *dev, struct device_attribute *attr,
			    char *buf)
{
	return sysfs_emit(buf, "%llu\n", READ_ONCE(page->refused));
}
static DEVICE_ATTR_RO(refused);

static ssize_t cpus_unapplied_show(struct device *dev,
				   struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%u\n", READ_ONCE(page->cpus_unapplied));
}
static DEVICE_ATTR_RO(cpus_unapplied);

static ssize_t devices_show(struct device *dev, struct device_attribute *attr,
			    char *buf)
{
	return sysfs_emit(buf, "%u\n", vnuma_pci_nodes_count());
}
static DEVICE_ATTR_RO(devices);

static ssize_t autonuma_told_show(struct device *dev,
				  struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%llu\n", vnuma_autonuma_count());
}
static DEVICE_ATTR_RO(autonuma_told);

static struct attribute *vnuma_attrs[] = {
	&dev_attr_mode.attr,
	&dev_attr_missing_symbols.attr,
	&dev_attr_generation.attr,
	&dev_attr_updates.attr,
	&dev_attr_refused.attr,
	&dev_attr_cpus_unapplied.attr,
	&dev_attr_devices.attr,
	&dev_attr_autonuma_told.attr,
	NULL,
};
ATTRIBUTE_GROUPS(vnuma);

static struct miscdevice vnuma_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "vnuma",
	.mode = 0444,
	.fops = &vnuma_fops,
	.groups = vnuma_groups,
};

static void send_uevent(u64 generation)
{
	char variable[sizeof("VNUMA_GENERATION=") + 16];
	char *envp[] = { variable, NULL };

	scnprintf(variable, sizeof(variable), "VNUMA_GENERATION=%016llx",
		  generation);
	kobject_uevent_env(&vnuma_misc.this_device->kobj, KOBJ_CHANGE, envp);
}

/** vnuma_device_init - the page, which CPU hotplug writes from now on */
int vnuma_device_init(void)
{
	BUILD_BUG_ON(sizeof(*page) > VNUMA_GD_SIZE);
	BUILD_BUG_ON(sizeof(*page) % sizeof(u64));
	page = vmalloc_user(VNUMA_GD_SIZE);
	if (!page)
		return -ENOMEM;
	page->magic = VNUMA_GD_MAGIC;
	page->version_major = VNUMA_GD_VERSION_MAJOR;
	page->version_minor = VNUMA_GD_VERSION_MINOR;
	page->page_size = sizeof(*page);
	page->mode = vnuma_mode;
	cpus_read_lock();
	draft.nr_nodes = num_online_nodes();
	fill_cpus();
	copy_draft();
	cpus_read_unlock();
	return 0;
}

/**
 * vnuma_device_register - make /dev/vnuma
 *
 * It exists as long as the module, so that programs can wait for a channel that
 * is attached later. It must be there before the first update.
 */
int vnuma_device_register(void)
{
	return misc_register(&vnuma_misc);
}

/** vnuma_device_unregister - no file is open any more, and no update comes */
void vnuma_device_unregister(void)
{
	misc_deregister(&vnuma_misc);
}

/** vnuma_device_exit - nobody writes the page any more */
void vnuma_device_exit(void)
{
	vfree(page);
}

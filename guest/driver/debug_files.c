// SPDX-License-Identifier: GPL-2.0
/*
 * The kernel's debug files of scheduler domains, until 6.3.
 *
 * Up to then every rebuild of the domains removes their files below
 * /sys/kernel/debug/sched/domains and makes them anew, ten a domain of each CPU
 * (update_sched_domain_debugfs(), kernel/sched/debug.c), which takes as long as all
 * the rest of an update. Since 6.4 it does that when it is asked for only ("verbose").
 * Here they are made once the update has been acknowledged.
 *
 * Without their directory the kernel leaves the files as they are and remembers the
 * CPUs whose domains have changed. It looks at the directory with
 * sched_domains_mutex held.
 */
#include "compat.h"
#include "vnuma.h"

#ifdef VNUMA_DEBUG_FILES

#include <linux/mutex.h>
#include <linux/workqueue.h>

/* While the kernel lacks it. */
static struct dentry *directory;

static void resume(struct work_struct *work)
{
	mutex_lock(vnuma_symbols.sched_domains_mutex);
	if (directory) {
		*vnuma_symbols.debugfs_sched = directory;
		directory = NULL;
		vnuma_symbols.update_sched_domain_debugfs();
	}
	mutex_unlock(vnuma_symbols.sched_domains_mutex);
}

static DECLARE_WORK(resume_work, resume);

/** vnuma_debug_files_pause - leave the files as they are until further notice */
void vnuma_debug_files_pause(void)
{
	if (!vnuma_symbols.debugfs_sched ||
	    !vnuma_symbols.update_sched_domain_debugfs)
		return;
	mutex_lock(vnuma_symbols.sched_domains_mutex);
	if (*vnuma_symbols.debugfs_sched) {
		directory = *vnuma_symbols.debugfs_sched;
		*vnuma_symbols.debugfs_sched = NULL;
	}
	mutex_unlock(vnuma_symbols.sched_domains_mutex);
}

/** vnuma_debug_files_resume - make them soon, and from now on as the kernel does */
void vnuma_debug_files_resume(void)
{
	if (READ_ONCE(directory))
		schedule_work(&resume_work);
}

/** vnuma_debug_files_finish - there is no update any more, and nothing is left to do after this */
void vnuma_debug_files_finish(void)
{
	flush_work(&resume_work);
}

#endif

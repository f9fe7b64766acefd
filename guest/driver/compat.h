/* SPDX-License-Identifier: GPL-2.0 */
/* What differs between kernels, or what their public headers leave out. */
#ifndef VNUMA_COMPAT_H
#define VNUMA_COMPAT_H

#include <linux/version.h>

/* Exported, but declared in kernel/rcu/rcu.h only. */
void rcu_expedite_gp(void);
void rcu_unexpedite_gp(void);

#endif /* VNUMA_COMPAT_H */

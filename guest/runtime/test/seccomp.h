/* SPDX-License-Identifier: Apache-2.0 */
/* Filters of system calls, as a container or a unit of systemd may have them. */
#ifndef VNUMA_TEST_SECCOMP_H
#define VNUMA_TEST_SECCOMP_H

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "tree.h"

#define REFUSED	(SECCOMP_RET_ERRNO | EPERM)

static inline void add_filter(struct sock_filter *code, size_t length)
{
	struct sock_fprog filter = { (unsigned short)length, code };

	expect_equal(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
	expect_equal(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), 0);
}

/* What the thread gets for this system call from now on. */
static inline void answer(unsigned int call, unsigned int how)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, how),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};

	add_filter(code, sizeof(code) / sizeof(*code));
}

static inline void refuse(unsigned int call)
{
	answer(call, REFUSED);
	expect(syscall(call, -1L, 0L, 0L, 0L, 0L, 0L) == -1 && errno == EPERM);
}

/* After this no library can be loaded either. */
static inline void refuse_files(void)
{
	refuse(SYS_open);
	refuse(SYS_openat);
}

/* The page of the driver, that is: what else is mapped from here on is private. */
static inline void refuse_shared_mappings(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[3])),
		BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, MAP_SHARED, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, REFUSED),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};

	add_filter(code, sizeof(code) / sizeof(*code));
	expect(mmap(NULL, 1, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == EPERM);
}

/* Any other call ends the process, as it does in strict mode (seccomp(2)), which a process that has a filter cannot enter. */
static inline void allow_only_reading(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_read, 4, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_write, 3, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit, 2, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};

	add_filter(code, sizeof(code) / sizeof(*code));
}

/* What is refused before any library has started, as the name of a case says: for a function in .preinit_array. */
static inline void refuse_from_start(const char *how)
{
	if (!strcmp(how, "no files"))
		refuse_files();
	if (!strcmp(how, "no page"))
		refuse_shared_mappings();
}

#endif /* VNUMA_TEST_SECCOMP_H */

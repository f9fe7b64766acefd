/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of alloc-test share: which arena memory is from, and the tests of each file. */
#ifndef VNUMA_TEST_ALLOC_TEST_H
#define VNUMA_TEST_ALLOC_TEST_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tree.h"

#define LOOK_EVERY	1024

int mallctl(const char *name, void *old, size_t *old_size, void *new, size_t new_size);
int mallctlnametomib(const char *name, size_t *mib, size_t *length);
int mallctlbymib(const size_t *mib, size_t length, void *old, size_t *old_size, void *new, size_t new_size);

/* The compiler must not leave out what is allocated for its own sake. */
extern __thread void *volatile kept;
extern struct vnuma_gd_page *page;

/* alloc-test.c */
extern volatile int no_more_arenas, loses_hooks;
extern void **hooks_of_program;
unsigned int thread_arena(void);
unsigned int arena_of(void *memory);
unsigned int allocated_in(void);
unsigned int automatic(void);
void schedule_on(uint16_t node);
void *hooks_of(unsigned int arena);
void **own_hooks(void *const *like);
void in_a_thread(void *(*what)(void *unused));
void *by_name(const char *name, size_t size);

/* alloc-arenas.c: which arena a thread uses. */
void gets_an_arena_later(void);
void follows(void);
void comes_along(void);
void threads_share(void);
void *copies_hooks(void *unused);
void leaves_hooks(void);
void keeps_hooks(void);
void *chooses(void *unused);
void *chooses_later(void *unused);
void *binds_itself_first(void *unused);
void has_created_ones(void);

/* alloc-memory.c: what arenas do with memory, and how functions behave that allocate it. */
void lies_in_huge_pages(void);
void share_no_huge_page(void);
void leaves_nothing(void);
void is_not_cancelled(void);
void needs_little_stack(void);
void new_follows(void);
void has_threads_of_its_own(bool by_number);
void allocates(void);

#endif /* VNUMA_TEST_ALLOC_TEST_H */

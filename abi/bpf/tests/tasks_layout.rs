//! Compares `tasks.h` with its Rust mirror, as the C compiler lays it out.

use std::{
    env, fs,
    mem::{offset_of, size_of},
    path::Path,
    process::Command,
};
use vnuma_abi_bpf::tasks::{
    CALLS, ENDED, MASK_WORDS, MAX_CPUS, MAX_EVENTS, MAX_TASKS, OFFLINE, RUNS, SLEEPS, STOPPED, TIMES, TRACED,
    Task, Tasks,
};

/// Prints `name value` for everything that both sides must agree on.
const PROGRAM: &str = r#"
#include <linux/types.h>
#include <stddef.h>
#include <stdio.h>
#include <vnuma/tasks.h>

#define MEMBER(s, m) printf(#m " at %zu of %zu\n", offsetof(struct s, m), sizeof(((struct s *)0)->m))

int main(void)
{
	MEMBER(vnuma_task, tid);
	MEMBER(vnuma_task, pid);
	MEMBER(vnuma_task, start_ns);
	MEMBER(vnuma_task, ran_ns);
	MEMBER(vnuma_task, waited_ns);
	MEMBER(vnuma_task, cpu);
	MEMBER(vnuma_task, policy);
	MEMBER(vnuma_task, state);
	MEMBER(vnuma_task, call);
	MEMBER(vnuma_task, stack);
	MEMBER(vnuma_task, sleeps);
	MEMBER(vnuma_task, nr_events);
	MEMBER(vnuma_task, nr_counts);
	MEMBER(vnuma_task, enabled_ns);
	MEMBER(vnuma_task, running_ns);
	MEMBER(vnuma_task, events);
	MEMBER(vnuma_task, counts);
	MEMBER(vnuma_task, cpus);
	MEMBER(vnuma_tasks, nr_tasks);
	MEMBER(vnuma_tasks, nr_cpus);
	MEMBER(vnuma_tasks, mask_words);
	MEMBER(vnuma_tasks, flags);
	MEMBER(vnuma_tasks, idle_ns);
	MEMBER(vnuma_tasks, tasks);
	printf("sizes %zu %zu\n", sizeof(struct vnuma_task), sizeof(struct vnuma_tasks));
	printf("constants %d %d %d %d %llu\n", VNUMA_TASKS_MAX, VNUMA_TASKS_EVENTS, VNUMA_TASKS_CPUS, VNUMA_TASKS_MASK_WORDS,
	       VNUMA_TASKS_OFFLINE);
	printf("flags %d %d states %d %d %d %d %d\n", VNUMA_TASKS_TIMES, VNUMA_TASKS_CALLS, VNUMA_TASK_RUNS, VNUMA_TASK_SLEEPS,
	       VNUMA_TASK_STOPPED, VNUMA_TASK_TRACED, VNUMA_TASK_ENDED);
	return 0;
}
"#;

fn c_side() -> String {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, program) = (dir.join("tasks_layout.c"), dir.join("tasks_layout"));
    fs::write(&source, PROGRAM).unwrap();
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/include");
    let built = Command::new(&compiler)
        .args(["-Wall", "-Werror", "-I", include, "-o"])
        .args([&program, &source])
        .status()
        .unwrap_or_else(|error| panic!("{compiler}: {error}"));
    assert!(built.success(), "{compiler} refused the header");
    String::from_utf8(Command::new(&program).output().unwrap().stdout).unwrap()
}

fn rust_side() -> String {
    let mut lines = String::new();
    macro_rules! member {
        ($struct:ident, $name:ident, $type:ty) => {
            let _: fn(&$struct) -> &$type = |all| &all.$name;
            let (at, size) = (offset_of!($struct, $name), size_of::<$type>());
            lines += &format!("{} at {at} of {size}\n", stringify!($name));
        };
    }
    member!(Task, tid, u32);
    member!(Task, pid, u32);
    member!(Task, start_ns, u64);
    member!(Task, ran_ns, u64);
    member!(Task, waited_ns, u64);
    member!(Task, cpu, u32);
    member!(Task, policy, u32);
    member!(Task, state, u32);
    member!(Task, call, i32);
    member!(Task, stack, u64);
    member!(Task, sleeps, u64);
    member!(Task, nr_events, u32);
    member!(Task, nr_counts, u32);
    member!(Task, enabled_ns, u64);
    member!(Task, running_ns, u64);
    member!(Task, events, [u64; MAX_EVENTS]);
    member!(Task, counts, [u64; MAX_EVENTS]);
    member!(Task, cpus, [u64; MASK_WORDS]);
    member!(Tasks, nr_tasks, u32);
    member!(Tasks, nr_cpus, u32);
    member!(Tasks, mask_words, u32);
    member!(Tasks, flags, u32);
    member!(Tasks, idle_ns, [u64; MAX_CPUS]);
    member!(Tasks, tasks, [Task; MAX_TASKS]);
    lines += &format!("sizes {} {}\n", size_of::<Task>(), size_of::<Tasks>());
    lines += &format!("constants {MAX_TASKS} {MAX_EVENTS} {MAX_CPUS} {MASK_WORDS} {OFFLINE}\n");
    lines += &format!("flags {TIMES} {CALLS} states {RUNS} {SLEEPS} {STOPPED} {TRACED} {ENDED}\n");
    lines
}

#[test]
fn header_and_mirror_agree() {
    assert_eq!(c_side(), rust_side());
}

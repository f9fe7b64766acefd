//! The header of the map `tasks` and its Rust mirror agree.

#[path = "../../tests/layout_check.rs"]
mod layout_check;

use std::{mem::offset_of, path::Path};
use vnuma_abi_bpf::tasks::{self as t, Task, Tasks};

const HEADER: &str = "tasks.h";

#[test]
fn constants_and_layouts_agree() {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let constants = [
        ("VNUMA_TASKS_MAX", t::MAX_TASKS as u64),
        ("VNUMA_TASKS_EVENTS", t::MAX_EVENTS as u64),
        ("VNUMA_TASKS_CPUS", t::MAX_CPUS as u64),
        ("VNUMA_TASKS_MASK_WORDS", t::MASK_WORDS as u64),
        ("VNUMA_TASKS_TIMES", t::TIMES.into()),
        ("VNUMA_TASKS_CALLS", t::CALLS.into()),
        ("VNUMA_TASK_RUNS", t::RUNS.into()),
        ("VNUMA_TASK_SLEEPS", t::SLEEPS.into()),
        ("VNUMA_TASK_STOPPED", t::STOPPED.into()),
        ("VNUMA_TASK_TRACED", t::TRACED.into()),
        ("VNUMA_TASK_ENDED", t::ENDED.into()),
        ("VNUMA_TASKS_OFFLINE", t::OFFLINE),
    ];
    let constants = constants.map(|(name, value)| (name.to_owned(), value)).to_vec();
    layout_check::all_constants(&include, HEADER, &constants);
    let layouts = [
        constants,
        layout!(Task, "vnuma_task", {
            tid, pid, start_ns, ran_ns, waited_ns, cpu, policy, state, call, stack, sleeps, nr_events, nr_counts,
            enabled_ns, running_ns, events, counts, cpus,
        }),
        layout!(Tasks, "vnuma_tasks", { nr_tasks, nr_cpus, mask_words, flags, idle_ns, tasks }),
    ];
    layout_check::compare(&include, HEADER, &layouts.concat());
}

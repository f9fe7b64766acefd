//! Compares the C header with its Rust mirror, as the C compiler lays it out.

use std::{
    env, fs,
    mem::{offset_of, size_of},
    path::Path,
    process::Command,
};
use vnuma_abi_bpf::{
    AFFINITY, COUNT_DROPPED, COUNT_REPORTED, EXITED, MIGRATED, PAGE_MOVES_LONGEST_NS, PAGE_MOVES_THREAD,
    PIDS, VcpuEvent, WAITS, WAKES, WATCHED_BITS,
};

/// Prints `name value` for everything that both sides must agree on.
const PROGRAM: &str = r#"
#include <linux/types.h>
#include <stddef.h>
#include <stdio.h>
#include <vnuma/page_moves.h>
#include <vnuma/vcpu_event.h>

#define MEMBER(m) printf("offset " #m " %zu\nsize " #m " %zu\n", \
	offsetof(struct vnuma_vcpu_event, m), sizeof(((struct vnuma_vcpu_event *)0)->m))

int main(void)
{
	MEMBER(time_ns);
	MEMBER(tid);
	MEMBER(kind);
	MEMBER(cpu);
	MEMBER(reserved);
	printf("size all %zu\n", sizeof(struct vnuma_vcpu_event));
	printf("const MIGRATED %d\nconst AFFINITY %d\nconst EXITED %d\n",
	       VNUMA_VCPU_MIGRATED, VNUMA_VCPU_AFFINITY, VNUMA_VCPU_EXITED);
	printf("const COUNT_REPORTED %d\nconst COUNT_DROPPED %d\nconst COUNTS %d\n",
	       VNUMA_VCPU_COUNT_REPORTED, VNUMA_VCPU_COUNT_DROPPED, VNUMA_VCPU_COUNTS);
	printf("const WAKES %d\nconst WAITS %d\n", VNUMA_VCPU_WAKES, VNUMA_VCPU_WAITS);
	printf("const PIDS %d\nconst WATCHED_BITS %d\n", VNUMA_VCPU_PIDS, VNUMA_VCPU_BITS);
	printf("const MOVES_THREAD %d\nconst MOVES_LONGEST_NS %d\n",
	       VNUMA_PAGE_MOVES_THREAD, VNUMA_PAGE_MOVES_LONGEST_NS);
	return 0;
}
"#;

fn c_side() -> String {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = dir.join("vcpu_event_layout.c");
    let program = dir.join("vcpu_event_layout");
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
        ($name:ident, $type:ty) => {
            lines += &format!(
                "offset {} {}\nsize {} {}\n",
                stringify!($name),
                offset_of!(VcpuEvent, $name),
                stringify!($name),
                size_of::<$type>()
            );
            let _: $type = VcpuEvent::default().$name;
        };
    }
    member!(time_ns, u64);
    member!(tid, u32);
    member!(kind, u32);
    member!(cpu, u32);
    member!(reserved, u32);
    lines += &format!("size all {}\n", size_of::<VcpuEvent>());
    lines += &format!("const MIGRATED {MIGRATED}\nconst AFFINITY {AFFINITY}\nconst EXITED {EXITED}\n");
    lines += &format!(
        "const COUNT_REPORTED {COUNT_REPORTED}\nconst COUNT_DROPPED {COUNT_DROPPED}\nconst COUNTS {}\n",
        COUNT_DROPPED + 1
    );
    lines += &format!("const WAKES {WAKES}\nconst WAITS {WAITS}\n");
    lines += &format!("const PIDS {PIDS}\nconst WATCHED_BITS {WATCHED_BITS}\n");
    lines +=
        &format!("const MOVES_THREAD {PAGE_MOVES_THREAD}\nconst MOVES_LONGEST_NS {PAGE_MOVES_LONGEST_NS}\n");
    lines
}

#[test]
fn header_and_mirror_agree() {
    assert_eq!(c_side(), rust_side());
}

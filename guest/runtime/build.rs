//! Compiles libvnuma into the crate, so that a program in Rust needs no library beside it.

const SOURCES: [&str; 3] = ["src/vnuma.c", "src/sysfs.c", "src/parse.c"];
const INCLUDE: [&str; 2] = ["include", "../../abi/guest-device/include"];

fn main() {
    for path in SOURCES.iter().chain(&INCLUDE).chain(&["src/internal.h", "src/calls.h"]) {
        println!("cargo::rerun-if-changed={path}");
    }
    cc::Build::new()
        .files(SOURCES)
        .includes(INCLUDE)
        .std("c11")
        .flag("-Wall")
        .flag("-Wextra")
        .compile("vnuma");
}

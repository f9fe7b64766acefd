//! Feeds a target: by the fuzzer, when built for it, or what is in the files that are named.
//!
//! ```text
//! cargo run -p vnuma-fuzz -- TARGET FILE...      cargo run -p vnuma-fuzz -- --list
//! ```
#![cfg_attr(fuzzing, no_main)]

/// Which target the fuzzer feeds; its command line belongs to libFuzzer.
#[cfg(fuzzing)]
fn chosen() -> &'static vnuma_fuzz::Target {
    use std::sync::OnceLock;
    static CHOSEN: OnceLock<&vnuma_fuzz::Target> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let name = std::env::var("VNUMA_FUZZ_TARGET").unwrap_or_default();
        vnuma_fuzz::find(&name)
            .unwrap_or_else(|| panic!("VNUMA_FUZZ_TARGET={name:?}: there is no such target"))
    })
}

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|input: &[u8]| (chosen().run)(input));

#[cfg(not(fuzzing))]
fn main() -> std::process::ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let name = arguments.next().unwrap_or_default();
    if name == "--list" {
        vnuma_fuzz::TARGETS.iter().for_each(|target| println!("{:<16} {}", target.name, target.about));
        return std::process::ExitCode::SUCCESS;
    }
    let Some(target) = name.to_str().and_then(vnuma_fuzz::find) else {
        eprintln!("vnuma-fuzz: {name:?}: there is no such target\nusage: vnuma-fuzz TARGET FILE... | --list");
        return std::process::ExitCode::from(2);
    };
    for file in arguments {
        let path = std::path::PathBuf::from(file);
        match std::fs::read(&path) {
            Ok(input) => (target.run)(&input),
            Err(error) => {
                eprintln!("vnuma-fuzz: {}: {error}", path.display());
                return std::process::ExitCode::FAILURE;
            }
        }
        println!("{}: survived", path.display());
    }
    std::process::ExitCode::SUCCESS
}

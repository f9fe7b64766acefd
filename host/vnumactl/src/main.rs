//! See the library.

fn main() -> std::process::ExitCode {
    vnumactl::main()
}

//! The command line of a QEMU.

use crate::procfs;

/// QEMU's command line is longer than any other: some hundred devices with a few hundred bytes each.
const COMMAND_LINE_LIMIT: u64 = 1 << 20;

/// QEMU's default of the channel's device for `master`, without which it does not send the device with the VM.
const DEFAULTS: [&str; 2] =
    ["ivshmem-doorbell.master=on", "driver=ivshmem-doorbell,property=master,value=on"];

/// The command line of a process, word by word. Empty if it cannot be read.
pub fn command_line(pid: i32) -> Vec<String> {
    let line = procfs::read_process(pid, "cmdline", COMMAND_LINE_LIMIT).unwrap_or_default();
    line.split('\0').map(str::to_owned).collect()
}

/// Was it started to take in a VM that comes from elsewhere?
pub fn receives(arguments: &[String]) -> bool {
    arguments.iter().any(|argument| argument == "-incoming")
}

/// Does it send the topology channel's device with the VM, if libvirt plugs it? libvirt itself tells QEMU so for devices without
/// interrupts only.
pub fn sends_channel(arguments: &[String]) -> bool {
    let is_default = |pair: &[String]| {
        matches!(pair[0].as_str(), "-global" | "--global") && DEFAULTS.contains(&pair[1].as_str())
    };
    arguments.windows(2).any(is_default)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_of_a_qemu_is_seen_on_its_command_line() {
        let sends = |text: &str| sends_channel(&text.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert!(sends("qemu -name web -global ivshmem-doorbell.master=on -S"));
        assert!(sends("qemu -global driver=ivshmem-doorbell,property=master,value=on"));
        for other in [
            "qemu",
            "qemu -global",
            "qemu -global ivshmem-doorbell.master=off",
            "qemu -global ivshmem-plain.master=on",
            "qemu -name ivshmem-doorbell.master=on",
            "qemu -global kvm-pit.lost_tick_policy=delay -name ivshmem-doorbell.master=on",
        ] {
            assert!(!sends(other), "{other}");
        }
    }

    #[test]
    fn a_process_is_known_by_its_words() {
        let own = command_line(std::process::id().cast_signed());
        assert_eq!(own.first().cloned(), std::env::args().next());
        assert!(command_line(-1).iter().all(String::is_empty));
        assert!(!receives(&own) && receives(&["qemu".to_owned(), "-incoming".to_owned()]));
    }
}

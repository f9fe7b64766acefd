//! A guest that sees no request for its channel's device while it boots, and gives it back when it is asked again.

use super::*;

/// A machine's first sector. When it starts it forgets what came before, as a kernel does, and then it gives back whatever the host
/// asks it for. The addresses are those of QEMU's `q35` with SeaBIOS: status of general events 0x620 (bit 1: hot-plug of PCI devices),
/// requests 0xcc4, ejection 0xcc8, selected bus 0xcd0.
///
/// ```text
///           cli
///           mov  $0x620, %dx        # forget
///           mov  $0xff, %al
///           out  %al, %dx
///   wait:   in   %dx, %al           # until something is asked for
///           test $2, %al
///           jz   wait
///           mov  $2, %al
///           out  %al, %dx
///           xor  %ecx, %ecx         # all buses
///   next:   mov  %ecx, %eax
///           mov  $0xcd0, %dx
///           outl %eax, %dx
///           mov  $0xcc4, %dx
///           inl  %dx, %eax
///           mov  $0xcc8, %dx
///           outl %eax, %dx
///           inc  %ecx
///           cmp  $16, %ecx
///           jb   next
///           mov  $0x620, %dx
///           jmp  wait
/// ```
const CODE: [u8; 49] = [
    0xfa, 0xba, 0x20, 0x06, 0xb0, 0xff, 0xee, 0xec, 0xa8, 0x02, 0x74, 0xfb, 0xb0, 0x02, 0xee, 0x66, 0x31,
    0xc9, 0x66, 0x89, 0xc8, 0xba, 0xd0, 0x0c, 0x66, 0xef, 0xba, 0xc4, 0x0c, 0x66, 0xed, 0xba, 0xc8, 0x0c,
    0x66, 0xef, 0x66, 0x41, 0x66, 0x83, 0xf9, 0x10, 0x72, 0xe6, 0xba, 0x20, 0x06, 0xeb, 0xd6,
];

/// A domain with that sector on its disk, which the firmware reads after 3 s.
fn domain(libvirt: &Libvirt) -> String {
    let path = libvirt.dir.path().join("lib/boot.img");
    let mut image = vec![0; 1 << 20];
    image[..CODE.len()].copy_from_slice(&CODE);
    image[510..512].copy_from_slice(&[0x55, 0xaa]);
    fs::write(&path, image).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    let disk = format!(
        "<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{}'/><target dev='sda' bus='sata'/></disk>",
        path.display()
    );
    let waits = "<bootmenu enable='yes' timeout='3000'/></os>";
    DOMAIN.replace("DEVICES", &disk).replace("</os>", waits)
}

/// As vnumad asks again, by the same call. QEMU passes on the second request if the first one was made after the guest began to run.
#[test]
fn a_guest_that_has_missed_a_request_gives_the_device_back_when_it_is_asked_again() {
    let Some(libvirt) = Libvirt::start() else { return };
    libvirt.create_from(&domain(&libvirt), "web", "");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let (_ours, theirs) = channel();
    vm.attach_channel(theirs).unwrap_or_else(|error| panic!("{error}"));
    // It stands still in its firmware, and when it runs it forgets.
    libvirt.must(&["resume", "web"]);
    libvirt.must(&["suspend", "web"]);
    assert!(matches!(vm.detach_channel(), Err(VmError::DetachPending { .. })));
    libvirt.must(&["resume", "web"]);
    let began = Instant::now();
    let mut asked = 1;
    let released_ms = wait_for("the guest to give the device back", || {
        if !vm.channel_attached().unwrap() {
            return Some(began.elapsed().as_millis());
        }
        thread::sleep(Duration::from_secs(6));
        assert!(vm.channel_attached().unwrap() || asked > 1, "it has not missed the first request");
        asked += 1;
        match vm.detach_channel() {
            Ok(()) | Err(VmError::DetachPending { .. } | VmError::NotAttached { .. }) => None,
            Err(error) => panic!("{error}"),
        }
    });
    println!("asked {asked} times, and given back {released_ms} ms after the guest was started");
    assert!(asked > 1 && !libvirt.is_tainted("web"));
    assert!(matches!(vm.detach_channel(), Err(VmError::NotAttached { .. })));
    // Its guest was not reset.
    let (_ours, theirs) = channel();
    vm.attach_channel(theirs).unwrap_or_else(|error| panic!("{error}"));
    assert!(matches!(vm.detach_channel(), Ok(()) | Err(VmError::DetachPending { .. })));
    wait_for("a guest that is up to give it back", || (!vm.channel_attached().unwrap()).then_some(()));
}

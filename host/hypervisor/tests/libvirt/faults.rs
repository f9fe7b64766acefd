//! A libvirt that refuses every client, and one that does not know what its QEMU has.

use super::*;
use std::os::unix::net::UnixListener;

impl Libvirt {
    /// Restarts libvirtd with another line of its configuration.
    fn restart_with(&mut self, line: &str, instead_of: &str) {
        self.kill_daemon();
        let path = self.dir.path().join("etc/libvirtd.conf");
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(instead_of), "{text}");
        fs::write(&path, text.replace(instead_of, line)).unwrap();
        self.launch_daemon();
    }
}

#[test]
fn a_libvirtd_that_refuses_access_is_named_and_loses_no_domain() {
    let Some(mut libvirt) = Libvirt::start() else { return };
    libvirt.create("web", "");
    let mut backend = libvirt.backend();
    let handle = find(&mut backend, "web");
    let problem = |backend: &mut LibvirtBackend| {
        let candidates = backend.scan().unwrap();
        let found: Vec<_> = candidates.iter().map(|candidate| &candidate.handle).collect();
        assert_eq!(found, [&handle], "the domain runs on");
        backend.sources()[0].problem.clone()
    };
    assert_eq!(problem(&mut backend), None);
    // A client has to log in, with a password that does not exist.
    let locks_out = "auth_unix_rw = \"sasl\"\n";
    libvirt.restart_with(locks_out, LETS_IN);
    let refusal = wait_for("libvirtd to refuse", || {
        let refusal = libvirt.virsh(&["version"]).expect_err("virsh is let in");
        refusal.contains("auth").then_some(refusal)
    });
    println!("virsh: {refusal}");
    let said =
        wait_for("the refusal to be told", || problem(&mut backend).filter(|said| said.contains("auth")));
    assert!(said.contains(&libvirt.uri()), "{said}");
    // One that begins meanwhile has no domain, and says why.
    let mut fresh = libvirt.backend();
    assert_eq!(fresh.scan().unwrap(), []);
    assert!(fresh.sources()[0].problem.as_ref().is_some_and(|said| said.contains("auth")));
    libvirt.restart_with(LETS_IN, locks_out);
    wait_for("the domain to be told of without a problem", || problem(&mut backend).is_none().then_some(()));
    assert_eq!(find(&mut fresh, "web"), handle);
    libvirt.connect(&mut backend, "web").describe().unwrap_or_else(|error| panic!("{error}"));
}

/// As a libvirtd leaves it that is killed after QEMU has plugged the device, and before it has written that down.
#[test]
fn a_device_that_libvirt_does_not_know_of_is_told_of_and_left_alone() {
    let Some(libvirt) = Libvirt::start() else { return };
    libvirt.create("web", "");
    let mut backend = libvirt.backend();
    let mut vm = libvirt.connect(&mut backend, "web");
    let socket = libvirt.dir.path().join("lib/channel.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    let served = thread::spawn(move || {
        let (peer, _) = listener.accept().unwrap();
        send_messages(&peer);
        peer
    });
    let monitor = |command: &str| {
        let answer = libvirt.must(&["qemu-monitor-command", "web", "--hmp", command]);
        assert_eq!(answer, "", "{command}");
    };
    monitor(&format!("chardev-add socket,id=charvnuma,path={}", socket.display()));
    monitor("device_add ivshmem-doorbell,id=ua-vnuma,chardev=charvnuma,vectors=4,bus=pci.1,addr=0");
    let _peer = served.join().unwrap();
    assert!(!vm.channel_attached().unwrap() && vm.tidy_channel().unwrap());
    let (_ours, theirs) = channel();
    let attach = vm.attach_channel(theirs).expect_err("it has one").to_string();
    let detach = vm.detach_channel().expect_err("libvirt cannot unplug it").to_string();
    for error in [attach, detach] {
        assert!(error.contains("libvirt does not know of it"), "{error}");
        assert!(error.contains("`virsh qemu-monitor-command web --hmp device_del ua-vnuma`"), "{error}");
    }
    // What it says works, with a guest that takes part.
    libvirt.must(&["resume", "web"]);
    monitor("device_del ua-vnuma");
    libvirt.reset("web");
    wait_for("the device to go", || (!vm.tidy_channel().unwrap()).then_some(()));
    assert!(matches!(vm.detach_channel(), Err(VmError::NotAttached { .. })));
    monitor("chardev-remove charvnuma");
    let (_ours, theirs) = channel();
    vm.attach_channel(theirs).unwrap_or_else(|error| panic!("{error}"));
}

/// libvirtd serves five requests of a client at a time, and reads no more of it.
#[test]
fn five_domains_that_hang_keep_no_other_waiting() {
    let Some(libvirt) = Libvirt::start() else { return };
    let names: Vec<String> = (1..=6).map(|number| format!("web-{number}")).collect();
    names.iter().for_each(|name| libvirt.create(name, ""));
    let mut backend = libvirt.backend();
    let mut vms: Vec<_> = names.iter().map(|name| libvirt.connect(&mut backend, name)).collect();
    let mut healthy = vms.pop().unwrap();
    let pids: Vec<Pid> = vms.iter().map(|vm| Pid::from_raw(vm.pid())).collect();
    let signal = |signal| pids.iter().for_each(|pid| kill(*pid, signal).unwrap());
    signal(Signal::SIGSTOP);
    let sockets = libvirt.dir.path().join("sockets");
    let under_way = || {
        let files = fs::read_dir(&sockets).ok()?.flatten();
        let count = files.filter(|file| file.path().extension().is_some_and(|end| end == "sock")).count();
        (count == 5).then_some(())
    };
    let (outcome, attached): (_, Vec<_>) = thread::scope(|scope| {
        let attach = |vm: &mut Box<dyn VmConnection>| {
            let (_ours, theirs) = channel();
            vm.attach_channel(theirs)
        };
        let hung: Vec<_> = vms.iter_mut().map(|vm| scope.spawn(move || attach(vm))).collect();
        wait_for("five calls", under_way);
        // libvirt has them then.
        thread::sleep(Duration::from_millis(300));
        let outcome = healthy.describe().and_then(|_| attach(&mut healthy));
        signal(Signal::SIGCONT);
        (outcome, hung.into_iter().map(|attach| attach.join().unwrap()).collect())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    attached.into_iter().for_each(|outcome| outcome.unwrap_or_else(|error| panic!("{error}")));
    assert_eq!(backend.sources()[0].problem, None);
}

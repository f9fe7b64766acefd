//! A libvirt in a container, as KubeVirt has one for each VM: a PID namespace and a `/run` of its own, perhaps another user.

use super::*;

/// As whom it runs.
const USERS: [u32; 2] = [0, 65534];

/// The files of its domains, as it calls their folder itself: `/var/run` is a link to `/run`, which is another one on the host.
fn states(user: u32) -> PathBuf {
    if user == 0 { "/var/run/libvirt/qemu" } else { "/var/run/libvirt/qemu/run" }.into()
}

/// vnumad's way to it.
fn backend(libvirt: &Libvirt, user: u32) -> LibvirtBackend {
    let root = format!("/proc/{}/root", libvirt.daemon().expect("it answers"));
    let uri = libvirt.uri_at(&Path::new(&root).join("run/libvirt/libvirt-sock"));
    let sockets = libvirt.dir.path().join("sockets");
    LibvirtBackend::new(&[uri], vec![states(user)], sockets).unwrap_or_else(|error| panic!("{error}"))
}

fn status(pid: i32, field: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    text.lines().find_map(|line| line.strip_prefix(field)).unwrap().trim().to_owned()
}

/// Runs a script in the mount namespace of a process, with a path.
fn inside(pid: i32, script: &str, path: &Path) {
    let mut command = Command::new("nsenter");
    command.args(["-m", "-t", &pid.to_string(), "sh", "-c", script, "sh"]).arg(path);
    assert!(command.status().unwrap().success(), "{script}");
}

#[test]
fn its_domains_are_described_moved_and_attached() {
    for user in USERS {
        let Some(libvirt) = Libvirt::start_in_container(user) else { return };
        libvirt.create("web", "");
        let mut backend = backend(&libvirt, user);
        let mut vm = libvirt.connect(&mut backend, "web");
        let description = vm.describe().unwrap_or_else(|error| panic!("{error}"));
        let (here, there) = (description.pid, libvirt.pid("web"));
        assert!(here != there && vm.pid() == here);
        assert_eq!(status(here, "NSpid:"), format!("{here}\t{there}"));
        for vcpu in &description.vcpus {
            let name = fs::read_to_string(format!("/proc/{here}/task/{}/comm", vcpu.tid)).unwrap();
            assert_eq!(name.trim(), format!("CPU {}/TCG", vcpu.index), "its thread");
        }
        assert_eq!(description.vcpus.len(), 4);
        let memory = description.guest_nodes.iter().filter_map(|node| node.memory.as_ref());
        assert_eq!(memory.filter(|memory| memory.mapping.is_some()).count(), 2);
        vm.pins().unwrap().pin(description.vcpus[2].tid, &set("1")).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(status(description.vcpus[2].tid, "Cpus_allowed_list:"), "1");
        // As a volume is mounted that cannot be written to.
        let sockets = libvirt.dir.path().join("sockets");
        fs::create_dir_all(&sockets).unwrap();
        inside(here, r#"mount --bind "$1" "$1" && mount -o remount,bind,ro "$1""#, &sockets);
        let (_ours, theirs) = channel();
        vm.attach_channel(theirs).unwrap_or_else(|error| panic!("{error}"));
        assert!(vm.channel_attached().unwrap() && vm.tidy_channel().unwrap());
        libvirt.must(&["resume", "web"]);
        // No operating system gives it back.
        assert!(matches!(vm.detach_channel(), Err(VmError::DetachPending { .. })));
        libvirt.reset("web");
        await_event(&mut *vm, VmEvent::ChannelDetached);
        assert!(!libvirt.is_tainted("web"));
        libvirt.must(&["destroy", "web"]);
        wait_for("it to be gone", || backend.scan().unwrap().is_empty().then_some(()));
    }
}

#[test]
fn a_container_without_the_folder_of_the_sockets_is_named() {
    let Some(libvirt) = Libvirt::start_in_container(65534) else { return };
    libvirt.create("web", "");
    let mut vm = libvirt.connect(&mut backend(&libvirt, 65534), "web");
    let sockets = libvirt.dir.path().join("sockets");
    fs::create_dir_all(&sockets).unwrap();
    inside(vm.pid(), r#"mount -t tmpfs none "$1""#, &sockets);
    let (_ours, theirs) = channel();
    let error = vm.attach_channel(theirs).expect_err("its QEMU cannot connect").to_string();
    let expected = format!("its QEMU has not {} of the host", sockets.display());
    assert!(error.contains(&expected), "{error}");
}

/// The file may have been written by anybody who has got into the container.
#[test]
fn its_files_name_processes_of_that_container_and_user_only() {
    let Some(libvirt) = Libvirt::start_in_container(65534) else { return };
    libvirt.create("web", "");
    let mut backend = backend(&libvirt, 65534);
    let handle = find(&mut backend, "web");
    let file = libvirt.states().join("web.xml");
    let text = fs::read_to_string(&file).unwrap();
    let pid = format!("pid='{}'", libvirt.pid("web"));
    assert!(text.contains(&pid));
    let refused = |named: i32, backend: &mut LibvirtBackend| {
        fs::write(&file, text.replacen(&pid, &format!("pid='{named}'"), 1)).unwrap();
        backend.connect(&handle).err().expect("it is refused").to_string()
    };
    let daemon = libvirt.daemon().unwrap().as_raw();
    let at = format!("/proc/{daemon}/root{}/web.xml: <domstatus pid> is", states(65534).display());
    // This process is on the host, and is root's.
    let own = std::process::id().cast_signed();
    let error = refused(own, &mut backend);
    let nobody = format!("{at} `{own}`: no process of the PID namespace of its libvirt has this number");
    assert!(error.ends_with(&nobody), "{error}");
    // The first one of the container is root's as well.
    let error = refused(1, &mut backend);
    assert!(error.contains(&format!("{at} `1`: process ")), "{error}");
    assert!(error.ends_with("is of user 0, and not of user 65534, to whom the file belongs"), "{error}");
    // libvirtd itself.
    let inside: i32 = status(daemon, "NSpid:").split_whitespace().last().unwrap().parse().unwrap();
    let error = refused(inside, &mut backend);
    assert!(error.ends_with(&format!("process {daemon} is not the QEMU of domain web")), "{error}");
    // A thread of another process.
    fs::write(&file, &text).unwrap();
    let mut vm = libvirt.connect(&mut backend, "web");
    let vcpu = text.find("<vcpu id='0' pid='").expect("its first vCPU") + "<vcpu id='0' pid='".len();
    let end = vcpu + text[vcpu..].find('\'').unwrap();
    fs::write(&file, format!("{}{inside}{}", &text[..vcpu], &text[end..])).unwrap();
    let error = vm.describe().expect_err("another thread");
    assert!(
        matches!(error, VmError::ForeignThread { vcpu: 0, tid, .. } if tid == i64::from(inside)),
        "{error}"
    );
    fs::write(&file, &text).unwrap();
    vm.describe().unwrap_or_else(|error| panic!("{error}"));
    // A user who is none of that libvirt's.
    std::os::unix::fs::chown(&file, Some(65533), None).unwrap();
    let error = backend.connect(&handle).err().expect("it is refused").to_string();
    assert!(
        error.ends_with("it belongs to user 65533, not to root or user 65534, as which its libvirt runs"),
        "{error}"
    );
}

//! A real libvirt: a libvirtd of its own, in a mount namespace of its own, so that the machine's libvirt, if it has one, is not touched.
//! Its machines have no operating system.

// Each test binary uses a part of it.
#![allow(dead_code)]

use nix::{
    sys::{
        signal::{Signal, kill},
        socket::{getsockopt, sockopt::PeerCredentials},
    },
    unistd::Pid,
};
use std::{
    fs,
    os::unix::{
        fs::{PermissionsExt, chown},
        net::UnixStream,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// No step takes this long, on no machine.
pub const HANG: Duration = Duration::from_secs(90);

/// Lines of libvirtd's log that are shown after a failure.
const SHOWN: usize = 80;

/// One libvirtd at a time.
static TURN: Mutex<()> = Mutex::new(());

/// In the namespace, libvirt's folders are those of the test. libvirt waits for QEMUs that it has ended until their parent has reaped
/// them, which is whoever reaps orphans: here a process that does nothing else, as that of the machine may be slow.
const START: &str = r#"
mkdir -p /var/cache/libvirt && mount --bind "$2" /var/cache/libvirt || exit 1
for place in run:"$4" lib:/var/lib/libvirt etc:/etc/libvirt log:/var/log/libvirt; do
    mkdir -p "${place#*:}" && mount --bind "$1/${place%%:*}" "${place#*:}" || exit 1
done
# What cannot be used need not be tried, which libvirt does again at each start.
[ ! -e /dev/kvm ] || mount --bind "$1/none" /dev/kvm || exit 1
# prctl(PR_SET_CHILD_SUBREAPER), and sethostname: libvirt does not migrate to a host of the same name.
dir=$1 host=$3
shift 4
exec perl -e 'syscall(157, 36, 1, 0, 0, 0); $name = shift; syscall(170, $name, length $name); fork or exec @ARGV; 1 while wait > 0' \
    "$host" "$@" libvirtd --config /etc/libvirt/libvirtd.conf --pid-file "$dir/libvirtd.pid"
"#;

/// Where a libvirtd runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On the host, but for its mounts.
    Host,
    /// In a container, with a PID namespace and a `/run` of its own, as this user.
    Container(u32),
}

/// It accepts clients without authentication.
pub const LETS_IN: &str = "auth_unix_rw = \"none\"\n";

pub const EMULATOR: &str = "/usr/bin/qemu-system-x86_64";
pub const DOMAIN: &str = "<domain type='qemu'><name>NAME</name><memory unit='MiB'>128</memory>
    <vcpu placement='static' cpuset='0-1'>4</vcpu>
    <cputune><vcpupin vcpu='1' cpuset='0'/><emulatorpin cpuset='1'/></cputune>
    <os><type arch='x86_64' machine='q35'>hvm</type></os><features><acpi/></features>
    <cpu mode='custom' match='exact'><model>qemu64</model><topology sockets='2' cores='2' threads='1'/>
      <numa><cell id='0' cpus='0-1' memory='64' unit='MiB'/><cell id='1' cpus='2-3' memory='64' unit='MiB'/></numa></cpu>
    <devices><emulator>/usr/bin/qemu-system-x86_64</emulator>
      <controller type='pci' index='1' model='pcie-root-port'/><controller type='pci' index='2' model='pcie-root-port'/>
      <controller type='usb' model='none'/><memballoon model='none'/>DEVICES</devices>EXTRA</domain>";

pub struct Libvirt {
    pub dir: TempDir,
    pub place: Place,
    /// What it takes the host to be called.
    host: &'static str,
    /// The parents of libvirtd and of the QEMUs that it has started.
    reapers: Vec<Child>,
    _turn: Option<MutexGuard<'static, ()>>,
}

impl Libvirt {
    /// `None` where there is none, which is said.
    pub fn start() -> Option<Self> {
        Some(Self::start_on("here", Place::Host, Some(Self::turn()?)))
    }

    /// In a container, as this user.
    pub fn start_in_container(user: u32) -> Option<Self> {
        Some(Self::start_on("here", Place::Container(user), Some(Self::turn()?)))
    }

    fn turn() -> Option<MutexGuard<'static, ()>> {
        let there = |program: &str| {
            ["/usr/sbin", "/usr/bin"].iter().any(|place| Path::new(place).join(program).exists())
        };
        let missing = ["libvirtd", "virsh", "qemu-system-x86_64", "unshare", "setpriv", "perl"]
            .into_iter()
            .find(|program| !there(program));
        if let Some(program) = missing {
            println!("skipped: this needs {program}");
            return None;
        }
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: this needs root");
            return None;
        }
        Some(TURN.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// One of another host, as far as libvirt can tell.
    pub fn start_other(&self) -> Self {
        Self::start_on("there", Place::Host, None)
    }

    fn start_on(host: &'static str, place: Place, turn: Option<MutexGuard<'static, ()>>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for folder in ["run", "lib", "etc", "log", "etc/libvirt"].map(|folder| dir.path().join(folder)) {
            fs::create_dir(&folder).unwrap();
            fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
            chown(&folder, Some(place.user()), None).unwrap();
        }
        fs::write(dir.path().join("none"), "").unwrap();
        fs::set_permissions(dir.path().join("none"), fs::Permissions::from_mode(0o0)).unwrap();
        // Two digits, of which libvirt wants more than one.
        let uuid = format!("5a{:02x}1f6e-4c8b-4d6a-9b0e-3f2a7c9d5e1b", host.len());
        // What QEMU said and what became of it is what tells most when a test fails.
        let log = "log_filters = \"2:qemu.qemu_monitor 1:qemu.qemu_process\"\nlog_outputs = \"1:stderr\"\n";
        let daemon = format!("{LETS_IN}host_uuid = \"{uuid}\"\n{log}");
        fs::write(dir.path().join("etc/libvirtd.conf"), daemon).unwrap();
        // Without virtlogd, and without namespaces of QEMUs, which take no /dev with mounts in it. libvirt migrates to no 127.0.0.1.
        // That of a user is in one more folder.
        let qemu = "stdio_handler = \"file\"\nsecurity_driver = \"none\"\nnamespaces = []\nmigration_host = \"0.0.0.0\"\n";
        for file in ["etc/qemu.conf", "etc/libvirt/qemu.conf"] {
            fs::write(dir.path().join(file), qemu).unwrap();
        }
        let mut libvirt = Self { dir, place, host, reapers: Vec::new(), _turn: turn };
        libvirt.start_daemon();
        libvirt
    }

    pub fn start_daemon(&mut self) {
        self.launch_daemon();
        wait_for("libvirtd to answer", || self.virsh(&["version"]).is_ok().then_some(()));
    }

    pub fn launch_daemon(&mut self) {
        let dir = self.dir.path();
        // What libvirt has found out about QEMU, which takes seconds, is kept.
        let user = self.place.user();
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("libvirt-cache-{user}"));
        fs::create_dir_all(&cache).unwrap();
        chown(&cache, Some(user), None).unwrap();
        let _ = fs::remove_file(dir.join("libvirtd.pid"));
        let mut command = Command::new("unshare");
        command.args(["-m", "-u", "--propagation", "private"]);
        let run = match self.place {
            Place::Host => "/run/libvirt",
            Place::Container(_) => {
                // All in it ends with its first process, which ends with this one.
                command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
                "/run"
            }
        };
        command.args(["sh", "-c", START, "sh"]).args([dir, &cache, Path::new(self.host), Path::new(run)]);
        if user != 0 {
            let id = user.to_string();
            command.args(["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups"]);
            command.env("XDG_RUNTIME_DIR", "/run").env("XDG_CONFIG_HOME", "/etc/libvirt");
            command.env("XDG_CACHE_HOME", "/var/cache/libvirt").env("HOME", "/var/lib/libvirt");
            // Whose folder is root's.
            fs::write(dir.join("libvirtd.pid"), "").unwrap();
            chown(dir.join("libvirtd.pid"), Some(user), None).unwrap();
        }
        let log = fs::File::create(dir.join("libvirtd.log")).unwrap();
        let reaper = command.stdin(Stdio::null()).stderr(log).spawn();
        self.reapers.push(reaper.unwrap());
    }

    /// libvirtd, by its number on the host.
    pub fn daemon(&self) -> Option<Pid> {
        if self.place != Place::Host {
            let peer = UnixStream::connect(self.socket()).ok()?;
            return Some(Pid::from_raw(getsockopt(&peer, PeerCredentials).ok()?.pid()));
        }
        let file = fs::read_to_string(self.dir.path().join("libvirtd.pid")).ok()?;
        file.trim().parse().ok().map(Pid::from_raw)
    }

    pub fn kill_daemon(&self) {
        let daemon = self.daemon().unwrap();
        self.signal(Signal::SIGKILL);
        wait_for("libvirtd to end", || kill(daemon, None).is_err().then_some(()));
    }

    pub fn uri(&self) -> String {
        self.uri_at(&self.socket())
    }

    pub fn uri_at(&self, socket: &Path) -> String {
        let driver = if self.place.user() == 0 { "system" } else { "session" };
        format!("qemu+unix:///{driver}?socket={}", socket.display())
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join(match self.place {
            Place::Host => "run/libvirt-sock",
            Place::Container(_) => "run/libvirt/libvirt-sock",
        })
    }

    pub fn virsh(&self, words: &[&str]) -> Result<String, String> {
        let run = Command::new("virsh").args(["-q", "-c", &self.uri()]).args(words).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if run.status.success() { Ok(text(&run.stdout)) } else { Err(text(&run.stderr)) }
    }

    pub fn must(&self, words: &[&str]) -> String {
        self.virsh(words).unwrap_or_else(|error| panic!("virsh {words:?}: {error}"))
    }

    /// Makes a domain, whose guest stands still until it is resumed: firmware alone takes a CPU for each vCPU.
    pub fn create(&self, name: &str, extra: &str) {
        self.create_with(name, extra, EMULATOR);
    }

    pub fn create_with(&self, name: &str, extra: &str, emulator: &str) {
        self.create_from(&DOMAIN.replace("DEVICES", "").replace(EMULATOR, emulator), name, extra);
    }

    pub fn create_from(&self, domain: &str, name: &str, extra: &str) {
        let file = self.dir.path().join("domain.xml");
        fs::write(&file, domain.replace("NAME", name).replace("EXTRA", extra)).unwrap();
        self.must(&["create", "--paused", file.to_str().unwrap()]);
    }

    /// A monitor of a domain's own, by what is added to its XML, and where that is.
    pub fn monitor(&self, name: &str) -> (String, PathBuf) {
        let sockets = self.dir.path().join("qmp");
        fs::create_dir_all(&sockets).unwrap();
        // QEMU makes the socket as its own user.
        fs::set_permissions(&sockets, fs::Permissions::from_mode(0o777)).unwrap();
        let socket = sockets.join(format!("{name}.sock"));
        let extra = format!(
            "<qemu:commandline xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'><qemu:arg value='-qmp'/>\
             <qemu:arg value='unix:{},server=on,wait=off'/></qemu:commandline>",
            socket.display()
        );
        (extra, socket)
    }

    /// A domain's process, by its number where its libvirtd runs.
    pub fn pid(&self, name: &str) -> i32 {
        let file = self.states().join(format!("{name}.pid"));
        fs::read_to_string(file).unwrap().trim().parse().unwrap()
    }

    pub fn states(&self) -> PathBuf {
        self.dir.path().join(match self.place {
            Place::Host => "run/qemu",
            Place::Container(0) => "run/libvirt/qemu",
            Place::Container(_) => "run/libvirt/qemu/run",
        })
    }

    /// libvirt marks domains that were tampered with.
    pub fn is_tainted(&self, name: &str) -> bool {
        fs::read_to_string(self.states().join(format!("{name}.xml"))).unwrap().contains("<taint")
    }

    /// Resets a guest whose channel is to be unplugged, and lets it stand still. Its firmware may wait with interrupts off for ever, as
    /// when other vCPUs were about to start. QEMU frees a device when its RCU lets it, and tells libvirt only then; an emulated
    /// vCPU that takes no interrupts holds that up until it stops. One of KVM does not.
    pub fn reset(&self, name: &str) {
        self.must(&["reset", name]);
        self.must(&["suspend", name]);
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.daemon().unwrap(), signal).unwrap();
    }
}

impl Place {
    fn user(self) -> u32 {
        match self {
            Self::Host => 0,
            Self::Container(user) => user,
        }
    }
}

impl Libvirt {
    /// What may tell why a test has failed.
    fn show(&self) {
        let log = fs::read_to_string(self.dir.path().join("libvirtd.log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        println!("the end of libvirtd's log:\n{}", lines[lines.len().saturating_sub(SHOWN)..].join("\n"));
        for entry in fs::read_dir(self.states()).into_iter().flatten().flatten() {
            let Some(name) =
                entry.file_name().to_str().and_then(|name| Some(name.strip_suffix(".pid")?.to_owned()))
            else {
                continue;
            };
            let script = r#"virsh -q -c "$1" domstate "$2"; virsh -c "$1" dumpxml "$2" | grep -c ua-vnuma
                virsh -c "$1" qemu-monitor-command "$2" '{"execute":"qom-list","arguments":{"path":"/machine/peripheral"}}' |
                    grep -c ua-vnuma"#;
            let mut command = Command::new("timeout");
            command.args(["10", "sh", "-c", script, "sh", &self.uri(), &name]);
            let run = command.output().unwrap();
            let [out, errors] =
                [&run.stdout, &run.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
            println!("{name}: state, devices of vnuma in its XML, in QEMU: {out}{errors}");
            let log = self.dir.path().join(format!("log/qemu/{name}.log"));
            println!("QEMU's log:\n{}", fs::read_to_string(&log).unwrap_or_else(|error| error.to_string()));
        }
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        if thread::panicking() {
            self.show();
        }
        if self.place != Place::Host {
            // The numbers that are in its files mean nothing here.
            for container in &mut self.reapers {
                let _ = container.kill();
                let _ = container.wait();
            }
            return;
        }
        let entries = fs::read_dir(self.states()).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.path().extension().is_some_and(|end| end == "pid")) {
            let pid = fs::read_to_string(entry.path()).ok().and_then(|pid| pid.trim().parse().ok());
            let _ = pid.map(|pid| kill(Pid::from_raw(pid), Signal::SIGKILL));
        }
        let _ = self.daemon().map(|daemon| kill(daemon, Signal::SIGKILL));
        for reaper in &mut self.reapers {
            let _ = reaper.wait();
        }
    }
}

pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + HANG;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until, "waiting for {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

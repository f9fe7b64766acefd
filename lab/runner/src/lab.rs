//! A booted server.

use std::fs;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use vnuma_lab_agent::PORTS;
use vnuma_lab_agent::client::{ClientError, Input, Session};
use vnuma_lab_agent::emulator;
use vnuma_lab_agent::protocol::Exec;

use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

use crate::binaries::{Binaries, BuildError};
use crate::children::GroupChild;
use crate::counters::{Counters, CountersError, LOAD_PMU, Ready};
use crate::file_error::{FileError, file_error};
use crate::image::{Image, ImageError};
use crate::initramfs::{self, InitramfsError};
use crate::network::{MOST_SERVERS, Member};
use crate::profile::{Profile, ProfileError};
use crate::progress::Progress;
use crate::qemu::{self, Accel, Init};
use crate::run_directory::{RunDirectory, run_directory};
use crate::{accel, acpi, hang, retries};

/// How long a boot may take; on a loaded machine of two cores it takes 10 to 30 s under emulation.
pub const BOOT_LIMIT: Duration = Duration::from_secs(600);
/// Lines of the console that are shown when the server dies.
const TAIL_LINES: usize = 60;
/// What the emulated processor says of itself, in the directory of the server.
const PROCESSOR_LOG: &str = "cpu.log";
/// How long the copy of what counts, or its loading, may take.
const LOAD_LIMIT: Duration = Duration::from_secs(300);
/// How often a server's end is looked for while waiting for it.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);

/// A server that boots and uses less than [`IDLE_CPU`] in this time has lost an interrupt: nothing in its boot waits so long.
const IDLE_LIMIT: Duration = Duration::from_secs(60);
/// A twentieth of a CPU: one that waits uses less, and one that boots beside other work gets more.
const IDLE_CPU: Duration = Duration::from_secs(3);

#[derive(Default)]
struct Idle(Option<(Instant, Duration)>);

impl Idle {
    /// Whether a server whose QEMU has used so much CPU time until now has done nothing for too long.
    fn is_too_long(&mut self, now: Instant, used: Duration) -> bool {
        let &mut (since, before) = self.0.get_or_insert((now, used));
        if used.saturating_sub(before) >= IDLE_CPU {
            self.0 = Some((now, used));
            return false;
        }
        now.saturating_duration_since(since) >= IDLE_LIMIT
    }
}

/// What went wrong in the lab; a command that fails is no error.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// No image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// No such profile.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The lab's own programs do not build.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// No counters.
    #[error(transparent)]
    Counters(#[from] CountersError),
    /// More servers than a network has addresses for, or none.
    #[error("{0} servers: expected 1 to {MOST_SERVERS}")]
    Servers(usize),
    /// No initial RAM disk.
    #[error(transparent)]
    Initramfs(#[from] InitramfsError),
    /// A local file.
    #[error(transparent)]
    File(#[from] FileError),
    /// QEMU cannot be started.
    #[error("{program} cannot be started: {source} (the packages needed are in lab/host-packages.txt)")]
    Start {
        /// Its name.
        program: &'static str,
        /// Why.
        source: io::Error,
    },
    /// It did not come up, twice.
    #[error("the server did not boot: {reason}\n{tail}")]
    Boot {
        /// Why.
        reason: String,
        /// The end of the console and of QEMU's messages.
        tail: String,
    },
    /// QEMU ended while the server was in use.
    #[error("the server died ({status}); the end of its console:\n{tail}")]
    Died {
        /// How QEMU ended.
        status: ExitStatus,
        /// The end of the console and of QEMU's messages.
        tail: String,
    },
    /// The command took too long.
    #[error("the command did not end within {} s; the server was stopped\n{report}", limit.as_secs())]
    Timeout {
        /// How long it had.
        limit: Duration,
        /// What the server said of itself before.
        report: String,
    },
    /// CPUs of an emulated server wait for interrupts that have come, or whose timer has fired and was not set again. No program in
    /// the server can bring that about.
    #[error("the emulated CPUs {cpus:?} have lost an interrupt; the server was stopped\n{report}")]
    Stuck {
        /// Which.
        cpus: Vec<usize>,
        /// What the server said of itself before.
        report: String,
    },
    /// The agent in the server, or a file transfer.
    #[error("{what}: {source}")]
    Agent {
        /// What was to be done.
        what: String,
        /// Why it was not.
        source: ClientError,
    },
}

impl LabError {
    /// Whether only the emulator can bring that about, and no program in the server: it may be tried once more.
    pub fn emulator_fault(&self) -> bool {
        match self {
            Self::Stuck { .. } => true,
            Self::Died { tail, .. } => {
                emulator::stale_breakpoint(tail) || emulator::silent_triple_fault(tail)
            }
            _ => false,
        }
    }
}

/// What a server is to be.
struct Server<'a> {
    profile: &'a str,
    counters: Option<&'a Counters>,
    init: Init,
    member: Option<Member>,
}

type Connection = Session<io::BufReader<UnixStream>, UnixStream>;

/// A server that runs until this value goes.
pub struct Lab {
    qemu: Arc<Mutex<GroupChild>>,
    sessions: Mutex<Vec<Connection>>,
    returned: Condvar,
    stopped: AtomicBool,
    directory: RunDirectory,
    _member: Option<Member>,
    _image: Image,
    boot_time: Duration,
    accel: Accel,
}

impl Lab {
    /// Builds what is missing and boots a server; a boot that fails is tried once more.
    pub fn boot(profile: &str) -> Result<Self, LabError> {
        Self::boot_with(profile, None)
    }

    /// Boots a server that has hardware counters, if they are given.
    pub fn boot_with(name: &str, counters: Option<&Counters>) -> Result<Self, LabError> {
        Self::boot_server(&Server { profile: name, counters, init: Init::Fast, member: None })
    }

    /// Boots a server with systemd as process 1.
    pub fn boot_systemd(profile: &str) -> Result<Self, LabError> {
        Self::boot_server(&Server { profile, counters: None, init: Init::Systemd, member: None })
    }

    /// Boots servers of these profiles side by side, with a network between them: `server0`, `server1` ... by name, in
    /// this order. The network goes with the first.
    pub fn boot_cluster(profiles: &[&str]) -> Result<Vec<Self>, LabError> {
        Self::boot_cluster_with(profiles, None)
    }

    /// The same, and the first one has hardware counters, if they are given.
    pub fn boot_cluster_with(profiles: &[&str], counters: Option<&Counters>) -> Result<Vec<Self>, LabError> {
        let count = profiles.len();
        if !(1..=MOST_SERVERS).contains(&count) {
            return Err(LabError::Servers(count));
        }
        let directory = Arc::new(run_directory()?);
        // Built once; the boots find it there.
        Image::ensure(Progress::Show)?;
        Binaries::build()?;
        std::thread::scope(|scope| {
            let boot = |(number, &profile)| {
                let member = Some(Member::new(directory.clone(), number, count));
                let counters = counters.filter(|_| number == 0);
                scope
                    .spawn(move || Self::boot_server(&Server { profile, counters, init: Init::Fast, member }))
            };
            let boots: Vec<_> = profiles.iter().enumerate().map(boot).collect();
            let booted: Vec<_> = boots.into_iter().map(|boot| boot.join()).collect();
            booted
                .into_iter()
                .map(|lab| lab.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        })
    }

    fn boot_server(server: &Server<'_>) -> Result<Self, LabError> {
        let profile = Profile::load(server.profile)?;
        let image = Image::ensure(Progress::Show)?;
        let binaries = Binaries::build()?;
        let mut initramfs = acpi::archive(&profile);
        initramfs.extend(initramfs::server(&image, &binaries)?);
        let build = |counters| Ready::build(&image, counters, server.profile, &profile);
        let ready = server.counters.map(build).transpose()?;
        let ready = ready.as_ref();
        let lab = match Self::try_boot(server, &profile, &image, &initramfs, ready) {
            Err(LabError::Boot { reason, tail }) => {
                retries::note("the server", &reason, &tail);
                Self::try_boot(server, &profile, &image, &initramfs, ready)
            }
            result => result,
        }?;
        ready.map_or(Ok(()), |ready| lab.load_counters(ready))?;
        Ok(lab)
    }

    /// Loads what counts into the server.
    fn load_counters(&self, ready: &Ready) -> Result<(), LabError> {
        for (file, path) in ready.files() {
            self.put(file, &path, LOAD_LIMIT)?;
        }
        let exec = Exec { argv: ["sh", "-c", LOAD_PMU].map(str::to_owned).into(), ..Exec::default() };
        let mut output = Vec::new();
        let status = self.exec(&exec, Input::Null, &mut output, &mut io::sink(), LOAD_LIMIT)?;
        if status != 0 {
            let output = String::from_utf8_lossy(&output).trim().to_owned();
            return Err(CountersError::Load { status, output }.into());
        }
        Ok(())
    }

    fn try_boot(
        server: &Server<'_>,
        profile: &Profile,
        image: &Image,
        initramfs: &[u8],
        counters: Option<&Ready>,
    ) -> Result<Self, LabError> {
        let started = Instant::now();
        let directory = run_directory()?;
        let path = directory.path().to_owned();
        let initramfs_path = path.join("initramfs");
        fs::write(&initramfs_path, initramfs).map_err(file_error(&initramfs_path))?;
        let kernel = image.vmlinux(image.server_kernel());
        let accel = match counters {
            // Only what is emulated can be looked at.
            Some(_) => Accel::Tcg,
            None => accel::choose(&image.tree(), &kernel, &initramfs_path),
        };
        let root_disk = image.root_disk();
        let files = qemu::Files {
            tree: &image.tree(),
            kernel: &kernel,
            initramfs: &initramfs_path,
            root_disk: &root_disk,
            directory: &path,
        };
        let member = server.member.as_ref();
        let mut command = qemu::server(profile, accel, &files, server.init, member);
        if let Some(counters) = counters {
            command.args(counters.arguments(&path)?);
        }
        Self::start(command, directory, image, accel, server.member.clone(), started)
    }

    /// Starts a machine and waits for its agent.
    pub(crate) fn start(
        mut command: Command,
        directory: RunDirectory,
        image: &Image,
        accel: Accel,
        member: Option<Member>,
        started: Instant,
    ) -> Result<Self, LabError> {
        let path = directory.path();
        // A triple fault ends a machine without a word on its console.
        command.args(["-d", "cpu_reset", "-D"]).arg(path.join(PROCESSOR_LOG));
        let log_path = path.join("qemu.log");
        let log = fs::File::create(&log_path).map_err(file_error(&log_path))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child =
            GroupChild::spawn(command).map_err(|source| LabError::Start { program: qemu::QEMU, source })?;
        let mut lab = Self {
            qemu: Arc::new(Mutex::new(child)),
            sessions: Mutex::new(Vec::new()),
            returned: Condvar::new(),
            stopped: AtomicBool::new(false),
            directory,
            _member: member,
            _image: image.clone(),
            boot_time: Duration::ZERO,
            accel,
        };
        let sessions = lab.connect(started + BOOT_LIMIT);
        let sessions = sessions.map_err(|reason| LabError::Boot { reason, tail: lab.tail() })?;
        lab.sessions = Mutex::new(sessions);
        lab.boot_time = started.elapsed();
        Ok(lab)
    }

    /// Waits for the agent's greeting on every port, the marker of a finished boot.
    fn connect(&self, deadline: Instant) -> Result<Vec<Connection>, String> {
        let mut sessions = Vec::new();
        for number in 0..PORTS {
            let path = self.directory.path().join(format!("agent{number}"));
            let stream = loop {
                match UnixStream::connect(&path) {
                    Ok(stream) => break stream,
                    Err(error) if Instant::now() > deadline => {
                        return Err(format!("{}: {error}", path.display()));
                    }
                    Err(_) => self.still_runs()?,
                }
                std::thread::sleep(Duration::from_millis(20));
            };
            sessions.push(self.greeted(stream, deadline)?);
        }
        Ok(sessions)
    }

    fn greeted(&self, stream: UnixStream, deadline: Instant) -> Result<Connection, String> {
        let text = |error: io::Error| error.to_string();
        stream.set_read_timeout(Some(WATCH_INTERVAL)).map_err(text)?;
        let mut idle = Idle::default();
        // Peek, so that no part of a frame is lost to a time limit.
        while !readable(&stream).map_err(text)? {
            self.still_runs()?;
            if let Some(used) = self.cpu_time()
                && idle.is_too_long(Instant::now(), used)
            {
                return Err(format!("it has not greeted, and done nothing for {} s", IDLE_LIMIT.as_secs()));
            }
            if Instant::now() > deadline {
                return Err(format!("no greeting of the agent within {} s", BOOT_LIMIT.as_secs()));
            }
        }
        stream.set_read_timeout(None).map_err(text)?;
        let reader = io::BufReader::with_capacity(64 << 10, stream.try_clone().map_err(text)?);
        Session::open(reader, stream).map_err(|error| error.to_string())
    }

    fn cpu_time(&self) -> Option<Duration> {
        let id = self.qemu.lock().unwrap_or_else(PoisonError::into_inner).child().id();
        let clock = clock_getcpuclockid(Pid::from_raw(i32::try_from(id).ok()?)).ok()?;
        Some(clock_gettime(clock).ok()?.into())
    }

    fn still_runs(&self) -> Result<(), String> {
        match self.status() {
            Some(status) => Err(format!("QEMU ended with {status}")),
            None => Ok(()),
        }
    }

    /// How QEMU ended, if it did.
    fn status(&self) -> Option<ExitStatus> {
        let mut qemu = self.qemu.lock().unwrap_or_else(PoisonError::into_inner);
        qemu.child().try_wait().ok().flatten()
    }

    /// How long the boot took, from the start of QEMU to the agent's greeting.
    pub fn boot_time(&self) -> Duration {
        self.boot_time
    }

    /// What runs the server.
    pub fn accel(&self) -> Accel {
        self.accel
    }

    /// Socket of the server's QEMU monitor (QMP), for one client at a time. It goes with the server.
    pub fn qmp_socket(&self) -> PathBuf {
        self.directory.path().join(qemu::QMP_SOCKET)
    }

    /// Socket of the second monitor of a guest ([`Lab::boot_guest`]).
    pub fn control_socket(&self) -> PathBuf {
        self.directory.path().join(qemu::CONTROL_SOCKET)
    }

    /// All that the console has.
    pub fn console(&self) -> String {
        let bytes = fs::read(self.directory.path().join("console.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).replace('\r', "")
    }

    /// The end of the console and of QEMU's messages.
    pub fn tail(&self) -> String {
        let mut text = String::new();
        for (name, title) in [("console.log", "console"), ("qemu.log", "qemu")] {
            let bytes = fs::read(self.directory.path().join(name)).unwrap_or_default();
            let content = String::from_utf8_lossy(&bytes);
            // The EPYC model has features that TCG lacks; QEMU says so for each CPU.
            let lines: Vec<&str> =
                content.lines().filter(|line| !line.contains("TCG doesn't support")).collect();
            for line in &lines[lines.len().saturating_sub(TAIL_LINES)..] {
                text.push_str(&format!("  {title}: {}\n", line.trim_end_matches('\r')));
            }
        }
        let processor = fs::read(self.directory.path().join(PROCESSOR_LOG)).unwrap_or_default();
        if String::from_utf8_lossy(&processor).lines().any(|line| line == "Triple fault") {
            text.push_str(&format!("  {}\n", emulator::TRIPLE_FAULT));
        }
        if text.is_empty() { "  (the console is empty)\n".into() } else { text }
    }

    /// Runs a program and gives its exit status. Several may run side by side, up to the number of ports;
    /// further ones wait.
    pub fn exec(
        &self,
        exec: &Exec,
        input: Input<'_>,
        stdout: &mut dyn Write,
        stderr: &mut dyn Write,
        limit: Duration,
    ) -> Result<i32, LabError> {
        let what = exec.argv.first().map_or("", String::as_str).to_owned();
        self.with_session(what, limit, |session| session.exec(exec, input, stdout, stderr))
    }

    /// Copies a file of this machine into the server, with its permissions.
    pub fn put(&self, source: &Path, destination: &str, limit: Duration) -> Result<(), LabError> {
        let file = fs::File::open(source).map_err(file_error(source))?;
        let metadata = file.metadata().map_err(file_error(source))?;
        if !metadata.is_file() {
            return Err(file_error(source)(io::Error::other("not a file; directories are not copied")).into());
        }
        let mode = metadata.permissions().mode() & 0o777;
        let what = format!("put {}:{destination}", source.display());
        self.with_session(what, limit, |session| session.put(destination, mode, file.as_fd()))
    }

    /// Copies a file of the server to this machine.
    pub fn get(&self, source: &str, destination: &Path, limit: Duration) -> Result<(), LabError> {
        let error = |error| file_error(destination)(error);
        let parent = destination.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        fs::create_dir_all(parent).map_err(error)?;
        // Complete or not at all.
        let mut file = tempfile::NamedTempFile::new_in(parent).map_err(error)?;
        let what = format!("get {source}:{}", destination.display());
        self.with_session(what, limit, |session| session.get(source, &mut file))?;
        file.as_file().set_permissions(fs::Permissions::from_mode(0o644)).map_err(error)?;
        Ok(file.persist(destination).map_err(|failed| error(failed.error)).map(drop)?)
    }

    /// Does something over a free session. When the limit passes, a CPU is stuck, or QEMU ends, the server is stopped,
    /// which ends the connection. Before that it is asked what hangs.
    fn with_session<T>(
        &self,
        what: String,
        limit: Duration,
        act: impl FnOnce(&mut Connection) -> Result<T, ClientError>,
    ) -> Result<T, LabError> {
        self.with_session_or(what, limit, act, || self.report())
    }

    /// The end of the console, where the CPUs are, and what the kernel says, if it still answers.
    fn report(&self) -> String {
        let mut report = format!("{}{}", self.tail(), hang::cpus(&self.qmp_socket()));
        let mut output = Vec::new();
        let look =
            |session: &mut Connection| session.exec(&hang::look(), Input::Null, &mut output, &mut io::sink());
        if let Err(error) = self.with_session_or("look".into(), hang::KERNEL_LIMIT, look, String::new) {
            report.push_str(&format!("  the kernel: {error}\n"));
        }
        report.push_str(&String::from_utf8_lossy(&output));
        report
    }

    fn with_session_or<T>(
        &self,
        what: String,
        limit: Duration,
        act: impl FnOnce(&mut Connection) -> Result<T, ClientError>,
        report: impl FnOnce() -> String + Send,
    ) -> Result<T, LabError> {
        let deadline = Instant::now() + limit;
        let mut session = self.take_session(deadline, limit)?;
        let (done, hang) = (Done::default(), OnceLock::new());
        let result = std::thread::scope(|scope| {
            scope.spawn(|| {
                if let Some(cpus) = self.wait_for(&done, deadline) {
                    hang.get_or_init(|| (cpus, report()));
                    self.stop();
                }
            });
            let result = act(&mut session);
            done.set();
            result
        });
        match result {
            Ok(value) => {
                self.return_session(session);
                Ok(value)
            }
            Err(ClientError::Refused(text)) => {
                self.return_session(session);
                Err(LabError::Agent { what, source: ClientError::Refused(text) })
            }
            Err(source) => match hang.into_inner() {
                Some((cpus, report)) if cpus.is_empty() => Err(LabError::Timeout { limit, report }),
                Some((cpus, report)) => Err(LabError::Stuck { cpus, report }),
                None => Err(self.explain(what, source)),
            },
        }
    }

    /// Waits until it is done: `None`. Else the CPUs that are stuck; none of them if the deadline has passed.
    fn wait_for(&self, done: &Done, deadline: Instant) -> Option<Vec<usize>> {
        let mut watch = hang::Watch::default();
        loop {
            let next = deadline.min(Instant::now() + hang::WATCH_INTERVAL);
            if done.wait_until(next) {
                return None;
            }
            if next == deadline {
                return Some(Vec::new());
            }
            // A machine's own CPUs lose nothing.
            if self.accel == Accel::Tcg {
                let stuck = watch.look(&hang::cpus(&self.qmp_socket()));
                if !stuck.is_empty() {
                    return Some(stuck);
                }
            }
        }
    }

    /// A broken session mostly means that QEMU has ended; it may be just about to.
    fn explain(&self, what: String, source: ClientError) -> LabError {
        let started = Instant::now();
        while !matches!(source, ClientError::Local { .. }) && started.elapsed() < Duration::from_secs(3) {
            if let Some(status) = self.status() {
                return LabError::Died { status, tail: self.tail() };
            }
            std::thread::sleep(WATCH_INTERVAL);
        }
        LabError::Agent { what, source }
    }

    fn take_session(&self, deadline: Instant, limit: Duration) -> Result<Connection, LabError> {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(status) = self.status() {
                return Err(LabError::Died { status, tail: self.tail() });
            }
            if let Some(session) = sessions.pop() {
                return Ok(session);
            }
            if Instant::now() >= deadline {
                let report = "  all connections are in use".into();
                return Err(LabError::Timeout { limit, report });
            }
            let waited = self.returned.wait_timeout(sessions, WATCH_INTERVAL);
            sessions = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn return_session(&self, session: Connection) {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).push(session);
        self.returned.notify_one();
    }

    /// Stops the server at once. Its file systems live in its memory, so nothing is lost by that.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.qemu.lock().unwrap_or_else(PoisonError::into_inner).kill();
        self.returned.notify_all();
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Whether something can be read, or the stream has ended; waits for the stream's read timeout.
fn readable(stream: &UnixStream) -> io::Result<bool> {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let timeout = PollTimeout::try_from(WATCH_INTERVAL).unwrap_or(PollTimeout::ZERO);
    let mut polled = [PollFd::new(stream.as_fd(), PollFlags::POLLIN)];
    match poll(&mut polled, timeout) {
        Ok(ready) => Ok(ready > 0),
        Err(nix::errno::Errno::EINTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Something that happens once and can be waited for.
#[derive(Default)]
struct Done {
    state: Mutex<bool>,
    changed: Condvar,
}

impl Done {
    fn set(&self) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Whether it happened before the deadline.
    fn wait_until(&self, deadline: Instant) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while !*state {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return false };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_does_nothing_for_a_minute_has_hung() {
        let (start, mut idle) = (Instant::now(), Idle::default());
        let mut look = |seconds, used_ms| {
            idle.is_too_long(start + Duration::from_secs(seconds), Duration::from_millis(used_ms))
        };
        assert!(!look(0, 5000) && !look(50, 5100));
        assert!(!look(59, 8000), "it works, if slowly");
        assert!(!look(100, 8500) && !look(118, 10_900) && look(119, 10_999));
    }
}

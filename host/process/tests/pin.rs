//! Pins threads of this test and of a child process, for real.

use std::{
    fs, io,
    os::fd::{AsFd, FromRawFd, OwnedFd},
    process::{Child, Command},
    sync::mpsc,
    thread,
};
use vnuma_model::CpuSet;
use vnuma_process::{ActError, pin_thread, pin_thread_if};

fn pidfd_of(pid: i32) -> OwnedFd {
    // SAFETY: takes numbers and returns a new descriptor or an error.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    assert!(fd >= 0, "pidfd_open: {}", io::Error::last_os_error());
    // SAFETY: the descriptor is new, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).unwrap()) }
}

fn own_pid() -> i32 {
    i32::try_from(std::process::id()).unwrap()
}

fn allowed(pid: i32, tid: i32) -> CpuSet {
    let status = fs::read_to_string(format!("/proc/{pid}/task/{tid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    line.parse().unwrap()
}

/// A thread that lives until the sender is dropped.
fn idle_thread() -> (i32, mpsc::Sender<()>, thread::JoinHandle<()>) {
    let (keep, ended) = mpsc::channel::<()>();
    let (tell, told) = mpsc::channel();
    let handle = thread::spawn(move || {
        tell.send(nix::unistd::gettid().as_raw()).unwrap();
        let _ = ended.recv();
    });
    (told.recv().unwrap(), keep, handle)
}

/// join() returns when the kernel clears the thread's id, a moment before it leaves /proc.
fn wait_until_gone(tid: i32) {
    while fs::exists(format!("/proc/self/task/{tid}")).unwrap() {
        thread::yield_now();
    }
}

struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn sleeper() -> Reaped {
    Reaped(Command::new("sleep").arg("600").spawn().unwrap())
}

#[test]
fn own_thread_is_confined_and_released() {
    let pid = own_pid();
    let (tid, keep, handle) = idle_thread();
    let all = allowed(pid, tid);
    let one: CpuSet = all.iter().take(1).collect();
    pin_thread(pidfd_of(pid).as_fd(), pid, tid, &one).unwrap();
    assert_eq!(allowed(pid, tid), one);
    pin_thread(pidfd_of(pid).as_fd(), pid, tid, &all).unwrap();
    assert_eq!(allowed(pid, tid), all);
    drop(keep);
    handle.join().unwrap();
}

#[test]
fn thread_of_another_process_is_not_touched() {
    let child = sleeper();
    let foreign = i32::try_from(child.0.id()).unwrap();
    let before = allowed(foreign, foreign);
    let one: CpuSet = before.iter().take(1).collect();
    let error = pin_thread(pidfd_of(own_pid()).as_fd(), own_pid(), foreign, &one).unwrap_err();
    assert!(matches!(error, ActError::ForeignThread { tid, .. } if tid == foreign), "{error}");
    assert_eq!(allowed(foreign, foreign), before);
}

#[test]
fn ended_process_is_said_to_have_ended() {
    let mut child = sleeper();
    let pid = i32::try_from(child.0.id()).unwrap();
    let pidfd = pidfd_of(pid);
    let cpus = allowed(pid, pid);
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    let error = pin_thread(pidfd.as_fd(), pid, pid, &cpus).unwrap_err();
    assert!(matches!(error, ActError::Exited { .. }), "{error}");
}

/// The number of a process may be another one's by now; the pidfd tells.
#[test]
fn pidfd_of_an_ended_process_protects_its_successor() {
    let mut ended = sleeper();
    let pidfd = pidfd_of(i32::try_from(ended.0.id()).unwrap());
    ended.0.kill().unwrap();
    ended.0.wait().unwrap();
    let successor = sleeper();
    let pid = i32::try_from(successor.0.id()).unwrap();
    let before = allowed(pid, pid);
    let one: CpuSet = before.iter().take(1).collect();
    let error = pin_thread(pidfd.as_fd(), pid, pid, &one).unwrap_err();
    assert!(matches!(error, ActError::Exited { .. }), "{error}");
    assert_eq!(allowed(pid, pid), before);
}

#[test]
fn ended_thread_is_refused() {
    let (tid, keep, handle) = idle_thread();
    let cpus = allowed(own_pid(), tid);
    drop(keep);
    handle.join().unwrap();
    wait_until_gone(tid);
    let error = pin_thread(pidfd_of(own_pid()).as_fd(), own_pid(), tid, &cpus).unwrap_err();
    assert!(matches!(error, ActError::ForeignThread { .. }), "{error}");
}

#[test]
fn odd_numbers_and_empty_sets_are_refused() {
    let pidfd = pidfd_of(own_pid());
    let cpus: CpuSet = [0].into_iter().collect();
    for (pid, tid) in [(own_pid(), 0), (own_pid(), -1), (0, own_pid()), (-1, own_pid())] {
        let error = pin_thread(pidfd.as_fd(), pid, tid, &cpus).unwrap_err();
        assert!(matches!(error, ActError::ForeignThread { .. }), "{error}");
    }
    let error = pin_thread(pidfd.as_fd(), own_pid(), own_pid(), &CpuSet::new()).unwrap_err();
    assert!(matches!(error, ActError::NoCpus { .. }), "{error}");
}

#[test]
fn cpus_that_do_not_exist_are_the_kernels_refusal() {
    let (tid, keep, handle) = idle_thread();
    let before = allowed(own_pid(), tid);
    let absent: CpuSet = [CpuSet::MAX_CPU].into_iter().collect();
    let error = pin_thread(pidfd_of(own_pid()).as_fd(), own_pid(), tid, &absent).unwrap_err();
    assert!(matches!(error, ActError::System { .. }), "{error}");
    assert_eq!(allowed(own_pid(), tid), before);
    drop(keep);
    handle.join().unwrap();
}

#[test]
fn a_mask_that_somebody_else_has_set_stays() {
    let pid = own_pid();
    let pidfd = pidfd_of(pid);
    let (tid, keep, handle) = idle_thread();
    let all = allowed(pid, tid);
    let [one, other]: [CpuSet; 2] = [0, 1].map(|at| all.iter().skip(at).take(1).collect());
    if other.is_empty() {
        eprintln!("skipped: this needs two CPUs");
        return;
    }
    pin_thread_if(pidfd.as_fd(), pid, tid, |found| *found == all, &one).unwrap();
    assert_eq!(allowed(pid, tid), one);
    let error = pin_thread_if(pidfd.as_fd(), pid, tid, |found| *found == all, &other).unwrap_err();
    assert!(matches!(&error, ActError::MaskChanged { found, .. } if *found == one), "{error}");
    assert_eq!(allowed(pid, tid), one, "it stays");
    drop(keep);
    handle.join().unwrap();
    wait_until_gone(tid);
    let gone = pin_thread_if(pidfd.as_fd(), pid, tid, |_| true, &all).unwrap_err();
    assert!(matches!(gone, ActError::ForeignThread { .. }), "{gone}");
}

/// While a CPU goes offline only `status` has all that was set.
#[test]
fn a_mask_that_is_not_the_expected_one_is_looked_at_twice() {
    let pid = own_pid();
    let (tid, keep, handle) = idle_thread();
    let all = allowed(pid, tid);
    let mut looks = 0;
    let second = |found: &CpuSet| {
        looks += 1;
        looks == 2 && *found == all
    };
    pin_thread_if(pidfd_of(pid).as_fd(), pid, tid, second, &all).unwrap();
    assert_eq!(looks, 2);
    drop(keep);
    handle.join().unwrap();
}

#[test]
fn a_thread_that_ends_before_its_mask_is_set_is_said_to_have_raced() {
    let pid = own_pid();
    let (tid, keep, handle) = idle_thread();
    let all = allowed(pid, tid);
    let mut thread = Some((keep, handle));
    let end = |_: &CpuSet| {
        let (keep, handle) = thread.take().unwrap();
        drop(keep);
        handle.join().unwrap();
        wait_until_gone(tid);
        true
    };
    let error = pin_thread_if(pidfd_of(pid).as_fd(), pid, tid, end, &all).unwrap_err();
    assert!(matches!(error, ActError::Raced { .. }), "{error}");
}

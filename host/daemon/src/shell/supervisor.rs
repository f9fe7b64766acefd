//! Sees that the shell's threads make progress.

use crate::core::event::Event;
use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};
use tracing::{error, info};
use vnuma_policy::world::VmId;
use vnuma_process::{Change, Groups, Hanging};

/// A thread of the host that works so long without a beat is silent. None has that much to do at once.
const PATIENCE: Duration = Duration::from_secs(30);
/// The same for a thread of a VM: a call to a hypervisor takes up to half a minute.
const PATIENCE_WITH_VM: Duration = Duration::from_secs(60);
/// A thread of the host that works so long without a beat hangs, and vnumad ends.
const HANGS: Duration = Duration::from_secs(120);
/// Between two looks.
const PAUSE: Duration = Duration::from_secs(1);

/// A thread that vnumad cannot work without.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ThreadFailed {
    /// It has panicked.
    #[error("the thread {name} panicked: {why}")]
    Panicked { name: String, why: String },
    /// It works without end.
    #[error("the thread {name} has made no progress for {} s", .0.as_secs(), name = .1)]
    Hangs(Duration, String),
}

/// All threads that work for the core's thread.
#[derive(Debug, Default)]
pub(super) struct Supervisor {
    /// The shell's: what each VM needs, and one for each connection to a hypervisor.
    pub(super) own: Groups,
    /// Of backends.
    others: Vec<Groups>,
    silent: BTreeSet<String>,
    /// Processes of VMs at which looks hang.
    hanging: BTreeSet<(VmId, i32)>,
    /// What has changed with these.
    looks: Vec<Event>,
    panics: u64,
    looked_at: Option<Instant>,
}

impl Supervisor {
    pub(super) fn with(others: Vec<Groups>) -> Self {
        Self { others, ..Self::default() }
    }

    /// Looks at them, if it is time, without waiting.
    ///
    /// Threads that look at one VM at a time for a thread of the host ([`vnuma_process::Looker`]) count as those of a VM.
    /// A panic of a thread of the host ends vnumad, and the service manager starts it again. That is simpler than to start this thread
    /// alone, and surer: what it knew (masks, counters, watches) is gone, and a vnumad that starts observes all of it again. So does one
    /// that hangs, unless the kernel has it wait: its process could not end, and publications go on meanwhile. A thread of a VM that
    /// panics has reported its connection as lost, and the core makes another one.
    pub(super) fn look(&mut self, now: Instant) -> Result<(), ThreadFailed> {
        if self.looked_at.is_some_and(|looked_at| now < looked_at + PAUSE) {
            return Ok(());
        }
        self.looked_at = Some(now);
        self.see_hanging();
        let groups: Vec<Groups> = [&self.own].into_iter().chain(&self.others).cloned().collect();
        for change in groups.iter().flat_map(|groups| groups.vms.look(now, PATIENCE_WITH_VM)) {
            // Its connection is made again.
            let _ = self.note(change);
        }
        let of_host: Vec<_> = groups.iter().flat_map(|groups| groups.host.look(now, PATIENCE)).collect();
        of_host.into_iter().try_for_each(|change| self.note(change))?;
        let hangs = groups.iter().find_map(|groups| groups.host.give_up(now, HANGS));
        hangs.map_or(Ok(()), |(name, time)| Err(ThreadFailed::Hangs(time, name)))
    }

    /// VMs at whose processes looks have begun to hang, or have returned, since the last call.
    pub(super) fn looks(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.looks)
    }

    fn see_hanging(&mut self) {
        let now: BTreeSet<_> = self.hanging().iter().map(|hanging| (hanging.vm, hanging.pid)).collect();
        let before = std::mem::take(&mut self.hanging);
        let begun = now.difference(&before).map(|(vm, pid)| Event::LooksHang(*vm, *pid, true));
        let over = before.difference(&now).map(|(vm, pid)| Event::LooksHang(*vm, *pid, false));
        self.looks.extend(begun.chain(over));
        self.hanging = now;
    }

    /// Looks that hang.
    pub(super) fn hanging(&self) -> Vec<Hanging> {
        self.own.looks.hanging()
    }

    /// Those that are silent now.
    pub(super) fn silent(&self) -> Vec<String> {
        self.silent.iter().cloned().collect()
    }

    /// How many have panicked. vnumad works on after those of VMs only.
    pub(super) fn panics(&self) -> u64 {
        self.panics
    }

    fn note(&mut self, change: Change) -> Result<(), ThreadFailed> {
        match change {
            Change::Panicked(name, why) => {
                error!(thread = name, why, "a thread panicked");
                self.silent.remove(&name);
                self.panics += 1;
                return Err(ThreadFailed::Panicked { name, why });
            }
            Change::Silent(name, time) => {
                error!(thread = name, seconds = time.as_secs(), "a thread makes no progress");
                self.silent.insert(name);
            }
            Change::Beats(name) => {
                info!(thread = name, "a thread makes progress again");
                self.silent.remove(&name);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use vnuma_process::Jobs;

    /// Looks each second of a clock of its own, until the condition is true.
    fn until(
        supervisor: &mut Supervisor,
        ahead: Duration,
        done: impl Fn(&Supervisor) -> bool,
    ) -> Option<ThreadFailed> {
        let end = Instant::now() + Duration::from_secs(60);
        while Instant::now() < end {
            supervisor.looked_at = None;
            if let Err(panicked) = supervisor.look(Instant::now() + ahead) {
                return Some(panicked);
            }
            if done(supervisor) {
                return None;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        panic!("not within a minute: {supervisor:?}");
    }

    #[test]
    fn a_thread_of_the_host_that_panics_ends_vnumad_and_one_of_a_vm_does_not() {
        let mut supervisor = Supervisor::default();
        let vm = supervisor.own.vms.start("vm-1", |_: Jobs<()>| panic!("a VM"));
        assert!(until(&mut supervisor, Duration::ZERO, |supervisor| supervisor.panics == 1).is_none());
        supervisor.others.push(Groups::default());
        let of_backend = supervisor.others[0].vms.start("lane", |_: Jobs<()>| panic!("a call"));
        assert!(until(&mut supervisor, Duration::ZERO, |supervisor| supervisor.panics == 2).is_none());
        let host = supervisor.others[0].host.start("mover", |_: Jobs<()>| panic!("a mask"));
        let ended = until(&mut supervisor, Duration::ZERO, |_| false).map(|panicked| panicked.to_string());
        assert_eq!(ended.as_deref(), Some("the thread mover panicked: a mask"));
        assert!(vm.is_ok() && of_backend.is_ok() && host.is_ok());
    }

    #[test]
    fn a_thread_that_hangs_is_silent_until_it_goes_on() {
        let (mut supervisor, (go_on, held)) = (Supervisor::default(), mpsc::channel::<()>());
        let hangs = move |jobs: Jobs<()>| {
            let _ = held.recv();
            jobs.for_each(drop);
        };
        let worker = supervisor.own.host.start("observer", hangs).expect("started");
        let silent = |supervisor: &Supervisor| supervisor.silent.contains("observer");
        assert!(until(&mut supervisor, PATIENCE, silent).is_none());
        go_on.send(()).expect("it waits for that");
        assert!(until(&mut supervisor, PATIENCE, |supervisor| !silent(supervisor)).is_none());
        drop(worker);
    }

    #[test]
    fn a_thread_of_the_host_that_hangs_for_long_ends_vnumad_and_is_not_waited_for() {
        let (mut supervisor, (go_on, held)) = (Supervisor::default(), mpsc::channel::<()>());
        let hangs = move |_: Jobs<()>| held.recv().unwrap_or(());
        let worker = supervisor.own.host.start("observer", hangs).expect("started");
        let ended = until(&mut supervisor, HANGS, |_| false).map(|failed| failed.to_string());
        let ended = ended.expect("an end");
        assert!(ended.starts_with("the thread observer has made no progress for 1"), "{ended}");
        drop(worker);
        drop(go_on);
    }

    #[test]
    fn it_looks_once_a_second() {
        let mut supervisor = Supervisor::default();
        let began = Instant::now();
        let looked = |supervisor: &mut Supervisor, after: Duration| {
            supervisor.look(began + after).expect("nothing is wrong");
            supervisor.looked_at.map(|at| at - began)
        };
        assert_eq!(looked(&mut supervisor, Duration::ZERO), Some(Duration::ZERO));
        assert_eq!(looked(&mut supervisor, PAUSE / 2), Some(Duration::ZERO));
        assert_eq!(looked(&mut supervisor, PAUSE), Some(PAUSE));
    }
}

//! Where the thread of a shard runs.

/// Where a thread that serves faults runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Where the scheduler puts it. It usually wakes a handler near the thread that faulted.
    Float,
    /// On the CPU of the threads that fault, looked up from time to time. A fault is then served without waking
    /// another CPU.
    Follow,
    /// On one CPU.
    Cpu(u32),
}

/// Keeps the calling thread where the faults are.
#[derive(Debug)]
pub struct Follower {
    placement: Placement,
    /// Faults until the next look.
    left: u32,
    cpu: Option<u32>,
    /// How often the thread was moved.
    pub moves: u64,
}

/// Faults between two looks at where the faulting thread runs. A look costs about as much as two faults.
const LOOK: u32 = 64;

impl Follower {
    /// For the calling thread.
    pub fn new(placement: Placement) -> Self {
        let mut follower = Self { placement, left: 0, cpu: None, moves: 0 };
        if let Placement::Cpu(cpu) = placement {
            follower.go(cpu);
        }
        follower
    }

    /// A thread of this process faulted. That it cannot be found, or its CPU is not allowed, is no error: the thread
    /// stays where it is.
    pub fn saw(&mut self, thread: i32) {
        if self.placement != Placement::Follow {
            return;
        }
        if self.left > 0 {
            self.left -= 1;
            return;
        }
        self.left = LOOK;
        let process = i32::try_from(std::process::id()).unwrap_or(0);
        if let Ok(cpu) = vnuma_process::procfs::read_last_cpu(process, thread) {
            self.go(cpu);
        }
    }

    fn go(&mut self, cpu: u32) {
        if self.cpu == Some(cpu) {
            return;
        }
        let mut set = nix::sched::CpuSet::new();
        let chosen = usize::try_from(cpu).ok().and_then(|cpu| set.set(cpu).ok());
        let myself = nix::unistd::Pid::from_raw(0);
        if chosen.is_some() && nix::sched::sched_setaffinity(myself, &set).is_ok() {
            self.cpu = Some(cpu);
            self.moves += 1;
        }
    }
}

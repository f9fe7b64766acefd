//! What is compared, fixed before the first figure of `full` was seen: the VM, workloads, policies, changes, goals.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray};

/// Memory of the VM, half of it on each guest node.
pub const MEMORY_MIB: u64 = 1536;
/// Guest nodes; each is at home on the server's node of the same number.
pub const NODES: usize = 2;
/// vCPUs, in order of their number: the node that each is at home on.
pub const HOMES: [usize; 4] = [0, 0, 1, 1];
/// CPUs of the server that vCPUs run on, of each node (lab/profiles/2n8c.toml). No vCPU runs on CPU 0 (lab/README.md).
pub const CPUS: [[u32; 3]; NODES] = [[1, 2, 3], [4, 5, 6]];
/// Programs that compete with vCPUs where these are moved by a balancer. They are on the CPUs of one node, where two of the three vCPUs
/// that run there have no CPU of their own then, and go to the other node.
pub const COMPETITORS: usize = 2;
/// CPU of QEMU's other threads.
pub const OTHERS: u32 = 7;
/// CPUs of the benchmark and of vnumad.
pub const HOST_CPUS: &[u32] = &[0, 7];
/// Classes of distance that the server has, the node itself included.
pub const CLASSES: u64 = 2;
/// vCPUs of the VM that rates are given for.
pub const RATED_VCPUS: u32 = 16;

/// Where a load with changes finds its vCPUs when it is measured: these are away from home. It began with all of them at home.
pub const AWAY_AT_FIRST: [usize; 2] = [0, 2];
/// vCPUs that go to the other node, in turn. With those above, two of four are away from home on average.
pub const TURNS: [usize; 4] = [1, 0, 2, 3];

/// A load runs for so long before it is measured, seconds of the guest: one with a compiler of its own, and others.
pub const WARM_UP_S: [u64; 2] = [16, 6];
/// And for so long after vCPUs have gone away.
pub const SETTLE_S: u64 = 8;
/// It is measured for so long without changes.
pub const QUIET_S: f64 = 24.0;
/// And for so many changes, but at least twice as long.
pub const CHANGES: usize = 4;

/// Bounds of the guest's AutoNUMA between two looks at the memory of a process, milliseconds, under all policies. The kernel's own are
/// 1000 and 60000: with these it took 15 to 30 s, before the driver told it, until it had moved what a vCPU uses, which moves on after 48.
pub const SCAN_PERIOD_MS: [u32; 2] = [100, 500];

/// What is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[derive(IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Workload {
    /// STREAM's triad over arrays that stay
    Stream,
    /// A stencil that allocates each row of each step anew
    Stencil,
    /// A Java program that makes orders and forgets them, with ParallelGC
    Orders,
    /// The same with G1; no part of the reduced form
    OrdersG1,
    /// The same with ZGC; no part of the reduced form
    OrdersZ,
    /// The stencil on mimalloc; no part of the reduced form, as are all that follow
    StencilMimalloc,
    /// The stencil on google/tcmalloc
    StencilTcmalloc,
    /// A key-value store in memory, on jemalloc
    StoreJemalloc,
    /// The store on mimalloc
    StoreMimalloc,
    /// The store on google/tcmalloc
    StoreTcmalloc,
    /// An OpenMP solver, which has no runtime that places memory
    Solver,
}

/// A memory allocator that a program is run with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Allocator {
    /// jemalloc of the guest's image.
    Jemalloc,
    /// mimalloc, which is brought.
    Mimalloc,
    /// google/tcmalloc, which guest/runtime builds.
    Tcmalloc,
}

impl Allocator {
    /// As rows have it, and vnuma-run.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// What its data are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// New all the time.
    Allocating,
    /// They stay.
    LongLived,
}

/// Of STREAM's three arrays together, MiB for each vCPU: more than the last-level cache of a node.
pub const STREAM_MIB: usize = 72;
/// Bytes of a row of the stencil: more than jemalloc keeps for a thread. Four rows are in use at a time, which is twice what an L2 of
/// the profiles holds. With rows of half that size they were just what it holds, and how many lines it kept depended on the pages.
pub const ROW_BYTES: usize = 128 << 10;
/// Rows of a step, for each vCPU: 72 MiB.
pub const ROWS: usize = 576;
/// Lines of the caches that values of the store have: 512 bytes to 3.5 KiB.
pub const VALUE_LINES: [usize; 2] = [8, 56];
/// Keys of the store, for each vCPU: 72 MiB of values.
pub const KEYS: u64 = 36 << 10;
/// Columns and rows of the solver's two grids, which are of 8 bytes: 72 MiB for each vCPU.
pub const GRID: [usize; 2] = [4096, 4608];
/// Options of the Java VM: eden is far larger than the last-level caches of both nodes, and keeps its size.
pub const JAVA: [&str; 2] = ["-Xmn320m", "-XX:-UseAdaptiveSizePolicy"];
/// Of its heap. ParallelGC has eden of each node grow and shrink with the threads there.
const HEAP: [&str; 2] = ["-Xms400m", "-Xmx400m"];
/// With G1 and ZGC half of the heap is of each node, whatever the threads do. With three of four threads on a node, as half of the
/// time here, three quarters of eden are wanted there, and with 400 MB a fifth of these would not fit. G1 does not look far enough for the
/// room (docs/results/runtimes.md); under `full` it has a quarter of the heap for each CPU.
const HEAP_IN_HALVES: [&str; 2] = ["-Xms800m", "-Xmx800m"];
/// The option by which a Java VM uses nodes.
pub const JAVA_NUMA: &str = "-XX:+UseNUMA";
/// And by which it does not, whatever its collector does on its own.
pub const JAVA_NO_NUMA: &str = "-XX:-UseNUMA";

impl Workload {
    /// All of them, in the order in which they are measured and shown.
    pub const ALL: &[Self] = Self::VARIANTS;
    /// Those of the reduced form.
    pub const REDUCED: [Self; 3] = [Self::Stream, Self::Stencil, Self::Orders];

    /// As rows have it.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// What its data are like.
    pub fn kind(self) -> Kind {
        match self {
            Self::Stream | Self::Solver => Kind::LongLived,
            _ => Kind::Allocating,
        }
    }

    /// What gives it memory.
    pub fn runtime(self) -> &'static str {
        match self {
            Self::Orders => "hotspot-parallel",
            Self::OrdersG1 => "hotspot-g1",
            Self::OrdersZ => "hotspot-z",
            _ => self.allocator().map_or("none", Allocator::name),
        }
    }

    /// The allocator of a program that has one of its own.
    pub fn allocator(self) -> Option<Allocator> {
        match self {
            Self::Stencil | Self::StoreJemalloc => Some(Allocator::Jemalloc),
            Self::StencilMimalloc | Self::StoreMimalloc => Some(Allocator::Mimalloc),
            Self::StencilTcmalloc | Self::StoreTcmalloc => Some(Allocator::Tcmalloc),
            Self::Stream | Self::Orders | Self::OrdersG1 | Self::OrdersZ | Self::Solver => None,
        }
    }

    /// Of a Java program: its collector, as vnuma-run and as the Java VM call it.
    pub fn collector(self) -> Option<[&'static str; 2]> {
        match self {
            Self::Orders => Some(["parallel", "-XX:+UseParallelGC"]),
            Self::OrdersG1 => Some(["g1", "-XX:+UseG1GC"]),
            Self::OrdersZ => Some(["z", "-XX:+UseZGC"]),
            _ => None,
        }
    }

    /// Of a Java program: options that set the size of its heap.
    pub fn heap(self) -> &'static [&'static str; 2] {
        match self {
            Self::OrdersG1 | Self::OrdersZ => &HEAP_IN_HALVES,
            _ => &HEAP,
        }
    }

    /// How often it is measured. Without changes a goal is 1 %, and of these workloads one cell differed by as much from the next; with G1
    /// and ZGC by 3 %, as which node new memory is on is by chance. So these are measured as often where a goal is 3 %.
    fn takes(self, policy: Policy, rate: u32) -> u32 {
        let by_chance = matches!(self, Self::OrdersG1 | Self::OrdersZ);
        let close = match rate {
            0 => policy != Policy::VnumaOs && !Self::REDUCED.contains(&self),
            _ => policy == Policy::Full && by_chance,
        };
        if close { 3 } else { 1 }
    }

    /// How long it runs before it is measured.
    pub fn warm_up_s(self) -> u64 {
        WARM_UP_S[usize::from(self.collector().is_none())]
    }
}

/// Who is told that vCPUs have moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[derive(IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Policy {
    /// Nothing ever moves, and all is local
    Ideal,
    /// The guest knows no nodes, and all of its memory is on the server's first
    None,
    /// It knows none, and its pages are spread over the server's nodes in turn
    Interleaved,
    /// It knows none, and each page is on the node of the vCPU that touched it first
    FirstTouch,
    /// The same, and the server's kernel takes pages to the vCPUs that use them
    AutonumaHost,
    /// Nobody: the guest has the nodes of its boot, and the runtime uses them
    StaticVnuma,
    /// The same, and the runtime does not use nodes
    VnumaOs,
    /// The guest's kernel, by vnuma; the runtime has the nodes of its start
    OsOnly,
    /// The guest's kernel and the runtime, which is started by vnuma-run
    Full,
}

impl Policy {
    /// All of them, in the order in which they are shown.
    pub const ALL: &[Self] = Self::VARIANTS;
    /// Those of the reduced form.
    pub const REDUCED: [Self; 4] = [Self::Ideal, Self::StaticVnuma, Self::OsOnly, Self::Full];

    /// As rows have it.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Is the VM attached to vnuma?
    pub fn is_attached(self) -> bool {
        matches!(self, Self::OsOnly | Self::Full)
    }

    /// Is the guest one without nodes, whose memory is the server's business? Where its pages are is decided when they are touched
    /// first, so that each cell has a VM of its own.
    pub fn is_black_box(self) -> bool {
        self.started_by().is_some()
    }

    /// What starts the VM of a black box: QEMU inherits the placement of memory from it. Nothing is set where it is first touch.
    pub fn started_by(self) -> Option<&'static [&'static str]> {
        match self {
            Self::None => Some(&["numactl", "--preferred=0"]),
            Self::Interleaved => Some(&["numactl", "--interleave=all"]),
            Self::FirstTouch | Self::AutonumaHost => Some(&[]),
            Self::Ideal | Self::StaticVnuma | Self::VnumaOs | Self::OsOnly | Self::Full => None,
        }
    }

    /// Is there a cell of it? Where nobody is told, one rate shows what the others do: docs/results/runtimes.md has `static-vnuma` at all
    /// of them, so that black boxes, each cell of which boots a VM, and `vnuma-os` have the reduced form's only. So have other workloads
    /// than the reduced form's: at five a minute a cell takes three and a half minutes. Of these only the tcmalloc ones and Java know
    /// nodes by themselves, and can be told not to use them.
    fn has(self, workload: Workload, rate: u32) -> bool {
        let reduced = Workload::REDUCED.contains(&workload);
        let knows_nodes = workload.collector().is_some() || workload.allocator() == Some(Allocator::Tcmalloc);
        match self {
            Self::Ideal => rate == 0,
            _ if self.is_black_box() => reduced && REDUCED_RATES.contains(&rate),
            Self::VnumaOs => (reduced || knows_nodes) && REDUCED_RATES.contains(&rate),
            _ => reduced || REDUCED_RATES.contains(&rate),
        }
    }
}

/// Changes a minute of guest time, for a VM of [`RATED_VCPUS`].
pub const RATES: [u32; 5] = [0, 5, 12, 20, 200];
/// Those of the reduced form.
pub const REDUCED_RATES: [u32; 2] = [0, 20];
/// The rate that goals are about.
pub const JUDGED_RATE: u32 = 20;

/// How vCPUs come to another node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum By {
    /// Each is put on a CPU of it, one at a time
    #[default]
    Hand,
    /// The server's scheduler takes them away from other load, which comes and goes
    Balancer,
}

impl By {
    /// As rows have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hand => "hand",
            Self::Balancer => "balancer",
        }
    }
}

/// A cell: a workload under a policy with so many changes a minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    pub workload: Workload,
    pub policy: Policy,
    pub rate: u32,
    pub by: By,
    /// Does the guest's kernel take pages to the threads that use them? A guest without nodes never does.
    pub autonuma: bool,
    /// Which one of those that are the same, from 0.
    pub take: u32,
}

impl Cell {
    /// One that the reduced form has, but for what it measures.
    fn is_like_reduced(&self) -> bool {
        Workload::REDUCED.contains(&self.workload)
            && Policy::REDUCED.contains(&self.policy)
            && REDUCED_RATES.contains(&self.rate)
    }
}

/// The cells of a form, in the order in which they are measured: black boxes first, then those without vnuma, as a VM is attached once.
pub fn cells(full: bool) -> Vec<Cell> {
    let policies: &[Policy] = if full { Policy::ALL } else { &Policy::REDUCED };
    let rates: &[u32] = if full { &RATES } else { &REDUCED_RATES };
    let workloads: &[Workload] = if full { Workload::ALL } else { &Workload::REDUCED };
    let mut cells = Vec::new();
    for (black_box, attached) in [(true, false), (false, false), (false, true)] {
        let from = cells.len();
        for &workload in workloads {
            let now =
                |policy: &&Policy| policy.is_black_box() == black_box && policy.is_attached() == attached;
            for &policy in policies.iter().filter(now) {
                for &rate in rates.iter().filter(|rate| policy.has(workload, **rate)) {
                    let cell = Cell { workload, policy, rate, by: By::Hand, autonuma: true, take: 0 };
                    cells.extend((0..workload.takes(policy, rate)).map(|take| Cell { take, ..cell }));
                    if full && cell.is_like_reduced() {
                        cells.push(Cell { autonuma: false, ..cell });
                    }
                    if full && cell.is_like_reduced() && rate > 0 {
                        cells.push(Cell { by: By::Balancer, ..cell });
                    }
                }
            }
        }
        // Those without AutoNUMA have another VM.
        cells[from..].sort_by_key(|cell| !cell.autonuma);
    }
    cells
}

/// Seconds of the guest between two changes of this VM; none without changes.
pub fn interval_s(rate: u32) -> Option<f64> {
    let of_this = rate as f64 * HOMES.len() as f64 / f64::from(RATED_VCPUS);
    (rate > 0).then(|| 60.0 / of_this)
}

/// How long a cell is measured, seconds of the guest.
pub fn window_s(rate: u32) -> f64 {
    interval_s(rate).map_or(QUIET_S, |interval| (interval * CHANGES as f64).max(2.0 * QUIET_S))
}

/// Goals of the issue.
pub mod goals {
    /// `static-vnuma` loses so much against `ideal`, else its rows show nothing.
    pub const LOSES: f64 = 0.05;
    /// `full` keeps so much of `ideal` where data are new all the time.
    pub const KEEPS: f64 = 0.97;
    /// And gets so much back of what `static-vnuma` loses where they stay.
    pub const RECOVERS: f64 = 0.90;
    /// Without changes `full` takes at most so much more than the same program without it. Where it takes less, nothing is lost.
    pub const QUIET: f64 = 0.01;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reduced_form_has_seven_cells_of_each_workload() {
        let reduced = cells(false);
        assert_eq!(reduced.len(), 7 * Workload::REDUCED.len());
        assert!(reduced.iter().all(|cell| cells(true).contains(cell)));
        let attached: Vec<bool> = reduced.iter().map(|cell| cell.policy.is_attached()).collect();
        assert!(attached.is_sorted(), "the VM is attached once: {attached:?}");
        assert!(cells(true).iter().all(|cell| cell.policy != Policy::Ideal || cell.rate == 0));
    }

    #[test]
    fn only_the_reduced_forms_workloads_have_all_rates() {
        let of =
            |workload| cells(true).into_iter().filter(|cell| cell.workload == workload).collect::<Vec<_>>();
        for &workload in Workload::ALL {
            let rates = of(workload).iter().filter(|cell| !REDUCED_RATES.contains(&cell.rate)).count();
            assert_eq!(rates > 0, Workload::REDUCED.contains(&workload), "{}", workload.name());
            let has_os = of(workload).iter().any(|cell| cell.policy == Policy::VnumaOs);
            let alone = [
                Workload::Solver,
                Workload::StoreJemalloc,
                Workload::StoreMimalloc,
                Workload::StencilMimalloc,
            ];
            assert_eq!(has_os, !alone.contains(&workload), "{}", workload.name());
            let os_rates = of(workload).into_iter().filter(|cell| cell.policy == Policy::VnumaOs);
            assert!(os_rates.map(|cell| cell.rate).all(|rate| REDUCED_RATES.contains(&rate)));
        }
        assert_eq!(cells(true).len(), 240);
    }

    #[test]
    fn the_full_form_has_the_reduced_one_without_autonuma_as_well() {
        assert!(cells(false).iter().all(|cell| cell.autonuma));
        let full = cells(true);
        let without: Vec<_> = full.iter().filter(|cell| !cell.autonuma).collect();
        let with = |cell: &&Cell| Cell { autonuma: true, ..**cell };
        assert_eq!(without.iter().map(with).collect::<Vec<_>>(), cells(false));
    }

    #[test]
    fn a_vm_is_attached_once_and_its_autonuma_is_never_switched() {
        let kept = |pair: &&[Cell]| {
            let [before, after] = [pair[0], pair[1]];
            !after.policy.is_black_box() && !before.policy.is_black_box() && before.autonuma == after.autonuma
        };
        let full = cells(true);
        let pairs = || full.windows(2);
        assert!(
            pairs().filter(kept).all(|pair| pair[0].policy.is_attached() <= pair[1].policy.is_attached())
        );
        let switches = pairs().filter(|pair| !pair[0].policy.is_black_box() && !kept(pair)).count();
        assert_eq!(switches, 3, "with, without, and the same attached");
    }

    #[test]
    fn the_full_form_has_changes_by_a_balancer_as_well() {
        assert!(cells(false).iter().all(|cell| cell.by == By::Hand));
        let full = cells(true);
        let balanced: Vec<_> = full.iter().filter(|cell| cell.by == By::Balancer).collect();
        let by_hand = |cell: &&Cell| Cell { by: By::Hand, ..**cell };
        let reduced = cells(false).into_iter().filter(|cell| cell.rate > 0).collect::<Vec<_>>();
        assert_eq!(balanced.iter().map(by_hand).collect::<Vec<_>>(), reduced);
    }

    #[test]
    fn other_load_makes_one_node_too_small_and_the_other_one_not() {
        // A balancer has something to do, and is done when three vCPUs are on the other node.
        for cpus in CPUS {
            assert!(COMPETITORS + HOMES.len() / 2 > cpus.len());
            assert_eq!((COMPETITORS + 1, HOMES.len() - 1), (cpus.len(), cpus.len()));
        }
    }

    #[test]
    fn black_boxes_are_in_the_full_form_only_and_come_first() {
        let full = cells(true);
        let first = full.iter().take_while(|cell| cell.policy.is_black_box()).count();
        assert_eq!(first, 4 * Workload::REDUCED.len() * REDUCED_RATES.len());
        assert!(full[first..].iter().all(|cell| !cell.policy.is_black_box()));
        let attached: Vec<bool> = full.iter().map(|cell| cell.policy.is_attached()).collect();
        assert!(attached.is_sorted(), "the VM is attached once: {attached:?}");
    }

    #[test]
    fn two_vcpus_are_away_on_average_and_no_node_is_overcrowded() {
        let mut at = HOMES;
        AWAY_AT_FIRST.iter().for_each(|vcpu| at[*vcpu] = 1 - at[*vcpu]);
        let mut away = 0;
        for turn in 0..2 * TURNS.len() {
            let vcpu = TURNS[turn % TURNS.len()];
            at[vcpu] = 1 - at[vcpu];
            away += at.iter().zip(HOMES).filter(|(now, home)| **now != *home).count();
            if turn + 1 == CHANGES {
                assert_eq!(away, 2 * CHANGES);
            }
            for (node, cpus) in CPUS.iter().enumerate() {
                assert!(at.iter().filter(|now| **now == node).count() <= cpus.len(), "{at:?}");
            }
        }
        assert_eq!(away, 2 * 2 * TURNS.len());
    }

    #[test]
    fn rates_are_those_of_a_larger_vm() {
        assert_eq!([0, 5, 20, 200].map(interval_s), [None, Some(48.0), Some(12.0), Some(1.2)]);
        assert_eq!([0, 5, 20, 200].map(window_s), [24.0, 192.0, 48.0, 48.0]);
    }

    #[test]
    fn a_half_of_the_heap_has_what_three_of_four_threads_want() {
        let mib = |option: &str, name: &str| -> usize {
            let size = option.strip_prefix(name).and_then(|rest| rest.strip_suffix('m'));
            size.expect("a size").parse().expect("a number")
        };
        for &workload in Workload::ALL.iter().filter(|workload| workload.collector().is_some()) {
            let [least, most] = workload.heap().map(|option| mib(option, &option[..4]));
            assert_eq!(least, most);
            let wanted = mib(JAVA[0], "-Xmn") * 3 / 4;
            assert!(workload == Workload::Orders || wanted < most / 2, "{}", workload.name());
            assert!(most + 320 < MEMORY_MIB as usize, "the guest has {MEMORY_MIB} MiB");
        }
    }

    #[test]
    fn what_a_vcpu_uses_is_in_no_cache_and_in_the_vm() {
        let cache = vnuma_lab_pricing::by_name("broadwell-2s").expect("a profile").llc.kib as usize >> 10;
        let stencil = (ROWS * ROW_BYTES) >> 20;
        let store = (KEYS as usize * VALUE_LINES.iter().sum::<usize>() / 2 * 64) >> 20;
        let solver = (2 * GRID[0] * GRID[1] * 8 / HOMES.len()) >> 20;
        let data = [STREAM_MIB, stencil, store, solver];
        assert!(data.iter().all(|mib| *mib > cache), "{data:?}, the cache has {cache} MiB");
        // A node has the data of all vCPUs that are there, and the kernel.
        let node = MEMORY_MIB as usize / NODES;
        assert!(data.iter().all(|mib| mib * HOMES.len() + 160 < node), "{data:?}, a node has {node} MiB");
    }
}

//! From what was asked for to what the VM will be; no I/O.

use std::str::FromStr;

use crate::host::HostNode;

/// Memory of a node is a multiple of this, so that huge pages fit.
const MEMORY_STEP_MIB: usize = 2;
/// A guest needs about this much for kernel and userland, in MiB.
const LEAST_MEMORY_MIB: usize = 256;
const MOST_MEMORY_MIB: usize = 1 << 20;
const MOST_VCPUS: usize = 64;
const MOST_NODES: usize = 16;
const MOST_NAME: usize = 32;
/// Linux drops a SLIT in which another node is as near as the node itself.
const LEAST_REMOTE_DISTANCE: u8 = 11;

/// What was asked for.
#[derive(clap::Args, Clone, Debug)]
pub struct Request {
    /// Its name: letters, digits, '-' and '_', at most 32
    pub name: String,
    /// Kernel in the image: a directory of /run/lab/kernels
    #[arg(long, default_value = "6.12")]
    pub kernel: String,
    /// Guest nodes; node i is bound to the i-th node of the server, beginning again after the last
    #[arg(long, value_name = "N", conflicts_with = "uma")]
    pub nodes: Option<usize>,
    /// vCPUs, dealt to the nodes in order
    #[arg(long, value_name = "N")]
    pub vcpus: Option<usize>,
    /// The node of each vCPU instead, such as 0:0,1:2,2:0. A node may be without any
    #[arg(long, value_name = "VCPU:NODE,...", conflicts_with_all = ["vcpus", "uma", "spare_slots"])]
    pub place: Option<Place>,
    /// Cores of a socket, which share a cache; a node has whole sockets
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with_all = ["uma", "spare_slots"])]
    pub cores: usize,
    /// Memory of all nodes together, such as 768M or 1G
    #[arg(long, value_name = "SIZE", default_value = "512M")]
    pub memory: Memory,
    /// Neither bind memory nor pin vCPU threads
    #[arg(long)]
    pub unbound: bool,
    /// A VM without NUMA, unbound
    #[arg(long)]
    pub uma: bool,
    /// Give every node as many sockets without a vCPU as it has vCPUs, for CPU hot-plug
    #[arg(long, conflicts_with = "uma")]
    pub spare_slots: bool,
    /// Give every node a virtio-mem device (`vmem0` and on) of this size, such as 512M, of which nothing is plugged
    #[arg(long, value_name = "SIZE", conflicts_with = "uma")]
    pub pluggable: Option<Memory>,
    /// Add these words to the kernel's command line, such as preempt=full
    #[arg(long, value_name = "WORDS")]
    pub append: Option<String>,
    /// Connect it to the network of the lab's servers
    #[arg(long)]
    pub network: bool,
    /// Pass a PCI function of the server through, behind a root port of its own. It is bound to vfio-pci already. May be given
    /// more than once
    #[arg(long = "device", value_name = "ADDRESS", conflicts_with = "placement")]
    pub devices: Vec<String>,
}

/// What the VM will be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The nodes; one without number for QEMU where the VM is UMA.
    pub nodes: Vec<GuestNode>,
    /// How many vCPUs they have.
    pub vcpus: usize,
    /// Whether the guest has NUMA nodes.
    pub numa: bool,
    /// Cores of a socket.
    pub cores: usize,
    /// Size of the virtio-mem device of each node, MiB; 0: there are none.
    pub pluggable_mib: usize,
    /// Distances, row = from, column = to.
    pub distances: Vec<Vec<u8>>,
}

/// A node of the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestNode {
    /// Memory in MiB.
    pub memory_mib: usize,
    /// Its vCPUs, by index.
    pub vcpus: Vec<usize>,
    /// Its sockets without a vCPU.
    pub spare: Vec<usize>,
    /// Where memory is bound and vCPU threads are pinned, if they are.
    pub home: Option<Home>,
}

/// A node of the server as the home of a guest node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home {
    /// Number of the node.
    pub node: usize,
    /// Its CPUs.
    pub cpus: Vec<usize>,
}

/// What is wrong with a request.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PlanError {
    /// The name would be no name of a file, or no nice one.
    #[error(
        "name \"{0}\": expected 1 to {MOST_NAME} letters, digits, '-' and '_', beginning with a letter or digit"
    )]
    Name(String),
    /// A number is out of range.
    #[error("{option} {value}: expected {low} to {high}")]
    Range {
        /// The option.
        option: &'static str,
        /// Its value.
        value: usize,
        /// The least.
        low: usize,
        /// The most.
        high: usize,
    },
    /// A node would be without vCPU.
    #[error("--vcpus {vcpus}: expected at least {nodes}, one for each of the guest nodes")]
    FewVcpus {
        /// vCPUs.
        vcpus: usize,
        /// Guest nodes.
        nodes: usize,
    },
    /// A vCPU would be on a node that the VM does not have.
    #[error("--place {vcpu}:{node}: expected a node below {nodes}")]
    Node {
        /// vCPU.
        vcpu: usize,
        /// Its node.
        node: usize,
        /// Guest nodes.
        nodes: usize,
    },
    /// A socket would be on two nodes.
    #[error("--cores {cores}: each of the {nodes} guest nodes must have whole sockets of the {vcpus} vCPUs")]
    Sockets {
        /// Cores of a socket.
        cores: usize,
        /// vCPUs.
        vcpus: usize,
        /// Guest nodes.
        nodes: usize,
    },
}

/// Memory, given as `512M` or `1G`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// In MiB.
    pub mib: usize,
}

impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let error = || format!("\"{text}\": expected MiB or GiB, such as 768M or 1G");
        let (number, factor) = match text.strip_suffix('M') {
            Some(number) => (number, 1),
            None => (text.strip_suffix('G').ok_or_else(error)?, 1024),
        };
        if !number.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(error());
        }
        let number: usize = number.parse().map_err(|_| error())?;
        let mib = number.checked_mul(factor).ok_or_else(error)?;
        if (LEAST_MEMORY_MIB..=MOST_MEMORY_MIB).contains(&mib) {
            return Ok(Self { mib });
        }
        Err(format!("\"{text}\": expected {LEAST_MEMORY_MIB}M to {}G", MOST_MEMORY_MIB / 1024))
    }
}

/// The node of each vCPU, given as `0:0,1:2,2:0`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place(Vec<usize>);

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let error = || format!("\"{text}\": expected VCPU:NODE,... with each vCPU from 0 on once");
        let pair = |pair: &str| {
            let (vcpu, node) = pair.split_once(':')?;
            Some((vcpu.parse::<usize>().ok()?, node.parse::<usize>().ok()?))
        };
        let mut pairs = text.split(',').map(pair).collect::<Option<Vec<_>>>().ok_or_else(error)?;
        pairs.sort_unstable();
        if pairs.iter().map(|(vcpu, _)| *vcpu).eq(0..pairs.len()) {
            return Ok(Self(pairs.into_iter().map(|(_, node)| node).collect()));
        }
        Err(error())
    }
}

impl Place {
    /// vCPUs are dealt to the nodes in order.
    fn dealt(vcpus: usize, nodes: usize) -> Self {
        let first = |node: usize| node * vcpus / nodes;
        Self((0..nodes).flat_map(|node| (first(node)..first(node + 1)).map(move |_| node)).collect())
    }

    fn on(&self, node: usize) -> Vec<usize> {
        (0..self.0.len()).filter(|&vcpu| self.0[vcpu] == node).collect()
    }

    fn has_whole_sockets(&self, cores: usize) -> bool {
        let whole = |socket: &[usize]| socket.len() == cores && socket.iter().all(|node| *node == socket[0]);
        self.0.chunks(cores).all(whole)
    }

    fn check(&self, nodes: usize) -> Result<(), PlanError> {
        match self.0.iter().enumerate().find(|(_, node)| **node >= nodes) {
            Some((vcpu, &node)) => Err(PlanError::Node { vcpu, node, nodes }),
            None => Ok(()),
        }
    }
}

/// A name becomes a directory and a socket.
pub fn check_name(name: &str) -> Result<(), PlanError> {
    let good = name.len() <= MOST_NAME
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
    if good { Ok(()) } else { Err(PlanError::Name(name.to_owned())) }
}

/// Decides what the VM will be.
pub fn plan(request: &Request, host: &[HostNode]) -> Result<Plan, PlanError> {
    let range = |option, value, low, high| {
        if (low..=high).contains(&value) {
            Ok(())
        } else {
            Err(PlanError::Range { option, value, low, high })
        }
    };
    check_name(&request.name)?;
    let nodes = if request.uma { 1 } else { request.nodes.unwrap_or(host.len().min(MOST_NODES)) };
    range("--nodes", nodes, 1, MOST_NODES)?;
    let vcpus = request.place.as_ref().map_or(request.vcpus.unwrap_or(nodes.max(2)), |place| place.0.len());
    range(if request.place.is_some() { "--place" } else { "--vcpus" }, vcpus, 1, MOST_VCPUS)?;
    if request.place.is_none() && vcpus < nodes {
        return Err(PlanError::FewVcpus { vcpus, nodes });
    }
    let place = request.place.clone().unwrap_or_else(|| Place::dealt(vcpus, nodes));
    place.check(nodes)?;
    let cores = request.cores;
    range("--cores", cores, 1, vcpus)?;
    if !place.has_whole_sockets(cores) {
        return Err(PlanError::Sockets { cores, vcpus, nodes });
    }
    let bound = !request.unbound && !request.uma && !host.is_empty();
    let home = |node: usize| bound.then(|| &host[node % host.len()]);
    let memory_mib = request.memory.mib / nodes / MEMORY_STEP_MIB * MEMORY_STEP_MIB;
    let spare = |node: usize| place.on(node).iter().map(|vcpu| vcpus + vcpu).collect();
    let guest_node = |node: usize| GuestNode {
        memory_mib,
        vcpus: place.on(node),
        spare: if request.spare_slots { spare(node) } else { Vec::new() },
        home: home(node).map(|home| Home { node: home.id, cpus: home.cpus.clone() }),
    };
    let distance = |from: usize, to: usize| match (from == to, host.len()) {
        (true, _) => 10,
        (false, 0) => 20,
        (false, homes) => host[from % homes].distances[to % homes].max(LEAST_REMOTE_DISTANCE),
    };
    let row = |from| (0..nodes).map(|to| distance(from, to)).collect();
    Ok(Plan {
        nodes: (0..nodes).map(guest_node).collect(),
        vcpus,
        numa: !request.uma,
        cores,
        pluggable_mib: request.pluggable.map_or(0, |memory| memory.mib),
        distances: (0..nodes).map(row).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn host(nodes: usize) -> Vec<HostNode> {
        let node = |id: usize| HostNode {
            id,
            cpus: vec![2 * id, 2 * id + 1],
            distances: (0..nodes).map(|to| if id == to { 10 } else { 20 + (id + to) as u8 }).collect(),
        };
        (0..nodes).map(node).collect()
    }

    fn request() -> Request {
        Request {
            name: "a".into(),
            kernel: "6.12".into(),
            nodes: None,
            vcpus: None,
            place: None,
            cores: 1,
            memory: Memory { mib: 512 },
            unbound: false,
            uma: false,
            spare_slots: false,
            pluggable: None,
            append: None,
            network: false,
            devices: Vec::new(),
        }
    }

    #[test]
    fn spare_slots_follow_the_vcpus_in_number_and_on_nodes() {
        let spare = Request { spare_slots: true, vcpus: Some(5), ..request() };
        let plan = plan(&spare, &host(2)).unwrap();
        let sockets: Vec<_> =
            plan.nodes.iter().map(|node| (node.vcpus.clone(), node.spare.clone())).collect();
        assert_eq!(sockets, [(vec![0, 1], vec![5, 6]), (vec![2, 3, 4], vec![7, 8, 9])]);
    }

    #[test]
    fn by_default_the_vm_has_the_nodes_of_the_server() {
        let plan = plan(&request(), &host(4)).unwrap();
        assert_eq!(plan.nodes.len(), 4);
        assert_eq!(plan.nodes[3].home, Some(Home { node: 3, cpus: vec![6, 7] }));
        assert_eq!(plan.nodes[3].vcpus, [3]);
        assert_eq!(plan.nodes[3].memory_mib, 128);
        assert_eq!(plan.distances[1], [21, 10, 23, 24]);
    }

    #[test]
    fn more_nodes_than_the_server_has_begin_again_and_are_never_at_no_distance() {
        let request = Request { nodes: Some(3), ..request() };
        let plan = plan(&request, &host(2)).unwrap();
        assert_eq!(plan.nodes[2].home.as_ref().unwrap().node, 0);
        assert_eq!(plan.distances[0], [10, 21, 11]);
    }

    #[test]
    fn unbound_and_uma_have_no_homes() {
        let unbound = plan(&Request { unbound: true, ..request() }, &host(2)).unwrap();
        assert!(unbound.numa && unbound.nodes.iter().all(|node| node.home.is_none()));
        assert_eq!(unbound.distances[0], [10, 21]);
        let uma = plan(&Request { uma: true, vcpus: Some(3), ..request() }, &host(2)).unwrap();
        assert_eq!(
            uma.nodes,
            [GuestNode { memory_mib: 512, vcpus: vec![0, 1, 2], spare: Vec::new(), home: None }]
        );
        assert!(!uma.numa);
    }

    #[test]
    fn bad_requests_say_what_is_wrong() {
        let text = |request: Request| plan(&request, &host(2)).unwrap_err().to_string();
        assert!(text(Request { name: "../x".into(), ..request() }).starts_with("name \"../x\": expected"));
        assert!(text(Request { name: String::new(), ..request() }).starts_with("name \"\""));
        assert!(text(Request { name: "-x".into(), ..request() }).starts_with("name \"-x\""));
        assert_eq!(text(Request { nodes: Some(17), ..request() }), "--nodes 17: expected 1 to 16");
        assert_eq!(text(Request { vcpus: Some(65), ..request() }), "--vcpus 65: expected 1 to 64");
        let few = text(Request { nodes: Some(4), vcpus: Some(3), ..request() });
        assert_eq!(few, "--vcpus 3: expected at least 4, one for each of the guest nodes");
    }

    #[test]
    fn a_place_says_the_node_of_each_vcpu() {
        let placed = Request { nodes: Some(3), place: Some("1:2,0:0,2:0".parse().unwrap()), ..request() };
        let plan = plan(&placed, &host(2)).unwrap();
        let vcpus: Vec<_> = plan.nodes.iter().map(|node| node.vcpus.clone()).collect();
        assert_eq!((plan.vcpus, vcpus), (3, vec![vec![0, 2], vec![], vec![1]]));
    }

    #[test]
    fn a_place_names_each_vcpu_once_and_nodes_that_are_there() {
        for bad in
            ["", "0", "0:", ":0", "0:-1", "1:0", "0:0,0:1", "0:0,2:0", "0:0,", "0:99999999999999999999"]
        {
            let error = bad.parse::<Place>().unwrap_err();
            assert!(error.ends_with("with each vCPU from 0 on once"), "{bad}: {error}");
        }
        let place = Some("0:0,1:3".parse().unwrap());
        let error = plan(&Request { nodes: Some(3), place, ..request() }, &host(2)).unwrap_err();
        assert_eq!(error.to_string(), "--place 1:3: expected a node below 3");
        let many = (0..65).map(|vcpu| format!("{vcpu}:0")).collect::<Vec<_>>().join(",");
        let place = Some(many.parse().unwrap());
        let error = plan(&Request { place, ..request() }, &host(2)).unwrap_err();
        assert_eq!(error.to_string(), "--place 65: expected 1 to 64");
    }

    #[test]
    fn a_node_has_whole_sockets() {
        let of = |cores, place: &str| {
            plan(
                &Request { cores, nodes: Some(2), place: Some(place.parse().unwrap()), ..request() },
                &host(2),
            )
        };
        assert_eq!(of(2, "0:1,1:1,2:0,3:0").unwrap().nodes[1].vcpus, [0, 1]);
        assert!(of(1, "0:0,1:1,2:1").is_ok());
        for place in ["0:0,1:1,2:1,3:0", "0:0,1:0,2:1"] {
            let error = of(2, place).unwrap_err().to_string();
            assert!(
                error.starts_with("--cores 2: each of the 2 guest nodes must have whole sockets"),
                "{error}"
            );
        }
        assert_eq!(of(3, "0:0,1:0").unwrap_err().to_string(), "--cores 3: expected 1 to 2");
    }

    #[test]
    fn memory_has_a_unit_and_bounds() {
        assert_eq!("768M".parse(), Ok(Memory { mib: 768 }));
        assert_eq!("2G".parse(), Ok(Memory { mib: 2048 }));
        for bad in [
            "",
            "M",
            "1",
            "-1G",
            "+1G",
            "1T",
            "0M",
            "255M",
            "99999999999999999999G",
            "18014398509481984G",
            "1.5G",
        ] {
            assert!(bad.parse::<Memory>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn every_vcpu_has_one_node_and_every_node_a_vcpu(
            nodes in 1_usize..=16, more in 0_usize..48, homes in 1_usize..9, mib in 256_usize..4096,
        ) {
            let vcpus = nodes + more;
            let request =
                Request { nodes: Some(nodes), vcpus: Some(vcpus), memory: Memory { mib }, ..request() };
            let plan = plan(&request, &host(homes)).unwrap();
            let dealt: Vec<usize> = plan.nodes.iter().flat_map(|node| node.vcpus.clone()).collect();
            prop_assert_eq!(dealt, (0..vcpus).collect::<Vec<_>>());
            prop_assert!(plan.nodes.iter().all(|node| !node.vcpus.is_empty()));
            prop_assert!(plan.nodes.iter().all(|node| node.memory_mib >= 2 && node.memory_mib % 2 == 0));
            for (from, row) in plan.distances.iter().enumerate() {
                prop_assert!(row.iter().enumerate().all(|(to, &d)| (from == to) == (d == 10)));
            }
        }
    }
}

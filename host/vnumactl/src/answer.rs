//! What is printed for an answer of vnumad.

use crate::{
    devices, doctor, hardware, memory, place, policy, rehome, resize, table::plain_lines, vms, watch,
};
use serde::de::DeserializeOwned;
use vnuma_api::{
    ApiError, Daemon, Devices, HostTopology, NodeFree, Placed, Rehome, Reserved, Scheduling, Sizes, Vm,
    VmMemory,
};
use vnuma_client::Error;
use vnuma_placement::print::Format;

/// A kind of answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To `hardware`.
    Hardware,
    /// To `devices`.
    Devices,
    /// To `capacity`.
    Capacity,
    /// To `list`.
    List,
    /// To `show`.
    Show,
    /// To `daemon`.
    Daemon,
    /// To `policy`, of all VMs.
    Policies,
    /// To `policy`, of one.
    Policy,
    /// To `memory`.
    Memory,
    /// To `rehome`.
    Rehome,
    /// To `resize`.
    Sizes,
    /// To the three questions of `doctor`, as an array.
    Doctor,
    /// To `place`.
    Placed,
    /// To `reservations`.
    Reservations,
    /// A line of `watch`.
    Event,
    /// To a request that failed.
    Error,
}

impl Answer {
    /// What is printed for the answer with this body.
    pub fn print(self, body: &[u8]) -> Result<String, String> {
        match self {
            Self::Hardware => read::<HostTopology>(body).map(|host| hardware::text(&host)),
            Self::Devices => read::<Devices>(body).map(|found| devices::text(&found)),
            Self::Capacity => read::<Vec<NodeFree>>(body).map(|nodes| devices::capacity(&nodes)),
            Self::List => read::<Vec<Vm>>(body).map(|vms| vms::list(&vms)),
            Self::Show => read::<Vm>(body).map(|vm| vms::show(&vm) + &vms::moved(&vm, 0)),
            Self::Daemon => read::<Daemon>(body).map(|daemon| vms::daemon(&daemon)),
            Self::Policies => read::<Vec<Scheduling>>(body).map(|vms| policy::list(&vms)),
            Self::Policy => read::<Scheduling>(body).map(|vm| policy::show(&vm)),
            Self::Memory => read::<VmMemory>(body).map(|vm| memory::show(&vm)),
            Self::Rehome => read::<Rehome>(body).map(|vm| {
                let bar = vm.rehome.as_ref().map(rehome::bar).unwrap_or_default();
                rehome::text(&vm) + &bar
            }),
            Self::Sizes => read::<Sizes>(body).map(|vm| resize::text(&vm)),
            Self::Doctor => read::<(Daemon, HostTopology, Vec<Vm>)>(body)
                .map(|(daemon, host, vms)| doctor::text(&doctor::examine(&daemon, &host, &vms))),
            Self::Placed => read::<Placed>(body).map(|placed| {
                let formats = [Format::Qemu, Format::Libvirt].map(|format| place::text(&placed, format));
                formats.concat() + &place::told(&placed, true)
            }),
            Self::Reservations => read::<Vec<Reserved>>(body).map(|all| place::list(&all)),
            Self::Event => watch::line(body, false).map_err(|error| error.to_string()),
            Self::Error => {
                read::<ApiError>(body).map(|refusal| plain_lines(&Error::Refused(refusal).to_string()) + "\n")
            }
        }
        .map_err(|error| plain_lines(&error))
    }
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    serde_json::from_slice(body).map_err(|error| error.to_string())
}

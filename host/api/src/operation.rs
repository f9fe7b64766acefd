//! The table of operations: what each is called, where it is served, what it takes and answers, and who may ask for it.

use crate::{
    AttachRequest, CAPACITY, DAEMON, DEVICES, Daemon as DaemonShown, Devices as DevicesShown, HARDWARE,
    HostTopology, MemoryPolicyRequest, MigrateRequest, Migration, MoveRequest, NodeFree, PLACEMENTS,
    POLICIES, PlaceRequest, Placed, PolicyRequest, Rehome as RehomeShown, RehomeRequest, ReplugRequest,
    Replugged, Reserved, ResizeRequest, Scheduling, Sizes, VMS, Vm, VmMemory, path::path_of,
};
use serde::{Serialize, de::DeserializeOwned};
use utoipa::ToSchema;

/// Who may ask for an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// Everybody who may connect to the socket. Such requests are `GET`, all others are `POST`.
    Read,
    /// Root, the daemon's own user, and the group that is configured. Has what is done, as in "attach needs root".
    Act(&'static str),
    /// Root and the daemon's own user: who has this right can get the memory of any VM.
    Send(&'static str),
}

/// What an operation is about: nothing in particular (`()`), or the VM of this name (`&str`).
pub trait Subject {
    /// The same without a lifetime.
    type Owned: Send + 'static;

    /// By the name in a path, which is empty if the path has none.
    fn owned(name: String) -> Self::Owned;

    /// The path of the operation for it.
    fn path(&self, template: &str) -> String;
}

impl Subject for () {
    type Owned = ();

    fn owned(_name: String) {}

    fn path(&self, template: &str) -> String {
        template.to_owned()
    }
}

impl Subject for &str {
    type Owned = String;

    fn owned(name: String) -> String {
        name
    }

    fn path(&self, template: &str) -> String {
        let (all, action) = template.split_once("/{name}").unwrap_or((template, ""));
        path_of(all, self, action.strip_prefix('/'))
    }
}

/// Something that vnumad can be asked for once, with one answer.
pub trait Operation {
    /// Its name (`operationId` of OpenAPI).
    const NAME: &'static str;
    /// Its path, with `{name}` for the VM's.
    const PATH: &'static str;
    /// What it does.
    const DESCRIPTION: &'static str;
    /// What its answer says.
    const DONE: &'static str;
    /// Who may ask for it.
    const RIGHT: Right;
    /// The answer is an array.
    const MANY: bool;
    /// What it is about.
    type Subject<'a>: Subject;
    /// Body of the request. One that is `null` as JSON need not be sent.
    type Input: Serialize;
    /// What is in the answer.
    type Item: Serialize + ToSchema;
    /// The answer: an item, or an array of them.
    type Output: Serialize + DeserializeOwned + Send + 'static;
}

/// Each row: the description, the name, the path, what it is about, the right, body and answer, and what the answer says.
macro_rules! operations {
    ($(#[doc = $text:literal] $operation:ident, $name:literal, $path:expr, $subject:ty, $right:expr, $input:ty => $output:tt, $done:literal;)+) => {
        $(
            #[doc = $text]
            #[derive(Clone, Copy, Debug)]
            pub struct $operation;

            impl Operation for $operation {
                const NAME: &'static str = $name;
                const PATH: &'static str = $path;
                const DESCRIPTION: &'static str = $text.trim_ascii_start();
                const DONE: &'static str = $done;
                const RIGHT: Right = $right;
                type Subject<'a> = $subject;
                type Input = $input;
                operations!(@output $output);
            }
        )+
    };
    (@output [$item:ty]) => {
        const MANY: bool = true;
        type Item = $item;
        type Output = Vec<$item>;
    };
    (@output $item:ty) => {
        const MANY: bool = false;
        type Item = $item;
        type Output = $item;
    };
}

use Right::{Act, Read, Send as MaySend};

operations! {
    /// The host, read again for the request.
    Hardware, "hardware", HARDWARE, (), Read, () => HostTopology, "The answer";
    /// PCI functions and who has them.
    Devices, "devices", DEVICES, (), Read, () => DevicesShown, "The answer";
    /// What is free on each node for VMs that are to be started.
    Capacity, "capacity", CAPACITY, (), Read, () => [NodeFree], "The answer";
    /// vnumad itself.
    Daemon, "daemon", DAEMON, (), Read, () => DaemonShown, "The answer";
    /// All VMs.
    List, "list", VMS, (), Read, () => [Vm], "The answer";
    /// A VM.
    Show, "show", "/v1/vms/{name}", &'a str, Read, () => Vm, "The answer";
    /// Plug a topology channel into the VM and publish its topology.
    Attach, "attach", "/v1/vms/{name}/attach", &'a str, Act("attach"), Option<AttachRequest> => Vm, "It was done";
    /// Unplug the topology channel.
    Detach, "detach", "/v1/vms/{name}/detach", &'a str, Act("detach"), () => Vm, "It was done";
    /// Confine a vCPU to the CPUs of a host node.
    MoveVcpu, "move_vcpu", "/v1/vms/{name}/move", &'a str, Act("move"), MoveRequest => Vm, "It was done";
    /// Plug a vCPU again, on the guest node that is right for it.
    Replug, "replug", "/v1/vms/{name}/replug", &'a str, Act("replug"), ReplugRequest => Replugged, "It was done";
    /// How the vCPUs of all VMs are scheduled.
    Policies, "policies", POLICIES, (), Read, () => [Scheduling], "The answer";
    /// How the vCPUs of the VM are scheduled.
    ShowPolicy, "show_policy", "/v1/vms/{name}/policy", &'a str, Read, () => Scheduling, "The answer";
    /// Give the VM another scheduling policy.
    SetPolicy, "set_policy", "/v1/vms/{name}/policy", &'a str, Act("setting a policy"), PolicyRequest => Scheduling, "It was done";
    /// Where the memory of the VM is, looked at for the request unless that was done a moment ago.
    ShowMemory, "show_memory", "/v1/vms/{name}/memory", &'a str, Read, () => VmMemory, "The answer";
    /// Give the VM another memory policy.
    SetMemoryPolicy, "set_memory_policy", "/v1/vms/{name}/memory", &'a str, Act("setting a memory policy"), MemoryPolicyRequest => VmMemory, "It was done";
    /// Where the guest nodes of the VM are, and how far the last re-home is.
    ShowRehome, "show_rehome", "/v1/vms/{name}/rehome", &'a str, Read, () => RehomeShown, "The answer";
    /// Give a guest node of the VM another home. It goes on after the answer.
    Rehome, "rehome", "/v1/vms/{name}/rehome", &'a str, Act("giving a guest node another home"), RehomeRequest => RehomeShown, "It has begun";
    /// End the re-home that is under way. What was moved stays where it is.
    StopRehome, "stop_rehome", "/v1/vms/{name}/rehome/stop", &'a str, Act("stopping a change of a guest node"), () => RehomeShown, "It was done";
    /// How large the guest nodes of the VM are and may be, and how far the last changes are.
    ShowSizes, "show_sizes", "/v1/vms/{name}/resize", &'a str, Read, () => Sizes, "The answer";
    /// Give a guest node of the VM another size by its virtio-mem devices, or let vnumad size it. It goes on after the answer.
    Resize, "resize", "/v1/vms/{name}/resize", &'a str, Act("sizing a guest node"), ResizeRequest => Sizes, "It has begun";
    /// End the changes of guest nodes that are under way. They keep the sizes that they have by then.
    StopResize, "stop_resize", "/v1/vms/{name}/resize/stop", &'a str, Act("stopping a change of a guest node"), () => Sizes, "It was done";
    /// How far the last migration of the VM is, also when the VM is gone.
    ShowMigration, "show_migration", "/v1/vms/{name}/migrate", &'a str, Read, () => Migration, "The answer";
    /// Detach the VM and migrate it to another host. It goes on after the answer. If it fails, the VM is attached again.
    Migrate, "migrate", "/v1/vms/{name}/migrate", &'a str, MaySend("migrate"), MigrateRequest => Migration, "It has begun";
    /// End the migration that is under way. The VM is attached again, after the answer.
    CancelMigration, "cancel_migration", "/v1/vms/{name}/migrate/cancel", &'a str, Act("cancelling a migration"), () => Migration, "It is being cancelled";
    /// Reservations of VMs.
    Placements, "placements", PLACEMENTS, (), Read, () => [Reserved], "The answer";
    /// Decide where a VM goes that is to be started, and reserve that.
    Place, "place", PLACEMENTS, (), Act("placing a VM"), PlaceRequest => Placed, "It was done";
    /// Give up the reservation of a VM that is not there.
    Release, "release", "/v1/placements/{name}/release", &'a str, Act("releasing a reservation"), () => Reserved, "It was done";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_what_they_are_about() {
        assert_eq!(().path(List::PATH), "/v1/vms");
        assert_eq!("web-1".path(Show::PATH), "/v1/vms/web-1");
        assert_eq!("a/b".path(StopRehome::PATH), "/v1/vms/a%2Fb/rehome/stop");
        assert_eq!("web".path(Release::PATH), "/v1/placements/web/release");
    }
}

//! Placements of VMs that are to be started, and reservations.

use crate::{
    failure::Failure,
    name, print,
    table::{Table, plain, plain_lines},
};
use std::io::{self, Write};
use vnuma_api::{PlaceRequest, Placed, Reserved, operation as op};
use vnuma_client::Client;
use vnuma_placement::{BASE_PAGE_BYTES, Locality, print::Format, shown_bytes};

/// What a VM is to have, and how its placement is printed.
#[derive(clap::Args)]
pub struct Arguments {
    /// Name that the VM will have
    #[arg(value_parser = name())]
    vm: String,
    /// vCPUs
    #[arg(long, value_name = "N")]
    vcpus: u32,
    /// Memory, such as 512M or 8G
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: u64,
    /// Address of a PCI function that is passed through; may be repeated
    #[arg(long, value_name = "ADDRESS")]
    device: Vec<String>,
    /// Huge pages of this size, such as 2M or 1G, instead of ordinary ones
    #[arg(long, value_name = "SIZE", value_parser = size)]
    hugepages: Option<u64>,
    /// If the node of a device has nothing left, take the nearest one that has
    #[arg(long)]
    allow_remote: bool,
    /// Seconds that the reservation waits for the VM
    #[arg(long, value_name = "S", default_value_t = 60)]
    lifetime: u64,
    /// Show the arithmetic, on standard error
    #[arg(long)]
    explain: bool,
    /// qemu, libvirt or json
    #[arg(long, value_name = "FORMAT", default_value = "qemu")]
    format: Format,
}

/// A size in bytes: a number with K, M, G or T.
pub fn size(text: &str) -> Result<u64, String> {
    let expected = || "expected a number with K, M, G or T, such as 512M or 8G".to_owned();
    let unit = text.chars().last().and_then(|unit| "KMGT".find(unit)).ok_or_else(expected)?;
    let digits = &text[..text.len() - 1];
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.parse::<u64>().ok().filter(|_| plain).ok_or_else(expected)?;
    number.checked_mul(1 << (10 * (unit + 1))).ok_or_else(|| "more than 16 EiB".to_owned())
}

/// Asks for a placement, and prints it.
pub async fn run(client: &Client, arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let request = PlaceRequest {
        name: arguments.vm.clone(),
        vcpus: arguments.vcpus,
        memory_bytes: arguments.memory,
        page_bytes: arguments.hugepages.unwrap_or(BASE_PAGE_BYTES),
        devices: arguments.device.clone(),
        locality: if arguments.allow_remote { Locality::Preferred } else { Locality::Required },
        lifetime_ms: arguments.lifetime.saturating_mul(1000),
    };
    let placed = client.ask::<op::Place>((), &request).await?;
    if json {
        return print(true, &placed, |_| String::new());
    }
    // Standard output is for QEMU, libvirt or a program.
    io::stderr().write_all(told(&placed, arguments.explain).as_bytes()).map_err(Failure::Output)?;
    print(false, &placed, |placed| text(placed, arguments.format))
}

/// The placement.
pub fn text(placed: &Placed, format: Format) -> String {
    plain_lines(&vnuma_placement::print::text(&placed.reservation.placement, format))
}

/// What is shown beside the placement.
pub fn told(placed: &Placed, explain: bool) -> String {
    let Reserved { id, waits_ms, placement, .. } = &placed.reservation;
    let arithmetic = if explain { plain_lines(&placed.explanation.to_string()) } else { String::new() };
    let seconds = waits_ms.unwrap_or_default() / 1000;
    let obstacles: String = placed.obstacles.iter().map(|one| format!("warning: {}\n", plain(one))).collect();
    format!(
        "{arithmetic}{obstacles}reservation {id} waits {seconds} s for the VM {}\n",
        plain(&placement.name)
    )
}

/// One line for each reservation.
pub fn list(all: &[Reserved]) -> String {
    if all.is_empty() {
        return "no reservations\n".to_owned();
    }
    let mut table = Table::new(">ID  VM  STATE  >VCPUS  >MEMORY  HOMES  CPUS  DEVICES");
    for Reserved { id, waits_ms, pid, placement } in all {
        let state = match (waits_ms, pid) {
            (Some(waits_ms), _) => format!("waits {} s", waits_ms / 1000),
            (None, Some(pid)) => format!("held by {pid}"),
            (None, None) => "held".to_owned(),
        };
        let join = |items: Vec<String>| if items.is_empty() { "-".to_owned() } else { items.join(",") };
        table.row([
            id.to_string(),
            plain(&placement.name),
            state,
            placement.vcpus().to_string(),
            shown_bytes(placement.memory_bytes()),
            join(placement.guest_nodes.iter().map(|node| node.home.to_string()).collect()),
            placement.cpus().to_string(),
            join(placement.devices.iter().map(|device| plain(&device.address)).collect()),
        ]);
    }
    table.text(0)
}

/// A reservation that was given up.
pub fn released(reserved: &Reserved) -> String {
    format!("reservation {} of the VM {} is given up\n", reserved.id, plain(&reserved.placement.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_model::DistanceMatrix;
    use vnuma_placement::{DevicePlan, Explanation, GuestNodePlan, Placement, Rule, VcpuPin};

    #[test]
    fn sizes_have_a_unit() {
        assert_eq!((size("4K"), size("8G"), size("2T")), (Ok(4096), Ok(8 << 30), Ok(2 << 40)));
        for wrong in ["", "G", "8", "8g", "+8G", "8GB", "1.5G", "8é"] {
            assert!(size(wrong).is_err_and(|error| error.starts_with("expected a number with K")), "{wrong}");
        }
        assert_eq!(size("99999999999T"), Err("more than 16 EiB".to_owned()));
    }

    fn placement() -> Placement {
        let node = |id, home, cpu| GuestNodePlan {
            id,
            home,
            memory_bytes: 1 << 30,
            vcpus: vec![VcpuPin { vcpu: id, cpu }],
        };
        Placement {
            name: "web".into(),
            page_bytes: 4096,
            guest_nodes: vec![node(0, 1, 4), node(1, 0, 9)],
            distances: DistanceMatrix::default(),
            devices: vec![DevicePlan {
                address: "0000:81:00.0".into(),
                host_node: Some(1),
                guest_node: Some(0),
                local: true,
            }],
        }
    }

    #[test]
    fn what_is_in_the_way_of_its_devices_is_told_beside_a_placement() {
        let reservation = Reserved { id: 3, waits_ms: Some(60_000), pid: None, placement: placement() };
        let explanation = Explanation {
            rule: Rule::Small,
            vcpus: 2,
            units: 1024,
            unit_bytes: 2 << 20,
            free_cpus: 4,
            free_units: 4096,
            memory_of_all: false,
            homes: Vec::new(),
            nodes: Vec::new(),
            remote: Vec::new(),
        };
        let mut placed = Placed { reservation, explanation, obstacles: Vec::new() };
        assert_eq!(told(&placed, false), "reservation 3 waits 60 s for the VM web\n");
        placed.obstacles = vec!["device 0000:81:00.0: no driver\u{1b} has it".into(), "b".into()];
        let expected = "warning: device 0000:81:00.0: no driver\u{fffd} has it\nwarning: b\nreservation 3 waits 60 s for the VM web\n";
        assert_eq!(told(&placed, false), expected);
        assert!(told(&placed, true).starts_with("rule: ") && told(&placed, true).ends_with(expected));
    }

    #[test]
    fn reservations_are_a_table() {
        let placement = placement();
        let waits = Reserved { id: 3, waits_ms: Some(59_500), pid: None, placement: placement.clone() };
        let mut held = Reserved { id: 4, waits_ms: None, pid: Some(77), placement };
        held.placement.devices.clear();
        held.placement.name = "a\u{1b}b".into();
        let expected = "\
ID  VM   STATE       VCPUS  MEMORY  HOMES  CPUS  DEVICES
 3  web  waits 59 s      2   2 GiB  1,0    4,9   0000:81:00.0
 4  a\u{fffd}b  held by 77      2   2 GiB  1,0    4,9   -
";
        assert_eq!(list(&[waits, held]), expected);
        assert_eq!(list(&[]), "no reservations\n");
    }
}

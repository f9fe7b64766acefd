//! VMs that migrate to another host: asks for it, shows how far it is, and waits for its end.

use crate::{
    failure::Failure,
    progress::{self, Progress},
    table::{plain, size},
};
use clap::Args;
use std::time::Duration;
use vnuma_api::{MigrateRequest, Migration, operation as op};
use vnuma_client::Client;

/// Between two looks at how far it is.
const LOOK: Duration = Duration::from_millis(200);

#[derive(Args)]
pub struct Arguments {
    /// Name of the VM
    #[arg(value_parser = crate::name())]
    vm: String,
    /// Where to: tcp:HOST:PORT, unix:PATH or vsock:CID:PORT of a QEMU that waits, or for a domain of libvirt the URI of another
    /// libvirt, such as qemu+ssh://HOST/system. Without it: show how far the last migration is
    #[arg(value_name = "DEST")]
    destination: Option<String>,
    /// Have the guest go on at the destination before all of its memory is there
    #[arg(long, requires = "destination")]
    post_copy: bool,
    /// Do not wait for the end
    #[arg(long, requires = "destination")]
    no_wait: bool,
    /// End the migration that is under way; the VM is attached again
    #[arg(long, conflicts_with = "destination")]
    cancel: bool,
}

pub async fn run(client: &Client, arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let vm = arguments.vm.as_str();
    if arguments.cancel {
        let mut shown = client.ask::<op::CancelMigration>(vm, &()).await?;
        while shown.is_active() {
            tokio::time::sleep(LOOK).await;
            shown = client.ask::<op::ShowMigration>(vm, &()).await?;
        }
        crate::print(json, &shown, text)?;
        return if shown.state == "cancelled" { Ok(()) } else { Err(failed(&shown)) };
    }
    let Some(destination) = arguments.destination.clone() else {
        let shown = client.ask::<op::ShowMigration>(vm, &()).await?;
        return crate::print(json, &shown, text);
    };
    let input = MigrateRequest { destination, post_copy: arguments.post_copy };
    let mut shown = client.ask::<op::Migrate>(vm, &input).await?;
    let mut progress = Progress::new(true);
    while !arguments.no_wait && shown.is_active() {
        progress.show(&shown.state, &bar(&shown));
        tokio::time::sleep(LOOK).await;
        shown = client.ask::<op::ShowMigration>(vm, &()).await?;
    }
    progress.end();
    crate::print(json, &shown, text)?;
    if shown.state == "done" || (arguments.no_wait && shown.is_active()) {
        Ok(())
    } else {
        Err(failed(&shown))
    }
}

fn failed(shown: &Migration) -> Failure {
    Failure::Migration { vm: plain(&shown.vm), destination: plain(&shown.destination) }
}

/// For example `sending    [######........................] 43 MiB sent, 120 MiB left, pass 1`.
pub fn bar(shown: &Migration) -> String {
    let share = match shown.total_bytes {
        0 => 0.0,
        total => 1.0 - shown.left_bytes as f64 / total as f64,
    };
    progress::bar(&shown.state, 10, share, &figures(shown))
}

fn figures(shown: &Migration) -> String {
    let [sent, left] = [shown.sent_bytes, shown.left_bytes].map(|bytes| size(bytes >> 10));
    format!("{sent} sent, {left} left, pass {}", shown.passes)
}

/// All of it.
pub fn text(shown: &Migration) -> String {
    let (vm, destination) = (plain(&shown.vm), plain(&shown.destination));
    let mut text = match shown.state.as_str() {
        "done" => {
            let stood = match shown.downtime_ms {
                Some(ms) => format!(", its guest stood still for {ms} ms"),
                None => String::new(),
            };
            format!("{vm}: it is at {destination}: {} sent{stood}\n", size(shown.sent_bytes >> 10))
        }
        "cancelled" => format!("{vm}: its migration to {destination} was cancelled; it runs here\n"),
        "failed" => format!("{vm}: its migration to {destination} failed\n"),
        state => format!("{vm}: on its way to {destination}: {}, {}\n", plain(state), figures(shown)),
    };
    if let Some(problem) = &shown.problem {
        text += &format!("  {}\n", plain(problem));
    }
    let again = shown.attached && ["cancelled", "failed"].contains(&shown.state.as_str());
    match (shown.state.as_str(), again) {
        // libvirt ends the QEMU of a domain that has left.
        ("done", _) if destination.starts_with("qemu") => {}
        ("done", _) => {
            text += "  Its QEMU here stands still, with the memory that it had. End it when the VM runs at its destination.\n";
        }
        (_, true) => text += "  See `vnumactl show` whether it is attached again, and docs/migration.md.\n",
        _ => {}
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn migration(state: &str) -> Migration {
        Migration {
            vm: "w\u{1b}eb".into(),
            destination: "tcp:b:4444".into(),
            state: state.into(),
            attached: true,
            sent_bytes: 100 << 20,
            left_bytes: 300 << 20,
            total_bytes: 400 << 20,
            passes: 1,
            downtime_ms: Some(31),
            problem: Some("no\u{7}t yet".into()),
            ..Migration::default()
        }
    }

    #[test]
    fn how_far_it_is_is_a_bar() {
        assert_eq!(
            bar(&migration("sending")),
            "sending    [#######.......................] 100 MiB sent, 300 MiB left, pass 1"
        );
        assert!(
            bar(&Migration::default())
                .ends_with("[..............................] 0 KiB sent, 0 KiB left, pass 0")
        );
    }

    #[test]
    fn how_it_ended_is_said() {
        for (state, line) in [
            ("done", "it is at tcp:b:4444: 100 MiB sent, its guest stood still for 31 ms"),
            ("cancelled", "its migration to tcp:b:4444 was cancelled; it runs here"),
            ("failed", "its migration to tcp:b:4444 failed"),
            ("sending", "on its way to tcp:b:4444: sending, 100 MiB sent, 300 MiB left, pass 1"),
        ] {
            let text = super::text(&migration(state));
            assert!(text.starts_with(&format!("w\u{fffd}eb: {line}\n  no\u{fffd}t yet\n")), "{text}");
            assert_eq!(text.contains("attached again"), ["cancelled", "failed"].contains(&state), "{text}");
            assert_eq!(text.contains("End it"), state == "done", "{text}");
        }
        let domain = Migration { destination: "qemu+ssh://b/system".into(), ..migration("done") };
        assert!(!text(&domain).contains("End it"), "libvirt has done so: {}", text(&domain));
    }
}

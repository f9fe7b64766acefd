//! The configuration file. Every key has a default; a key that is not known, or a value out of
//! range, is refused with its file, line and name.

#[cfg(test)]
mod manual;
#[cfg(test)]
mod tests;

use crate::core::sanitize;
use std::{
    net::SocketAddr,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};
use toml::Spanned;
use vnuma_observe::location::Prefer;
use vnuma_policy::{
    SettlePolicy,
    memory_move::MemoryPolicy,
    rehome_policy::RehomeSettings,
    repatriation::MemorySettings,
    scheduling::{Policy, analyzer::Bounds},
    sizing::SizeSettings,
};
use vnuma_settings::{SettingsError, Source, Table};

/// The configuration file if none is named.
pub const DEFAULT_PATH: &str = "/etc/vnuma/vnumad.toml";

/// The configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Socket of the API.
    pub socket: PathBuf,
    /// Group that may use the socket, besides root's.
    pub group: Option<String>,
    /// Group that may act, besides root and the user that vnumad runs as.
    pub act_group: Option<String>,
    /// Connections that one user may have at a time.
    pub connections_per_user: usize,
    /// Watchers that one user may have at a time.
    pub watchers_per_user: usize,
    /// Address and TCP port at which metrics are served to everybody who can reach it. `None`: on the socket only.
    pub metrics: Option<SocketAddr>,
    /// Directory of QMP sockets.
    pub directory: Option<PathBuf>,
    /// QMP sockets elsewhere.
    pub sockets: Vec<PathBuf>,
    /// How long QEMU may take for a command.
    pub command_limit: Duration,
    /// URIs of libvirts whose domains are VMs. None: libvirt is not used.
    pub libvirt_uris: Vec<String>,
    /// Where libvirt's QEMU driver keeps files of domains that run.
    pub libvirt_directories: Vec<PathBuf>,
    /// Directory of the sockets over which QEMUs of libvirt get their channels.
    pub libvirt_sockets: PathBuf,
    /// Where the host's `sys` and `proc` are.
    pub root: PathBuf,
    /// How vCPU locations are learned.
    pub location: Prefer,
    /// Time between two readings of vCPU locations, if they are polled.
    pub poll_interval: Duration,
    /// Time between two readings of everything, in case an event was lost.
    pub resync_interval: Duration,
    /// How often the rest is looked at.
    pub intervals: Intervals,
    /// Directory of the records of channels, from which the next vnumad recovers them.
    pub records: PathBuf,
    /// When changes are published.
    pub settle: SettlePolicy,
    /// How long a vCPU of a guest without a channel has to be away from its guest node before it is replugged. `None`: for ever.
    pub replug_after: Option<Duration>,
    /// How the vCPUs of a VM are scheduled until an operator says otherwise.
    pub policy: Policy,
    /// Length of a period of the scheduling policies.
    pub policy_period: Duration,
    /// Bounds between the types of vCPUs.
    pub policy_bounds: Bounds,
    /// The bounds adapt to the loads that run.
    pub policy_adaptive_bounds: bool,
    /// Bytes of memory that policies may move in a second; 0: none.
    pub policy_memory: u64,
    /// Memory accesses of vCPUs are sampled.
    pub policy_samples: bool,
    /// How displaced memory comes home.
    pub memory: MemorySettings,
    /// How guest nodes are sized by themselves.
    pub sizes: SizeSettings,
    /// When guest nodes get other homes by themselves.
    pub rehome: RehomeSettings,
}

/// How often vnumad looks at what can change without an event. The interval of resyncs is beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intervals {
    /// Between two looks at VMs' processes and at the main loops of their hypervisors.
    pub process: Duration,
    /// After which a hypervisor is asked for a sign of life although its main loop looks idle.
    pub probe: Duration,
    /// Most between two descriptions of a VM whose memory is not bound.
    pub describe: Duration,
    /// Between two readings of the host's topology.
    pub host: Duration,
}

impl Default for Intervals {
    fn default() -> Self {
        Self {
            process: Duration::from_millis(500),
            probe: Duration::from_secs(20),
            describe: Duration::from_secs(30),
            host: Duration::from_secs(30),
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            socket: vnuma_api::DEFAULT_SOCKET.into(),
            group: None,
            act_group: None,
            connections_per_user: 64,
            watchers_per_user: 16,
            metrics: None,
            directory: Some("/run/vnuma/qmp".into()),
            sockets: Vec::new(),
            command_limit: Duration::from_secs(1),
            libvirt_uris: Vec::new(),
            libvirt_directories: vec!["/run/libvirt/qemu".into()],
            libvirt_sockets: "/run/vnuma/libvirt".into(),
            root: "/".into(),
            location: Prefer::Auto,
            poll_interval: Duration::from_millis(100),
            resync_interval: Duration::from_secs(2),
            intervals: Intervals::default(),
            records: "/run/vnuma/channels".into(),
            settle: SettlePolicy::default(),
            replug_after: None,
            policy: Policy::Off,
            policy_period: Duration::from_secs(1),
            policy_bounds: Bounds::default(),
            policy_adaptive_bounds: false,
            policy_memory: 0,
            policy_samples: false,
            memory: MemorySettings::default(),
            sizes: SizeSettings::default(),
            rehome: RehomeSettings::default(),
        }
    }
}

/// Most connections to libvirt, and directories of its files.
const LIBVIRTS: usize = 16;
/// Longest of [`Intervals`], in milliseconds.
const LONGEST_MS: u64 = 3_600_000;
/// A day, in seconds.
const DAY: u64 = 86_400;
const SECOND_NS: u64 = 1_000_000_000;

type Taken = Result<(), SettingsError>;

impl Config {
    /// Reads `path`; without one, the default path if there is such a file, and the defaults if not.
    pub fn load(path: Option<&Path>) -> Result<Self, SettingsError> {
        vnuma_settings::load(path, DEFAULT_PATH, Self::parse)
    }

    /// Understands the text of `path`.
    pub fn parse(path: &Path, text: &str) -> Result<Self, SettingsError> {
        let mut config = Self::default();
        Source::new(path, text).read(|file| {
            file.section("api", |table| config.api(table))?;
            file.section("metrics", |table| config.metrics(table))?;
            file.section("vms", |table| config.vms(table))?;
            file.section("libvirt", |table| config.libvirt(table))?;
            file.section("observe", |table| config.observe(table))?;
            file.section("publish", |table| config.publish(table))?;
            file.section("replug", |table| {
                table.number("after_s", 1..=DAY, |s| config.replug_after = Some(Duration::from_secs(s)))
            })?;
            file.section("policy", |table| config.policy(table))?;
            file.section("memory", |table| memory(table, &mut config.memory))?;
            file.section("size", |table| sizes(table, &mut config.sizes))?;
            file.section("rehome", |table| {
                let settings = &mut config.rehome;
                table.is_second("mode", &["manual", "auto"], &mut settings.auto)?;
                table.number("settle_s", 1..=DAY, |s| settings.settle_ns = s * SECOND_NS)?;
                table.number("rest_s", 1..=DAY, |s| settings.rest_ns = s * SECOND_NS)
            })
        })?;
        Ok(config)
    }

    fn api(&mut self, table: &mut Table<'_>) -> Taken {
        path(table, "socket", &mut self.socket)?;
        table.set("group", &mut self.group)?;
        table.set("act_group", &mut self.act_group)?;
        table.number("connections_per_user", 1..=4096, |count| self.connections_per_user = count as usize)?;
        table.number("watchers_per_user", 1..=4096, |count| self.watchers_per_user = count as usize)
    }

    fn metrics(&mut self, table: &mut Table<'_>) -> Taken {
        let Some(value) = table.given::<String>("listen")? else { return Ok(()) };
        self.metrics = value.get_ref().parse().ok().filter(|address: &SocketAddr| address.port() != 0);
        if self.metrics.is_some() {
            return Ok(());
        }
        let expected = "an address and a port, such as 127.0.0.1:9743 or [::1]:9743";
        Err(table.wrong("listen", &value, sanitize(value.get_ref()), expected))
    }

    fn vms(&mut self, table: &mut Table<'_>) -> Taken {
        let (directory, sockets) = (table.path("directory")?, table.paths("sockets", usize::MAX)?);
        // A list of sockets takes the place of the default directory.
        if directory.is_some() || sockets.is_some() {
            self.directory = directory;
        }
        self.sockets = sockets.unwrap_or_default();
        millis(table, "command_limit_ms", 1000..=60_000, &mut self.command_limit)
    }

    fn libvirt(&mut self, table: &mut Table<'_>) -> Taken {
        let uris = table.given::<Vec<Spanned<String>>>("uris")?.map(Spanned::into_inner).unwrap_or_default();
        for (at, uri) in uris.iter().enumerate() {
            let text = uri.get_ref();
            // The process of a VM has to be on this host.
            let host = text.split_once("://").map(|(_, rest)| rest);
            let expected =
                if !host.is_some_and(|host| host.starts_with('/')) || text.contains(char::is_control) {
                    "a URI of this host, such as qemu:///system".to_owned()
                } else if at == LIBVIRTS || uris[..at].iter().any(|other| other.get_ref() == text) {
                    format!("at most {LIBVIRTS} different ones")
                } else {
                    continue;
                };
            return Err(table.wrong("uris", uri, sanitize(&format!("{text:?}")), expected));
        }
        self.libvirt_uris = uris.into_iter().map(Spanned::into_inner).collect();
        if let Some(directories) = table.paths("state_directories", LIBVIRTS)? {
            self.libvirt_directories = directories;
        }
        path(table, "socket_directory", &mut self.libvirt_sockets)
    }

    fn observe(&mut self, table: &mut Table<'_>) -> Taken {
        path(table, "root", &mut self.root)?;
        if let Some(at) = table.word("location", &["auto", "bpf", "poll"])? {
            self.location = [Prefer::Auto, Prefer::Bpf, Prefer::Poll][at];
        }
        millis(table, "poll_interval_ms", 10..=10_000, &mut self.poll_interval)?;
        millis(table, "resync_interval_ms", 1000..=60_000, &mut self.resync_interval)?;
        let Intervals { process, probe, describe, host } = &mut self.intervals;
        millis(table, "process_interval_ms", 100..=LONGEST_MS, process)?;
        millis(table, "probe_interval_ms", 1000..=LONGEST_MS, probe)?;
        millis(table, "describe_interval_ms", 2000..=LONGEST_MS, describe)?;
        millis(table, "host_interval_ms", 1000..=LONGEST_MS, host)
    }

    fn publish(&mut self, table: &mut Table<'_>) -> Taken {
        let settle = &mut self.settle;
        table.number("dwell_ms", 0..=60_000, |ms| settle.dwell_ns = ms * 1_000_000)?;
        table.number("calm_dwell_ms", 0..=60_000, |ms| settle.calm_dwell_ns = ms * 1_000_000)?;
        table.number("calm_s", 0..=3600, |s| settle.calm_ns = s * SECOND_NS)?;
        table.number("max_per_second", 1..=1000, |count| settle.max_per_second = count as u32)?;
        path(table, "records", &mut self.records)
    }

    fn policy(&mut self, table: &mut Table<'_>) -> Taken {
        named(table, "default", Policy::ALL.iter().map(|policy| policy.name()), &mut self.policy)?;
        millis(table, "period_ms", 100..=60_000, &mut self.policy_period)?;
        table.is_second("bounds", &["fixed", "adaptive"], &mut self.policy_adaptive_bounds)?;
        table.number("memory_mib_per_s", 0..=65_536, |mib| self.policy_memory = mib << 20)?;
        table.is_second("samples", &["off", "ibs"], &mut self.policy_samples)?;
        let (given_low, given_high) = (bound(table, "bound_low")?, bound(table, "bound_high")?);
        let Bounds { low, high } = &mut self.policy_bounds;
        given_low.iter().for_each(|value| *low = *value.get_ref());
        given_high.iter().for_each(|value| *high = *value.get_ref());
        match (given_high, given_low) {
            _ if low < high => Ok(()),
            (Some(value), _) => {
                let expected = format!("more than policy.bound_low, {low}");
                Err(table.wrong("bound_high", &value, high.to_string(), expected))
            }
            (None, Some(value)) => {
                let expected = format!("less than policy.bound_high, {high}");
                Err(table.wrong("bound_low", &value, low.to_string(), expected))
            }
            (None, None) => Ok(()),
        }
    }
}

fn memory(table: &mut Table<'_>, settings: &mut MemorySettings) -> Taken {
    named(table, "policy", MemoryPolicy::ALL.iter().map(|policy| policy.name()), &mut settings.policy)?;
    let scale = (1..=DAY, SECOND_NS);
    pair(table, ("observe_s", &mut settings.observe_ns), ("period_s", &mut settings.period_ns), scale)?;
    table.number("amount_permille", 1..=1000, |permille| settings.amount_permille = permille)?;
    table.number("mib_per_s", 1..=65_536, |mib| settings.bytes_per_s = mib << 20)?;
    table.number("observe_permille", 1..=1000, |permille| settings.cost_permille = permille)?;
    table.is_second("hotness", &["off", "auto"], &mut settings.hotness)
}

fn sizes(table: &mut Table<'_>, settings: &mut SizeSettings) -> Taken {
    table.is_second("mode", &["fixed", "auto"], &mut settings.auto)?;
    let SizeSettings { low_permille, high_permille, least_permille, most_permille, .. } = settings;
    pair(table, ("low_permille", low_permille), ("high_permille", high_permille), (0..=1000, 1))?;
    pair(table, ("least_permille", least_permille), ("most_permille", most_permille), (0..=1000, 1))?;
    table.number("pause_s", 1..=DAY, |s| settings.pause_ns = s * SECOND_NS)
}

/// Reads two numbers within `range`. The first may not be above the second. Both are multiplied by `unit`.
fn pair(
    table: &mut Table<'_>,
    (lower_key, lower): (&'static str, &mut u64),
    (upper_key, upper): (&'static str, &mut u64),
    (range, unit): (RangeInclusive<u64>, u64),
) -> Taken {
    let (given, limit) = (table.number_at(lower_key, range.clone())?, table.number_at(upper_key, range)?);
    let value = |given: &Option<Spanned<u64>>| given.as_ref().map(|given| *given.get_ref() * unit);
    // If only one is given, the other one is moved so that the first is not above the second.
    *upper = value(&limit).unwrap_or((*upper).max(value(&given).unwrap_or(0)));
    *lower = value(&given).unwrap_or((*lower).min(*upper));
    match given {
        Some(given) if *lower > *upper => {
            let section = table.section_name();
            let expected = format!("at most {section}{upper_key}, {}", *upper / unit);
            Err(table.wrong(lower_key, &given, given.get_ref().to_string(), expected))
        }
        _ => Ok(()),
    }
}

fn millis(
    table: &mut Table<'_>,
    key: &'static str,
    range: RangeInclusive<u64>,
    place: &mut Duration,
) -> Taken {
    table.number(key, range, |ms| *place = Duration::from_millis(ms))
}

fn path(table: &mut Table<'_>, key: &'static str, place: &mut PathBuf) -> Taken {
    table.path(key).map(|given| given.into_iter().for_each(|path| *place = path))
}

/// A bound between types, in references per thousand instructions.
fn bound(table: &mut Table<'_>, key: &'static str) -> Result<Option<Spanned<f64>>, SettingsError> {
    let given = table.given::<f64>(key)?;
    match given.as_ref().filter(|bound| !(0.01..=1000.0).contains(bound.get_ref())) {
        Some(wrong) => Err(table.wrong(key, wrong, wrong.get_ref().to_string(), "0.01 to 1000")),
        None => Ok(given),
    }
}

/// What has one of these names.
fn named<T: FromStr>(
    table: &mut Table<'_>,
    key: &'static str,
    names: impl Iterator<Item = &'static str>,
    place: &mut T,
) -> Taken {
    let Some(value) = table.given::<String>(key)? else { return Ok(()) };
    *place = value.get_ref().parse().map_err(|_| {
        let expected = format!("one of {}", names.collect::<Vec<_>>().join(", "));
        table.wrong(key, &value, sanitize(&format!("{:?}", value.get_ref())), expected)
    })?;
    Ok(())
}

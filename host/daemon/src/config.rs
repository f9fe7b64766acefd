//! The configuration file. Every key has a default; a key that is not known, or a value out of
//! range, is refused with its file, line and name.

#[cfg(test)]
mod manual;
#[cfg(test)]
mod tests;

use crate::core::sanitize;
use serde::Deserialize;
use std::{
    net::SocketAddr,
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
use vnuma_settings::{SettingsError, Source};

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
    /// They follow the loads that run.
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

/// How often vnumad looks at what may change without an event, but for a resync.
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

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct File {
    api: Api,
    metrics: MetricsSection,
    vms: Vms,
    libvirt: Libvirt,
    observe: Observe,
    publish: Publish,
    replug: Replug,
    policy: PolicySection,
    memory: MemorySection,
    size: SizeSection,
    rehome: RehomeSection,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Api {
    socket: Option<Spanned<PathBuf>>,
    group: Option<String>,
    act_group: Option<String>,
    connections_per_user: Option<Spanned<i64>>,
    watchers_per_user: Option<Spanned<i64>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct MetricsSection {
    listen: Option<Spanned<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Vms {
    directory: Option<Spanned<PathBuf>>,
    sockets: Option<Vec<Spanned<PathBuf>>>,
    command_limit_ms: Option<Spanned<i64>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Libvirt {
    uris: Option<Vec<Spanned<String>>>,
    state_directories: Option<Vec<Spanned<PathBuf>>>,
    socket_directory: Option<Spanned<PathBuf>>,
}

/// Most connections to libvirt, and directories of its files.
const LIBVIRTS: usize = 16;

impl Libvirt {
    fn uris(&self, source: &Source<'_>) -> Result<Option<Vec<String>>, SettingsError> {
        let Some(uris) = &self.uris else { return Ok(None) };
        let key = "libvirt.uris";
        for (at, uri) in uris.iter().enumerate() {
            let text = uri.get_ref();
            let shown = || sanitize(&format!("{text:?}"));
            // The process of a VM has to be on this host.
            let host = text.split_once("://").map(|(_, rest)| rest);
            if !host.is_some_and(|host| host.starts_with('/')) || text.contains(char::is_control) {
                let expected = "a URI of this host, such as qemu:///system".to_owned();
                return Err(source.value_error(key, uri, shown(), expected));
            }
            if at == LIBVIRTS || uris[..at].iter().any(|other| other.get_ref() == text) {
                let expected = format!("at most {LIBVIRTS} different ones");
                return Err(source.value_error(key, uri, shown(), expected));
            }
        }
        Ok(Some(uris.iter().map(|uri| uri.get_ref().clone()).collect()))
    }

    fn directories(&self, source: &Source<'_>) -> Result<Option<Vec<PathBuf>>, SettingsError> {
        let Some(directories) = &self.state_directories else { return Ok(None) };
        let key = "libvirt.state_directories";
        if let Some(last) = directories.get(LIBVIRTS) {
            let (shown, expected) = (format!("{:?}", last.get_ref()), format!("at most {LIBVIRTS}"));
            return Err(source.value_error(key, last, sanitize(&shown), expected));
        }
        let paths = directories.iter().filter_map(|path| absolute(source, key, Some(path)).transpose());
        paths.collect::<Result<_, _>>().map(Some)
    }
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Observe {
    root: Option<Spanned<PathBuf>>,
    location: Option<Location>,
    poll_interval_ms: Option<Spanned<i64>>,
    resync_interval_ms: Option<Spanned<i64>>,
    process_interval_ms: Option<Spanned<i64>>,
    probe_interval_ms: Option<Spanned<i64>>,
    describe_interval_ms: Option<Spanned<i64>>,
    host_interval_ms: Option<Spanned<i64>>,
}

/// Longest of [`Intervals`], in milliseconds.
const LONGEST_MS: u64 = 3_600_000;

impl Observe {
    fn intervals(&self, source: &Source<'_>) -> Result<Intervals, SettingsError> {
        let of = |key, value: &Option<Spanned<i64>>, least, default| {
            let ms = source.number(key, value, least..=LONGEST_MS)?;
            Ok(ms.map_or(default, Duration::from_millis))
        };
        let default = Intervals::default();
        Ok(Intervals {
            process: of("observe.process_interval_ms", &self.process_interval_ms, 100, default.process)?,
            probe: of("observe.probe_interval_ms", &self.probe_interval_ms, 1000, default.probe)?,
            describe: of("observe.describe_interval_ms", &self.describe_interval_ms, 2000, default.describe)?,
            host: of("observe.host_interval_ms", &self.host_interval_ms, 1000, default.host)?,
        })
    }
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Location {
    Auto,
    Bpf,
    Poll,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Publish {
    dwell_ms: Option<Spanned<i64>>,
    calm_dwell_ms: Option<Spanned<i64>>,
    calm_s: Option<Spanned<i64>>,
    max_per_second: Option<Spanned<i64>>,
    records: Option<Spanned<PathBuf>>,
}

impl Publish {
    fn settle(&self, source: &Source<'_>, default: SettlePolicy) -> Result<SettlePolicy, SettingsError> {
        let millis = |key, value, default: u64| {
            let ms = source.number(key, value, 0..=60_000)?;
            Ok(ms.map_or(default, |ms| ms * 1_000_000))
        };
        let calm_s = source.number("publish.calm_s", &self.calm_s, 0..=3600)?;
        let max_per_second = source.number("publish.max_per_second", &self.max_per_second, 1..=1000)?;
        Ok(SettlePolicy {
            dwell_ns: millis("publish.dwell_ms", &self.dwell_ms, default.dwell_ns)?,
            calm_dwell_ns: millis("publish.calm_dwell_ms", &self.calm_dwell_ms, default.calm_dwell_ns)?,
            calm_ns: calm_s.map_or(default.calm_ns, |s| s * 1_000_000_000),
            max_per_second: max_per_second.map_or(default.max_per_second, |n| n as u32),
        })
    }
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Replug {
    after_s: Option<Spanned<i64>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct PolicySection {
    default: Option<Spanned<String>>,
    period_ms: Option<Spanned<i64>>,
    bound_low: Option<Spanned<f64>>,
    bound_high: Option<Spanned<f64>>,
    bounds: Option<BoundsMode>,
    memory_mib_per_s: Option<Spanned<i64>>,
    samples: Option<Samples>,
}

impl PolicySection {
    fn bounds(&self, source: &Source<'_>, default: Bounds) -> Result<Bounds, SettingsError> {
        let (low_key, high_key) = ("policy.bound_low", "policy.bound_high");
        let low = bound(source, low_key, self.bound_low.as_ref())?.unwrap_or(default.low);
        let high = bound(source, high_key, self.bound_high.as_ref())?.unwrap_or(default.high);
        match (&self.bound_high, &self.bound_low) {
            _ if low < high => Ok(Bounds { low, high }),
            (Some(value), _) => Err(source.value_error(
                high_key,
                value,
                high.to_string(),
                format!("more than {low_key}, {low}"),
            )),
            (None, Some(value)) => Err(source.value_error(
                low_key,
                value,
                low.to_string(),
                format!("less than {high_key}, {high}"),
            )),
            (None, None) => Ok(default),
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct MemorySection {
    policy: Option<Spanned<String>>,
    period_s: Option<Spanned<i64>>,
    amount_permille: Option<Spanned<i64>>,
    mib_per_s: Option<Spanned<i64>>,
    observe_s: Option<Spanned<i64>>,
    observe_permille: Option<Spanned<i64>>,
    hotness: Option<HotnessMode>,
}

/// Whether it is watched how hot memory is.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum HotnessMode {
    Auto,
    Off,
}

impl MemorySection {
    fn settings(&self, source: &Source<'_>) -> Result<MemorySettings, SettingsError> {
        let default = MemorySettings::default();
        let seconds = |key, value| {
            let s = source.number(key, value, 1..=86_400)?;
            Ok(s.map(|s| s * 1_000_000_000))
        };
        let given = seconds("memory.period_s", &self.period_s)?;
        let observe = seconds("memory.observe_s", &self.observe_s)?;
        if let (Some(period_ns), Some(observe_ns), Some(value)) = (given, observe, &self.observe_s)
            && observe_ns > period_ns
        {
            let expected = format!("at most memory.period_s, {}", period_ns / 1_000_000_000);
            return Err(source.value_error("memory.observe_s", value, value.get_ref().to_string(), expected));
        }
        // The one that is not given follows the other one.
        let period_ns = given.unwrap_or(default.period_ns.max(observe.unwrap_or(0)));
        let observe_ns = observe.unwrap_or(default.observe_ns.min(period_ns));
        let amount = source.number("memory.amount_permille", &self.amount_permille, 1..=1000)?;
        let mib_per_s = source.number("memory.mib_per_s", &self.mib_per_s, 1..=65_536)?;
        let names: Vec<_> = MemoryPolicy::ALL.iter().map(|policy| policy.name()).collect();
        let cost = source.number("memory.observe_permille", &self.observe_permille, 1..=1000)?;
        Ok(MemorySettings {
            policy: named(source, "memory.policy", &self.policy, &names)?.unwrap_or(default.policy),
            period_ns,
            amount_permille: amount.unwrap_or(default.amount_permille),
            bytes_per_s: mib_per_s.map_or(default.bytes_per_s, |mib| mib << 20),
            observe_ns,
            cost_permille: cost.unwrap_or(default.cost_permille),
            hotness: self.hotness != Some(HotnessMode::Off),
        })
    }
}

/// Who sizes guest nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Sizer {
    /// Operators.
    Fixed,
    /// The controller.
    Auto,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct SizeSection {
    mode: Option<Sizer>,
    low_permille: Option<Spanned<i64>>,
    high_permille: Option<Spanned<i64>>,
    pause_s: Option<Spanned<i64>>,
    least_permille: Option<Spanned<i64>>,
    most_permille: Option<Spanned<i64>>,
}

impl SizeSection {
    fn settings(&self, source: &Source<'_>) -> Result<SizeSettings, SettingsError> {
        let default = SizeSettings::default();
        let pair = |low: (&'static str, &Option<Spanned<i64>>, u64),
                    high: (&'static str, &Option<Spanned<i64>>, u64)| {
            let (lower, upper) =
                (source.number(low.0, low.1, 0..=1000)?, source.number(high.0, high.1, 0..=1000)?);
            // The one that is not given follows the other one.
            let upper_value = upper.unwrap_or(high.2.max(lower.unwrap_or(0)));
            let lower_value = lower.unwrap_or(low.2.min(upper_value));
            match low.1 {
                Some(value) if lower_value > upper_value => {
                    let expected = format!("at most {}, {upper_value}", high.0);
                    Err(source.value_error(low.0, value, lower_value.to_string(), expected))
                }
                _ => Ok((lower_value, upper_value)),
            }
        };
        let (low_permille, high_permille) = pair(
            ("size.low_permille", &self.low_permille, default.low_permille),
            ("size.high_permille", &self.high_permille, default.high_permille),
        )?;
        let (least_permille, most_permille) = pair(
            ("size.least_permille", &self.least_permille, default.least_permille),
            ("size.most_permille", &self.most_permille, default.most_permille),
        )?;
        let pause = source.number("size.pause_s", &self.pause_s, 1..=86_400)?;
        Ok(SizeSettings {
            auto: self.mode.map_or(default.auto, |mode| mode == Sizer::Auto),
            low_permille,
            high_permille,
            pause_ns: pause.map_or(default.pause_ns, |s| s * 1_000_000_000),
            least_permille,
            most_permille,
        })
    }
}

/// Who gives guest nodes other homes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RehomeMode {
    /// Operators.
    Manual,
    /// Operators and vnumad.
    Auto,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RehomeSection {
    mode: Option<RehomeMode>,
    settle_s: Option<Spanned<i64>>,
    rest_s: Option<Spanned<i64>>,
}

impl RehomeSection {
    fn settings(&self, source: &Source<'_>) -> Result<RehomeSettings, SettingsError> {
        let default = RehomeSettings::default();
        let settle = source.number("rehome.settle_s", &self.settle_s, 1..=86_400)?;
        let rest = source.number("rehome.rest_s", &self.rest_s, 1..=86_400)?;
        Ok(RehomeSettings {
            auto: self.mode.map_or(default.auto, |mode| mode == RehomeMode::Auto),
            settle_ns: settle.map_or(default.settle_ns, |s| s * 1_000_000_000),
            rest_ns: rest.map_or(default.rest_ns, |s| s * 1_000_000_000),
        })
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

impl Config {
    /// Reads `path`; without one, the default path if there is such a file, and the defaults if not.
    pub fn load(path: Option<&Path>) -> Result<Self, SettingsError> {
        vnuma_settings::load(path, DEFAULT_PATH, Self::parse)
    }

    /// Understands the text of `path`.
    pub fn parse(path: &Path, text: &str) -> Result<Self, SettingsError> {
        let source = &Source::new(path, text);
        let file: File = source.parse()?;
        let default = Self::default();
        let millis = |key, value: &Option<Spanned<i64>>, range, default: Duration| {
            source.number(key, value, range).map(|ms| ms.map_or(default, Duration::from_millis))
        };
        let for_each_user = |key, value: &Option<Spanned<i64>>, default: usize| {
            source.number(key, value, 1..=4096).map(|number| number.map_or(default, |number| number as usize))
        };
        let path = |key, value: &Option<Spanned<PathBuf>>, default: PathBuf| {
            absolute(source, key, value.as_ref()).map(|path| path.unwrap_or(default))
        };
        let File { api, vms, libvirt, observe, publish, policy, .. } = &file;
        let sockets = vms.sockets.iter().flatten();
        let sockets = sockets.filter_map(|path| absolute(source, "vms.sockets", Some(path)).transpose());
        let only_sockets = vms.sockets.is_some() && vms.directory.is_none();
        let directory = absolute(source, "vms.directory", vms.directory.as_ref())?;
        let (poll_ms, resync_ms) = (&observe.poll_interval_ms, &observe.resync_interval_ms);
        let (limit_ms, period_ms) = (&vms.command_limit_ms, &policy.period_ms);
        let (connections, watchers) = (&api.connections_per_user, &api.watchers_per_user);
        let policy_memory = source.number("policy.memory_mib_per_s", &policy.memory_mib_per_s, 0..=65_536)?;
        let replug_after = source.number("replug.after_s", &file.replug.after_s, 1..=86_400)?;
        let names: Vec<_> = Policy::ALL.iter().map(|policy| policy.name()).collect();
        Ok(Self {
            socket: path("api.socket", &api.socket, default.socket)?,
            group: api.group.clone(),
            act_group: api.act_group.clone(),
            connections_per_user: for_each_user(
                "api.connections_per_user",
                connections,
                default.connections_per_user,
            )?,
            watchers_per_user: for_each_user("api.watchers_per_user", watchers, default.watchers_per_user)?,
            metrics: listen(source, file.metrics.listen.as_ref())?,
            directory: if only_sockets { None } else { directory.or(default.directory) },
            sockets: sockets.collect::<Result<_, _>>()?,
            command_limit: millis("vms.command_limit_ms", limit_ms, 1000..=60_000, default.command_limit)?,
            libvirt_uris: libvirt.uris(source)?.unwrap_or(default.libvirt_uris),
            libvirt_directories: libvirt.directories(source)?.unwrap_or(default.libvirt_directories),
            libvirt_sockets: path(
                "libvirt.socket_directory",
                &libvirt.socket_directory,
                default.libvirt_sockets,
            )?,
            root: path("observe.root", &observe.root, default.root)?,
            location: observe.location.map_or(default.location, Into::into),
            poll_interval: millis("observe.poll_interval_ms", poll_ms, 10..=10_000, default.poll_interval)?,
            resync_interval: millis(
                "observe.resync_interval_ms",
                resync_ms,
                1000..=60_000,
                default.resync_interval,
            )?,
            intervals: observe.intervals(source)?,
            records: path("publish.records", &publish.records, default.records)?,
            settle: publish.settle(source, default.settle)?,
            replug_after: replug_after.map(Duration::from_secs),
            policy: named(source, "policy.default", &policy.default, &names)?.unwrap_or(default.policy),
            policy_period: millis("policy.period_ms", period_ms, 100..=60_000, default.policy_period)?,
            policy_bounds: policy.bounds(source, default.policy_bounds)?,
            policy_adaptive_bounds: policy.bounds == Some(BoundsMode::Adaptive),
            policy_memory: policy_memory.unwrap_or(0) << 20,
            policy_samples: policy.samples == Some(Samples::Ibs),
            memory: file.memory.settings(source)?,
            sizes: file.size.settings(source)?,
            rehome: file.rehome.settings(source)?,
        })
    }
}

/// Whether the bounds between the types stay.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum BoundsMode {
    Fixed,
    Adaptive,
}

/// What samples memory accesses.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Samples {
    Off,
    Ibs,
}

impl From<Location> for Prefer {
    fn from(location: Location) -> Self {
        match location {
            Location::Auto => Self::Auto,
            Location::Bpf => Self::Bpf,
            Location::Poll => Self::Poll,
        }
    }
}

/// An address to listen at.
fn listen(source: &Source<'_>, value: Option<&Spanned<String>>) -> Result<Option<SocketAddr>, SettingsError> {
    let Some(value) = value else { return Ok(None) };
    let address = value.get_ref().parse().ok().filter(|address: &SocketAddr| address.port() != 0);
    address.map(Some).ok_or_else(|| {
        let expected = "an address and a port, such as 127.0.0.1:9743 or [::1]:9743";
        source.value_error("metrics.listen", value, sanitize(value.get_ref()), expected)
    })
}

/// A bound between types, in references per thousand instructions.
fn bound(
    source: &Source<'_>,
    key: &'static str,
    value: Option<&Spanned<f64>>,
) -> Result<Option<f64>, SettingsError> {
    let Some(value) = value else { return Ok(None) };
    let bound = *value.get_ref();
    if (0.01..=1000.0).contains(&bound) {
        return Ok(Some(bound));
    }
    Err(source.value_error(key, value, bound.to_string(), "0.01 to 1000"))
}

/// What has one of these names.
fn named<T: FromStr>(
    source: &Source<'_>,
    key: &'static str,
    value: &Option<Spanned<String>>,
    names: &[&str],
) -> Result<Option<T>, SettingsError> {
    let Some(value) = value else { return Ok(None) };
    let name = value.get_ref();
    name.parse().map(Some).map_err(|_| {
        let expected = format!("one of {}", names.join(", "));
        source.value_error(key, value, sanitize(&format!("{name:?}")), expected)
    })
}

fn absolute(
    source: &Source<'_>,
    key: &'static str,
    value: Option<&Spanned<PathBuf>>,
) -> Result<Option<PathBuf>, SettingsError> {
    let Some(value) = value else { return Ok(None) };
    let path = value.get_ref();
    if path.is_absolute() {
        return Ok(Some(path.clone()));
    }
    Err(source.value_error(key, value, format!("{path:?}"), "an absolute path"))
}

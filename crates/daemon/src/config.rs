//! The configuration file. Every key has a default; a key that is not known, or a value out of
//! range, is refused with its file, line and name.

#[cfg(test)]
mod manual;

use crate::core::sanitize;
use serde::Deserialize;
use std::{
    net::SocketAddr,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    time::Duration,
};
use toml::Spanned;
use vnuma_host::location::Prefer;
use vnuma_placement::{
    SettlePolicy,
    repatriation::{MemoryPolicy, MemorySettings},
    scheduling::{Policy, analyzer::Bounds},
};

/// The configuration file if none is named.
pub const DEFAULT_PATH: &str = "/etc/vnuma/vnumad.toml";

/// Longest configuration file, in bytes.
const SIZE_LIMIT: u64 = 1 << 20;

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

/// Why the configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// It is not TOML, or has an unknown key or a value of the wrong type.
    #[error("{}: line {line}: {message}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong with it.
        message: String,
    },
    /// A value is out of its range.
    #[error("{}: line {line}: {key} = {value}: must be {expected}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Section and key.
        key: &'static str,
        /// What was found.
        value: String,
        /// What is accepted.
        expected: String,
    },
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct File {
    api: Api,
    metrics: MetricsSection,
    vms: Vms,
    observe: Observe,
    publish: Publish,
    replug: Replug,
    policy: PolicySection,
    memory: MemorySection,
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
    fn intervals(&self, source: &Source<'_>) -> Result<Intervals, ConfigError> {
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
    fn settle(&self, source: &Source<'_>, default: SettlePolicy) -> Result<SettlePolicy, ConfigError> {
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
    fn bounds(&self, source: &Source<'_>, default: Bounds) -> Result<Bounds, ConfigError> {
        let (low_key, high_key) = ("policy.bound_low", "policy.bound_high");
        let low = source.bound(low_key, self.bound_low.as_ref())?.unwrap_or(default.low);
        let high = source.bound(high_key, self.bound_high.as_ref())?.unwrap_or(default.high);
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
}

impl MemorySection {
    fn settings(&self, source: &Source<'_>) -> Result<MemorySettings, ConfigError> {
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
        let cost = source.number("memory.observe_permille", &self.observe_permille, 1..=1000)?;
        Ok(MemorySettings {
            policy: source.memory_policy("memory.policy", self.policy.as_ref())?.unwrap_or(default.policy),
            period_ns,
            amount_permille: amount.unwrap_or(default.amount_permille),
            bytes_per_s: mib_per_s.map_or(default.bytes_per_s, |mib| mib << 20),
            observe_ns,
            cost_permille: cost.unwrap_or(default.cost_permille),
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
        }
    }
}

impl Config {
    /// Reads `path`; without one, the default path if there is such a file, and the defaults if not.
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        let (path, must_exist) = (path.unwrap_or(Path::new(DEFAULT_PATH)), path.is_some());
        match read(path) {
            Ok(bytes) => match str::from_utf8(&bytes) {
                Ok(text) => Self::parse(path, text),
                Err(error) => {
                    let line = 1 + bytes[..error.valid_up_to()].iter().filter(|&&byte| byte == b'\n').count();
                    Err(ConfigError::Parse { path: path.into(), line, message: "not UTF-8".into() })
                }
            },
            Err(error) if !must_exist && error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(source) => Err(ConfigError::Read { path: path.into(), source }),
        }
    }

    /// Understands the text of `path`.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let source = Source { path, text };
        let file: File = toml::from_str(text).map_err(|error| source.parse_error(&error))?;
        let default = Self::default();
        let millis = |key, value: &Option<Spanned<i64>>, range, default: Duration| {
            source.number(key, value, range).map(|ms| ms.map_or(default, Duration::from_millis))
        };
        let poll_interval = millis(
            "observe.poll_interval_ms",
            &file.observe.poll_interval_ms,
            10..=10_000,
            default.poll_interval,
        )?;
        let resync_interval = millis(
            "observe.resync_interval_ms",
            &file.observe.resync_interval_ms,
            1000..=60_000,
            default.resync_interval,
        )?;
        let intervals = file.observe.intervals(&source)?;
        let settle = file.publish.settle(&source, default.settle)?;
        let replug_after = source.number("replug.after_s", &file.replug.after_s, 1..=86_400)?;
        let policy_period =
            millis("policy.period_ms", &file.policy.period_ms, 100..=60_000, default.policy_period)?;
        let policy = source.policy("policy.default", file.policy.default.as_ref())?;
        let policy_bounds = file.policy.bounds(&source, default.policy_bounds)?;
        let policy_memory =
            source.number("policy.memory_mib_per_s", &file.policy.memory_mib_per_s, 0..=65_536)?;
        let only_sockets = file.vms.sockets.is_some() && file.vms.directory.is_none();
        let directory = source.absolute("vms.directory", file.vms.directory.as_ref())?;
        Ok(Self {
            socket: source.absolute("api.socket", file.api.socket.as_ref())?.unwrap_or(default.socket),
            connections_per_user: source.count(
                "api.connections_per_user",
                &file.api.connections_per_user,
                default.connections_per_user,
            )?,
            watchers_per_user: source.count(
                "api.watchers_per_user",
                &file.api.watchers_per_user,
                default.watchers_per_user,
            )?,
            metrics: source.listen("metrics.listen", file.metrics.listen.as_ref())?,
            group: file.api.group,
            act_group: file.api.act_group,
            directory: if only_sockets { None } else { directory.or(default.directory) },
            sockets: file
                .vms
                .sockets
                .unwrap_or_default()
                .iter()
                .filter_map(|path| source.absolute("vms.sockets", Some(path)).transpose())
                .collect::<Result<_, _>>()?,
            root: source.absolute("observe.root", file.observe.root.as_ref())?.unwrap_or(default.root),
            location: file.observe.location.map_or(default.location, Into::into),
            poll_interval,
            resync_interval,
            intervals,
            records: source
                .absolute("publish.records", file.publish.records.as_ref())?
                .unwrap_or(default.records),
            settle,
            replug_after: replug_after.map(Duration::from_secs),
            policy: policy.unwrap_or(default.policy),
            policy_period,
            policy_bounds,
            policy_adaptive_bounds: file.policy.bounds == Some(BoundsMode::Adaptive),
            policy_memory: policy_memory.unwrap_or(0) << 20,
            policy_samples: file.policy.samples == Some(Samples::Ibs),
            memory: file.memory.settings(&source)?,
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

fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read;
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path)?.take(SIZE_LIMIT + 1).read_to_end(&mut bytes)?;
    if read as u64 > SIZE_LIMIT {
        let reason = format!("longer than {SIZE_LIMIT} bytes");
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, reason));
    }
    Ok(bytes)
}

/// A file, to name lines of it in errors.
struct Source<'a> {
    path: &'a Path,
    text: &'a str,
}

impl Source<'_> {
    fn line(&self, offset: usize) -> usize {
        1 + self.text.bytes().take(offset).filter(|&byte| byte == b'\n').count()
    }

    fn parse_error(&self, error: &toml::de::Error) -> ConfigError {
        let line = self.line(error.span().map_or(0, |span| span.start));
        let message = sanitize(&error.message().replace('\n', " "));
        ConfigError::Parse { path: self.path.into(), line, message }
    }

    fn value_error<T>(
        &self,
        key: &'static str,
        at: &Spanned<T>,
        value: String,
        expected: String,
    ) -> ConfigError {
        ConfigError::Value { path: self.path.into(), line: self.line(at.span().start), key, value, expected }
    }

    fn number(
        &self,
        key: &'static str,
        value: &Option<Spanned<i64>>,
        range: RangeInclusive<u64>,
    ) -> Result<Option<u64>, ConfigError> {
        let Some(value) = value else { return Ok(None) };
        let number = u64::try_from(*value.get_ref()).ok().filter(|number| range.contains(number));
        number.map(Some).ok_or_else(|| {
            let expected = format!("{} to {}", range.start(), range.end());
            self.value_error(key, value, value.get_ref().to_string(), expected)
        })
    }

    /// An address to listen at.
    fn listen(
        &self,
        key: &'static str,
        value: Option<&Spanned<String>>,
    ) -> Result<Option<SocketAddr>, ConfigError> {
        let Some(value) = value else { return Ok(None) };
        let address = value.get_ref().parse().ok().filter(|address: &SocketAddr| address.port() != 0);
        address.map(Some).ok_or_else(|| {
            let expected = "an address and a port, such as 127.0.0.1:9743 or [::1]:9743".to_owned();
            self.value_error(key, value, sanitize(value.get_ref()), expected)
        })
    }

    /// A bound between types, in references per thousand instructions.
    fn bound(&self, key: &'static str, value: Option<&Spanned<f64>>) -> Result<Option<f64>, ConfigError> {
        let Some(value) = value else { return Ok(None) };
        let bound = *value.get_ref();
        if (0.01..=1000.0).contains(&bound) {
            return Ok(Some(bound));
        }
        Err(self.value_error(key, value, bound.to_string(), "0.01 to 1000".to_owned()))
    }

    /// The name of a scheduling policy.
    fn policy(
        &self,
        key: &'static str,
        value: Option<&Spanned<String>>,
    ) -> Result<Option<Policy>, ConfigError> {
        let Some(value) = value else { return Ok(None) };
        let name = value.get_ref();
        name.parse().map(Some).map_err(|_| {
            let expected = format!("one of {}", Policy::ALL.map(Policy::name).join(", "));
            self.value_error(key, value, sanitize(&format!("{name:?}")), expected)
        })
    }

    /// The name of a memory policy.
    fn memory_policy(
        &self,
        key: &'static str,
        value: Option<&Spanned<String>>,
    ) -> Result<Option<MemoryPolicy>, ConfigError> {
        let Some(value) = value else { return Ok(None) };
        let name = value.get_ref();
        name.parse().map(Some).map_err(|_| {
            let expected = format!("one of {}", MemoryPolicy::ALL.map(MemoryPolicy::name).join(", "));
            self.value_error(key, value, sanitize(&format!("{name:?}")), expected)
        })
    }

    /// A limit for each user.
    fn count(
        &self,
        key: &'static str,
        value: &Option<Spanned<i64>>,
        default: usize,
    ) -> Result<usize, ConfigError> {
        Ok(self.number(key, value, 1..=4096)?.map_or(default, |number| number as usize))
    }

    fn absolute(
        &self,
        key: &'static str,
        value: Option<&Spanned<PathBuf>>,
    ) -> Result<Option<PathBuf>, ConfigError> {
        let Some(value) = value else { return Ok(None) };
        let path = value.get_ref();
        if path.is_absolute() {
            return Ok(Some(path.clone()));
        }
        Err(self.value_error(key, value, format!("{path:?}"), "an absolute path".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(Path::new("/etc/x.toml"), text).map_err(|error| error.to_string())
    }

    #[test]
    fn an_empty_file_is_the_default() {
        assert_eq!(parse(""), Ok(Config::default()));
    }

    #[test]
    fn every_key_is_taken() {
        let text = r#"
            [api]
            socket = "/a/s"
            group = "kvm"
            act_group = "adm"
            connections_per_user = 5
            watchers_per_user = 4
            [metrics]
            listen = "[::1]:9743"
            [vms]
            directory = "/a/d"
            sockets = ["/a/1", "/a/2"]
            [observe]
            root = "/a/root"
            location = "poll"
            poll_interval_ms = 50
            resync_interval_ms = 3000
            process_interval_ms = 100
            probe_interval_ms = 3600000
            describe_interval_ms = 2000
            host_interval_ms = 1000
            [publish]
            dwell_ms = 500
            calm_dwell_ms = 0
            calm_s = 2
            max_per_second = 3
            records = "/a/r"
            [replug]
            after_s = 7
            [policy]
            default = "vprobe"
            period_ms = 500
            bound_low = 2.5
            bound_high = 18.0
            bounds = "adaptive"
            memory_mib_per_s = 3
            samples = "ibs"
            [memory]
            policy = "adaptive"
            period_s = 100
            amount_permille = 50
            mib_per_s = 10
            observe_s = 20
            observe_permille = 2
        "#;
        let expected = Config {
            socket: "/a/s".into(),
            group: Some("kvm".into()),
            act_group: Some("adm".into()),
            connections_per_user: 5,
            watchers_per_user: 4,
            metrics: Some("[::1]:9743".parse().expect("an address")),
            directory: Some("/a/d".into()),
            sockets: vec!["/a/1".into(), "/a/2".into()],
            root: "/a/root".into(),
            location: Prefer::Poll,
            poll_interval: Duration::from_millis(50),
            resync_interval: Duration::from_secs(3),
            intervals: Intervals {
                process: Duration::from_millis(100),
                probe: Duration::from_secs(3600),
                describe: Duration::from_secs(2),
                host: Duration::from_secs(1),
            },
            records: "/a/r".into(),
            settle: SettlePolicy {
                dwell_ns: 500_000_000,
                calm_dwell_ns: 0,
                calm_ns: 2_000_000_000,
                max_per_second: 3,
            },
            replug_after: Some(Duration::from_secs(7)),
            policy: Policy::Vprobe,
            policy_period: Duration::from_millis(500),
            policy_bounds: Bounds { low: 2.5, high: 18.0 },
            policy_adaptive_bounds: true,
            policy_memory: 3 << 20,
            policy_samples: true,
            memory: MemorySettings {
                policy: MemoryPolicy::Adaptive,
                period_ns: 100_000_000_000,
                amount_permille: 50,
                bytes_per_s: 10 << 20,
                observe_ns: 20_000_000_000,
                cost_permille: 2,
            },
        };
        assert_eq!(parse(text), Ok(expected));
    }

    #[test]
    fn limits_of_memory_agree_or_are_refused() {
        let memory = |text: &str| parse(&format!("[memory]\n{text}\n")).map(|config| config.memory);
        let of = |text: &str| {
            let found = memory(text).expect("accepted");
            (found.period_ns / 1_000_000_000, found.observe_ns / 1_000_000_000)
        };
        assert_eq!(
            (of("policy = \"both\""), of("period_s = 30"), of("observe_s = 1000")),
            ((900, 60), (30, 30), (1000, 1000))
        );
        let refused = |text: &str| memory(text).expect_err("refused");
        assert_eq!(
            refused("period_s = 30\nobserve_s = 31"),
            "/etc/x.toml: line 3: memory.observe_s = 31: must be at most memory.period_s, 30"
        );
        assert!(
            refused("policy = \"all\"").ends_with("must be one of none, periodic, amount, both, adaptive")
        );
    }

    #[test]
    fn a_list_of_sockets_replaces_the_default_directory() {
        assert_eq!(parse("[vms]\nsockets = []").expect("valid").directory, None);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, error) in [
            ("\n[publish]\ndwel_ms = 1", "/etc/x.toml: line 3: unknown field `dwel_ms`"),
            ("[nothing]", "/etc/x.toml: line 1: unknown field `nothing`"),
            (
                "[publish]\n\ndwell_ms = \"1\"",
                "/etc/x.toml: line 3: invalid type: string \"1\", expected i64",
            ),
            (
                "[metrics]\nlisten = \"localhost:9743\"",
                "/etc/x.toml: line 2: metrics.listen = localhost:9743: must be an address and a port, such as 127.0.0.1:9743 or [::1]:9743",
            ),
            (
                "[metrics]\nlisten = \"127.0.0.1:0\"",
                "/etc/x.toml: line 2: metrics.listen = 127.0.0.1:0: must be an address and a port, such as 127.0.0.1:9743 or [::1]:9743",
            ),
            ("[publish]\ndwell_ms = -1", "/etc/x.toml: line 2: publish.dwell_ms = -1: must be 0 to 60000"),
            ("[publish]\ncalm_s = 3601", "/etc/x.toml: line 2: publish.calm_s = 3601: must be 0 to 3600"),
            (
                "[publish]\nmax_per_second = 0",
                "/etc/x.toml: line 2: publish.max_per_second = 0: must be 1 to 1000",
            ),
            (
                "[observe]\nresync_interval_ms = 10",
                "/etc/x.toml: line 2: observe.resync_interval_ms = 10: must be 1000 to 60000",
            ),
            (
                "[observe]\nprocess_interval_ms = 99",
                "/etc/x.toml: line 2: observe.process_interval_ms = 99: must be 100 to 3600000",
            ),
            (
                "[observe]\nprobe_interval_ms = 3600001",
                "/etc/x.toml: line 2: observe.probe_interval_ms = 3600001: must be 1000 to 3600000",
            ),
            (
                "[observe]\n\ndescribe_interval_ms = 1999",
                "/etc/x.toml: line 3: observe.describe_interval_ms = 1999: must be 2000 to 3600000",
            ),
            (
                "[observe]\nhost_interval_ms = -1",
                "/etc/x.toml: line 2: observe.host_interval_ms = -1: must be 1000 to 3600000",
            ),
            (
                "[api]\nconnections_per_user = 0",
                "/etc/x.toml: line 2: api.connections_per_user = 0: must be 1 to 4096",
            ),
            (
                "[policy]\nbound_low = nan",
                "/etc/x.toml: line 2: policy.bound_low = NaN: must be 0.01 to 1000",
            ),
            (
                "[policy]\nbound_low = 20.0",
                "/etc/x.toml: line 2: policy.bound_low = 20: must be less than policy.bound_high, 20",
            ),
            (
                "[policy]\nbound_low = 5.0\nbound_high = 4.0",
                "/etc/x.toml: line 3: policy.bound_high = 4: must be more than policy.bound_low, 5",
            ),
            ("[policy]\nperiod_ms = 99", "/etc/x.toml: line 2: policy.period_ms = 99: must be 100 to 60000"),
            (
                "[policy]\n\ndefault = \"best\"",
                "/etc/x.toml: line 3: policy.default = \"best\": must be one of off, observe, credit, vcpu-p, lb, brm, \
                 vprobe-paper, vprobe",
            ),
            ("[replug]\nafter_s = 0", "/etc/x.toml: line 2: replug.after_s = 0: must be 1 to 86400"),
            ("[api]\nsocket = \"x\"", "/etc/x.toml: line 2: api.socket = \"x\": must be an absolute path"),
            (
                "[vms]\nsockets = [\"/a\",\n\"b\"]",
                "/etc/x.toml: line 3: vms.sockets = \"b\": must be an absolute path",
            ),
            ("[observe]\nlocation = \"guess\"", "/etc/x.toml: line 2: unknown variant `guess`"),
            ("[publish", "/etc/x.toml: line 1: "),
            // A key cannot disturb the terminal that it is shown on.
            ("\n[\"a\\u001b[2J\"]", r"/etc/x.toml: line 2: unknown field `a\u{1b}[2J`"),
        ] {
            let found = parse(text).expect_err(text);
            assert!(found.starts_with(error), "{text:?}: {found}");
        }
    }

    #[test]
    fn a_named_file_must_exist() {
        assert!(Config::load(Some(Path::new("/nonexistent/x.toml"))).is_err());
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("long.toml");
        std::fs::write(&path, " ".repeat(SIZE_LIMIT as usize + 1)).expect("written");
        let error = Config::load(Some(&path)).expect_err("too long").to_string();
        assert!(error.contains("longer than"), "{error}");
        std::fs::write(&path, b"[publish]\n# caf\xe9\n").expect("written");
        let error = Config::load(Some(&path)).expect_err("not UTF-8").to_string();
        assert_eq!(error, format!("{}: line 2: not UTF-8", path.display()));
    }
}

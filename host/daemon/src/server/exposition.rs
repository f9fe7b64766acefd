//! Metrics as Prometheus reads them. docs/metrics.md lists them all, and a test compares.

use super::joined::joined;
use crate::{
    core::Refusal,
    shell::totals::{BOUNDS_S, Latencies, Totals, VmTotals},
};
use axum::body::Bytes;
use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet, prometheus_text, text},
    metrics::{MetricType, counter::Counter, family::Family, gauge::Gauge, info::Info},
    registry::{Registry, Unit},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, atomic::AtomicU64},
    time::{Duration, Instant},
};
use tokio::sync::Mutex;
use vnuma_api::{Daemon, GuestNode, Limited, Scheduling, VcpuState, Vm};

/// VMs that have series of their own; the rest is only counted. The names of VMs are their QEMUs' to choose.
const MOST_VMS: usize = 4096;
/// Guest nodes of a VM that have series of their own.
const MOST_NODES: usize = 64;

/// What there is to tell.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(crate) daemon: Daemon,
    pub(crate) vms: Vec<Vm>,
    pub(crate) scheduling: Vec<Scheduling>,
    pub(crate) totals: Totals,
}

/// The same in both formats, which all answers share.
#[derive(Clone, Debug)]
pub(crate) struct Exposition {
    /// OpenMetrics 1.0.
    pub(crate) open: Bytes,
    /// Prometheus' text format 0.0.4.
    pub(crate) plain: Bytes,
}

/// Name, help and value of a metric.
type Metric<Of, Value = u64> = (&'static str, &'static str, fn(Of) -> Value);

/// Labels of a series.
type Labels = Vec<(&'static str, String)>;

/// A metric of these series. Each series is there from the start, so that the first of its events counts.
fn counts(series: impl IntoIterator<Item = (Labels, u64)>) -> Family<Labels, Counter> {
    let family = Family::default();
    for (labels, value) in series {
        Family::<_, Counter>::get_or_create(&family, &labels).inc_by(value);
    }
    family
}

/// The same of values that go up and down.
fn gauges(series: impl IntoIterator<Item = (Labels, u64)>) -> Family<Labels, Gauge<u64, AtomicU64>> {
    let family = Family::default();
    for (labels, value) in series {
        Family::<_, Gauge<_, _>>::get_or_create(&family, &labels).set(value);
    }
    family
}

impl EncodeMetric for Latencies {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let bounds = BOUNDS_S.into_iter().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(self.counts).collect();
        encoder.encode_histogram::<NoLabelSet>(self.sum_s, self.count(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

impl Snapshot {
    /// As text.
    pub(crate) fn text(&self) -> Result<Exposition, fmt::Error> {
        let mut registry = Registry::with_prefix("vnuma");
        self.host(&mut registry);
        self.guests(&mut registry);
        self.memory(&mut registry);
        self.publications(&mut registry);
        self.policies(&mut registry);
        self.acts(&mut registry);
        let (mut open, mut plain) = (String::new(), String::new());
        text::encode(&mut open, &registry)?;
        prometheus_text::encode(&mut plain, &registry)?;
        Ok(Exposition { open: open.into(), plain: plain.into() })
    }

    fn shown(&self) -> impl Iterator<Item = &Vm> {
        self.vms.iter().take(MOST_VMS)
    }

    fn host(&self, registry: &mut Registry) {
        let Daemon { version, location_source, counters, places, .. } = &self.daemon;
        let build = Info::new(vec![("version", version.clone())]);
        registry.register("build", "The running vnumad", build);
        let sources = vec![
            ("location_source", location_source.clone()),
            ("counter_source", counters.source.clone()),
            ("places_by", places.mechanism.clone()),
        ];
        registry.register("sources", "How vnumad observes and acts on this host", Info::new(sources));
        let passed_over = self.daemon.capabilities.iter().map(|of| {
            let labels = vec![("capability", of.name.clone()), ("in_use", of.in_use.clone())];
            (labels, of.passed_over.len() as u64)
        });
        let better = "Ways that would be better than the one in use";
        registry.register("passed_over", better, gauges(passed_over));
        for (name, help, value) in [
            ("vms", "VMs that vnumad knows", self.vms.len() as u64),
            (
                "vms_without_series",
                "VMs beyond the first 4096, of which nothing else is told",
                self.vms.len().saturating_sub(MOST_VMS) as u64,
            ),
            ("watchers", "Clients that watch events", self.daemon.watchers as u64),
            (
                "silent_threads",
                "Threads of vnumad that have worked for long without any progress",
                self.daemon.silent_threads.len() as u64,
            ),
            (
                "hanging_looks",
                "Looks at processes of VMs that have not returned in time",
                self.daemon.hanging_looks.len() as u64,
            ),
            ("counted_threads", "Threads whose hardware counters are read", counters.threads as u64),
            (
                "counted_threads_failed",
                "Threads whose hardware counters cannot be opened or read",
                counters.failed as u64,
            ),
        ] {
            registry.register(name, help, gauges([(Labels::new(), value)]));
        }
        let of_one = |of: &Limited| (vec![("work", of.work.clone()), ("party", of.party.clone())], of.times);
        let limited = counts(self.daemon.limited.iter().map(of_one));
        registry.register("limited", "How often a party had to wait for work that it caused", limited);
        for (name, help, value) in [
            (
                "location_events_lost",
                "Events of vCPUs' locations that came faster than they were taken",
                self.daemon.location_events_lost,
            ),
            (
                "watchers_dropped",
                "Watchers that were dropped because they read too slowly",
                self.daemon.watchers_dropped,
            ),
            (
                "thread_panics",
                "Threads of vnumad for a VM that have panicked; its connection, or the look at it, is made again",
                self.totals.thread_panics,
            ),
            ("stolen_local", "vCPUs that scx_vnuma stole within their node", places.stolen_local),
            ("stolen_remote", "vCPUs that scx_vnuma stole from another node", places.stolen_remote),
            ("stolen_starved", "Of both, those that had waited too long", places.starved),
        ] {
            registry.register(name, help, counts([(Labels::new(), value)]));
        }
    }

    fn guests(&self, registry: &mut Registry) {
        let policies: BTreeMap<&str, &str> =
            self.scheduling.iter().map(|of| (of.vm.as_str(), of.policy.as_str())).collect();
        let state = |vm: &Vm| {
            let driver = vm.publication.driver_mode.map(|mode| mode.to_string());
            let labels = vec![
                ("vm", vm.name.clone()),
                ("hypervisor", vm.hypervisor.to_string()),
                ("channel", vm.channel.to_string()),
                ("driver_mode", driver.unwrap_or_else(|| "none".to_owned())),
                ("policy", policies.get(vm.name.as_str()).copied().unwrap_or("unknown").to_owned()),
            ];
            (labels, 1)
        };
        let states = gauges(self.shown().map(state));
        registry.register("vm_state", "1 for the states and the policy that a VM has now", states);
        let in_states = |vm: &Vm, found: Vec<VcpuState>| {
            let all = [VcpuState::True, VcpuState::Approximate, VcpuState::Stale, VcpuState::Unknown];
            all.map(|state| {
                let labels = vec![("vm", vm.name.clone()), ("state", state.to_string())];
                (labels, found.iter().filter(|found| **found == state).count() as u64)
            })
        };
        let vcpus = self.shown().flat_map(|vm| in_states(vm, vm.vcpus.iter().map(|of| of.state).collect()));
        registry.register("vcpus", "vCPUs by how true the guest's view of them is", gauges(vcpus));
        let devices = self.shown().filter(|vm| !vm.devices.is_empty());
        let devices = devices.flat_map(|vm| in_states(vm, vm.devices.iter().map(|of| of.state).collect()));
        let help = "Passed-through devices by how true the guest's view is";
        registry.register("devices", help, gauges(devices));
    }

    fn memory(&self, registry: &mut Registry) {
        let nodes = || {
            let nodes = |vm: &'_ Vm| {
                vm.nodes.iter().take(MOST_NODES).map(|node| (vm.name.clone(), *node)).collect::<Vec<_>>()
            };
            self.shown().flat_map(nodes)
        };
        let of = |vm, id: u32| vec![("vm", vm), ("guest_node", id.to_string())];
        let memory = gauges(nodes().map(|(vm, node)| (of(vm, node.id), node.memory_bytes)));
        registry.register_with_unit("guest_node_memory", "Memory of a guest node", Unit::Bytes, memory);
        registry.register_with_unit(
            "guest_node_displaced",
            "Memory of a guest node that is resident on other host nodes than its home",
            Unit::Bytes,
            gauges(nodes().filter_map(|(vm, node)| Some((of(vm, node.id), node.displaced_bytes?)))),
        );
        let home = |(vm, node): (String, GuestNode)| {
            let mut labels = of(vm, node.id);
            labels.push(("host_node", node.home?.to_string()));
            Some((labels, 1))
        };
        let help = "1 for the host node that a guest node's memory is on";
        registry.register("guest_node_home", help, gauges(nodes().filter_map(home)));
    }

    fn publications(&self, registry: &mut Registry) {
        let Totals { update, acknowledge, .. } = &self.totals;
        registry.register_with_unit(
            "update_latency",
            "From a change on the host until the guest's kernel uses it",
            Unit::Seconds,
            update.clone(),
        );
        registry.register_with_unit(
            "acknowledge_latency",
            "From the publication of a topology until the guest's kernel uses it",
            Unit::Seconds,
            acknowledge.clone(),
        );
        let values: [Metric<&vnuma_api::Publication>; 4] = [
            ("publications", "Topologies published to a guest", |of| of.publications),
            ("acknowledgements", "Topologies that the guest's kernel has acknowledged", |of| {
                of.acknowledgements
            }),
            ("suppressed_changes", "Changes that were gone before their dwell was over", |of| {
                of.suppressed_by_dwell
            }),
            ("deferred_publications", "Publications that had to wait for publish.max_per_second", |of| {
                of.deferred_by_cap
            }),
        ];
        for (name, help, value) in values {
            let series = self.shown().map(|vm| (vec![("vm", vm.name.clone())], value(&vm.publication)));
            registry.register(name, help, counts(series));
        }
    }

    /// Of each VM that is shown: its name, and what was done to it.
    fn totals(&self) -> impl Iterator<Item = (Labels, VmTotals)> {
        self.shown().map(|vm| {
            (vec![("vm", vm.name.clone())], self.totals.vms.get(&vm.name).cloned().unwrap_or_default())
        })
    }

    /// What was done to VMs, and what came of it.
    fn acts(&self, registry: &mut Registry) {
        let values: [Metric<VmTotals>; 5] = [
            ("attaches", "Times that a VM got a topology channel", |of| of.attaches),
            ("detaches", "Times that a VM lost its topology channel", |of| of.detaches),
            ("vcpu_node_changes", "Times that a vCPU came to another host node", |of| of.counts.node_changes),
            ("replugs", "vCPUs that were replugged to another guest node", |of| of.replugs),
            ("memory_moves", "Moves of a VM's memory that have ended", |of| of.memory_moves),
        ];
        for (name, help, value) in values {
            registry.register(name, help, counts(self.totals().map(|(vm, of)| (vm, value(of)))));
        }
        let bytes = counts(self.totals().map(|(vm, of)| (vm, of.memory_bytes)));
        registry.register_with_unit("memory_moved", "Memory that these moved", Unit::Bytes, bytes);
        let with = |vm: &Labels, label, value: &str| [&vm[..], &[(label, value.to_owned())]].concat();
        let moves = counts(self.totals().flat_map(|(vm, of)| {
            let ours = of.counts.moves.into_iter().map(|(why, count)| (with(&vm, "reason", why), count));
            let by_policy = of.steps.iter().map(|((policy, _), count)| (with(&vm, "reason", policy), *count));
            ours.chain(by_policy).collect::<Vec<_>>()
        }));
        registry.register("vcpu_moves", "vCPUs that vnumad moved, by why", moves);
        let rehomes = |of: VmTotals| of.counts.rehomes.into_iter().collect::<Vec<_>>();
        let resizes = |of: VmTotals| of.counts.resizes.into_iter().collect();
        let outcomes: [Metric<VmTotals, Vec<(&'static str, u64)>>; 2] = [
            ("rehomes", "Guest nodes that were to get another home, by outcome", rehomes),
            ("resizes", "Guest nodes that were to grow or to shrink, by outcome", resizes),
        ];
        for (name, help, outcomes) in outcomes {
            let series = self.totals().flat_map(|(vm, of)| {
                let one = |(outcome, count)| (with(&vm, "outcome", outcome), count);
                outcomes(of).into_iter().map(one).collect::<Vec<_>>()
            });
            registry.register(name, help, counts(series));
        }
        let outcome = |(outcome, count): (&&str, &u64)| (vec![("outcome", (*outcome).to_owned())], *count);
        let help = "Migrations to another host that have ended, by outcome";
        registry.register("migrations", help, counts(self.totals.migrations.iter().map(outcome)));
    }

    fn policies(&self, registry: &mut Registry) {
        let steps = counts(self.totals().flat_map(|(vm, of)| {
            let step = |((policy, cause), count)| {
                ([&vm[..], &[("policy", policy), ("cause", cause)]].concat(), count)
            };
            of.steps.into_iter().map(step).collect::<Vec<_>>()
        }));
        registry.register("policy_steps", "vCPUs that a policy confined or gave back, and why", steps);
        let remote = Family::<Labels, Gauge<f64, AtomicU64>>::default();
        let known: BTreeSet<&str> = self.shown().map(|vm| vm.name.as_str()).collect();
        for of in self.scheduling.iter().filter(|of| known.contains(of.vm.as_str())) {
            let shares: Vec<f64> = of.vcpus.iter().filter_map(|vcpu| vcpu.remote_share).collect();
            if !shares.is_empty() {
                let mean = shares.iter().sum::<f64>() / shares.len() as f64;
                remote.get_or_create(&vec![("vm", of.vm.clone())]).set(mean);
            }
        }
        registry.register_with_unit(
            "remote_access",
            "Share of a VM's memory accesses that left the nodes of its vCPUs in the last period, mean of the vCPUs",
            Unit::Other("ratio".to_owned()),
            remote,
        );
    }
}

/// What was gathered is answered for so long, so that those who ask often cost the core no more than one who asks once a second.
const FRESH: Duration = Duration::from_secs(1);

/// What was gathered last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metrics(Arc<Mutex<Option<(Instant, Exposition)>>>);

impl Metrics {
    /// A request that comes while another one gathers waits for that. What was begun is ended also when the client that it was begun
    /// for has gone: clients that ask and go would have vnumad begin again and again.
    pub(super) async fn get<E: From<Refusal> + Send + 'static>(
        &self,
        gather: impl Future<Output = Result<Snapshot, E>> + Send + 'static,
    ) -> Result<Exposition, E> {
        let mut last = Arc::clone(&self.0).lock_owned().await;
        if let Some((at, exposition)) = &*last
            && at.elapsed() < FRESH
        {
            return Ok(exposition.clone());
        }
        let gathered = tokio::spawn(async move {
            let snapshot = gather.await?;
            // Hundreds of VMs are many lines: not on the thread that serves the others.
            let text = tokio::task::spawn_blocking(move || snapshot.text()).await;
            let exposition = joined(text)?.map_err(|_| Refusal::ShuttingDown)?;
            *last = Some((Instant::now(), exposition.clone()));
            Ok(exposition)
        });
        joined(gathered.await)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn of<T: serde::de::DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).expect("as it is sent")
    }

    fn vm(name: &str) -> Vm {
        let vcpu = json!({
            "apic_id": 0, "tid": 1, "host_cpu": 0, "host_node": 0, "pinned": false, "guest_node": 0,
            "acked_node": 0, "target_node": 0, "state": "stale",
        });
        let device = json!({
            "host": "0000:01:00.0", "host_node": 0, "guest": null, "guest_node": null, "acked_node": null,
            "target_node": 0, "state": "unknown",
        });
        of(json!({
            "name": name, "pid": 1, "hypervisor": "answers", "channel": "attached", "described": true, "attached": true, "run_state": "running",
            "problem": null, "distances": [[10]], "vcpus": [vcpu], "devices": [device],
            "nodes": [{"id": 3, "home": 1, "memory_bytes": 4096, "displaced_bytes": 1024}],
            "publication": {
                "generation": null, "acknowledged": null, "driver_mode": "safe", "publications": 7,
                "acknowledgements": 6, "suppressed_by_dwell": 5, "deferred_by_cap": 4,
            },
        }))
    }

    /// One of everything.
    fn snapshot(vms: Vec<Vm>) -> Snapshot {
        let daemon = of(json!({
            "version": "1", "pid": 1, "location_source": "bpf", "why_not_bpf": null, "affinity_events": true,
            "capabilities": [{"name": "locations", "in_use": "poll", "passed_over": [{"way": "bpf", "why": "no BTF"}], "since_ns": 1}],
            "location_events_lost": 1, "replug_after_s": null, "watchers": 2, "watchers_dropped": 3,
            "limited": [{"work": "descriptions", "party": "vm a", "times": 5, "last_ns": 6}],
        }));
        let share = |remote_share| json!({"vcpu": 0, "moves": 0, "remote_share": remote_share});
        let scheduling = of(json!({"vm": "a", "policy": "vprobe", "vcpus": [share(0.25), share(0.75)]}));
        let steps = [(("vprobe".to_owned(), "its memory is there".to_owned()), 2)].into();
        let totals = VmTotals {
            counts: crate::core::counts::VmCounts { node_changes: 9, ..Default::default() },
            replugs: 1,
            steps,
            memory_moves: 1,
            memory_bytes: 8192,
            attaches: 3,
            ..VmTotals::default()
        };
        let mut update = Latencies { sum_s: 1.5, ..Latencies::default() };
        (update.counts[0], update.counts[13]) = (3, 1);
        let of_vms = [("a".to_owned(), totals)].into();
        let totals = Totals { update, vms: of_vms, migrations: [("failed", 4)].into(), ..Totals::default() };
        Snapshot { daemon, vms, scheduling: vec![scheduling], totals }
    }

    fn lines(snapshot: &Snapshot) -> Vec<String> {
        let text = snapshot.text().expect("text");
        str::from_utf8(&text.plain).expect("UTF-8").lines().map(str::to_owned).collect()
    }

    #[test]
    fn values_are_those_of_the_api() {
        let lines = lines(&snapshot(vec![vm("a")]));
        for line in [
            "vnuma_vcpus{vm=\"a\",state=\"stale\"} 1",
            "vnuma_vcpus{vm=\"a\",state=\"true\"} 0",
            "vnuma_passed_over{capability=\"locations\",in_use=\"poll\"} 1",
            "vnuma_limited_total{work=\"descriptions\",party=\"vm a\"} 5",
            "vnuma_devices{vm=\"a\",state=\"unknown\"} 1",
            "vnuma_guest_node_displaced_bytes{vm=\"a\",guest_node=\"3\"} 1024",
            "vnuma_publications_total{vm=\"a\"} 7",
            "vnuma_suppressed_changes_total{vm=\"a\"} 5",
            "vnuma_policy_steps_total{vm=\"a\",policy=\"vprobe\",cause=\"its memory is there\"} 2",
            "vnuma_memory_moved_bytes_total{vm=\"a\"} 8192",
            "vnuma_attaches_total{vm=\"a\"} 3",
            "vnuma_vcpu_moves_total{vm=\"a\",reason=\"vprobe\"} 2",
            "vnuma_vcpu_moves_total{vm=\"a\",reason=\"operator\"} 0",
            "vnuma_rehomes_total{vm=\"a\",outcome=\"stopped\"} 0",
            "vnuma_migrations_total{outcome=\"failed\"} 4",
            "vnuma_remote_access_ratio{vm=\"a\"} 0.5",
            "vnuma_update_latency_seconds_bucket{le=\"0.001\"} 3",
            "vnuma_update_latency_seconds_bucket{le=\"10\"} 3",
            "vnuma_update_latency_seconds_bucket{le=\"+Inf\"} 4",
            "vnuma_update_latency_seconds_count 4",
        ] {
            assert!(lines.iter().any(|found| found == line), "{line} is not in {lines:#?}");
        }
    }

    #[test]
    fn vms_and_guest_nodes_beyond_the_limits_are_only_counted() {
        let mut many: Vec<Vm> = (0..MOST_VMS + 2).map(|number| vm(&number.to_string())).collect();
        let node = many[0].nodes[0];
        many[0].nodes = (0..1000).map(|id| vnuma_api::GuestNode { id, ..node }).collect();
        let lines = lines(&snapshot(many));
        let of = |begin: &str| lines.iter().filter(|line| line.starts_with(begin)).count();
        assert_eq!(of("vnuma_publications_total{"), MOST_VMS);
        assert_eq!(of("vnuma_guest_node_memory_bytes{vm=\"0\","), MOST_NODES);
        assert!(lines.contains(&format!("vnuma_vms {}", MOST_VMS + 2)));
        assert!(lines.contains(&"vnuma_vms_without_series 2".to_owned()));
    }

    /// Name, type and labels of each metric.
    type Table = BTreeMap<String, (String, BTreeSet<String>)>;

    fn told() -> Table {
        let lines = lines(&snapshot(vec![vm("a")]));
        let types: BTreeMap<&str, &str> =
            lines.iter().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect();
        let mut table = Table::new();
        for line in lines.iter().filter(|line| !line.starts_with('#')) {
            let (series, _) = line.rsplit_once(' ').expect("a value");
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let of_histogram =
                |end| name.strip_suffix(end).filter(|name| types.get(name) == Some(&"histogram"));
            let name = ["_bucket", "_sum", "_count"].into_iter().find_map(of_histogram).unwrap_or(name);
            let labels = labels.split("\",").filter_map(|label| Some(label.split_once('=')?.0.to_owned()));
            let entry = table.entry(name.to_owned()).or_default();
            entry.0 = types[name].to_owned();
            entry.1.extend(labels.filter(|label| label != "le"));
        }
        table
    }

    fn listed(manual: &str) -> Table {
        let rows = manual.lines().filter(|line| line.starts_with("| `vnuma_"));
        rows.map(|line| {
            let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
            let labels = cells[2].split('`').skip(1).step_by(2).map(str::to_owned).collect();
            // Prometheus' older format has no type for them.
            let kind = if cells[1] == "info" { "gauge" } else { cells[1] };
            (cells[0].trim_matches('`').to_owned(), (kind.to_owned(), labels))
        })
        .collect()
    }

    const MANUAL: &str = include_str!("../../../../docs/metrics.md");
    /// By how many a VM adds to what Prometheus keeps.
    #[test]
    fn a_vm_has_as_many_series_as_the_manual_says() {
        let lines = lines(&snapshot(vec![vm("a")]));
        let of_vm: Vec<_> = lines.iter().filter(|line| line.contains("vm=\"a\"")).collect();
        let of = |begin: &str| of_vm.iter().filter(|line| line.starts_with(begin)).count();
        let states = of("vnuma_vcpus{") + of("vnuma_devices{");
        let nodes = of("vnuma_guest_node_");
        let (steps, remote) = (of("vnuma_policy_steps_total{"), of("vnuma_remote_access_ratio{"));
        let moves = of("vnuma_vcpu_moves_total{vm=\"a\",reason=\"vprobe\"}");
        let others = of_vm.len() - states - nodes - moves - steps - remote;
        assert_eq!((moves, steps, remote), (1, 1, 1));
        let said = format!(
            "A VM has {others} series, up to {states} for its vCPUs and devices, {nodes} for each guest node, \
             one for each policy that moved its vCPUs and for each of its causes,\nand one more while "
        );
        assert!(MANUAL.contains(&said), "not in the manual: {said}");
    }

    const DASHBOARD: &str = include_str!("../../../../packaging/grafana/vnuma-dashboard.json");

    #[test]
    fn the_manual_has_each_metric_with_its_type_and_labels() {
        assert_eq!(listed(MANUAL), told());
    }

    #[test]
    fn the_dashboard_shows_metrics_that_there_are() {
        let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
        let panels = dashboard["panels"].as_array().expect("panels");
        let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().expect("targets"));
        let mut queries = 0;
        for query in targets.map(|target| target["expr"].as_str().expect("a query")) {
            queries += 1;
            let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            for name in query.split(|c| !word(c)).filter(|name| name.starts_with("vnuma_")) {
                let name = name.strip_suffix("_bucket").unwrap_or(name);
                assert!(told().contains_key(name), "{name} in {query}");
            }
        }
        assert!(queries >= 10, "{queries} queries");
    }
}

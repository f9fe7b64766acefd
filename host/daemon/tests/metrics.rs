//! Metrics, as Prometheus gets them.

mod common;

use common::{
    Daemon,
    vms::{Process, VcpuThread, describe},
    wait_for,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

const OPEN: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Head and body of what is answered.
fn get(mut stream: impl Read + Write, path: &str, accept: &str) -> (String, String) {
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    (head.to_lowercase(), body.to_owned())
}

fn of_socket(daemon: &Daemon, accept: &str) -> (String, String) {
    let stream = UnixStream::connect(&daemon.socket).expect("connected");
    stream.set_read_timeout(Some(vnuma_test_kit::HANG_LIMIT)).expect("a limit");
    get(stream, "/metrics", accept)
}

fn of_port(address: SocketAddr, path: &str) -> (String, String) {
    let stream = TcpStream::connect(address).expect("connected");
    stream.set_read_timeout(Some(vnuma_test_kit::HANG_LIMIT)).expect("a limit");
    get(stream, path, OPEN)
}

/// By series, with its labels.
fn series(text: &str) -> BTreeMap<&str, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (series, value) = line.rsplit_once(' ').expect("a value");
            (series, value.parse().expect("a number"))
        })
        .collect()
}

/// A daemon with a VM that is attached, has moved, and has acknowledged that.
fn with_a_vm(name: &str, change: impl FnOnce(&mut vnuma_daemon::Config)) -> (Daemon, [VcpuThread; 2]) {
    let daemon = Daemon::start_with(None, change);
    let threads = [VcpuThread::start(), VcpuThread::start()];
    threads[0].pin(0);
    threads[1].pin(1);
    let tids = threads.each_ref().map(|thread| thread.tid);
    daemon.add("vm", describe(name, std::process::id().cast_signed(), &[0, 1], &tids));
    let has = |wanted: &str| {
        let (_, text) = of_socket(&daemon, "");
        text.lines()
            .any(|line| line.starts_with("vnuma_vcpus{") && line.contains(wanted) && line.ends_with(" 2"))
    };
    wait_for("the vCPUs to be seen", || has("state=\"true\""));
    (daemon, threads)
}

/// Its VM `web` is attached, moves, and acknowledges that.
fn attach_and_move(daemon: &Daemon, threads: &[VcpuThread; 2]) {
    assert_eq!(common::http::ask(&daemon.socket, "POST", "/v1/vms/web/attach", "").0, 200);
    let guest = daemon.guest("vm");
    threads[1].pin(0);
    wait_for("the move to be published and acknowledged", || {
        let found = guest.read().expect("published");
        guest.acknowledge(found.generation).expect("the doorbell works");
        let (_, text) = of_socket(daemon, "");
        let series = series(&text);
        series["vnuma_vcpu_node_changes_total{vm=\"web\"}"] >= 1.0
            && series["vnuma_update_latency_seconds_count"] >= 2.0
    });
}

#[test]
fn what_has_happened_is_told() {
    let (daemon, threads) = with_a_vm("web", |_| {});
    attach_and_move(&daemon, &threads);
    let moved = common::http::ask(&daemon.socket, "POST", "/v1/vms/web/move", r#"{"vcpu": 0, "node": 1}"#);
    assert_eq!(moved.0, 200, "{}", moved.1);
    // What was gathered is answered for a second.
    let operator = "vnuma_vcpu_moves_total{vm=\"web\",reason=\"operator\"}";
    wait_for("the move to be counted", || series(&of_socket(&daemon, "text/plain").1)[operator] == 1.0);
    let (head, text) = of_socket(&daemon, "text/plain");
    assert!(head.starts_with("http/1.1 200") && head.contains("text/plain; version=0.0.4"), "{head}");
    let found = series(&text);
    let state =
        "{vm=\"web\",hypervisor=\"answers\",channel=\"attached\",driver_mode=\"fast\",policy=\"off\"}";
    assert_eq!(found[format!("vnuma_vm_state{state}").as_str()], 1.0);
    assert_eq!(found["vnuma_guest_node_home{vm=\"web\",guest_node=\"1\",host_node=\"1\"}"], 1.0);
    assert_eq!(found["vnuma_vms"], 1.0);
    assert_eq!(found["vnuma_attaches_total{vm=\"web\"}"], 1.0);
    let count = found["vnuma_update_latency_seconds_count"];
    assert_eq!(found["vnuma_update_latency_seconds_bucket{le=\"+Inf\"}"], count);
    assert_eq!(found["vnuma_acknowledgements_total{vm=\"web\"}"], count);
    assert!(found["vnuma_update_latency_seconds_sum"] >= found["vnuma_acknowledge_latency_seconds_sum"]);

    let mut process = Process::start();
    daemon.add("short", describe("short", process.pid(), &[0, 1], &[process.pid()]));
    let shows = || of_socket(&daemon, "").1.contains("vm=\"short\"");
    wait_for("another VM", shows);
    daemon.change("short", |vm| vm.refuses = true);
    process.kill();
    wait_for("its series to end with it", || !shows());
}

/// The first is managed. The other one is shown by the name of its socket, and its series are its own.
#[test]
fn two_vms_of_one_name_are_counted_once_each() {
    let (daemon, _threads) = with_a_vm("web", |_| {});
    assert_eq!(common::http::ask(&daemon.socket, "POST", "/v1/vms/web/attach", "").0, 200);
    let process = Process::start();
    daemon.add("other", describe("web", process.pid(), &[0, 1], &[process.pid()]));
    let of_vms = || series_of(&of_socket(&daemon, "").1, "vnuma_publications_total");
    wait_for("the other one", || of_vms().len() == 2);
    let read = |path: &str| common::http::ask(&daemon.socket, "GET", path, "").1;
    let list = read("/v1/vms");
    let names: Vec<_> = list.as_array().expect("a list").iter().map(|vm| &vm["name"]).collect();
    assert_eq!(names, ["other", "web"]);
    let problem = read("/v1/vms/other")["problem"].as_str().unwrap_or_default().to_owned();
    assert_eq!(problem, "its name `web` is taken by the VM at memory:vm");
    let published = read("/v1/vms/web")["publication"]["publications"].as_f64().expect("a number");
    assert!(published >= 1.0);
    assert_eq!(of_vms(), [("{vm=\"other\"}".to_owned(), 0.0), ("{vm=\"web\"}".to_owned(), published)]);
    let policies = read("/v1/policies");
    let names: Vec<_> = policies.as_array().expect("a list").iter().map(|of| &of["vm"]).collect();
    assert_eq!(names, ["other", "web"]);
}

/// Labels and value of each series of a metric.
fn series_of(text: &str, metric: &str) -> Vec<(String, f64)> {
    let all = series(text).into_iter();
    all.filter_map(|(series, value)| Some((series.strip_prefix(metric)?.to_owned(), value))).collect()
}

#[test]
fn both_formats_have_the_same_and_names_cannot_break_them() {
    let (daemon, _threads) = with_a_vm("a\"}\\b", |_| {});
    let (head, open) = of_socket(&daemon, OPEN);
    assert!(head.contains(&format!("content-type: {OPEN}")), "{head}");
    assert!(open.ends_with("# EOF\n"), "{open}");
    assert!(open.contains("# UNIT vnuma_update_latency_seconds seconds\n"), "{open}");
    let (_, plain) = of_socket(&daemon, "text/plain");
    // Bounds are 1.0 in one of them and 1 in the other.
    let names = |text: &str| {
        series(text).into_keys().map(|name| name.replace(".0\"}", "\"}")).collect::<BTreeSet<_>>()
    };
    assert_eq!(names(&open), names(&plain));
    assert!(names(&open).contains("vnuma_publications_total{vm=\"a\\\"}\\\\b\"}"), "{open}");
}

/// Free at this moment.
fn port() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr()).expect("a port")
}

#[test]
fn a_port_serves_metrics_and_nothing_else_and_bears_many_who_ask() {
    let address = port();
    let (daemon, _threads) = with_a_vm("web", |config| config.metrics = Some(address));
    assert!(of_port(address, "/metrics").1.ends_with("# EOF\n"));
    for path in ["/v1/vms", "/v1/watch", "/"] {
        assert!(of_port(address, path).0.starts_with("http/1.1 404"), "{path}");
    }
    // Those who connect and say nothing take no place from those who ask, as long as there are places.
    let _silent: Vec<_> = (0..20).map(|_| TcpStream::connect(address).expect("connected")).collect();
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    assert!(of_port(address, "/metrics").0.starts_with("http/1.1 200"));
                }
            });
        }
    });
    eprintln!("200 scrapes in {:?}", begin.elapsed());
    assert!(begin.elapsed() < vnuma_test_kit::HANG_LIMIT);
    // Another one cannot have the port, and says which it was.
    let (socket, records) =
        (daemon.socket.with_extension("other"), daemon.config.records.with_extension("other"));
    let config = vnuma_daemon::Config { socket, records, ..daemon.config.clone() };
    let factory: vnuma_daemon::BackendFactory = Arc::new(|| unreachable!("it does not start"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let taken = runtime.block_on(vnuma_daemon::run(
        config,
        factory,
        vnuma_daemon::Notifier::default(),
        std::future::pending::<()>(),
    ));
    let error = format!("{:#}", taken.expect_err("the port is taken"));
    assert!(error.starts_with(&format!("metrics.listen = {address}: ")), "{error}");
}

/// As from another host.
fn connect_from(source: Ipv4Addr, address: SocketAddr) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4()?;
        socket.bind((source, 0).into())?;
        socket.connect(address).await?.into_std()
    });
    let stream = stream.expect("connected");
    stream.set_nonblocking(false).expect("changed");
    stream.set_read_timeout(Some(vnuma_test_kit::HANG_LIMIT / 2)).expect("a limit");
    stream
}

/// They have the places of their address, for a minute.
#[test]
fn readers_that_stop_after_the_head_keep_no_other_address_waiting() {
    let address = port();
    let (_daemon, _threads) = with_a_vm("web", |config| config.metrics = Some(address));
    let stop = |mut stream: TcpStream| {
        let mut head = [0; 12];
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").expect("sent");
        stream.read_exact(&mut head).expect("a head");
        (stream, String::from_utf8_lossy(&head).into_owned())
    };
    let mut stopped: Vec<_> = (0..32).map(|_| stop(connect_from(Ipv4Addr::LOCALHOST, address))).collect();
    assert!(stopped.iter().all(|(_, head)| head == "HTTP/1.1 200"));
    let (head, body) = get(connect_from([127, 0, 0, 2].into(), address), "/metrics", OPEN);
    assert!(head.starts_with("http/1.1 200") && body.ends_with("# EOF\n"), "{head}");
    let (head, body) = of_port(address, "/metrics");
    assert!(head.starts_with("http/1.1 503"), "{head}");
    assert!(body.contains("127.0.0.1 has 32 connections to the metrics, and gets no more now"), "{body}");
    // 64 in all.
    stopped.extend((0..32).map(|_| stop(connect_from([127, 0, 0, 3].into(), address))));
    let (head, _) = get(connect_from([127, 0, 0, 2].into(), address), "/metrics", OPEN);
    assert!(head.starts_with("http/1.1 200"), "{head}");
    drop(stopped);
    wait_for("the places to be free", || of_port(address, "/metrics").0.starts_with("http/1.1 200"));
}

/// What is answered may be a second old, and the core is not asked again until then.
#[test]
fn who_asks_often_does_not_trouble_the_core() {
    let (daemon, _threads) = with_a_vm("web", |_| {});
    // Answered at different times, unless they are one answer: the watcher counts itself.
    let watchers = || series(&of_socket(&daemon, "").1)["vnuma_watchers"];
    wait_for("an answer of a moment ago", || {
        let before = watchers();
        let mut stream = UnixStream::connect(&daemon.socket).expect("connected");
        stream.write_all(b"GET /v1/watch HTTP/1.1\r\nHost: x\r\n\r\n").expect("sent");
        let mut first = [0];
        stream.read_exact(&mut first).expect("a head");
        let at_once = watchers();
        std::thread::sleep(Duration::from_millis(1100));
        (before, at_once, watchers()) == (before, before, before + 1.0)
    });
}

#[test]
#[ignore = "needs promtool: make test"]
fn promtool_has_nothing_to_say() {
    let promtool = std::env::var_os("PROMTOOL").expect("PROMTOOL names it");
    let (daemon, threads) = with_a_vm("web", |_| {});
    attach_and_move(&daemon, &threads);
    let check = |text: &str| {
        let mut command = Command::new(&promtool);
        let mut child = command
            .args(["check", "metrics"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("promtool");
        child.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("read");
        let output = child.wait_with_output().expect("ended");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (_, text) = of_socket(&daemon, "text/plain");
    for metric in ["publications_total", "vcpu_node_changes_total", "update_latency_seconds_count"] {
        let line = text.lines().find(|line| line.starts_with(&format!("vnuma_{metric}"))).expect(metric);
        assert!(!line.ends_with(" 0"), "nothing has happened: {line}");
    }
    assert_eq!(check(&text), (true, String::new()), "{text}");
    // It would say something.
    let broken = text.replace("vnuma_vms ", "vnuma_vms_total ").replace("# TYPE vnuma_vms gauge", "");
    assert!(!check(&broken).0 || !check(&broken).1.is_empty());
}

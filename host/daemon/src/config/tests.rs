//! What the configuration accepts, and how it refuses the rest.

use super::*;

fn parse(text: &str) -> Result<Config, String> {
    Config::parse(Path::new("/etc/x.toml"), text).map_err(|error| error.to_string())
}

#[test]
fn an_empty_file_is_the_default() {
    assert_eq!(parse(""), Ok(Config::default()));
}

#[test]
#[expect(clippy::too_many_lines, reason = "a list of all keys")]
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
        command_limit_ms = 7000
        [libvirt]
        uris = ["qemu:///system", "qemu+unix:///system?socket=/a/l"]
        state_directories = ["/a/q"]
        socket_directory = "/a/c"
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
        hotness = "off"
        [size]
        mode = "auto"
        low_permille = 20
        high_permille = 40
        pause_s = 7
        least_permille = 100
        most_permille = 900
        [rehome]
        mode = "auto"
        settle_s = 30
        rest_s = 90
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
        command_limit: Duration::from_secs(7),
        libvirt_uris: vec!["qemu:///system".into(), "qemu+unix:///system?socket=/a/l".into()],
        libvirt_directories: vec!["/a/q".into()],
        libvirt_sockets: "/a/c".into(),
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
            hotness: false,
        },
        sizes: SizeSettings {
            auto: true,
            low_permille: 20,
            high_permille: 40,
            pause_ns: 7_000_000_000,
            least_permille: 100,
            most_permille: 900,
        },
        rehome: RehomeSettings { auto: true, settle_ns: 30_000_000_000, rest_ns: 90_000_000_000 },
    };
    assert_eq!(parse(text), Ok(expected));
}

#[test]
fn libvirts_are_on_this_host_and_named_once() {
    let refused = |text: &str| parse(&format!("[libvirt]\n{text}\n")).expect_err("refused");
    let other = "must be a URI of this host, such as qemu:///system";
    assert_eq!(
        refused("uris = [\"qemu+ssh://far/system\"]"),
        format!("/etc/x.toml: line 2: libvirt.uris = \"qemu+ssh://far/system\": {other}")
    );
    assert!(refused("uris = [\"\"]").ends_with(other));
    assert!(refused("uris = [\"qemu:///a\", \"qemu:///a\"]").ends_with("must be at most 16 different ones"));
    let many = |text: &str| vec![text; 17].join(", ");
    assert!(refused(&format!("state_directories = [{}]", many("\"/a\""))).ends_with("must be at most 16"));
    assert!(refused("state_directories = [\"a\"]").ends_with("must be an absolute path"));
    assert!(refused("socket_directory = \"a\"").ends_with("must be an absolute path"));
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
    assert!(refused("policy = \"all\"").ends_with("must be one of none, periodic, amount, both, adaptive"));
}

#[test]
fn bounds_of_sizes_agree_or_are_refused() {
    let sizes = |text: &str| parse(&format!("[size]\n{text}\n")).map(|config| config.sizes);
    let of = |text: &str| {
        let found = sizes(text).expect("accepted");
        (found.low_permille, found.high_permille, found.least_permille, found.most_permille)
    };
    assert_eq!(of("mode = \"fixed\""), (50, 150, 0, 1000));
    assert_eq!(
        (of("low_permille = 300"), of("high_permille = 10")),
        ((300, 300, 0, 1000), (10, 10, 0, 1000))
    );
    let refused = |text: &str| sizes(text).expect_err("refused");
    assert_eq!(
        refused("low_permille = 31\nhigh_permille = 30"),
        "/etc/x.toml: line 2: size.low_permille = 31: must be at most size.high_permille, 30"
    );
    assert!(
        refused("least_permille = 2\nmost_permille = 1").ends_with("must be at most size.most_permille, 1")
    );
    assert!(refused("most_permille = 1001").ends_with("must be 0 to 1000"));
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
        ("[publish]\n\ndwell_ms = \"1\"", "/etc/x.toml: line 3: invalid type: string \"1\", expected i64"),
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
        ("[policy]\nbound_low = nan", "/etc/x.toml: line 2: policy.bound_low = NaN: must be 0.01 to 1000"),
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
    std::fs::write(&path, " ".repeat(vnuma_settings::SIZE_LIMIT as usize + 1)).expect("written");
    let error = Config::load(Some(&path)).expect_err("too long").to_string();
    assert!(error.contains("longer than"), "{error}");
    std::fs::write(&path, b"[publish]\n# caf\xe9\n").expect("written");
    let error = Config::load(Some(&path)).expect_err("not UTF-8").to_string();
    assert_eq!(error, format!("{}: line 2: not UTF-8", path.display()));
}

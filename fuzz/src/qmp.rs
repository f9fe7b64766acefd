//! A conversation with a QEMU that says what it wants.
//!
//! The first line of an input says what is done, a letter each: `d`escribe, `a`ttach, `c`hannel attached?, `x` detach,
//! `e`vents, `m`igrate, `l`ook how far that is, `s`witch to post-copy, `k` cancel it, `t` mark it, `w` is it marked?. Each line that follows is what the peer says, one a command:
//!
//! | line | the peer says |
//! |---|---|
//! | `!TEXT` | `TEXT`, and then the next line |
//! | `-TEXT` | that it refuses the command, because of `TEXT` |
//! | `JSON` | that this is the answer; `$0` and `$1` are threads of its own |
//!
//! When there are no more lines it hangs up.

use crate::{expect_clear, scratch, start_vcpu};
use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::{Mutex, OnceLock, mpsc},
    thread,
    time::Duration,
};
use vnuma_hypervisor::{Migrates, Plug, QmpBackend, VmBackend, VmConnection, VmError, check_name};
use vnuma_model::{VmDescription, VmHandle};

const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#;

/// A command that does not come within this time will not come: what is under way waits for an event.
const IDLE: Duration = Duration::from_millis(20);

/// Most lines of an input, so that it ends.
const LINES: usize = 256;

/// The other end, which lasts as long as this process.
struct Peer {
    scripts: mpsc::Sender<Vec<Vec<u8>>>,
    handle: VmHandle,
    threads: [i32; 2],
}

fn peer() -> &'static Mutex<Peer> {
    static PEER: OnceLock<Mutex<Peer>> = OnceLock::new();
    PEER.get_or_init(|| {
        let socket = scratch().join("qmp.sock");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let (scripts, received) = mpsc::channel();
        let threads = [start_vcpu(), start_vcpu()];
        thread::spawn(move || {
            while let (Ok((stream, _)), Ok(script)) = (listener.accept(), received.recv()) {
                // The other end may have hung up.
                let _ = serve(&stream, script, threads);
            }
        });
        let handle = QmpBackend::handle(&socket).expect("a path of ours");
        Mutex::new(Peer { scripts, handle, threads })
    })
}

fn serve(mut stream: &UnixStream, script: Vec<Vec<u8>>, threads: [i32; 2]) -> std::io::Result<()> {
    writeln!(stream, "{GREETING}")?;
    let mut script = script.into_iter();
    let mut commands = BufReader::new(stream).lines();
    while let Some(command) = commands.next().transpose()? {
        let command: serde_json::Value = serde_json::from_str(&command)?;
        let id = &command["id"];
        if command["execute"] == "qmp_capabilities" {
            writeln!(stream, "{{\"return\": {{}}, \"id\": {id}}}")?;
            stream.set_read_timeout(Some(IDLE))?;
            continue;
        }
        loop {
            let Some(line) = script.next() else { return Ok(()) };
            if let Some(raw) = line.strip_prefix(b"!") {
                stream.write_all(&[raw, b"\n"].concat())?;
                continue;
            }
            let (head, body, tail) = match line.strip_prefix(b"-") {
                Some(reason) => {
                    let reason = serde_json::Value::from(String::from_utf8_lossy(reason)).to_string();
                    ("{\"error\": {\"desc\": ", reason.into_bytes(), "}")
                }
                None => ("{\"return\": ", name_threads(&line, threads), ""),
            };
            let end = format!("{tail}, \"id\": {id}}}\n");
            stream.write_all(&[head.as_bytes(), &body, end.as_bytes()].concat())?;
            break;
        }
    }
    Ok(())
}

/// Puts thread ids in the place of `$0` and `$1`.
fn name_threads(line: &[u8], threads: [i32; 2]) -> Vec<u8> {
    let mut named = Vec::with_capacity(line.len());
    let mut bytes = line.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        match (byte, bytes.peek()) {
            (b'$', Some(b'0' | b'1')) => {
                let index = usize::from(bytes.next() == Some(b'1'));
                named.extend(threads[index].to_string().into_bytes());
            }
            _ => named.push(byte),
        }
    }
    named
}

/// What was learned is within its bounds, and threads are this process's own. What failed says why.
pub fn run(input: &[u8]) {
    let mut lines = input.split(|&byte| byte == b'\n').map(<[u8]>::to_vec);
    let acts = lines.next().unwrap_or_default();
    let peer = peer().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    peer.scripts.send(lines.take(LINES).collect()).expect("the peer lives");
    let mut vm = match QmpBackend::default().connect(&peer.handle) {
        Ok(vm) => vm,
        // The machine is busy: the peer had no turn for a second.
        Err(VmError::NoGreeting { .. } | VmError::Timeout { .. }) => return,
        Err(error) => panic!("the greeting was good: {error}"),
    };
    for act in acts.iter().take(4) {
        if let Err(error) = perform(vm.as_mut(), *act, &peer) {
            expect_clear(&error.to_string());
        }
    }
}

fn perform(vm: &mut dyn VmConnection, act: u8, peer: &Peer) -> Result<(), VmError> {
    match act {
        b'd' => vm.describe().map(|description| check(&description, peer)),
        b'a' => {
            let (ours, _) = UnixStream::pair().expect("a pair of sockets");
            vm.attach_channel(Plug::Ivshmem(ours.into()))
        }
        b'c' => vm.channel_attached().map(drop),
        b'r' => vm.removable_vcpu(1).map(drop),
        b'p' => vm.plug_vcpu(1).map(drop),
        b'u' => vm.unplug_vcpu(1),
        b'x' => vm.detach_channel(),
        b'm' => migrates(vm).migrate("tcp:host:1", true),
        b'l' => migrates(vm).progress().map(|migration| {
            migration.problem.iter().for_each(|problem| crate::expect_plain(problem));
        }),
        b's' => migrates(vm).start_post_copy(),
        b'k' => migrates(vm).cancel(),
        b't' => migrates(vm).mark(true),
        b'w' => migrates(vm).is_marked().map(drop),
        _ => vm.poll_event(Duration::ZERO).map(drop),
    }
}

fn migrates(vm: &mut dyn VmConnection) -> &mut dyn Migrates {
    vm.migrates().expect("a QEMU migrates")
}

fn check(description: &VmDescription, peer: &Peer) {
    assert_eq!(description.pid, std::process::id().cast_signed());
    check_name(&description.name).unwrap_or_else(|error| panic!("{error}"));
    assert!(description.vcpus.len() <= 4096 && description.guest_nodes.len() <= 128);
    assert!(description.vcpus.windows(2).all(|pair| pair[0].apic_id < pair[1].apic_id));
    let own = |tid: i32| std::path::Path::new("/proc/self/task").join(tid.to_string()).exists();
    assert!(description.vcpus.iter().all(|vcpu| peer.threads.contains(&vcpu.tid) || own(vcpu.tid)));
    let tids: BTreeSet<i32> = description.vcpus.iter().map(|vcpu| vcpu.tid).collect();
    assert_eq!(tids.len(), description.vcpus.len(), "one thread runs two vCPUs");
    assert!(description.guest_nodes.windows(2).all(|pair| pair[0].id < pair[1].id));
    assert!(description.devices.len() <= 256);
    description.devices.iter().for_each(|device| crate::expect_plain(&device.host));
    for node in &description.guest_nodes {
        if let Some(memory) = &node.memory {
            assert!(memory.id.len() <= 1024 && node.memory_bytes >= memory.size_bytes, "{node:?}");
            crate::expect_plain(memory.policy.as_ref());
        }
    }
}

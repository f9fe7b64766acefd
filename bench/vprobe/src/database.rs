//! In a guest: programs of Debian that run on one vCPU for ever. Redis and memcached serve values, and this program is their
//! client: it has a request under way on each of its connections, so that the vCPU never sleeps. sysbench reads its memory.

use crate::{
    committed::{Kind, seed},
    load::{Count, Ready},
    team::Random,
};
use anyhow::{Context, Result, bail, ensure};
use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use vnuma_bench_common::{
    cells::print,
    frames::{frames_of, ranges},
};

const PAGE: usize = 4096;
/// Values of each server, some 26 MiB with what it keeps of them.
const VALUES: u64 = 24_576;
/// Length of a value.
const VALUE: usize = 1000;
/// Requests that fill a server and are on the way at once.
const FILLING: u64 = 64;
/// Which memory the guest's kernel has in huge pages.
const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
/// Memory that sysbench reads: a power of two, as it wants.
pub const SYSBENCH_MIB: usize = 32;
/// A server begins, and sysbench fills its memory, in this time.
const HANG: Duration = Duration::from_secs(600);

/// A program that ends with this one.
fn start(program: &str, arguments: &[&str]) -> Result<Child> {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", program]).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().with_context(|| program.to_owned())
}

/// Runs until it is killed. The CPU is chosen already.
pub fn run(kind: Kind, cpu: usize, connections: usize) -> Result<()> {
    // Small pages of several programs would lie side by side, where they cannot be placed apart.
    fs::write(HUGE_PAGES, "always").context(HUGE_PAGES)?;
    match kind {
        Kind::Redis => serve(Protocol::Redis, cpu, connections),
        Kind::Memcached => serve(Protocol::Memcached, cpu, connections),
        Kind::Sysbench => sysbench(),
        _ => bail!("{} is no program of Debian", kind.name()),
    }
}

fn sysbench() -> Result<()> {
    let block = format!("--memory-block-size={SYSBENCH_MIB}M");
    let endless = ["--time=0", "--events=0", "--memory-total-size=1000000T"];
    let how = ["--memory-scope=local", "--memory-oper=read", "--memory-access-mode=rnd"];
    let arguments = [&["memory", "--threads=1", &block][..], &endless, &how, &["run"]].concat();
    let mut child = start("sysbench", &arguments)?;
    let wanted = (SYSBENCH_MIB << 20) / PAGE;
    let end = Instant::now() + HANG;
    loop {
        ensure!(child.try_wait()?.is_none() && Instant::now() < end, "sysbench has not filled its memory");
        let frames = memory_of(child.id())?;
        if frames.len() >= wanted {
            // What it has done cannot be seen from outside.
            print(&Ready { memory: ranges(&frames), other: Vec::new(), count: None })?;
            break;
        }
        thread::sleep(Duration::from_millis(100));
    }
    bail!("sysbench: {}", child.wait()?)
}

/// Page frames of the memory that a process has for itself.
fn memory_of(pid: u32) -> Result<Vec<u64>> {
    let path = format!("/proc/{pid}/maps");
    let maps = fs::read_to_string(&path).context(path)?;
    let mut frames = Vec::new();
    for (start, bytes) in maps.lines().filter_map(anonymous) {
        frames.append(&mut frames_of(&pid.to_string(), start, bytes)?);
    }
    Ok(frames)
}

/// Address and length of a mapping that a process can write and that is of no file (proc(5), `maps`).
fn anonymous(line: &str) -> Option<(usize, usize)> {
    let mut words = line.split_whitespace();
    let (range, rights, inode) = (words.next()?, words.next()?, words.nth(2)?);
    let (start, end) = range.split_once('-')?;
    let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16));
    let (start, end) = (start.ok()?, end.ok()?);
    (rights == "rw-p" && inode == "0" && end > start).then(|| (start, end - start))
}

/// What a server understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Redis,
    Memcached,
}

impl Protocol {
    fn start(self, socket: &str, connections: usize) -> Result<Child> {
        let most = (connections + 64).to_string();
        match self {
            Self::Redis => {
                let keeps_nothing = ["--save", "", "--appendonly", "no", "--databases", "1"];
                let listens = ["--port", "0", "--unixsocket", socket, "--maxclients", &most];
                // A huge page is of one server, so that it can be placed.
                let huge = ["--disable-thp", "no"];
                start("redis-server", &[&listens[..], &keeps_nothing, &huge].concat())
            }
            Self::Memcached => {
                // At its start memcached takes a page of the memory of -m for each size class of values.
                start("memcached", &["-u", "root", "-s", socket, "-t", "1", "-m", "128", "-L", "-c", &most])
            }
        }
    }

    fn set(self, key: u64) -> Vec<u8> {
        let head = match self {
            Self::Redis => format!("*3\r\n$3\r\nSET\r\n$12\r\nkey:{key:08}\r\n${VALUE}\r\n"),
            Self::Memcached => format!("set key:{key:08} 0 0 {VALUE}\r\n"),
        };
        [head.as_bytes(), &[b'v'; VALUE], b"\r\n"].concat()
    }

    /// What it answers to that.
    fn stored(self) -> &'static [u8] {
        match self {
            Self::Redis => b"+OK\r\n",
            Self::Memcached => b"STORED\r\n",
        }
    }

    fn get(self, key: u64) -> String {
        match self {
            Self::Redis => format!("*2\r\n$3\r\nGET\r\n$12\r\nkey:{key:08}\r\n"),
            Self::Memcached => format!("get key:{key:08}\r\n"),
        }
    }

    /// What comes before and after the value in its answer.
    fn around(self, key: u64) -> (String, &'static str) {
        match self {
            Self::Redis => (format!("${VALUE}\r\n"), "\r\n"),
            Self::Memcached => (format!("VALUE key:{key:08} 0 {VALUE}\r\n"), "\r\nEND\r\n"),
        }
    }
}

/// A connection on which one value is asked for.
struct Connection<S> {
    stream: S,
    /// Which.
    key: u64,
}

impl<S: Read + Write> Connection<S> {
    fn ask(&mut self, protocol: Protocol, key: u64) -> Result<()> {
        self.key = key;
        self.stream.write_all(protocol.get(key).as_bytes()).context("asking for a value")
    }

    /// Waits for the value. `buffer` is as long as needed.
    fn answer(&mut self, protocol: Protocol, buffer: &mut Vec<u8>) -> Result<()> {
        let (before, after) = protocol.around(self.key);
        buffer.resize(before.len() + VALUE + after.len(), 0);
        let mut filled = 0;
        while filled < buffer.len() {
            let count = self.stream.read(&mut buffer[filled..]).context("waiting for a value")?;
            ensure!(count > 0, "the server has ended a connection");
            filled += count;
            // The answer for a missing value is shorter than `before`, so each part is compared as it comes.
            let known = filled.min(before.len());
            let head = String::from_utf8_lossy(&buffer[..known]).into_owned();
            ensure!(before.as_bytes().starts_with(&buffer[..known]), "the server answered {head:?}");
        }
        ensure!(buffer.ends_with(after.as_bytes()), "the value of key {} does not end", self.key);
        Ok(())
    }
}

/// The key of the next request.
fn key(random: &mut Random) -> u64 {
    random.next() % VALUES
}

fn serve(protocol: Protocol, cpu: usize, connections: usize) -> Result<()> {
    ensure!(connections > 0, "--connections 0: expected at least 1");
    let socket = PathBuf::from(format!("/tmp/bench-vprobe-{cpu}.sock"));
    let mut child = protocol.start(&socket.display().to_string(), connections)?;
    let mut first = connect(&socket, &mut child)?;
    fill(protocol, &mut first)?;
    let mut open = |_| {
        let stream = UnixStream::connect(&socket).context("one more connection")?;
        Ok(Connection { stream, key: 0 })
    };
    let mut all = (0..connections).map(&mut open).collect::<Result<Vec<_>>>()?;
    let (mut random, mut buffer, mut count) = (Random(seed(cpu)), Vec::new(), Count::new(None)?);
    for connection in &mut all {
        connection.ask(protocol, key(&mut random))?;
    }
    for turn in 0_u64.. {
        for connection in &mut all {
            connection.answer(protocol, &mut buffer)?;
            connection.ask(protocol, key(&mut random))?;
            count.add(1);
        }
        if turn == 0 {
            // From now on it has all the memory that it needs.
            let memory = ranges(&memory_of(child.id())?);
            print(&Ready { memory, other: Vec::new(), count: Some(count.address()?) })?;
        }
    }
    Ok(())
}

/// The first connection, as soon as the server listens.
fn connect(socket: &Path, child: &mut Child) -> Result<UnixStream> {
    let end = Instant::now() + HANG;
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return Ok(stream),
            Err(error) => {
                let ended = child.try_wait()?;
                ensure!(ended.is_none() && Instant::now() < end, "{}: {error}, {ended:?}", socket.display());
                thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// Gives the server all values.
fn fill(protocol: Protocol, stream: &mut (impl Read + Write)) -> Result<()> {
    let mut answer = vec![0; protocol.stored().len()];
    for first in (0..VALUES).step_by(FILLING as usize) {
        let keys = first..(first + FILLING).min(VALUES);
        for key in keys.clone() {
            stream.write_all(&protocol.set(key)).context("storing a value")?;
        }
        for key in keys {
            stream.read_exact(&mut answer).context("storing a value")?;
            let text = String::from_utf8_lossy(&answer);
            ensure!(answer == protocol.stored(), "key {key}: the server answered {text:?}");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        collections::HashMap,
        io::{BufRead, BufReader},
        sync::{Arc, Mutex},
    };

    #[test]
    fn memory_of_its_own_is_what_it_can_write_and_no_file_has() {
        for (line, expected) in [
            ("7f10-7f12 rw-p 00000000 00:00 0", Some((0x7f10, 2))),
            ("55d0-55e0 rw-p 00000000 00:00 0                          [heap]", Some((0x55d0, 16))),
            ("7f10-7f12 r--p 00000000 00:00 0", None),
            ("7f10-7f12 rw-s 00000000 00:01 1028 /dev/zero (deleted)", None),
            ("7f10-7f12 rw-p 00021000 fe:00 77 /usr/lib/libc.so.6", None),
            ("7f12-7f10 rw-p 00000000 00:00 0", None),
            ("nonsense", None),
        ] {
            assert_eq!(anonymous(line), expected, "{line}");
        }
    }

    /// Reads a request as the server would: its words, and a value.
    fn request(protocol: Protocol, reader: &mut impl BufRead) -> Option<(bool, String)> {
        let mut line = || {
            let mut line = String::new();
            (reader.read_line(&mut line).ok()? > 0).then(|| line.trim_end().to_owned())
        };
        let (set, key) = match protocol {
            Protocol::Redis => {
                let _count = line()?;
                let _length = line()?;
                let set = line()? == "SET";
                assert_eq!(line()?, "$12");
                let key = line()?;
                if set {
                    assert_eq!(line()?, format!("${VALUE}"));
                }
                (set, key)
            }
            Protocol::Memcached => {
                let words: Vec<String> = line()?.split(' ').map(str::to_owned).collect();
                if words[0] == "set" {
                    assert_eq!(words[2..], ["0", "0", &VALUE.to_string()].map(str::to_owned));
                }
                (words[0] == "set", words[1].clone())
            }
        };
        if set {
            assert_eq!(line()?.len(), VALUE);
        }
        Some((set, key))
    }

    /// A server that has what it was given, on one end of a pair of sockets.
    fn server(protocol: Protocol, known: &Arc<Mutex<HashMap<String, ()>>>) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let known = Arc::clone(known);
        thread::spawn(move || {
            let mut writer = theirs.try_clone().expect("cloned");
            let mut reader = BufReader::new(theirs);
            while let Some((set, key)) = request(protocol, &mut reader) {
                let mut known = known.lock().expect("no panic");
                let answer = if set {
                    known.insert(key, ());
                    protocol.stored().to_vec()
                } else if known.contains_key(&key) {
                    let number = key.strip_prefix("key:").and_then(|n| n.parse().ok()).expect("a key");
                    let (before, after) = protocol.around(number);
                    [before.as_bytes(), &[b'v'; VALUE], after.as_bytes()].concat()
                } else {
                    (if protocol == Protocol::Redis { "$-1\r\n" } else { "END\r\n" }).into()
                };
                if writer.write_all(&answer).is_err() {
                    return;
                }
            }
        });
        ours
    }

    #[test]
    fn values_that_were_stored_are_answered_and_others_are_an_error() {
        for protocol in [Protocol::Redis, Protocol::Memcached] {
            let known = Arc::default();
            fill(protocol, &mut server(protocol, &known)).expect("stored");
            assert_eq!(known.lock().expect("no panic").len() as u64, VALUES);
            let mut connection = Connection { stream: server(protocol, &known), key: 0 };
            let mut buffer = Vec::new();
            for key in [0, 7, VALUES - 1] {
                connection.ask(protocol, key).expect("asked");
                connection.answer(protocol, &mut buffer).expect("answered");
            }
            connection.ask(protocol, VALUES).expect("asked");
            let error = connection.answer(protocol, &mut buffer).expect_err("not stored").to_string();
            assert!(error.starts_with("the server answered "), "{protocol:?}: {error}");
        }
    }
}

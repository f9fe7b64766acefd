//! A TCP proxy between two nodes of the DSM, which misbehaves on request.
//!
//! It stands for what a network or a broken peer does: the nodes on both sides are real and do not know of it.

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};
use vnuma_random::Rng;

/// What becomes of bytes that come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conduct {
    /// They pass.
    Pass,
    /// They are kept: the peer seems to be stopped. They pass later, if that ends.
    Stop,
    /// They pass a few at a time, with a pause before each.
    Slow {
        /// Bytes at a time.
        bytes: usize,
        /// Between them.
        pause: Duration,
    },
    /// The connections end.
    Cut,
    /// Bytes that look random come in place of them.
    Garbage {
        /// Says which.
        seed: u64,
    },
}

/// How often a pump looks for a new conduct.
const LOOK: Duration = Duration::from_millis(2);

#[derive(Debug)]
struct Told {
    conduct: Mutex<Conduct>,
    over: AtomicBool,
}

impl Told {
    fn conduct(&self) -> Conduct {
        *self.conduct.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Listens in place of a node. Its threads end with it.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    told: Arc<Told>,
}

impl Proxy {
    /// In front of `target`, on a free port of the loopback.
    pub fn new(target: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let told = Arc::new(Told { conduct: Mutex::new(Conduct::Pass), over: AtomicBool::new(false) });
        let theirs = Arc::clone(&told);
        thread::spawn(move || serve(&listener, target, &theirs));
        Ok(Self { address, told })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it does from now on, in both directions of all connections.
    pub fn conduct(&self, conduct: Conduct) {
        *self.told.conduct.lock().unwrap_or_else(PoisonError::into_inner) = conduct;
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.told.over.store(true, Ordering::Relaxed);
    }
}

fn serve(listener: &TcpListener, target: SocketAddr, told: &Arc<Told>) {
    while !told.over.load(Ordering::Relaxed) {
        let Ok((inner, _)) = listener.accept() else {
            thread::sleep(LOOK);
            continue;
        };
        let told = Arc::clone(told);
        thread::spawn(move || connect(&inner, target, &told));
    }
}

/// Nodes start in any order: the target may not be there yet.
fn connect(inner: &TcpStream, target: SocketAddr, told: &Arc<Told>) {
    let outer = loop {
        match TcpStream::connect(target) {
            Ok(outer) => break outer,
            Err(_) if told.over.load(Ordering::Relaxed) || told.conduct() == Conduct::Cut => return,
            Err(_) => thread::sleep(LOOK),
        }
    };
    for (from, to) in [(inner, &outer), (&outer, inner)] {
        if let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) {
            let told = Arc::clone(told);
            thread::spawn(move || {
                // The end of a connection is what a pump ends with.
                let _ = pump(from, to, &told);
            });
        }
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, told: &Told) -> io::Result<()> {
    from.set_nonblocking(false)?;
    from.set_read_timeout(Some(LOOK))?;
    to.set_nodelay(true)?;
    to.set_write_timeout(Some(Duration::from_secs(5)))?;
    let mut buffer = vec![0; 64 << 10];
    let mut random = None;
    let outcome = loop {
        if told.over.load(Ordering::Relaxed) || told.conduct() == Conduct::Cut {
            break Ok(());
        }
        if told.conduct() == Conduct::Stop {
            thread::sleep(LOOK);
            continue;
        }
        let count = match from.read(&mut buffer) {
            Ok(0) => break Ok(()),
            Ok(count) => count,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => 0,
            Err(error) => break Err(error),
        };
        if let Err(error) = pass(&mut buffer[..count], &mut to, told, &mut random) {
            break Err(error);
        }
    };
    // Both ends see it.
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
    outcome
}

fn pass(bytes: &mut [u8], to: &mut TcpStream, told: &Told, random: &mut Option<Rng>) -> io::Result<()> {
    let mut rest = bytes;
    loop {
        match told.conduct() {
            Conduct::Pass => return to.write_all(rest),
            Conduct::Stop if !rest.is_empty() && !told.over.load(Ordering::Relaxed) => thread::sleep(LOOK),
            Conduct::Stop | Conduct::Cut => return Ok(()),
            Conduct::Slow { bytes, pause } => {
                if rest.is_empty() {
                    return Ok(());
                }
                thread::sleep(pause);
                let (now, later) = rest.split_at_mut(bytes.min(rest.len()));
                to.write_all(now)?;
                rest = later;
            }
            Conduct::Garbage { seed } => {
                // Also when nothing came: who sends garbage does not wait to be asked.
                let random = random.get_or_insert_with(|| Rng::new(seed));
                let garbage: [u8; 256] = std::array::from_fn(|_| random.number() as u8);
                return to.write_all(&garbage);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    /// Both ends of a connection through a proxy.
    fn connected() -> (Proxy, TcpStream, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let proxy = Proxy::new(listener.local_addr().expect("an address")).expect("a proxy");
        let near = TcpStream::connect(proxy.address()).expect("connected");
        let (far, _) = listener.accept().expect("a connection");
        for stream in [&near, &far] {
            stream.set_read_timeout(Some(Duration::from_millis(300))).expect("a timeout");
        }
        (proxy, near, far)
    }

    fn read(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; 100];
        stream.read(&mut bytes).map(|count| bytes[..count].to_vec())
    }

    #[test]
    fn bytes_pass_and_wait_while_it_is_stopped() {
        let (proxy, mut near, mut far) = connected();
        near.write_all(b"one").expect("written");
        assert_eq!(read(&mut far).expect("read"), b"one");
        proxy.conduct(Conduct::Stop);
        thread::sleep(LOOK * 5);
        near.write_all(b"two").expect("written");
        read(&mut far).expect_err("nothing comes");
        proxy.conduct(Conduct::Pass);
        assert_eq!(read(&mut far).expect("read"), b"two");
    }

    #[test]
    fn slow_bytes_come_one_after_the_other() {
        let (proxy, mut near, mut far) = connected();
        proxy.conduct(Conduct::Slow { bytes: 1, pause: Duration::from_millis(20) });
        let begin = Instant::now();
        near.write_all(b"slow").expect("written");
        let mut seen = Vec::new();
        while seen.len() < 4 {
            seen.extend(read(&mut far).expect("read"));
        }
        assert!(seen == b"slow" && begin.elapsed() >= Duration::from_millis(60), "{seen:?}");
    }

    #[test]
    fn a_cut_ends_both_sides_and_garbage_comes_unasked() {
        let (proxy, mut near, mut far) = connected();
        proxy.conduct(Conduct::Garbage { seed: 7 });
        assert!(
            !read(&mut near).expect("garbage").is_empty() && !read(&mut far).expect("garbage").is_empty()
        );
        proxy.conduct(Conduct::Cut);
        for stream in [&mut near, &mut far] {
            let begin = Instant::now();
            while matches!(read(stream), Ok(bytes) if !bytes.is_empty()) {
                assert!(begin.elapsed() < Duration::from_secs(10), "it does not end");
            }
        }
    }
}

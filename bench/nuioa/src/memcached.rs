//! A client of memcached's text protocol (doc/protocol.txt there): one command after the other on one connection, nine of ten read.

use crate::committed::{GUEST_ADDRESS, SEED};
use anyhow::{Context, Result, bail, ensure};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

const PORT: u16 = 11211;
const KEYS: u64 = 500;
/// One command in so many writes.
const WRITES: u64 = 10;
const HANG: Duration = Duration::from_secs(60);
/// Longest line of an answer.
const LINE: u64 = 1024;

#[derive(Default)]
struct State {
    goes: bool,
    halted: bool,
    done: u64,
    failed: Option<String>,
}

type Shared = Arc<(Mutex<State>, Condvar)>;

/// A thread that asks while it is let go.
pub struct Client(Shared);

impl Client {
    /// Connects, and writes all keys.
    pub fn start(bytes: usize) -> Result<Self> {
        let mut connection = Connection::open(bytes)?;
        (0..KEYS).try_for_each(|key| connection.set(key))?;
        let shared = Shared::default();
        let own = shared.clone();
        thread::spawn(move || {
            if let Err(error) = work(&mut connection, &own) {
                let mut state = own.0.lock().unwrap_or_else(PoisonError::into_inner);
                (state.failed, state.halted) = (Some(format!("{error:#}")), true);
                own.1.notify_all();
            }
        });
        Ok(Self(shared))
    }

    pub fn go(&self) -> Result<()> {
        let mut state = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        (state.goes, state.halted, state.done) = (true, state.failed.is_some(), 0);
        self.0.1.notify_all();
        Ok(())
    }

    /// Commands since it was let go; all have their answer.
    pub fn halt(&self) -> Result<u64> {
        let mut state = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.goes = false;
        while !state.halted {
            state = self.0.1.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match &state.failed {
            Some(error) => bail!("memcached: {error}"),
            None => Ok(state.done),
        }
    }
}

fn work(connection: &mut Connection, shared: &Shared) -> Result<()> {
    let mut random = SEED;
    for number in 0_u64.. {
        let mut state = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        while !state.goes {
            state.halted = true;
            shared.1.notify_all();
            state = shared.1.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        // Numerical Recipes' generator; its upper bits are used.
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let key = (random >> 16) % KEYS;
        if number % WRITES == 0 { connection.set(key) } else { connection.get(key) }?;
        shared.0.lock().unwrap_or_else(PoisonError::into_inner).done += 1;
    }
    Ok(())
}

struct Connection {
    stream: BufReader<TcpStream>,
    value: Vec<u8>,
}

impl Connection {
    fn open(bytes: usize) -> Result<Self> {
        let end = Instant::now() + HANG;
        let stream = loop {
            match TcpStream::connect((GUEST_ADDRESS, PORT)) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > end => return Err(error).context("connecting to memcached"),
                Err(_) => thread::sleep(Duration::from_millis(200)),
            }
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(HANG))?;
        Ok(Self { stream: BufReader::new(stream), value: vec![b'v'; bytes] })
    }

    fn ask(&mut self, words: &[u8]) -> Result<String> {
        self.stream.get_mut().write_all(words)?;
        self.line()
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        (&mut self.stream).take(LINE).read_line(&mut line).context("no answer")?;
        Ok(line.trim_end().to_owned())
    }

    fn set(&mut self, key: u64) -> Result<()> {
        let mut words = format!("set key{key} 0 0 {}\r\n", self.value.len()).into_bytes();
        words.extend_from_slice(&self.value);
        words.extend(b"\r\n");
        let answer = self.ask(&words)?;
        ensure!(answer == "STORED", "set: {answer:?}");
        Ok(())
    }

    fn get(&mut self, key: u64) -> Result<()> {
        let answer = self.ask(format!("get key{key}\r\n").as_bytes())?;
        let expected = format!("VALUE key{key} 0 {}", self.value.len());
        ensure!(answer == expected, "get: {answer:?}, expected {expected:?}");
        let mut value = vec![0; self.value.len() + 2];
        self.stream.read_exact(&mut value)?;
        let end = self.line()?;
        ensure!(end == "END", "get: {end:?} behind the value");
        Ok(())
    }
}

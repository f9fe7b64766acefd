//! What vnumad tells its service manager (`sd_notify(3)`): that it serves, that its loop turns, that it stops.
//!
//! The crates for this send by a socket that blocks while the manager does not read, and the core's thread may not wait for
//! another process. So this one does not block: what the manager has no room for is sent again a little later.

use std::{
    env,
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
    sync::Arc,
    time::{Duration, Instant},
};

/// How often the manager hears of the loop within the time that it waits for that.
const FEEDS: u32 = 3;
/// After how much less than that a message that could not be sent is sent again.
const AGAIN: u32 = 10;
/// The shortest time that a manager may wait. The loop does not turn for less.
const LEAST: Duration = Duration::from_millis(100);

/// Why the manager cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum NotifyError {
    /// There is no such socket.
    #[error("NOTIFY_SOCKET = {socket}: {source}")]
    Socket {
        /// What the variable says.
        socket: String,
        /// The system's error.
        source: io::Error,
    },
    /// How long the manager waits cannot be understood.
    #[error("WATCHDOG_USEC = {value}: must be {} to {}", LEAST.as_micros(), u64::MAX)]
    Watchdog {
        /// What the variable says.
        value: String,
    },
}

/// The service manager, if there is one.
#[derive(Clone, Debug, Default)]
pub struct Notifier {
    socket: Option<Arc<UnixDatagram>>,
    watchdog: Option<Duration>,
}

impl Notifier {
    /// The one that this process's environment names.
    pub fn from_environment() -> Result<Self, NotifyError> {
        let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
        let Some(socket) = variable("NOTIFY_SOCKET") else { return Ok(Self::default()) };
        let pid = variable("WATCHDOG_PID");
        // The variables may be those of a parent.
        let ours = pid.is_none_or(|pid| *pid == *std::process::id().to_string());
        Self::new(&socket, variable("WATCHDOG_USEC").filter(|_| ours).as_deref())
    }

    /// One that listens at `socket`, and ends this process if it hears nothing of the loop for `watchdog` microseconds.
    fn new(socket: &OsStr, watchdog: Option<&OsStr>) -> Result<Self, NotifyError> {
        let connect = || -> io::Result<UnixDatagram> {
            let address = match socket.as_bytes() {
                [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
                [b'/', ..] => SocketAddr::from_pathname(socket)?,
                _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a path nor @NAME")),
            };
            let unbound = UnixDatagram::unbound()?;
            unbound.connect_addr(&address)?;
            unbound.set_nonblocking(true)?;
            Ok(unbound)
        };
        let shown = |text: &OsStr| text.to_string_lossy().into_owned();
        let connected = connect().map_err(|source| NotifyError::Socket { socket: shown(socket), source })?;
        let limit = |text: &OsStr| {
            let microseconds = text.to_str().and_then(|text| text.parse().ok()).map(Duration::from_micros);
            let usable = microseconds.filter(|limit| *limit >= LEAST);
            usable.ok_or_else(|| NotifyError::Watchdog { value: shown(text) })
        };
        Ok(Self { socket: Some(Arc::new(connected)), watchdog: watchdog.map(limit).transpose()? })
    }

    /// It serves. `status` is what the manager shows.
    pub(crate) fn ready(&self, status: &str) {
        self.tell(&format!("READY=1\nSTATUS={}", status.replace('\n', " ")));
    }

    /// It stops, as it was asked to.
    pub(crate) fn stopping(&self) {
        self.tell("STOPPING=1\nSTATUS=VMs keep what was published to them");
    }

    /// For the loop that the manager watches over, if it does.
    pub(crate) fn watchdog(&self) -> Option<Watchdog> {
        let every = self.watchdog? / FEEDS;
        Some(Watchdog { notifier: self.clone(), every, due: Instant::now() })
    }

    /// False if the manager has no room, or is gone.
    fn tell(&self, message: &str) -> bool {
        self.socket.as_ref().is_none_or(|socket| socket.send(message.as_bytes()).is_ok())
    }
}

/// Tells the manager that a loop turns. The loop itself has to own it: another thread would go on while that one stands still.
#[derive(Debug)]
pub(crate) struct Watchdog {
    notifier: Notifier,
    every: Duration,
    due: Instant,
}

impl Watchdog {
    /// The loop has turned. The manager is told if it is time.
    pub(crate) fn turned(&mut self, now: Instant) {
        if self.due <= now {
            let told = self.notifier.tell("WATCHDOG=1");
            self.due = now + if told { self.every } else { self.every / AGAIN };
        }
    }

    /// When the loop has to turn again at the latest.
    pub(crate) fn due(&self) -> Instant {
        self.due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(manager: &UnixDatagram) -> String {
        let mut bytes = [0; 256];
        let length = manager.recv(&mut bytes).expect("a message");
        String::from_utf8(bytes[..length].to_vec()).expect("UTF-8")
    }

    fn manager(address: &SocketAddr) -> UnixDatagram {
        let manager = UnixDatagram::bind_addr(address).expect("bound");
        manager.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
        manager
    }

    #[test]
    fn both_kinds_of_addresses_are_reached() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notify");
        let name = format!("@vnuma-test-{}", std::process::id());
        let named = SocketAddr::from_abstract_name(&name[1..]).expect("a name");
        for (socket, address) in [
            (path.as_os_str(), SocketAddr::from_pathname(&path).expect("a path")),
            (OsStr::new(&name), named),
        ] {
            let manager = manager(&address);
            let notifier = Notifier::new(socket, None).expect("connected");
            assert!(notifier.watchdog().is_none());
            notifier.ready("two\nlines");
            assert_eq!(received(&manager), "READY=1\nSTATUS=two lines");
            notifier.stopping();
            assert!(received(&manager).starts_with("STOPPING=1\n"));
        }
    }

    #[test]
    fn what_cannot_be_is_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notify");
        let error = |socket: &OsStr, watchdog: Option<&str>| {
            Notifier::new(socket, watchdog.map(OsStr::new)).expect_err("refused").to_string()
        };
        assert!(error(path.as_os_str(), None).starts_with(&format!("NOTIFY_SOCKET = {}: ", path.display())));
        assert_eq!(
            error(OsStr::new("vsock:1:2"), None),
            "NOTIFY_SOCKET = vsock:1:2: neither a path nor @NAME"
        );
        let _manager = manager(&SocketAddr::from_pathname(&path).expect("a path"));
        for value in ["", "soon", "-1", "99999"] {
            let refused = error(path.as_os_str(), Some(value));
            assert_eq!(refused, format!("WATCHDOG_USEC = {value}: must be 100000 to 18446744073709551615"));
        }
    }

    /// A manager that hangs delays nothing, and hears of the loop when it reads again.
    #[test]
    fn a_manager_that_does_not_read_stops_no_loop() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notify");
        let manager = manager(&SocketAddr::from_pathname(&path).expect("a path"));
        let notifier = Notifier::new(path.as_os_str(), Some(OsStr::new("3000000"))).expect("connected");
        let mut watchdog = notifier.watchdog().expect("wanted");
        let mut now = watchdog.due();
        let mut told = 0;
        while told < 100_000 {
            watchdog.turned(now);
            match watchdog.due() - now {
                every if every == Duration::from_secs(1) => told += 1,
                again => {
                    assert_eq!(again, Duration::from_millis(100));
                    break;
                }
            }
            // Nothing is sent before it is time.
            watchdog.turned(now);
            now = watchdog.due();
        }
        assert!(told > 0 && told < 100_000, "{told} messages for a manager that reads none");
        for _ in 0..told {
            assert_eq!(received(&manager), "WATCHDOG=1");
        }
        watchdog.turned(watchdog.due());
        assert_eq!(received(&manager), "WATCHDOG=1");
    }
}

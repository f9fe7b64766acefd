//! The local terminal of a user: raw mode and size.

use std::io::{self, IsTerminal};
use std::sync::{Mutex, PoisonError};

use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};

/// The settings before raw mode.
static SAVED: Mutex<Option<Termios>> = Mutex::new(None);

/// Raw mode while it lives.
#[derive(Debug)]
pub struct RawMode(());

impl RawMode {
    /// Puts the terminal on stdin into raw mode; `None` if there is none.
    pub fn enter() -> io::Result<Option<Self>> {
        if !io::stdin().is_terminal() {
            return Ok(None);
        }
        let settings = tcgetattr(io::stdin())?;
        let mut raw = settings.clone();
        cfmakeraw(&mut raw);
        *SAVED.lock().unwrap_or_else(PoisonError::into_inner) = Some(settings);
        tcsetattr(io::stdin(), SetArg::TCSADRAIN, &raw)?;
        Ok(Some(Self(())))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

/// Ends raw mode if it is on; for ends of the process that pass no `Drop`.
pub fn restore() {
    if let Some(settings) = SAVED.lock().unwrap_or_else(PoisonError::into_inner).take() {
        // There is no way left to report an error.
        let _ = tcsetattr(io::stdin(), SetArg::TCSADRAIN, &settings);
    }
}

/// Rows and columns of the terminal on stdout, if there is one.
pub fn size() -> Option<(u16, u16)> {
    // SAFETY: all-zero is a valid winsize.
    let mut size: libc::winsize = unsafe { std::mem::zeroed() };
    // SAFETY: TIOCGWINSZ writes one winsize to the address given, which is one.
    let result = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &mut size) };
    (result == 0 && size.ws_row > 0 && size.ws_col > 0).then_some((size.ws_row, size.ws_col))
}

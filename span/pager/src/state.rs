//! The state of each page, as the pager has set it up.
//!
//! ```text
//!                 install(ReadWrite)
//!      ┌──────────────────────────────────────┐
//!      │    install(ReadOnly)      upgrade    ▼
//!   Invalid ────────────▶ ReadOnly ───▶ ReadWrite
//!    ▲ │ ▲                │  ▲             │ │
//!    │ │ └── invalidate ──┘  └─ downgrade ─┘ │
//!    │ │ └────────── invalidate ─────────────┘
//!    │ └─ poison (from any) ─▶ Poisoned ─ install ─▶ ReadOnly, ReadWrite
//! ```
//!
//! One word for each page: the state, a lock bit for the few system calls of a change, and the number of pins.

use std::{
    fmt, io,
    sync::atomic::{AtomicU16, Ordering},
};

/// What a guest may do with a page without a fault that reaches the handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PageState {
    /// Nothing: the first access waits for the handler.
    Invalid,
    /// Read: the first write waits for the handler.
    ReadOnly,
    /// Read and write.
    ReadWrite,
    /// The content is lost: an access ends in SIGBUS, and in `KVM_RUN` with an error.
    Poisoned,
}

impl PageState {
    /// By their numbers.
    const ALL: [Self; 4] = [Self::Invalid, Self::ReadOnly, Self::ReadWrite, Self::Poisoned];

    fn from_bits(bits: u16) -> Self {
        Self::ALL[usize::from(bits & STATE)]
    }

    /// May a guest do this now?
    pub fn allows(self, access: Access) -> bool {
        match access {
            Access::Read => matches!(self, Self::ReadOnly | Self::ReadWrite),
            Access::Write => self == Self::ReadWrite,
        }
    }
}

impl fmt::Display for PageState {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Invalid => "invalid",
            Self::ReadOnly => "read-only",
            Self::ReadWrite => "read-write",
            Self::Poisoned => "poisoned",
        })
    }
}

/// What a node wants to do with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Access {
    /// Load.
    Read,
    /// Store, or load and store.
    Write,
}

/// Why the state of a page was not changed.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// There is no such page.
    #[error("page {page} is outside the region, which has {pages} pages")]
    Outside {
        /// The page.
        page: u64,
        /// How many there are.
        pages: u64,
    },
    /// The page is not in a state that this can be done in. Nothing was changed.
    #[error("page {page} cannot be {act}: it is {state}")]
    State {
        /// The page.
        page: u64,
        /// What was asked for.
        act: &'static str,
        /// What it is.
        state: PageState,
    },
    /// Device code holds the page. Nothing was changed; it can be tried again when the pin is gone.
    #[error("page {page} cannot be {act}: it is pinned {pins} times")]
    Pinned {
        /// The page.
        page: u64,
        /// What was asked for.
        act: &'static str,
        /// How many pins there are.
        pins: u16,
    },
    /// The system refused. The page is as it was before, or further from the guest's reach.
    #[error("page {page}: {call}: {source}")]
    System {
        /// The page.
        page: u64,
        /// The system call.
        call: &'static str,
        /// What it said.
        source: io::Error,
    },
}

const STATE: u16 = 0b11;
const LOCKED: u16 = 0b100;
const PIN: u16 = 0b1000;
/// Largest number of pins of a page.
const PIN_LIMIT: u16 = u16::MAX / PIN;

/// States of all pages of a region.
#[derive(Debug)]
pub(crate) struct States {
    words: Box<[AtomicU16]>,
}

impl States {
    pub(crate) fn new(pages: usize) -> Self {
        Self { words: (0..pages).map(|_| AtomicU16::new(0)).collect() }
    }

    pub(crate) fn len(&self) -> u64 {
        self.words.len() as u64
    }

    fn word(&self, page: u64) -> Result<&AtomicU16, PageError> {
        let index = usize::try_from(page).ok();
        let outside = PageError::Outside { page, pages: self.len() };
        index.and_then(|index| self.words.get(index)).ok_or(outside)
    }

    /// The state as it is at this moment; of a page that is being changed, the state before.
    pub(crate) fn get(&self, page: u64) -> Result<PageState, PageError> {
        Ok(PageState::from_bits(self.word(page)?.load(Ordering::Acquire)))
    }

    /// Does device code hold the page at this moment?
    pub(crate) fn is_pinned(&self, page: u64) -> Result<bool, PageError> {
        Ok(self.word(page)?.load(Ordering::Acquire) >= PIN)
    }

    /// Waits until no other thread changes the page. A change is a few system calls, none of which waits for a guest.
    pub(crate) fn lock(&self, page: u64) -> Result<Locked<'_>, PageError> {
        let word = self.word(page)?;
        let mut spins = 0_u32;
        loop {
            let bits = word.fetch_or(LOCKED, Ordering::Acquire);
            if bits & LOCKED == 0 {
                return Ok(Locked { word, page, state: PageState::from_bits(bits), pins: bits / PIN });
            }
            spins += 1;
            if spins.is_multiple_of(64) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }

    pub(crate) fn unpin(&self, page: u64) {
        if let Ok(word) = self.word(page) {
            word.fetch_sub(PIN, Ordering::AcqRel);
        }
    }
}

/// A page has as many pins as can be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TooMany {
    page: u64,
}

impl From<TooMany> for PageError {
    fn from(error: TooMany) -> Self {
        Self::Pinned { page: error.page, act: "pinned once more", pins: PIN_LIMIT }
    }
}

/// A page that no other thread changes, until this is dropped.
#[derive(Debug)]
pub(crate) struct Locked<'a> {
    word: &'a AtomicU16,
    pub(crate) page: u64,
    pub(crate) state: PageState,
    pins: u16,
}

impl Locked<'_> {
    /// Nothing that takes rights from the guest is done while device code holds the page.
    pub(crate) fn unpinned(&self, act: &'static str) -> Result<(), PageError> {
        match self.pins {
            0 => Ok(()),
            pins => Err(PageError::Pinned { page: self.page, act, pins }),
        }
    }

    pub(crate) fn refuse<T>(&self, act: &'static str) -> Result<T, PageError> {
        Err(PageError::State { page: self.page, act, state: self.state })
    }

    pub(crate) fn pin(&self) -> Result<(), TooMany> {
        if self.word.load(Ordering::Acquire) / PIN >= PIN_LIMIT {
            return Err(TooMany { page: self.page });
        }
        self.word.fetch_add(PIN, Ordering::AcqRel);
        Ok(())
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let state = self.state as u16;
        // The number of pins may have changed since: pins are released without the lock.
        let change = |bits: u16| Some(bits & !(STATE | LOCKED) | state);
        let _ = self.word.fetch_update(Ordering::Release, Ordering::Relaxed, change);
    }
}

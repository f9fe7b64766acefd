//! What is done to pages: access, contents, twins.

use crate::NodeError;
use std::{
    collections::HashMap,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use vnuma_abi_dsm_wire::{Delta, PAGE_SIZE, diff};
use vnuma_coherence::{Access, Payload};
use vnuma_dsm_pager::{Access as Right, Page, PageError, PageState, Region};

/// A mistake on purpose, by which tests show that they would find one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sabotage {
    /// None.
    #[default]
    None,
    /// An invalidation is acknowledged, and the copy is dropped some time later.
    LateInvalidation,
    /// An invalidation is not sent, and its acknowledgement is made up: the protocol is broken, not the pages.
    SkipInvalidation,
    /// The thread that is to handle a fault on this page panics.
    Panic {
        /// The page.
        page: u64,
    },
}

/// How long a copy outlives its invalidation.
const LATE: Duration = Duration::from_millis(1);

/// What came, or goes, beside a message.
#[derive(Debug, Default)]
pub(crate) enum Contents {
    #[default]
    None,
    Page(Box<Page>),
    Delta(Vec<u8>),
}

/// The pages of a shard, as threads of the program see them.
#[derive(Debug)]
pub(crate) struct Pages {
    region: Arc<Region>,
    /// Contents that differences start from.
    twins: HashMap<u64, Box<Page>>,
    /// Twins that are not used any more: their memory is.
    spare: Vec<Box<Page>>,
    pub sabotage: Sabotage,
    pub pin_limit: Duration,
    late: Vec<(Instant, u64)>,
}

/// Spare twins that are kept.
const SPARE: usize = 64;

impl Pages {
    pub fn new(region: Arc<Region>, sabotage: Sabotage, pin_limit: Duration) -> Self {
        Self { region, twins: HashMap::new(), spare: Vec::new(), sabotage, pin_limit, late: Vec::new() }
    }

    /// Changes what threads may do. A twin is made of the content before they may write.
    pub fn set_access(&mut self, page: u64, access: Access, twin: bool) -> Result<(), NodeError> {
        if self.sabotage == Sabotage::LateInvalidation && access == Access::None {
            self.late.push((Instant::now() + LATE, page));
            return Ok(());
        }
        self.settle(page)?;
        if twin {
            self.keep_twin(page)?;
        }
        self.change(page, access)
    }

    fn change(&mut self, page: u64, access: Access) -> Result<(), NodeError> {
        let region = &self.region;
        match (region.state(page)?, access) {
            (PageState::Invalid | PageState::Poisoned, Access::None)
            | (PageState::ReadOnly, Access::Read)
            | (PageState::ReadWrite, Access::Write) => {}
            (PageState::Invalid | PageState::Poisoned, Access::Read) => {
                region.install_with(page, Right::Read, |_| {})?;
            }
            (PageState::Invalid | PageState::Poisoned, Access::Write) => {
                region.install_with(page, Right::Write, |_| {})?;
            }
            (PageState::ReadOnly, Access::Write) => region.upgrade(page)?,
            (PageState::ReadWrite, Access::Read) => self.unpinned(|| region.downgrade(page, |_| ()))?,
            (PageState::ReadOnly | PageState::ReadWrite, Access::None) => {
                self.unpinned(|| region.invalidate(page, |_| ()))?;
            }
        }
        Ok(())
    }

    fn keep_twin(&mut self, page: u64) -> Result<(), NodeError> {
        let twin = self.twins.entry(page).or_insert_with(|| blank(&mut self.spare));
        // A page that can be written already has its twin.
        if self.region.state(page)? != PageState::ReadWrite {
            self.region.peek(page, |bytes| twin.copy_from_slice(bytes))?;
        }
        Ok(())
    }

    /// The page goes to another node, and this one has no use for its twin.
    pub fn forget_twin(&mut self, page: u64) {
        if let Some(twin) = self.twins.remove(&page)
            && self.spare.len() < SPARE
        {
            self.spare.push(twin);
        }
    }

    /// Writes what came, keeps a twin, and maps the page. Without access it is mapped later.
    pub fn install(
        &mut self,
        page: u64,
        access: Access,
        contents: &Contents,
        twin: bool,
    ) -> Result<(), NodeError> {
        self.settle(page)?;
        let wrong = |detail| NodeError::Contents { page, detail };
        let delta = match contents {
            Contents::None => return Err(wrong("contents were announced, and none came")),
            Contents::Page(_) => None,
            Contents::Delta(bytes) => {
                Some(Delta::decode(bytes).map_err(|_| wrong("the difference makes no sense"))?)
            }
        };
        let right = match access {
            Access::None => None,
            Access::Read => Some(Right::Read),
            Access::Write => Some(Right::Write),
        };
        // A reader that becomes a writer and gets the whole page.
        if matches!(self.region.state(page)?, PageState::ReadOnly | PageState::ReadWrite) {
            self.change(page, Access::None)?;
        }
        let mut kept = twin.then(|| self.twins.remove(&page).unwrap_or_else(|| blank(&mut self.spare)));
        let fill = |bytes: &mut Page| {
            match (contents, &delta) {
                (Contents::Page(content), _) => bytes.copy_from_slice(&content[..]),
                (_, Some(delta)) => delta.apply(bytes),
                _ => {}
            }
            if let Some(kept) = &mut kept {
                kept.copy_from_slice(bytes);
            }
        };
        match right {
            Some(right) => self.region.install_with(page, right, fill)?,
            None => self.region.store(page, fill)?,
        }
        if let Some(kept) = kept {
            self.twins.insert(page, kept);
        }
        Ok(())
    }

    /// Takes access away, and then reads what is to be sent into `out`. Says what it is: a difference that would be too long
    /// is sent as a page.
    pub fn read(
        &mut self,
        page: u64,
        access: Access,
        payload: Payload,
        out: &mut Outgoing,
    ) -> Result<Payload, NodeError> {
        self.settle(page)?;
        self.change(page, access)?;
        let twin = match payload {
            Payload::Delta { .. } => self.twins.get(&page),
            Payload::None | Payload::Page => None,
        };
        out.delta.clear();
        let short = self.region.peek(page, |bytes| {
            let short = twin.is_some_and(|twin| diff(twin, bytes, &mut out.delta));
            if !short {
                out.page.copy_from_slice(bytes);
            }
            short
        })?;
        Ok(if short { payload } else { Payload::Page })
    }

    /// Words that differ from the twin, of a page that threads cannot write; 0 without a twin.
    pub fn changed(&self, page: u64) -> Result<u16, NodeError> {
        let Some(twin) = self.twins.get(&page) else { return Ok(0) };
        let words = |bytes: &Page| bytes.as_chunks::<8>().0.to_vec();
        let differ =
            |now: &Page| words(now).iter().zip(words(twin)).filter(|(now, then)| *now != then).count();
        Ok(self.region.peek(page, differ)? as u16)
    }

    /// Accesses fail from now on.
    pub fn poison(&mut self, page: u64) -> Result<(), NodeError> {
        self.settle(page)?;
        self.forget_twin(page);
        self.unpinned(|| self.region.poison(page))?;
        Ok(())
    }

    /// As [`Self::poison`], but does not wait.
    pub fn poison_unless_pinned(&mut self, page: u64) -> Result<(), NodeError> {
        self.settle(page)?;
        self.region.poison(page)?;
        self.forget_twin(page);
        Ok(())
    }

    /// Does what sabotage has put off: of this page, and of those whose time has come.
    fn settle(&mut self, page: u64) -> Result<(), NodeError> {
        if self.late.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        let (due, late) = self.late.iter().partition(|(at, of)| *of == page || *at <= now);
        self.late = late;
        let due: Vec<(Instant, u64)> = due;
        due.into_iter().try_for_each(|(_, page)| self.change(page, Access::None))
    }

    /// As [`Self::settle`], for the time alone. True if something is left.
    pub fn settle_late(&mut self) -> Result<bool, NodeError> {
        self.settle(u64::MAX)?;
        Ok(!self.late.is_empty())
    }

    /// Waits until device code lets go of a page that it took after the shard had looked. The shard serves nothing meanwhile.
    fn unpinned(&self, mut act: impl FnMut() -> Result<(), PageError>) -> Result<(), PageError> {
        let begin = Instant::now();
        loop {
            match act() {
                Err(PageError::Pinned { .. }) if begin.elapsed() < self.pin_limit => {
                    thread::sleep(Duration::from_micros(20));
                }
                outcome => return outcome,
            }
        }
    }
}

/// What is about to be sent.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub page: Box<Page>,
    pub delta: Vec<u8>,
}

impl Outgoing {
    pub fn new() -> Self {
        Self { page: Box::new([0; PAGE_SIZE]), delta: Vec::new() }
    }
}

fn blank(spare: &mut Vec<Box<Page>>) -> Box<Page> {
    spare.pop().unwrap_or_else(|| Box::new([0; PAGE_SIZE]))
}

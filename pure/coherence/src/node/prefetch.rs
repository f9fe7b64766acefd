//! Sequential readers: what is asked for ahead of them.
//!
//! The use of a page that was prefetched causes no fault, so it cannot be seen.
//! A reader that faults on the page just behind its window has used the window; then the window doubles.
//! An owner that refuses is using the page. What lies ahead is wanted by others then, and the window halves.

use vnuma_abi_dsm_wire::PageId;

/// Readers that are followed at a time.
const STREAMS: usize = 8;
/// Pages of the first window.
const FIRST: u32 = 2;

/// A sequential reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Stream {
    /// The page whose fault shows that it goes on.
    next: u64,
    /// Pages asked for last.
    window: u32,
}

/// The readers of a node; the one that went on last is the first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Streams {
    streams: Vec<Stream>,
}

impl Streams {
    /// A read fault on a page. Returns how many pages behind it are worth asking for; at most `most`.
    pub fn fault(&mut self, page: PageId, most: u32) -> u32 {
        let found = self.streams.iter().position(|stream| stream.next == page.0);
        let window = match found {
            Some(index) => (self.streams.remove(index).window * 2).max(FIRST).min(most),
            None => {
                self.streams.truncate(STREAMS - 1);
                0
            }
        };
        self.streams.insert(0, Stream { next: page.0.saturating_add(1 + u64::from(window)), window });
        window
    }

    /// A page that was asked for ahead of a reader is not given. What is left of the window is the half behind it.
    pub fn refused(&mut self, page: PageId) {
        let ahead =
            |stream: &&mut Stream| (1..=u64::from(stream.window)).contains(&stream.next.wrapping_sub(page.0));
        if let Some(stream) = self.streams.iter_mut().find(ahead) {
            stream.window /= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_doubles_while_a_reader_goes_on() {
        let mut streams = Streams::default();
        let mut page = 100;
        let windows: Vec<_> = (0..6)
            .map(|_| {
                let window = streams.fault(PageId(page), 16);
                page += 1 + u64::from(window);
                window
            })
            .collect();
        assert_eq!(windows, [0, 2, 4, 8, 16, 16]);
    }

    #[test]
    fn the_window_halves_when_owners_refuse() {
        let mut streams = Streams::default();
        let mut page = 100;
        let mut go_on = |streams: &mut Streams| {
            let window = streams.fault(PageId(page), 16);
            page += 1 + u64::from(window);
            (window, page)
        };
        assert_eq!([0; 4].map(|_: u32| go_on(&mut streams).0), [0, 2, 4, 8]);
        let (window, next) = go_on(&mut streams);
        assert_eq!(window, 16);
        // Those of the last window only: not the page that the reader wants next, and not one that it has used.
        streams.refused(PageId(next));
        streams.refused(PageId(next - 17));
        streams.refused(PageId(next - 1));
        assert_eq!(go_on(&mut streams).0, 16, "halved and doubled");
        let (_, next) = go_on(&mut streams);
        for page in next - 16..next {
            streams.refused(PageId(page));
        }
        assert_eq!(go_on(&mut streams).0, FIRST, "it begins anew");
    }

    #[test]
    fn random_readers_and_many_readers_get_nothing() {
        let mut streams = Streams::default();
        assert!((0..100).all(|index| streams.fault(PageId(index * 7919 % 1009), 16) == 0));
        // Eight at a time are followed.
        let mut streams = Streams::default();
        let starts: Vec<u64> = (0..8).map(|stream| stream * 1000).collect();
        assert!(starts.iter().all(|start| streams.fault(PageId(*start), 16) == 0));
        assert!(starts.iter().all(|start| streams.fault(PageId(start + 1), 16) == 2));
    }

    #[test]
    fn the_window_stays_within_the_limit() {
        let mut streams = Streams::default();
        streams.fault(PageId(0), 1);
        assert_eq!(streams.fault(PageId(1), 1), 1);
        let mut streams = Streams::default();
        streams.fault(PageId(u64::MAX), 16);
        assert_eq!(streams.fault(PageId(u64::MAX), 16), 2);
    }
}

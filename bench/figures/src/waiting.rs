//! What is waited for is said every few seconds.

use std::{
    sync::{
        Mutex, Once, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Who waits says so that often.
const WORD: Duration = Duration::from_secs(5);

/// What is waited for, the innermost one last: its number, what, and since when.
static WAITS: Mutex<Vec<(usize, String, Instant)>> = Mutex::new(Vec::new());

/// Something is waited for until this is dropped.
#[must_use]
pub struct Waiting(usize);

/// From now on the standard error output says every few seconds that this is waited for.
pub fn waiting(what: &str) -> Waiting {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    static SPEAKER: Once = Once::new();
    SPEAKER.call_once(|| drop(thread::spawn(speak)));
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    waits(|waits| waits.push((number, what.to_owned(), Instant::now())));
    Waiting(number)
}

impl Drop for Waiting {
    fn drop(&mut self) {
        waits(|waits| waits.retain(|(number, ..)| *number != self.0));
    }
}

fn waits<T>(with: impl FnOnce(&mut Vec<(usize, String, Instant)>) -> T) -> T {
    with(&mut WAITS.lock().unwrap_or_else(PoisonError::into_inner))
}

fn speak() {
    loop {
        thread::sleep(WORD);
        waits(|waits| word(waits, Instant::now())).inspect(|word| eprintln!("{word}"));
    }
}

/// About the innermost one that has taken some time.
fn word(waits: &[(usize, String, Instant)], now: Instant) -> Option<String> {
    let age = |since: &Instant| now.saturating_duration_since(*since);
    let (_, what, since) = waits.iter().rfind(|(.., since)| age(since) >= WORD)?;
    Some(format!("waiting for {what}: {} s", age(since).as_secs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_taken_some_time_is_said_the_innermost_first() {
        let (now, of) = (Instant::now(), |what: &str, s| (0, what.to_owned(), Duration::from_secs(s)));
        let said = |waits: &[(usize, String, Duration)]| {
            let since = |(number, what, age): &(usize, String, Duration)| (*number, what.clone(), now - *age);
            word(&waits.iter().map(since).collect::<Vec<_>>(), now)
        };
        assert_eq!(
            said(&[of("a cell", 30), of("a VM", 12), of("an answer", 1)]).unwrap(),
            "waiting for a VM: 12 s"
        );
        assert_eq!(said(&[of("an answer", 1)]), None);
        let (one, other) = (waiting("one"), waiting("other"));
        drop(one);
        let left = || waits(|waits| waits.iter().map(|(_, what, _)| what.clone()).collect::<Vec<_>>());
        assert!(left().contains(&"other".to_owned()) && !left().contains(&"one".to_owned()));
        drop(other);
        assert!(!left().contains(&"other".to_owned()));
    }
}

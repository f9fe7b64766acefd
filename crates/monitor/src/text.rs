//! Foreign text in messages.

/// Longest piece of foreign text in a message.
const SHOWN: usize = 80;

/// At most [`SHOWN`] characters of `text`, with everything escaped that would disturb a
/// terminal or a log.
pub(crate) fn shorten(text: &str) -> String {
    let mut shown: String = text.trim_end().chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if text.trim_end().chars().nth(SHOWN).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_and_odd_texts_are_tamed() {
        assert_eq!(shorten("12\n"), "12");
        assert_eq!(shorten("a\u{1b}[2Jb"), "a\\u{1b}[2Jb");
        assert_eq!(shorten(&"x".repeat(81)), format!("{}…", "x".repeat(80)));
        assert_eq!(shorten(&"x".repeat(80)), "x".repeat(80));
    }
}

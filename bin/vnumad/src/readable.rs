//! Messages that quote what others wrote.

/// Longest message, in bytes, give or take its last character.
const LIMIT: usize = 1000;

/// A message of bounded length, with everything escaped that would disturb a terminal or a log.
pub(crate) fn readable(message: &str) -> String {
    let mut text = String::new();
    for c in message.chars() {
        // Escaped, a character is several.
        if text.len() >= LIMIT {
            text.push('…');
            break;
        }
        if c.is_control() { text.extend(c.escape_debug()) } else { text.push(c) }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_one_line_of_bounded_length() {
        assert_eq!(readable("a `\u{1b}[2J`\nb \"c\" é"), "a `\\u{1b}[2J`\\nb \"c\" é");
        assert_eq!(readable(&"x".repeat(LIMIT)), "x".repeat(LIMIT));
        assert_eq!(readable(&"x".repeat(LIMIT + 1)), format!("{}…", "x".repeat(LIMIT)));
        assert!(readable(&"\u{1b}".repeat(LIMIT)).len() < LIMIT + 20);
    }
}

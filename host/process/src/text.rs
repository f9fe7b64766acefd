//! Foreign text in messages: of bounded length, and with everything escaped that would disturb a terminal or a log.

/// Longest piece of foreign text in a message.
const SHOWN: usize = 80;

/// Longest reason that quotes foreign text, in bytes, give or take its last character.
const REASON: usize = 300;

/// A reason that may quote foreign text.
pub fn sanitize_reason(reason: &str) -> String {
    sanitize(reason, REASON)
}

/// A message that may quote foreign text, of `limit` bytes, give or take its last character.
pub fn sanitize(message: &str, limit: usize) -> String {
    let mut shown = String::new();
    for c in message.chars() {
        // Escaped, a character is several.
        if shown.len() >= limit {
            shown.push('…');
            break;
        }
        if c.is_control() { shown.extend(c.escape_debug()) } else { shown.push(c) }
    }
    shown
}

/// At most [`SHOWN`] characters of `text`.
pub fn sanitize_short(text: &str) -> String {
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
        assert_eq!(sanitize_short("12\n"), "12");
        assert_eq!(sanitize_short("a\u{1b}[2Jb"), "a\\u{1b}[2Jb");
        assert_eq!(sanitize_short(&"x".repeat(81)), format!("{}…", "x".repeat(80)));
        assert_eq!(sanitize_short(&"x".repeat(80)), "x".repeat(80));
        assert_eq!(sanitize_reason("`a` \u{1b}\n \"c\" é"), "`a` \\u{1b}\\n \"c\" é");
        assert_eq!(sanitize_reason(&"x".repeat(301)), format!("{}…", "x".repeat(300)));
        assert!(sanitize_reason(&"\u{1b}".repeat(300)).len() < 320);
    }
}

//! Columns that line up.

/// Rows below a heading.
pub struct Table {
    /// Is it aligned to the right, of each column.
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings, two spaces apart; `>` before one aligns its column to the right.
    pub fn new(headings: &str) -> Self {
        let headings: Vec<&str> = headings.split("  ").collect();
        let right = |heading: &&str| heading.starts_with('>');
        let text = |heading: &&str| heading.trim_start_matches('>').to_owned();
        Self { right: headings.iter().map(right).collect(), rows: vec![headings.iter().map(text).collect()] }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl Into<Vec<String>>) {
        self.rows.push(cells.into());
    }

    /// The text, each line indented.
    pub fn text(&self, indent: usize) -> String {
        let width = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max()
        };
        let widths: Vec<usize> = (0..self.right.len()).map(|column| width(column).unwrap_or(0)).collect();
        let mut text = String::new();
        for row in &self.rows {
            let cells = row.iter().zip(&widths).zip(&self.right).map(|((cell, &width), right)| {
                // Not by a width of format!, which has 16 bits: a VM's problem may be any text.
                let space = " ".repeat(width - cell.chars().count());
                if *right { space + cell } else { cell.clone() + &space }
            });
            let line = cells.collect::<Vec<_>>().join("  ");
            text.push_str(&format!("{:indent$}{}\n", "", line.trim_end()));
        }
        text
    }
}

/// All of them, or `-` where there is none.
pub fn list(items: impl Iterator<Item = String>) -> String {
    let items: Vec<String> = items.collect();
    if items.is_empty() { "-".to_owned() } else { items.join(", ") }
}

/// A value, or `-` where there is none.
pub fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or("-".to_owned(), |value| value.to_string())
}

/// A size in the largest unit that keeps it above 10, from KiB.
pub fn size(kib: u64) -> String {
    match kib {
        0..10_240 => format!("{kib} KiB"),
        10_240..10_485_760 => format!("{} MiB", kib >> 10),
        _ => format!("{} GiB", kib >> 20),
    }
}

/// The same, from bytes.
pub fn shown(bytes: u64) -> String {
    size(bytes >> 10)
}

/// Text of others, without what could disturb a terminal.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// The same for text that may have several lines.
pub fn plain_lines(text: &str) -> String {
    text.split('\n').map(plain).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new("NAME  >CPU  STATE");
        table.row(["a".into(), "12".into(), "true".into()]);
        table.row(["longer".into(), "3".into(), "".into()]);
        assert_eq!(table.text(1), " NAME    CPU  STATE\n a        12  true\n longer    3\n");
    }

    #[test]
    fn a_cell_may_be_of_any_length() {
        let mut table = Table::new("A  >B");
        table.row(["x".repeat(100_000), "1".into()]);
        table.row(["y".into(), "2".into()]);
        assert!(table.text(0).lines().all(|line| line.len() == 100_003));
    }

    #[test]
    fn sizes_and_gaps() {
        assert_eq!(
            (size(2048), size(10_240), size(64 << 20)),
            ("2048 KiB".into(), "10 MiB".into(), "64 GiB".into())
        );
        assert_eq!((or_dash(None::<u32>), or_dash(Some(3))), ("-".into(), "3".into()));
        assert_eq!(plain("a\u{1b}[31mb"), "a\u{fffd}[31mb");
        assert_eq!(plain_lines("a\u{1b}\nb\r"), "a\u{fffd}\nb\u{fffd}");
    }
}

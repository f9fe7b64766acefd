//! Sizes as people read them.

/// A number of bytes by the largest unit that divides it: `8 GiB`, `1536 MiB`, `1 byte`.
pub fn shown_bytes(bytes: u64) -> String {
    let units = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(size, _)| bytes >= *size && bytes.is_multiple_of(*size)) {
        Some((size, name)) => format!("{} {name}", bytes / size),
        None if bytes == 1 => "1 byte".to_owned(),
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::shown_bytes;

    #[test]
    fn the_largest_unit_that_divides_is_used() {
        let shown = [0, 1, 1000, 4096, 1536 << 20, 8 << 30, 3 << 40].map(shown_bytes);
        assert_eq!(shown, ["0 bytes", "1 byte", "1000 bytes", "4 KiB", "1536 MiB", "8 GiB", "3 TiB"]);
    }
}

//! Which Debian mirror packages come from: `$VNUMA_DEBIAN_MIRROR`, else the one that this machine's own
//! apt is configured with, else the public one.

use std::path::Path;

/// The public mirror.
const DEFAULT: &str = "http://deb.debian.org/debian";

/// The mirror to use.
pub fn debian_mirror() -> String {
    if let Ok(mirror) = std::env::var("VNUMA_DEBIAN_MIRROR")
        && is_mirror(&mirror)
    {
        return mirror;
    }
    configured(Path::new("/etc/apt")).unwrap_or_else(|| DEFAULT.into())
}

/// Looks through sources.list and sources.list.d, in apt's order.
fn configured(apt: &Path) -> Option<String> {
    let mut files = vec![apt.join("sources.list")];
    let mut parts: Vec<_> = std::fs::read_dir(apt.join("sources.list.d"))
        .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default();
    parts.sort();
    files.extend(parts);
    files.iter().find_map(|file| {
        let text = std::fs::read_to_string(file).ok()?;
        match file.extension()?.to_str()? {
            "list" => from_list(&text),
            "sources" => from_deb822(&text),
            _ => None,
        }
    })
}

/// One-line style: `deb [options] URI SUITE COMPONENT...`
fn from_list(text: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let rest = line.trim().strip_prefix("deb ")?.trim_start();
        let rest = match rest.strip_prefix('[') {
            Some(options) => options.split_once(']')?.1,
            None => rest,
        };
        rest.split_whitespace().next().filter(|uri| is_mirror(uri)).map(str::to_owned)
    })
}

/// Deb822 style: paragraphs of `Key: value` with the addresses in `URIs`.
fn from_deb822(text: &str) -> Option<String> {
    text.split("\n\n").find_map(|paragraph| {
        let value = |key: &str| {
            paragraph.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                name.eq_ignore_ascii_case(key).then(|| value.trim())
            })
        };
        let enabled = value("Enabled").is_none_or(|value| !value.eq_ignore_ascii_case("no"));
        let binary = value("Types").is_some_and(|types| types.split_whitespace().any(|kind| kind == "deb"));
        let uris = value("URIs").filter(|_| enabled && binary)?;
        uris.split_whitespace().find(|uri| is_mirror(uri)).map(str::to_owned)
    })
}

/// Debian's main archive ends in `/debian` on every mirror; its security archive and others do not.
fn is_mirror(uri: &str) -> bool {
    let scheme = ["http://", "https://", "file:/"].iter().any(|scheme| uri.starts_with(scheme));
    let clean = uri.chars().all(|c| c.is_ascii_graphic());
    scheme && clean && uri.trim_end_matches('/').ends_with("/debian")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_archive_in_both_styles() {
        let list = "# deb http://old/debian x main\ndeb https://other/node y main\n\
                    deb [arch=amd64 signed-by=/k] https://mirror/debian/ bookworm main\n";
        assert_eq!(from_list(list).unwrap(), "https://mirror/debian/");
        let sources = "Types: deb\nEnabled: no\nURIs: http://off/debian\n\n\
                       Types: deb\nURIs: http://sec/debian-security\n\nTypes: deb-src\nURIs: http://s/debian\n\n\
                       Types: deb\n# comment: yes\nURIs: http://a/x http://right/debian\nSuites: bookworm\n";
        assert_eq!(from_deb822(sources).unwrap(), "http://right/debian");
    }

    #[test]
    fn finds_nothing_in_nothing() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(configured(directory.path()), None);
        std::fs::create_dir(directory.path().join("sources.list.d")).unwrap();
        std::fs::write(directory.path().join("sources.list.d/a.sources"), "Types: deb\nURIs: x\n").unwrap();
        assert_eq!(configured(directory.path()), None);
    }

    #[test]
    fn an_address_with_spaces_or_of_another_kind_is_no_mirror() {
        assert!(is_mirror("http://deb.debian.org/debian"));
        for bad in ["http://deb.debian.org/debian-security", "ftp://x/debian", "http://x/a b/debian", ""] {
            assert!(!is_mirror(bad), "{bad}");
        }
    }
}

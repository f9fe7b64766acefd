//! Names of VMs: they become part of paths, of URLs and of what a terminal shows.

use crate::VmError;
use vnuma_process::text::sanitize_short;

/// Longest name, bytes.
const LIMIT: usize = 64;

/// Checks a name.
pub fn check_name(name: &str) -> Result<(), VmError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-+@:".contains(&byte);
    let reason = if name.is_empty() {
        "it is empty"
    } else if name.len() > LIMIT {
        "it has more than 64 bytes"
    } else if !name.bytes().all(plain) {
        "only letters, digits and _ . - + @ : can be in it"
    } else if !name.as_bytes()[0].is_ascii_alphanumeric() {
        "it does not begin with a letter or digit"
    } else {
        return Ok(());
    };
    Err(VmError::Name { name: sanitize_short(name), reason })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names() {
        for name in ["a", "web-1", "instance-0000002f", "0", "a.b_c@d:e+f", &"x".repeat(64)] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        for name in ["", ".", "..", ".a", "-a", "a/b", "a b", "a\nb", "ä", &"x".repeat(65)] {
            assert!(check_name(name).is_err(), "{name}");
        }
        assert_eq!(
            check_name("a/../b").unwrap_err().to_string(),
            "VM name `a/../b` is refused: only letters, digits and _ . - + @ : can be in it"
        );
    }

    proptest! {
        #[test]
        fn accepted_names_are_one_harmless_path_component(name in ".{0,70}") {
            if check_name(&name).is_ok() {
                let path = std::path::Path::new(&name);
                prop_assert_eq!(path.components().count(), 1);
                prop_assert_eq!(path.file_name(), Some(name.as_ref()));
            }
        }
    }
}

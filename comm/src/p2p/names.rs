//! Names of calls that arrive from other processes, kept for the life of this one.

use crate::sync::real::Mutex;

/// Longest name that travels, in bytes; a longer one is cut.
pub(super) const LONGEST: usize = 64;
/// Number of names that are kept. Further names are left out of errors, so that a faulty peer cannot fill the memory.
const MOST: usize = 1024;

static NAMES: Mutex<Vec<&'static str>> = Mutex::fixed(Vec::new());

/// Returns `name` as a name of a call; `None` if too many others are kept already.
pub(super) fn intern(name: &str) -> Option<&'static str> {
    let mut names = NAMES.lock();
    if let Some(known) = names.iter().find(|known| **known == name) {
        return Some(known);
    }
    if names.len() == MOST {
        return None;
    }
    let kept: &'static str = Box::leak(name.into());
    names.push(kept);
    Some(kept)
}

/// Cuts `name` at the last character that ends within [`LONGEST`].
pub(super) fn cut(name: &str) -> &str {
    &name[..name.floor_char_boundary(LONGEST)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_kept_once_and_cut_between_characters() {
        let (a, b) = (intern("one").unwrap(), intern(&String::from("one")).unwrap());
        assert!(std::ptr::eq(a, b));
        let long = format!("{}é", "x".repeat(LONGEST - 1));
        assert_eq!(cut(&long), "x".repeat(LONGEST - 1));
        assert_eq!(cut("short"), "short");
    }
}

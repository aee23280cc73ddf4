//! Entries of parameters that have several names.

use std::collections::BTreeMap;

/// Returns the entry of a parameter that `get` finds by its name or another of its names.
pub(crate) fn find<T>(
    name: &str,
    get: impl Fn(&str) -> Option<T>,
    tied: &BTreeMap<String, String>,
) -> Option<T> {
    if let Some(entry) = get(name) {
        return Some(entry);
    }
    let (whose, bare) = name.split_at(of_whom(name));
    let own = tied.get(bare).map_or(bare, |to| to);
    let others = tied.iter().filter(|(_, to)| *to == own).map(|(other, _)| &**other);
    let mut names = std::iter::once(own).chain(others);
    names.find_map(|bare| get(&format!("{whose}{bare}")))
}

/// Returns the index at which a parameter's own name begins in a tensor's name, which may have a prefix for a worker or fragment.
fn of_whom(name: &str) -> usize {
    let whose = ["worker.", "fragment.", "sent."].iter().any(|whose| name.starts_with(whose));
    name.find('/').filter(|_| whose).map_or(0, |slash| slash + 1)
}

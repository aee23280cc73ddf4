//! Environment of a program whose malloc keeps freed memory, on huge pages: a freed vector costs no page faults when it is allocated
//! again.

use std::process::Command;

/// Tunables of glibc, with values. `mmap_max` 0: no allocation has a mapping of its own, which its `free` would give back;
/// `mmap_threshold` does the same for the C library's threads; `trim_threshold`: the heap's end is not given back; `hugetlb` 1: the
/// heap asks for transparent huge pages.
const TUNABLES: [(&str, &str); 4] = [
    ("glibc.malloc.hugetlb", "1"),
    ("glibc.malloc.mmap_max", "0"),
    ("glibc.malloc.mmap_threshold", "68719476736"),
    ("glibc.malloc.trim_threshold", "68719476736"),
];

/// Variables with the same effect, except for huge pages, in every version of glibc.
const VARIABLES: [(&str, &str); 2] = [("MALLOC_MMAP_MAX_", "0"), ("MALLOC_TRIM_THRESHOLD_", "68719476736")];

/// Dynamic loaders of glibc, which list the tunables.
const LOADERS: [&str; 2] = ["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"];

/// Returns the loader's list of tunables; empty without such a loader.
pub(super) fn tunables() -> String {
    let list = |loader: &&str| {
        let output = Command::new(loader).arg("--list-tunables").output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    LOADERS.iter().find_map(list).unwrap_or_default()
}

/// Returns the variables for a C library with these tunables: the tunables if it knows all of them, else [`VARIABLES`].
pub(super) fn kept(tunables: &str) -> Vec<(String, String)> {
    let known = |name: &str| {
        let mut lines = tunables.lines();
        lines.any(|line| line.split_once(':').is_some_and(|(own, _)| own == name))
    };
    let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    if !TUNABLES.iter().all(|(name, _)| known(name)) {
        return VARIABLES.into_iter().map(owned).collect();
    }
    let settings: Vec<String> = TUNABLES.iter().map(|(name, value)| format!("{name}={value}")).collect();
    vec![("GLIBC_TUNABLES".to_owned(), settings.join(":"))]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tunables_are_used_if_all_are_known() {
        let list = "glibc.rtld.nns: 0x4 (min: 0x1, max: 0x10)\nglibc.malloc.hugetlb: 0x0 (min: 0x0)\n\
                    glibc.malloc.mmap_max: 0 (min: 0)\nglibc.malloc.mmap_threshold: 0x0\nglibc.malloc.trim_threshold: 0x0\n";
        let [(name, value)] = <[_; 1]>::try_from(kept(list)).unwrap();
        assert_eq!(name, "GLIBC_TUNABLES");
        assert!(value.starts_with("glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:"), "{value}");
    }

    #[test]
    fn an_older_library_gets_variables() {
        for list in ["", "glibc.malloc.mmap_max: 0\nglibc.malloc.trim_threshold: 0\n"] {
            let names: Vec<String> = kept(list).into_iter().map(|(name, _)| name).collect();
            assert_eq!(names, ["MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"]);
        }
    }
}

//! Memory of this process as reported by the operating system; supported on Linux only.

use std::fs;

use serde::{Deserialize, Serialize};

/// Measures the peak of this process's resident memory since a point in time.
#[derive(Debug)]
pub(crate) struct Process {
    before: Option<u64>,
    reset: bool,
}

/// Resident bytes of this process; `None` if the system does not report them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// At the start of the measurement (VmRSS), with freed memory that the allocator keeps.
    pub(crate) before: Option<u64>,
    /// Peak since then (VmHWM).
    pub(crate) peak: Option<u64>,
}

impl Process {
    /// Resets the peak to the current resident memory.
    pub(crate) fn watch() -> Self {
        // The kernel's interface: 5 resets only VmHWM.
        let reset = fs::write("/proc/self/clear_refs", "5").is_ok();
        Self { before: status().and_then(|status| field(&status, "VmRSS:")), reset }
    }

    /// Returns the current measurement. Without a reset the peak would be older, and is omitted.
    pub(crate) fn seen(&self) -> Seen {
        let peak = status().filter(|_| self.reset).and_then(|status| field(&status, "VmHWM:"));
        Seen { before: self.before, peak }
    }
}

impl Seen {
    /// Returns the bytes of two processes together; a number that is known of one process only counts alone.
    pub(crate) fn and(self, other: Seen) -> Seen {
        let sum = |a: Option<u64>, b: Option<u64>| a.into_iter().chain(b).reduce(|a, b| a + b);
        Seen { before: sum(self.before, other.before), peak: sum(self.peak, other.peak) }
    }
}

fn status() -> Option<String> {
    fs::read_to_string("/proc/self/status").ok()
}

/// Returns a field of /proc/self/status or /proc/meminfo, which are in kibibytes, labelled kB.
pub(crate) fn field(status: &str, name: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_and_anything_else_is_none() {
        let status = "Name:\tbench\nVmHWM:\t   1234 kB\nVmRSS:\t     12 kB\nOdd:\t 5 MB\n";
        assert_eq!(field(status, "VmHWM:"), Some(1234 * 1024));
        assert_eq!(field(status, "VmRSS:"), Some(12 * 1024));
        assert_eq!(field(status, "Odd:"), None);
        assert_eq!(field(status, "VmPin:"), None);
    }

    #[test]
    fn bytes_of_processes_add_up() {
        let seen = |before, peak| Seen { before, peak };
        let sum = seen(Some(1), None).and(seen(Some(2), Some(5))).and(Seen::default());
        assert_eq!(sum, seen(Some(3), Some(5)));
        assert_eq!(Seen::default().and(Seen::default()), Seen::default());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_that_is_held_is_seen() {
        let watch = Process::watch();
        let held = std::hint::black_box(vec![1u8; 64 << 20]);
        let seen = watch.seen();
        assert!(seen.before.unwrap() > 1 << 20 && seen.peak.unwrap() >= held.len() as u64, "{seen:?}");
    }
}

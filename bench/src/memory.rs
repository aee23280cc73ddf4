//! What the operating system says about this process's memory; only Linux is asked.

use std::fs;

use serde::Serialize;

/// Watches the peak of this process's resident memory from some moment on.
#[derive(Debug)]
pub(crate) struct Process {
    before: Option<u64>,
    reset: bool,
}

/// Resident bytes of this process; none where the system does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Seen {
    /// When watching began, what was freed and kept by the allocator included (VmRSS).
    pub(crate) before: Option<u64>,
    /// The most since then (VmHWM).
    pub(crate) peak: Option<u64>,
}

impl Process {
    /// Starts the peak again from what is resident now.
    pub(crate) fn watch() -> Self {
        // The kernel's word for it: 5 resets VmHWM and nothing else.
        let reset = fs::write("/proc/self/clear_refs", "5").is_ok();
        Self { before: status().and_then(|status| field(&status, "VmRSS:")), reset }
    }

    /// What has been seen so far. Where the peak could not be reset it is an older one, and not told.
    pub(crate) fn seen(&self) -> Seen {
        let peak = status().filter(|_| self.reset).and_then(|status| field(&status, "VmHWM:"));
        Seen { before: self.before, peak }
    }
}

fn status() -> Option<String> {
    fs::read_to_string("/proc/self/status").ok()
}

/// A field of /proc/self/status or /proc/meminfo, which gives kibibytes and calls them kB.
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

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_that_is_held_is_seen() {
        let watch = Process::watch();
        let held = std::hint::black_box(vec![1u8; 64 << 20]);
        let seen = watch.seen();
        assert!(seen.before.unwrap() > 1 << 20 && seen.peak.unwrap() >= held.len() as u64, "{seen:?}");
    }
}

//! Description of the machine that was measured.

use std::fmt;
use std::fs;

use meshstep_optim::Isa;
use meshstep_tensor::Threads;
use serde::{Deserialize, Serialize};

/// Properties of a machine that figures depend on. Two reports are comparable if all of them are equal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    pub processor: String,
    pub cores: usize,
    /// Number of threads of an update.
    pub threads: usize,
    /// Widest vector instructions in use.
    pub vectors: String,
    pub memory: u64,
    pub system: String,
    /// Setting for huge pages of large allocations.
    pub huge_pages: String,
    /// The GPU, if the figures are from a GPU.
    #[serde(default)]
    pub gpu: Option<String>,
    /// True if debug assertions were enabled.
    pub debug: bool,
}

impl Machine {
    pub fn here() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let memory = field(&read("/proc/meminfo"), "MemTotal")
            .and_then(|kib| kib.trim_end_matches("kB").trim().parse::<u64>().ok());
        let pages = read("/sys/kernel/mm/transparent_hugepage/enabled");
        Machine {
            processor: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(unknown),
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            threads: Threads::shared().count(),
            vectors: format!("{:?}", Isa::detect()),
            memory: memory.map_or(0, |kib| kib * 1024),
            system: format!("{} {}", std::env::consts::OS, read("/proc/sys/kernel/osrelease").trim()),
            huge_pages: chosen(&pages).unwrap_or_else(unknown),
            gpu: None,
            debug: cfg!(debug_assertions),
        }
    }

    /// Describes the first difference from another machine.
    pub fn differs(&self, other: &Machine) -> Option<String> {
        let of_gpu = |of: &Machine| of.gpu.clone().unwrap_or_else(|| "none".to_owned());
        let both = [
            ("processor", &self.processor, &other.processor),
            ("vectors", &self.vectors, &other.vectors),
            ("cores", &self.cores.to_string(), &other.cores.to_string()),
            ("threads", &self.threads.to_string(), &other.threads.to_string()),
            ("memory", &self.memory.to_string(), &other.memory.to_string()),
            ("system", &self.system, &other.system),
            ("huge pages", &self.huge_pages, &other.huge_pages),
            ("GPU", &of_gpu(self), &of_gpu(other)),
            ("debug assertions", &self.debug.to_string(), &other.debug.to_string()),
        ]
        .map(|(what, own, other)| {
            (own != other).then(|| format!("{what}: {own} here, {other} in the other report"))
        });
        both.into_iter().flatten().next()
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { processor, cores, threads, vectors, memory, system, huge_pages, gpu, debug } = self;
        let gib = *memory as f64 / (1u64 << 30) as f64;
        write!(f, "{processor}, {cores} cores, {threads} threads, {vectors}, {gib:.0} GiB, {system}, ")?;
        write!(f, "huge pages: {huge_pages}{}", if *debug { ", debug assertions" } else { "" })?;
        gpu.as_ref().map_or(Ok(()), |gpu| write!(f, "; {gpu}"))
    }
}

fn unknown() -> String {
    "unknown".to_owned()
}

/// Returns the value of the first line `name: value`.
fn field(text: &str, name: &str) -> Option<String> {
    let named = |line: &str| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    };
    text.lines().find_map(named)
}

/// Returns the word in brackets.
fn chosen(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_and_choices_are_found() {
        let text = "processor\t: 0\nmodel name\t: A Processor\nmodel name\t: Another\n";
        assert_eq!(field(text, "model name").as_deref(), Some("A Processor"));
        assert_eq!(field("MemTotal:       24576 kB\n", "MemTotal").as_deref(), Some("24576 kB"));
        assert_eq!(field(text, "name"), None);
        assert_eq!(chosen("always [madvise] never").as_deref(), Some("madvise"));
        assert_eq!(chosen("never"), None);
    }

    #[test]
    fn a_difference_is_named() {
        let here = Machine::here();
        assert_eq!(here.differs(&here), None);
        let other = Machine { cores: here.cores + 1, ..here.clone() };
        let differs = here.differs(&other).unwrap();
        assert!(differs.starts_with("cores: "), "{differs}");
    }
}

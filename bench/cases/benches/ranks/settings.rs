//! Arguments and environment of the program.

use anyhow::{Context as _, Result, bail, ensure};
use std::path::PathBuf;

pub(crate) struct Settings {
    pub(crate) ranks: Vec<usize>,
    /// Elements of an update; a power of two.
    pub(crate) len: usize,
    pub(crate) rounds: usize,
    /// Time budget in seconds.
    pub(crate) seconds: Option<f64>,
    /// A substring of the cases' names.
    only: Option<String>,
    /// An interpreter and its script, for comparisons with PyTorch.
    pub(crate) torch: Option<[PathBuf; 2]>,
    /// Output file.
    pub(crate) path: Option<PathBuf>,
}

/// Defaults of a trial run, in which cargo only checks that the program works.
const TRIAL: [(&str, &str); 3] =
    [("CPU_BENCH_RANKS", "2"), ("CPU_BENCH_LOG2", "10"), ("CPU_BENCH_ROUNDS", "1")];

const MOST_RANKS: usize = 64;

impl Settings {
    pub(crate) fn read() -> Result<Self> {
        let args: Vec<String> = std::env::args().skip(1).collect();
        // `cargo bench` adds `--bench`; the GPU bundle passes `--measure`.
        let trial = !args.iter().any(|arg| ["--bench", "--measure", "--torch"].contains(&arg.as_str()));
        let text = |name: &str| -> Option<String> {
            let given = std::env::var(name).ok().filter(|text| !text.is_empty());
            let small = TRIAL.iter().find(|(own, _)| trial && *own == name);
            given.or_else(|| small.map(|(_, value)| (*value).to_owned()))
        };
        let torch = match args.iter().position(|arg| arg == "--torch") {
            None => None,
            Some(at) => match &args[at + 1..] {
                [python, script] => Some([python, script].map(PathBuf::from)),
                _ => bail!("--torch takes an interpreter and the script peers.py"),
            },
        };
        let file = if torch.is_some() { "cpu-torch.json" } else { "cpu-bench.json" };
        let log2 = number(&text, "CPU_BENCH_LOG2")?.unwrap_or(26);
        ensure!((10..=32).contains(&log2), "CPU_BENCH_LOG2 is {log2}; set it to a number from 10 to 32");
        Ok(Settings {
            ranks: ranks(text("CPU_BENCH_RANKS").as_deref().unwrap_or("4,8,16"))?,
            len: 1 << log2,
            rounds: number(&text, "CPU_BENCH_ROUNDS")?.unwrap_or(11).max(1),
            seconds: number(&text, "GPU_BENCH_SECONDS")?,
            only: text("GPU_BENCH_ONLY"),
            torch,
            path: std::env::var_os("OUT").map(|out| PathBuf::from(out).join(file)),
        })
    }

    /// Returns true if a case with this name is selected.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|part| name.contains(part))
    }

    /// Returns the elements of each parameter of a step; the step has a quarter of an update's elements.
    pub(crate) fn len_of_step(&self) -> usize {
        (self.len / 4 / crate::rows::PARAMS).max(1)
    }

    /// Returns the bytes of the collectives on each rank: up to a quarter of an update's vector.
    pub(crate) fn sizes(&self) -> Vec<usize> {
        [64 << 10, 1 << 20, 16 << 20, 64 << 20]
            .into_iter()
            .filter(|&bytes| bytes <= self.len.max(64 << 10))
            .collect()
    }

    /// Returns the bytes of the collectives in the comparison with gloo.
    pub(crate) fn bytes_beside_torch(&self) -> usize {
        self.len.clamp(64 << 10, 16 << 20)
    }
}

/// Parses a list such as `4,8,16`.
fn ranks(text: &str) -> Result<Vec<usize>> {
    let one = |part: &str| part.trim().parse().ok().filter(|ranks| (1..=MOST_RANKS).contains(ranks));
    let all: Option<Vec<usize>> = text.split(',').map(one).collect();
    all.with_context(|| {
        format!("CPU_BENCH_RANKS is {text:?}; set it to numbers from 1 to {MOST_RANKS}, separated by commas")
    })
}

fn number<T: std::str::FromStr>(text: &impl Fn(&str) -> Option<String>, name: &str) -> Result<Option<T>> {
    let Some(text) = text(name) else { return Ok(None) };
    text.trim().parse().ok().map(Some).with_context(|| format!("{name} is {text:?}; set it to a number"))
}

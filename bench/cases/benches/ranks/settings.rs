//! The program's arguments and environment.

use anyhow::{Context as _, Result, bail, ensure};
use std::path::PathBuf;

pub(crate) struct Settings {
    pub(crate) ranks: Vec<usize>,
    /// Elements of an update; a power of two.
    pub(crate) len: usize,
    pub(crate) rounds: usize,
    /// No case begins later.
    pub(crate) seconds: Option<f64>,
    /// A part of the cases' names.
    only: Option<String>,
    /// An interpreter and the script that it runs, for what is measured beside PyTorch.
    pub(crate) torch: Option<[PathBuf; 2]>,
    /// The file that is written.
    pub(crate) path: Option<PathBuf>,
}

/// Where cargo only wants to know that the program runs.
const TRIAL: [(&str, &str); 3] =
    [("CPU_BENCH_RANKS", "2"), ("CPU_BENCH_LOG2", "10"), ("CPU_BENCH_ROUNDS", "1")];

const MOST_RANKS: usize = 64;

impl Settings {
    pub(crate) fn read() -> Result<Self> {
        let args: Vec<String> = std::env::args().skip(1).collect();
        // `cargo bench` adds `--bench`; the bundle gives `--measure`.
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
        ensure!((10..=32).contains(&log2), "CPU_BENCH_LOG2 is {log2}; it is from 10 to 32");
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

    /// Whether a case of this name is asked for.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|part| name.contains(part))
    }

    /// Elements of each parameter of a step, which has a quarter of an update's.
    pub(crate) fn len_of_step(&self) -> usize {
        (self.len / 4 / crate::rows::PARAMS).max(1)
    }

    /// Bytes on each rank of collectives: up to a quarter of an update's vector.
    pub(crate) fn sizes(&self) -> Vec<usize> {
        [64 << 10, 1 << 20, 16 << 20, 64 << 20]
            .into_iter()
            .filter(|&bytes| bytes <= self.len.max(64 << 10))
            .collect()
    }

    /// Of collectives beside gloo's.
    pub(crate) fn bytes_beside_torch(&self) -> usize {
        self.len.clamp(64 << 10, 16 << 20)
    }
}

/// `4,8,16`.
fn ranks(text: &str) -> Result<Vec<usize>> {
    let one = |part: &str| part.trim().parse().ok().filter(|ranks| (1..=MOST_RANKS).contains(ranks));
    let all: Option<Vec<usize>> = text.split(',').map(one).collect();
    all.with_context(|| {
        format!("CPU_BENCH_RANKS is {text:?}; it is numbers from 1 to {MOST_RANKS} with commas between")
    })
}

fn number<T: std::str::FromStr>(text: &impl Fn(&str) -> Option<String>, name: &str) -> Result<Option<T>> {
    let Some(text) = text(name) else { return Ok(None) };
    text.trim().parse().ok().map(Some).with_context(|| format!("{name} is {text:?}; it is a number"))
}

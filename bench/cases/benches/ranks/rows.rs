//! Cases for each number of ranks: names, sizes, and the work.

use anyhow::Result;
use meshstep_bench_cases::collectives::{Only, operations, share_of_copy};
use meshstep_bench_cases::ranks::{OURS, together};
use meshstep_bench_cases::samples::Samples;
use meshstep_bench_cases::shapes::even;
use meshstep_bench_cases::step::{StepAndCopy, bytes_a_param};
use meshstep_bench_cases::update::case;
use meshstep_shard::Stage;
use meshstep_tensor::{DType, Layout, Threads};
use serde_json::{Value, json};

use crate::settings::Settings;

/// A row of the record.
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) ranks: usize,
    pub(crate) work: Work,
}

#[derive(Clone)]
pub(crate) enum Work {
    /// The update of a flat vector, by its name in the table of updates, on as many threads as there are ranks.
    Update { name: &'static str, len: usize },
    /// Operation `idx` of the table of collectives, on `bytes` bytes on each rank.
    Collective { idx: usize, bytes: usize },
    /// A whole step of `count` parameters of `len` elements.
    Step { stage: Stage, count: usize, len: usize },
}

const UPDATES: [&str; 3] =
    ["adamw", "adamw, f32 master, bf16 grads and copy", "adamw, bf16 and remainder, bf16 grads"];

pub(crate) const STAGES: [(&str, Stage); 4] = [
    ("step, stage 0", Stage::Replicated),
    ("step, stage 1", Stage::Zero1),
    ("step, stage 2", Stage::Zero2),
    ("step, stage 3", Stage::Zero3),
];

/// Number of parameters of a step.
pub(crate) const PARAMS: usize = 16;

/// Returns all rows, in the order of the numbers of ranks.
pub(crate) fn rows(settings: &Settings) -> Vec<Row> {
    settings.ranks.iter().flat_map(|&ranks| of(ranks, settings)).collect()
}

fn of(ranks: usize, settings: &Settings) -> Vec<Row> {
    let row = |name: String, work| Row { name: format!("{name}, {ranks} ranks"), ranks, work };
    let update = |name| row(name_of(name), Work::Update { name, len: settings.len });
    let step = |(name, stage): (&str, Stage)| {
        row(name.to_owned(), Work::Step { stage, count: PARAMS, len: settings.len_of_step() })
    };
    let collective = |bytes: usize| {
        operations(ranks).into_iter().enumerate().map(move |(idx, (name, ..))| {
            row(format!("{name}, {}", shown(bytes)), Work::Collective { idx, bytes })
        })
    };
    let mut rows: Vec<Row> = UPDATES.map(update).into();
    rows.extend(STAGES.map(step));
    rows.extend(settings.sizes().into_iter().flat_map(collective));
    rows
}

fn name_of(update: &str) -> String {
    format!("update, {update}")
}

/// Formats a size as `64 KiB` or `16 MiB`.
pub(crate) fn shown(bytes: usize) -> String {
    if bytes < 1 << 20 { format!("{} KiB", bytes >> 10) } else { format!("{} MiB", bytes >> 20) }
}

impl Row {
    /// Returns the identification of the row in the record.
    pub(crate) fn head(&self) -> Value {
        json!({ "name": self.name, "ranks": self.ranks })
    }

    /// Measures the row and returns its figures.
    pub(crate) fn measure(&self, rounds: usize) -> Result<Value> {
        match self.work {
            Work::Update { name, len } => {
                let mut case = case(name, len)?.on(&Threads::new(self.ranks)?);
                let [copy, update] = case.times(rounds)?;
                let bytes = case.bytes() * len;
                Ok(figures(&update, &copy, bytes, json!({ "params": len, "threads": self.ranks })))
            }
            Work::Collective { idx, bytes } => {
                let len = bytes / DType::F32.size();
                let samples = together(self.ranks, (2, rounds), |comm| Only::new(comm, len, idx))?;
                let copy = samples[1 - OURS].times(share_of_copy(self.ranks, idx));
                let (.., buffers) = operations(self.ranks)[idx];
                Ok(figures(&samples[OURS], &copy, buffers * bytes, json!({ "bytes_each": bytes })))
            }
            Work::Step { stage, count, len } => {
                let (layout, bytes): (Layout, usize) =
                    (even(count, len)?, bytes_a_param(self.ranks) * count * len);
                let samples =
                    together(self.ranks, (2, rounds), |comm| StepAndCopy::new(&comm, stage, &layout, bytes))?;
                Ok(figures(&samples[OURS], &samples[1 - OURS], bytes, json!({ "params": count * len })))
            }
        }
    }
}

/// Returns the time next to the reference, which is the time of a copy of the bytes that must be moved.
fn figures(took: &Samples, copy: &Samples, bytes: usize, mut size: Value) -> Value {
    let (time, reference, share) = (took.median(), copy.median(), copy.over(took).median());
    let figures = json!({
        "ms": time.median * 1e3,
        "low_ms": time.low * 1e3,
        "high_ms": time.high * 1e3,
        "reference_ms": reference.median * 1e3,
        "share_of_reference": share.median,
        "bytes": bytes,
        "gb_per_s": bytes as f64 / time.median / 1e9,
        "rounds": time.rounds,
    });
    for (key, value) in figures.as_object().into_iter().flatten() {
        size[key] = value.clone();
    }
    size
}

//! Reference passes by as many processes as there are ranks, each over memory as that of a collective in shared memory.

use anyhow::Result;
use meshstep_bench_cases::copies::{MovedBytes, PASSES, PassTimes};
use meshstep_bench_cases::samples::Samples;
use serde_json::json;

use crate::measure::peers::Group;
use crate::measure::rank::Way;
use crate::measure::record::{Cell, Table};

/// Processes that run the passes, and their seconds.
pub(super) struct ProcessPasses {
    group: Group,
    ranks: usize,
    /// Bytes of each process.
    bytes: usize,
    turns: Vec<[f64; 3]>,
}

impl ProcessPasses {
    pub(super) fn start(ranks: usize) -> Result<Self> {
        Ok(ProcessPasses {
            group: Group::start(Way::SharedMemory, ranks)?,
            ranks,
            bytes: 0,
            turns: Vec::new(),
        })
    }

    /// Prepares passes over `bytes` bytes of each process.
    pub(super) fn prepare(&mut self, bytes: usize) -> Result<()> {
        (self.bytes, self.turns) = (bytes, Vec::new());
        self.group.case(json!({ "case": "passes", "bytes": bytes }))
    }

    /// Runs each pass once and returns the seconds of all.
    pub(super) fn run(&mut self) -> Result<f64> {
        let mut turn = [0.0; 3];
        for seconds in &mut turn {
            *seconds = self.group.run()?;
        }
        self.turns.push(turn);
        Ok(turn.iter().sum())
    }

    /// Returns the times of all turns but the first, which races do not count.
    pub(super) fn times(&self) -> PassTimes {
        let of = |pass: usize| self.turns.iter().skip(1).map(|turn| turn[pass]).collect();
        PassTimes { seconds: [0, 1, 2].map(of), bytes: self.ranks * self.bytes }
    }
}

pub(super) fn table(title: &str) -> Table {
    let passes = PASSES.map(|pass| pass.name());
    let columns = [&passes[..], &["the case's bytes at these speeds", "shared memory / these"]].concat();
    let mut table = Table::new(title, &columns);
    table.note("each process passes over its own registered memory, all at once; the bytes of a case are those that all ranks read and write");
    table
}

/// Returns the cells of an operation that moves these bytes.
pub(super) fn cells(passes: &PassTimes, moved: MovedBytes, shared: &Samples) -> Vec<Cell> {
    let priced = passes.price(moved);
    let mut cells: Vec<Cell> = PASSES.map(|pass| Cell::Speed(passes.speed(pass))).into();
    cells.extend([Cell::Time(priced.median()), Cell::Ratio(shared.over(&priced).median())]);
    cells
}

//! Reference passes on their own: reading, writing, and both in place, on memory that is allocated as the optimizer's.

use anyhow::{Result, anyhow};
use meshstep_bench_cases::copies::{self, PASSES, Pages, PassTimes};
use meshstep_bench_cases::race::{race, timed};
use meshstep_tensor::Threads;

use crate::measure::effort::Effort;
use crate::measure::record::{Cell, Table};

/// Measures the passes in turns, over more memory than the caches hold in a full run.
pub(super) fn passes(effort: Effort) -> Result<PassTimes> {
    let bytes = effort.pick(copies::LARGE_BYTES / 8, copies::LARGE_BYTES);
    let contestants = PASSES.map(|pass| timed(move |pages: &mut Pages| pages.pass(pass, &Threads::shared())));
    let samples = race(&mut Pages::new(bytes)?, effort.pick(5, 15), contestants.into())?;
    let seconds = samples.try_into().map_err(|_| anyhow!("the samples of a pass are missing"))?;
    Ok(PassTimes { seconds, bytes })
}

/// Returns a row for each pass.
pub(super) fn table(title: &str, passes: &PassTimes) -> Table {
    let mut table = Table::new(title, &["bytes of a pass", "time", "speed"]);
    for (pass, seconds) in PASSES.into_iter().zip(&passes.seconds) {
        let (bytes, speed) = (Cell::Bytes(passes.bytes as u64), Cell::Speed(passes.speed(pass)));
        table.row(pass.name(), [bytes, Cell::Time(seconds.median()), speed]);
    }
    table.note("on memory that is allocated as the optimizer's, by as many threads as an update has; in place counts both directions");
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pass_has_its_row() {
        let seconds = [1.0, 2.0, 4.0].map(|seconds| [seconds; 3].into_iter().collect());
        let table = table("references", &PassTimes { seconds, bytes: 1000 });
        let speeds: Vec<&Cell> = table.rows.iter().map(|row| &row.cells[2]).collect();
        assert_eq!(speeds, [&Cell::Speed(1000.0), &Cell::Speed(500.0), &Cell::Speed(500.0)]);
        assert_eq!(table.rows[1].name, "write");
    }
}

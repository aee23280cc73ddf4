//! Whole clipped steps of processes.

use anyhow::Result;
use meshstep_bench_cases::race::{Contestant, race};
use meshstep_bench_cases::samples::Samples;
use serde_json::json;

use super::times::{of_settings, time};
use super::{Contest, Effort, Section, Table, Wanted};
use crate::measure::record::Cell;

/// Least ratio of gloo's step to that of shared memory.
const STEP: f64 = 6.0;

/// Small steps: number of tensors and their length.
const SMALL: [(usize, usize); 2] = [(1, 1 << 10), (16, 4 << 10)];

/// Small steps in a row of one sample.
const TIMES: usize = 25;

const COLUMNS: &[&str] = &[
    "shared memory, stage 1",
    "sockets, stage 1",
    "all_reduce, clip, fused AdamW over gloo",
    "OpenMPI, by hand",
    "gloo / shared memory",
    "gloo / sockets",
    "OpenMPI / shared memory",
    "gloo's malloc",
    "usual malloc",
    "malloc kept",
    "gloo with a closing barrier",
];

impl Contest<'_> {
    /// Compares steps of 16 tensors of 1 Mi elements.
    pub(super) fn step(&mut self, section: &mut Section, effort: Effort) -> Result<()> {
        let shape = (16, effort.pick(1 << 14, 1 << 20));
        let mut table = Table::new(self.title("a clipped step"), COLUMNS);
        let ratio = self.race_steps(&mut table, shape, (1, effort.pick(3, 11)))?;
        section.bar("a step through shared memory: gloo's / ours", ratio, Wanted::AtLeast(STEP));
        section.tables.push(table);
        Ok(())
    }

    /// Compares steps that spend their time on messages and calls.
    pub(super) fn small_steps(&mut self, section: &mut Section, effort: Effort) -> Result<()> {
        let title = format!("small clipped steps, each the mean of {TIMES} in a row,");
        let mut table = Table::new(self.title(&title), COLUMNS);
        for shape in SMALL {
            let ratio = self.race_steps(&mut table, shape, (TIMES, effort.pick(3, 11)))?;
            let what = format!("a step of {}, {} processes: gloo / shared memory", words(shape), self.ranks);
            section.bar(what, ratio, Wanted::AtLeast(1.0));
        }
        section.tables.push(table);
        Ok(())
    }

    /// Adds a row of steps and returns gloo's time over that of shared memory.
    fn race_steps(
        &mut self,
        table: &mut Table,
        (count, length): (usize, usize),
        (times, rounds): (usize, usize),
    ) -> Result<f64> {
        let case =
            json!({ "case": "ddp", "count": count, "length": length, "times": times, "ranks": self.ranks });
        let (shared, sockets, torch) = (&mut self.ways.shared, &mut self.ways.sockets, &mut *self.torch);
        shared.case(case.clone())?;
        sockets.case(case.clone())?;
        torch.case(case)?;
        let mut contestants: Vec<Contestant<'_, ()>> =
            vec![Box::new(|()| shared.run()), Box::new(|()| sockets.run()), Box::new(|()| torch.run())];
        if let Some(mpi) = &mut self.mpi {
            mpi.case("step", count * length * size_of::<f32>(), times)?;
            contestants.push(Box::new(|()| mpi.run()));
        }
        let mut samples = race(&mut (), rounds, contestants)?.into_iter();
        let mut next = || samples.next().map(|samples| samples.times(1.0 / times as f64));
        let [shared, sockets, _] = std::array::from_fn(|_| next().unwrap_or_default());
        let (gloo, mpi) = (self.torch.times().over(times), next());
        let (malloc, better) = gloo.better();
        let ratio = |above: &Samples, below: &Samples| Cell::Ratio(above.over(below).median());
        let missing = || Cell::Text("not measured".to_owned());
        let mut cells = [&shared, &sockets, better].map(time).to_vec();
        cells.push(mpi.as_ref().map_or_else(missing, time));
        cells.extend([ratio(better, &shared), ratio(better, &sockets)]);
        cells.push(mpi.as_ref().map_or_else(missing, |mpi| ratio(mpi, &shared)));
        cells.push(Cell::Text(malloc.to_owned()));
        cells.extend(of_settings(&gloo));
        table.row(words((count, length)), cells);
        Ok(better.over(&shared).median().median)
    }
}

/// Describes the parameters of a step.
fn words((count, length): (usize, usize)) -> String {
    let tensors = if count == 1 { "tensor" } else { "tensors" };
    format!("{} parameters in {count} {tensors}", count * length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_named_by_their_parameters() {
        assert_eq!(SMALL.map(words), ["1024 parameters in 1 tensor", "65536 parameters in 16 tensors"]);
    }
}

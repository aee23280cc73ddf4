//! Source of a worker's state on a load: the same worker's saved state, or the mean of several workers'.

use super::mean::{mean, of_fragment, weighed, within};
use super::record::LocalRecord;
use super::rows::Row;
use super::{AllWorkers, Mode};
use crate::exchange::in_flight::Flight;
use crate::exchange::owned_spans::trained;
use meshstep_checkpoint::extend::{Fitting, MASTER, PARAM, STAGING, SavedParts, SavedTensor, read_same};
use meshstep_checkpoint::{CheckpointError, Load, Saved, WINDOW};
use meshstep_tensor::{Buffer, Category, DType, cast};
use std::ops::Range;

impl AllWorkers<'_> {
    /// Selects the state to resume from in a checkpoint of workers.
    pub(super) fn choose_of(&mut self, record: LocalRecord, load: &Load) -> Result<(), CheckpointError> {
        let workers = &self.local.engine.workers.across;
        let same = record.same_plan(&self.local.engine.plan);
        let anew = same.is_err() && load.other_settings;
        record.check_counts()?;
        if !anew {
            same?;
            record.check(&self.local.engine.plan)?;
        }
        let all: Vec<usize> = (0..record.workers.len()).collect();
        let counted = record.counted()?;
        self.mode = match (anew, all.len() == workers.world_size()) {
            (true, _) => Mode::Mean { weighed: Vec::new(), anew },
            (false, true) => Mode::Own,
            (false, false) => {
                let (plan, trained) = (&self.local.engine.plan, trained(&self.local.inner));
                Mode::Mean { weighed: weighed(plan, &trained, &record, &counted), anew }
            }
        };
        if !anew {
            let options = self.local.inner.options();
            let engine = &self.local.engine;
            for flight in &record.flights {
                let of = (&engine.plan, &engine.parts);
                let resumed = Flight::resumed(flight.fragments.clone(), flight.arrives(), of, options);
                self.flights.push(resumed.map_err(CheckpointError::memory)?);
            }
        }
        let workers = if let Mode::Own = self.mode { all } else { counted };
        self.rows = self.all_rows(workers, !anew)?;
        self.record = record;
        Ok(())
    }

    /// Selects the state to resume from in a checkpoint of an optimizer that was no worker.
    pub(super) fn choose_bare(&mut self, steps: u64) -> Result<(), CheckpointError> {
        self.mode = Mode::Mean { weighed: Vec::new(), anew: true };
        self.rows = self.all_rows(vec![0], false)?;
        self.rows.bare = true;
        self.record = LocalRecord { step: steps, ..LocalRecord::default() };
        Ok(())
    }

    /// Returns the mean of the workers' values of one vector of a row, for this rank, read in parts; `None` if no values were saved.
    pub(super) fn merged(
        &mut self,
        row: usize,
        i: usize,
        (saved, contents, fitting): (&Saved, &[SavedTensor], &Fitting<'_>),
    ) -> Result<Option<Buffer>, CheckpointError> {
        let memory = CheckpointError::memory::<meshstep_tensor::Error>;
        let vectors = &contents[row].vectors;
        let (first, values) = self.vector(row, vectors[i].slot).map_err(CheckpointError::memory)?;
        let (range, dtype) = (first..first + values.len(), values.dtype());
        // Parameters are rounded from the mean of their masters.
        let master = vectors.iter().position(|vector| vector.name == MASTER);
        let i = master.filter(|_| vectors[i].name == PARAM).unwrap_or(i);
        let (named, wide) = (&vectors[i].name, vectors[i].dtype.dtype().unwrap_or(dtype));
        let rows = self.rows.alike(row);
        let from: Option<Vec<_>> =
            rows.iter().map(|&row| Some((&contents[row], fitting.sources[row][i]?))).collect();
        let Some(from) = from.filter(|_| !range.is_empty()) else { return Ok(None) };
        let meter = self.local.inner.options().meter.clone();
        let mut merged = Buffer::zeroed(range.len(), dtype, &meter, Category::Staging).map_err(memory)?;
        let most = at_once(from.len(), wide);
        for start in range.clone().step_by(most) {
            let part = start..range.end.min(start + most);
            let values = read_same(saved, &from, (named, part.clone(), wide), &meter)?;
            let shares = self.shares(row, named, &part).into_iter();
            let into = merged.as_mut().slice(part.start - first..part.end - first).map_err(memory)?;
            if wide == dtype {
                mean(&values, shares, into).map_err(memory)?;
                continue;
            }
            let mut rounded = Buffer::zeroed(part.len(), wide, &meter, Category::Staging).map_err(memory)?;
            mean(&values, shares, rounded.as_mut()).map_err(memory)?;
            cast(rounded.as_slice(), into).map_err(memory)?;
        }
        Ok(Some(merged))
    }

    /// Returns the workers' shares in a range, where they differ.
    fn shares<'s>(
        &'s self,
        row: usize,
        vector: &'s str,
        range: &'s Range<usize>,
    ) -> Vec<(Range<usize>, &'s [f64])> {
        let Mode::Mean { weighed, .. } = &self.mode else { return Vec::new() };
        match &self.rows.rows[row] {
            Row::Param { entry, .. } => {
                let slot = Some(vector).filter(|name| ![PARAM, MASTER].contains(name));
                within(weighed, (*entry, slot), range).collect()
            }
            // Use the shares of the values that the snapshot is subtracted from when the mean arrives; otherwise the difference would keep
            // parts of single workers.
            Row::Sent { elements, .. } => {
                let shares = of_fragment(weighed, elements.fragment);
                shares.map(|shares| (0..range.len(), shares)).into_iter().collect()
            }
            Row::Shared(_) => Vec::new(),
        }
    }
}

/// Returns the number of elements that are read at once from each of `workers` workers.
fn at_once(workers: usize, dtype: DType) -> usize {
    (STAGING / workers).max(WINDOW as usize) / dtype.size()
}

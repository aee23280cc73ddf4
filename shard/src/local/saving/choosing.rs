//! What of a saved step goes into a worker: what the same worker has saved, or the mean of several.

use super::mean::{mean, weighed, within};
use super::record::LocalRecord;
use super::rows::Row;
use super::{AllWorkers, Mode};
use crate::Optimizer;
use crate::checkpoint::{CheckpointError, Content, Fitting, Load, MASTER, PARAM, Saved, Vectors, read_same};
use crate::local::flight::Flight;
use meshstep_tensor::{Buffer, DType, cast};
use std::ops::Range;

impl AllWorkers<'_> {
    /// What was saved by workers: what this one goes on with.
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
                let (plan, trained) = (&self.local.engine.plan, self.local.inner.trained());
                Mode::Mean { weighed: weighed(plan, &trained, &record, &counted), anew }
            }
        };
        if !anew {
            let Optimizer { options, .. } = &self.local.inner;
            let engine = &self.local.engine;
            for flight in &record.flights {
                let of = (&engine.plan, &engine.parts);
                let resumed = Flight::resumed(flight.fragments.clone(), flight.arrives(), of, &options.meter);
                self.flights.push(resumed.map_err(CheckpointError::memory)?);
            }
        }
        let workers = if let Mode::Own = self.mode { all } else { counted };
        self.rows = self.all_rows(workers, !anew)?;
        self.record = record;
        Ok(())
    }

    /// What was saved by no worker.
    pub(super) fn choose_bare(&mut self, steps: u64) -> Result<(), CheckpointError> {
        self.mode = Mode::Mean { weighed: Vec::new(), anew: true };
        self.rows = self.all_rows(vec![0], false)?;
        self.rows.bare = true;
        self.record = LocalRecord { step: steps, ..LocalRecord::default() };
        Ok(())
    }

    /// The mean of what workers have of one vector of a row, for this rank; `None` where nothing was saved.
    pub(super) fn merged(
        &mut self,
        row: usize,
        i: usize,
        (saved, contents, fitting): (&Saved, &[Content], &Fitting<'_>),
    ) -> Result<Option<Buffer>, CheckpointError> {
        let memory = CheckpointError::memory::<meshstep_tensor::Error>;
        let vectors = &contents[row].vectors;
        let (first, values) = self.vector(row, vectors[i].slot).map_err(CheckpointError::memory)?;
        let (range, dtype) = (first..first + values.len(), values.dtype());
        // Parameters follow their masters.
        let master = vectors.iter().position(|vector| vector.name == MASTER);
        let i = master.filter(|_| vectors[i].name == PARAM).unwrap_or(i);
        let (named, wide) = (&vectors[i].name, vectors[i].dtype.dtype().unwrap_or(dtype));
        let rows = self.rows.alike(row);
        let from: Option<Vec<_>> =
            rows.iter().map(|&row| Some((&contents[row], fitting.sources[row][i]?))).collect();
        let Some(from) = from.filter(|_| !range.is_empty()) else { return Ok(None) };
        let meter = self.local.inner.options.meter.clone();
        let values = read_same(saved, &from, (named, range.clone(), wide), &meter)?;
        let shares = self.shares(row, named, &range);
        let mean = mean(&values, shares.into_iter(), wide, &meter).map_err(memory)?;
        Ok(Some(if wide == dtype { mean } else { narrowed(&mean, dtype, &meter).map_err(memory)? }))
    }

    /// How much workers count, where they do not count alike.
    fn shares<'s>(
        &'s self,
        row: usize,
        vector: &'s str,
        range: &'s Range<usize>,
    ) -> Vec<(Range<usize>, &'s [f64])> {
        let (Mode::Mean { weighed, .. }, Row::Param { entry, .. }) = (&self.mode, &self.rows.rows[row])
        else {
            return Vec::new();
        };
        let slot = Some(vector).filter(|name| ![PARAM, MASTER].contains(name));
        within(weighed, (*entry, slot), range).collect()
    }
}

fn narrowed(
    values: &Buffer,
    dtype: DType,
    meter: &meshstep_tensor::Meter,
) -> Result<Buffer, meshstep_tensor::Error> {
    let mut narrow = Buffer::zeroed(values.len(), dtype, meter, meshstep_tensor::Category::Staging)?;
    cast(values.as_slice(), narrow.as_mut())?;
    Ok(narrow)
}

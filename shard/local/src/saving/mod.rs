//! Checkpoints of workers: each worker's parameters and moments, the state shared by all workers, and exchanges in flight.

mod exchange;
mod in_flight;
mod mean;
mod merge_on_load;
mod record;
mod rows;

use crate::LocalOptimizer;
use crate::exchange::in_flight::Flight;
use crate::exchange::owned_spans::trained;
use mean::Weighed;
use meshstep_checkpoint::extend::{
    Catalog, CheckpointCall, Copies, Fitting, Read, SavedParts, SavedProgress, SavedTensor, Settings,
    read_own,
};
use meshstep_checkpoint::{
    self as checkpoint, CheckpointError, Contents, Load, ModelPlacement, Saveable, Saved,
};
use meshstep_comm::Communicator;
use meshstep_shard::extend::{OptimizerExchange, OptimizerShard, VectorKind as Slot};
use meshstep_shard::{Error, Optimizer, same_everywhere};
use meshstep_tensor::{DType, Queue, Slice, SliceMut};
use record::{LocalRecord, LocalSection};
use rows::{Elements, Row, Rows, is_of, sent_mut};
use std::borrow::Cow;
use std::sync::Arc;

/// Maximum number of workers' parameters that a record may list for each tensor of the checkpoint.
const MOST_ROWS: usize = 16;

impl Saveable for LocalOptimizer {
    fn contents(&mut self) -> Contents<'_> {
        Contents::made(AllWorkers::new(self))
    }
}

/// State to save or load, from the point of view of one rank of one worker.
#[derive(Debug)]
struct AllWorkers<'a> {
    local: &'a mut LocalOptimizer,
    mode: Mode,
    rows: Rows,
    record: LocalRecord,
    /// Number of updates of each row.
    t: Vec<u64>,
    /// Exchanges in flight, with their values landed: of the engine during a save, and to be the engine's after a load.
    flights: Vec<Flight>,
    /// True if the flights are the engine's.
    saves: bool,
}

/// Source of a worker's state on a load.
#[derive(Debug)]
enum Mode {
    /// State that the same worker saved.
    Own,
    /// Mean of several workers; with `anew` the workers begin the plan afresh.
    Mean { weighed: Vec<Weighed>, anew: bool },
}

impl<'a> AllWorkers<'a> {
    fn new(local: &'a mut LocalOptimizer) -> Self {
        let record = LocalRecord::of(&local.engine, &[]);
        let (mode, rows) = (Mode::Own, Rows::default());
        AllWorkers { local, mode, rows, record, t: Vec::new(), flights: Vec::new(), saves: false }
    }

    fn worker(&self) -> usize {
        self.local.engine.workers.across.rank()
    }

    /// Returns true if this worker holds, or takes in, the saved state of `worker`.
    fn is_here(&self, worker: usize) -> bool {
        matches!(self.mode, Mode::Mean { .. }) || worker == self.worker()
    }

    /// Returns the saved worker that provides this worker's counts.
    fn model(&self) -> usize {
        if let Mode::Own = self.mode { self.worker() } else { self.rows.workers[0] }
    }

    fn all_rows(&self, workers: Vec<usize>, with_fragments: bool) -> Result<Rows, CheckpointError> {
        let (inner, plan) = (&self.local.inner, &self.local.engine.plan);
        match with_fragments {
            true => Rows::new(plan, &trained(inner), inner.own_params().count(), workers, &self.flights),
            false => Ok(Rows::params(inner.own_params().count(), workers)),
        }
    }

    /// Returns this rank's part of `elements`; `own` describes the optimizer's parameters.
    fn beside_of(&self, row: &Row, elements: &Elements, t: u64, own: &[SavedTensor]) -> SavedTensor {
        let (name, parts) = (self.rows.name(row, ""), &self.local.engine.parts);
        elements.content(name, t, parts, &own[elements.entry].holding)
    }

    /// Returns the place of a fragment's vector on this rank: its first element within the fragment's part of the parameter, and its kind.
    fn beside(&self, param: usize, slot: Slot) -> Option<(usize, rows::Kind, (usize, usize))> {
        let parts = &self.local.engine.parts;
        let elements = match &self.rows.rows[param] {
            Row::Shared(elements) => elements,
            Row::Sent { worker, elements } if self.is_here(*worker) => elements,
            _ => return None,
        };
        let (i, kind) = elements.place(parts, slot)?;
        Some((parts.of(elements.fragment).spots[i].first, kind, (elements.fragment, i)))
    }
}

impl Drop for AllWorkers<'_> {
    fn drop(&mut self) {
        if self.saves {
            self.local.engine.flights = std::mem::take(&mut self.flights);
        }
    }
}

impl SavedParts for AllWorkers<'_> {
    fn queue(&self) -> Queue {
        self.local.inner.options().queue.clone()
    }

    fn vector(&mut self, param: usize, slot: Slot) -> Result<(usize, Slice<'_>), Error> {
        let nothing = Slice::from(&[] as &[f32]);
        if let Row::Param { worker, entry } = self.rows.rows[param] {
            return if self.is_here(worker) {
                self.local.inner.vector(entry, slot)
            } else {
                Ok((0, nothing))
            };
        }
        let Some((first, kind, place)) = self.beside(param, slot) else { return Ok((0, nothing)) };
        let values = kind.buffer(&self.local.engine.parts, &self.flights, place)?;
        Ok((first, values.unwrap_or(nothing)))
    }

    fn optimizer(&mut self) -> &mut Optimizer {
        &mut self.local.inner
    }

    fn inside(&mut self) -> &mut dyn SavedParts {
        &mut self.local.inner
    }

    fn placement<'p>(&self, inside: Box<dyn ModelPlacement + 'p>) -> Box<dyn ModelPlacement + 'p> {
        let count = self.local.engine.workers.across.world_size();
        Box::new(Copies { of: "workers", count, inside })
    }

    fn supports(&self, call: CheckpointCall) -> Result<(), CheckpointError> {
        Err(call.unsupported("workers", "save a checkpoint of all workers, on a disk or in memory"))
    }

    /// Waits for the values of the exchanges in flight.
    fn begin_save(&mut self) -> Result<(), Error> {
        let LocalOptimizer { inner, engine, .. } = &mut *self.local;
        self.flights = std::mem::take(&mut engine.flights);
        self.saves = true;
        self.flights.iter_mut().for_each(|flight| flight.settle(inner.options()));
        self.record = LocalRecord::of(engine, &self.flights);
        Ok(())
    }

    fn ranks(&mut self) -> Arc<dyn Communicator> {
        Arc::clone(&self.local.engine.workers.world)
    }

    fn name_by_steps(&mut self) -> u64 {
        self.local.engine.step
    }

    fn call_all(&mut self, what: &str, ready: Result<(), Error>) -> Result<(), Error> {
        let text = format!("this call = {what}\n");
        let called = self.local.inner.call_together(what, ready);
        let told = called.as_ref().map_or_else(|error| format!("this call = {error}\n"), |()| text);
        let same = same_everywhere(&*self.local.engine.workers.world, self.local.inner.options(), &told);
        called?;
        same
    }

    fn compare_all(&mut self) -> Result<(), checkpoint::Error> {
        self.tell()
    }

    fn end_all(&mut self, error: &Error) {
        if !matches!(error, Error::Disagree { .. }) {
            self.local.engine.workers.world.abort();
            self.local.engine.workers.across.abort();
        }
    }

    fn choose<'m>(&mut self, saved: &'m Catalog, load: &Load) -> Result<Cow<'m, Catalog>, CheckpointError> {
        let settings = Settings::new(saved.settings().clone());
        let LocalSection { local: Some(record) } = settings.section()? else {
            self.choose_bare(SavedProgress::read(&settings)?.steps.unwrap_or(saved.step()))?;
            return Ok(Cow::Borrowed(saved));
        };
        // Each worker has one tensor for each parameter; a record of far more workers than tensors is invalid.
        let rows = record.workers.len().saturating_mul(self.local.inner.own_params().count());
        if rows > MOST_ROWS * saved.count().max(1) {
            return Err(record.of_too_many());
        }
        self.choose_of(record, load)?;
        let Mode::Mean { anew, .. } = self.mode else { return Ok(Cow::Borrowed(saved)) };
        Ok(Cow::Owned(saved.only(|name| is_of(name, &self.rows.workers, !anew))))
    }

    fn read(
        &mut self,
        saved: &Saved,
        contents: &[SavedTensor],
        fitting: &Fitting<'_>,
    ) -> Result<Vec<Read>, CheckpointError> {
        if let Mode::Own = self.mode {
            return read_own(self, saved, contents, fitting);
        }
        let mut all = Vec::new();
        for row in 0..contents.len() {
            for i in 0..contents[row].vectors.len() {
                let merged = match self.rows.alike(row)[0] == row {
                    true => self.merged(row, i, (saved, contents, fitting))?,
                    false => None,
                };
                all.extend(merged.map(|values| (row, contents[row].vectors[i].slot, values)));
            }
        }
        Ok(all)
    }

    fn set_updates(&mut self, t: &[Option<u64>]) {
        let model = self.model();
        for (row, t) in self.rows.rows.iter().zip(t).filter_map(|(row, t)| Some((row, (*t)?))) {
            match row {
                Row::Param { worker, entry } if *worker == model => {
                    self.local.inner.own_params_mut().set_t(*entry, t)
                }
                Row::Sent { worker, elements } if *worker == model => {
                    let (parts, f) = (&self.local.engine.parts, elements.fragment);
                    let (Some(first), Some(sent)) =
                        (elements.first_spot(parts), sent_mut(&mut self.flights, f))
                    else {
                        continue;
                    };
                    sent.snapshots.iter_mut().skip(first).take(elements.count()).for_each(|s| s.1 = t);
                }
                _ => {}
            }
        }
    }

    fn tensors(&self, placing: &dyn ModelPlacement) -> Result<Vec<SavedTensor>, CheckpointError> {
        self.flights.iter().try_for_each(Flight::failure)?;
        let own = self.local.inner.tensors(placing)?;
        let told = |(r, row): (usize, &Row)| {
            let t = self.t.get(r).copied().unwrap_or_default();
            match row {
                Row::Param { worker, entry } => {
                    let of = own[*entry].clone();
                    let owned = if self.is_here(*worker) { of.owned } else { 0..0 };
                    SavedTensor { name: self.rows.name(row, &of.name), t, owned, ..of }
                }
                Row::Shared(elements) => self.beside_of(row, elements, t, &own),
                Row::Sent { worker, elements } => {
                    let of = self.beside_of(row, elements, t, &own);
                    let owned = if self.is_here(*worker) { of.owned } else { 0..0 };
                    SavedTensor { owned, shared: false, ..of }
                }
            }
        };
        Ok(self.rows.rows.iter().enumerate().map(told).collect())
    }

    fn vector_mut(&mut self, param: usize, slot: Slot) -> Result<SliceMut<'_>, Error> {
        let nothing = SliceMut::empty(DType::F32, self.queue().place());
        if let Row::Param { worker, entry } = self.rows.rows[param] {
            return if self.is_here(worker) { self.local.inner.vector_mut(entry, slot) } else { Ok(nothing) };
        }
        let Some((_, kind, place)) = self.beside(param, slot) else { return Ok(nothing) };
        let values = kind.buffer_mut(&mut self.local.engine.parts, &mut self.flights, place)?;
        Ok(values.unwrap_or(nothing))
    }

    fn settings(&self) -> Settings {
        self.local.inner.settings().with(&LocalSection { local: Some(self.record.clone()) })
    }

    fn check(&self, settings: &Settings) -> Result<(), CheckpointError> {
        self.local.inner.check(&self.own_settings(settings))
    }

    fn resume(&mut self, settings: &Settings) -> Result<(), checkpoint::Error> {
        self.local.inner.resume(&self.own_settings(settings))?;
        Ok(self.go_on()?)
    }
}

//! Checkpoints of workers: each worker's parameters and moments, the state shared by all workers, and exchanges in flight.

mod exchange;
mod in_flight;
mod mean;
mod merge_on_load;
mod record;
mod rows;

use super::in_flight::Flight;
use super::{LocalError, LocalOptimizer};
use crate::checkpoint::{
    CheckpointError, Fitting, Load, Loaded, LocalPieces, Manifest, ModelPlacement, Read, Save, Saveable,
    Saved, SavedTensor, Saving, Settings, Store, Unsharded, Vectors, load_all, read_own, save_all,
    save_all_async,
};
use crate::local::owned_spans::trained;
use crate::update::values::VectorKind as Slot;
use crate::{Error, Optimizer, same_everywhere};
use mean::Weighed;
use meshstep_comm::Communicator;
use meshstep_tensor::{DType, Param, Queue, Slice, SliceMut};
pub(crate) use record::LocalRecord;
use rows::{Elements, Row, Rows, is_of, sent_mut};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

impl LocalOptimizer {
    /// Saves all workers as one checkpoint, between two steps, also in the middle of an interval: each worker's parameters, moments and
    /// `t`, the result of the last exchange, the outer optimizer's state, exchanges in flight (after waiting for their values), the step,
    /// and the plan. Collective over all ranks of all workers, and otherwise as [`Optimizer::save`].
    pub fn save(&mut self, store: &Store, save: Save<'_>) -> Result<u64, LocalError> {
        self.save_placed(store, save, &self.alike())
    }

    /// [`save`](Self::save) of workers with parameters cut as `placing` describes within one worker.
    pub fn save_placed(
        &mut self,
        store: &Store,
        save: Save<'_>,
        placing: &dyn ModelPlacement,
    ) -> Result<u64, LocalError> {
        self.saving(placing, |all, placing| save_all(all, store, save, placing))
    }

    /// [`Optimizer::save_async`] of all workers; see [`save`](Self::save). Dropping the optimizer waits for the save.
    pub fn save_async(&mut self, store: &Store, save: Save<'_>) -> Result<Saving, LocalError> {
        self.save_async_placed(store, save, &self.alike())
    }

    /// [`save_async`](Self::save_async) of workers with parameters cut as `placing` describes within one worker.
    pub fn save_async_placed(
        &mut self,
        store: &Store,
        save: Save<'_>,
        placing: &dyn ModelPlacement,
    ) -> Result<Saving, LocalError> {
        self.saving(placing, |all, placing| save_all_async(all, store, save, placing))
    }

    /// Loads a checkpoint of workers onto any ranks and stage of each worker. Collective over all ranks of all workers, and otherwise as
    /// [`Optimizer::load`].
    ///
    /// The same number of workers continues bit for bit. For another number, the saved workers' own states are merged: parameters, masters,
    /// moments and sent values become the mean of the workers with values that count, in f64, rounded once, weighted by tokens if the plan
    /// says so. Tokens since each fragment's last exchange are divided evenly, rounded up. Shared state stays, and so do exchanges in
    /// flight and the step; `t`, the loss scale and skips are the first worker's. Merging takes memory for 16 MiB of the saved workers'
    /// values, or 1 MiB of each worker's.
    ///
    /// Another plan is an error, unless `other_settings` allows it: then the workers begin the plan together, from the mean, with a fresh
    /// outer optimizer. They begin in the same way from a checkpoint of an [`Optimizer`].
    pub fn load(&mut self, store: &Store, load: Load) -> Result<Loaded, LocalError> {
        self.load_placed(store, load, &self.alike())
    }

    /// [`load`](Self::load) onto workers with parameters cut as `placing` describes within one worker.
    pub fn load_placed(
        &mut self,
        store: &Store,
        load: Load,
        placing: &dyn ModelPlacement,
    ) -> Result<Loaded, LocalError> {
        let placing = self.placing(placing);
        let mut all = AllWorkers::new(self, Vec::new());
        Ok(load_all(&mut all, store, load, &placing)?)
    }

    fn saving<T>(
        &mut self,
        placing: &dyn ModelPlacement,
        call: impl FnOnce(&mut AllWorkers<'_>, &Meshed<'_>) -> Result<T, Error>,
    ) -> Result<T, LocalError> {
        let placing = self.placing(placing);
        let mut flights = std::mem::take(&mut self.engine.flights);
        flights.iter_mut().for_each(|flight| flight.settle(&self.inner.params.options));
        let mut all = AllWorkers::new(self, flights);
        let done = call(&mut all, &placing);
        self.engine.flights = std::mem::take(&mut all.flights);
        Ok(done?)
    }

    fn alike(&self) -> Unsharded {
        Unsharded { ranks: self.inner.comm().world_size() }
    }

    fn placing<'a>(&self, inside: &'a dyn ModelPlacement) -> Meshed<'a> {
        Meshed { workers: self.engine.workers.across.world_size(), inside }
    }
}

/// Maximum number of workers' parameters that a record may list for each tensor of the checkpoint.
const MOST_ROWS: usize = 16;

/// Placement of several workers; `inside` describes the ranks of one.
struct Meshed<'a> {
    workers: usize,
    inside: &'a dyn ModelPlacement,
}

impl ModelPlacement for Meshed<'_> {
    fn mesh(&self) -> String {
        format!("workers={},{}", self.workers, self.inside.mesh())
    }

    fn holding(&self, param: &Param) -> LocalPieces {
        self.inside.holding(param)
    }

    fn tied(&self) -> BTreeMap<String, String> {
        self.inside.tied()
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
    /// Exchanges in flight, with their values landed.
    flights: Vec<Flight>,
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
    fn new(local: &'a mut LocalOptimizer, flights: Vec<Flight>) -> Self {
        let record = LocalRecord::of(&local.engine, &flights);
        AllWorkers { local, mode: Mode::Own, rows: Rows::default(), record, t: Vec::new(), flights }
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
            true => Rows::new(plan, &trained(inner), inner.params.entries.len(), workers, &self.flights),
            false => Ok(Rows::params(inner.params.entries.len(), workers)),
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

impl Vectors for AllWorkers<'_> {
    fn queue(&self) -> Queue {
        self.local.inner.params.options.queue.clone()
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
}

impl Saveable for AllWorkers<'_> {
    fn optimizer(&mut self) -> &mut Optimizer {
        &mut self.local.inner
    }

    fn ranks(&mut self) -> Arc<dyn Communicator> {
        Arc::clone(&self.local.engine.workers.world)
    }

    fn name_by_steps(&mut self) -> u64 {
        self.local.engine.step
    }

    fn call_all(&mut self, what: &str, ready: Result<(), Error>) -> Result<(), Error> {
        let text = format!("this call = {what}\n");
        let called = self.local.inner.reducer.call_together(what, ready).map(drop);
        let told = called.as_ref().map_or_else(|error| format!("this call = {error}\n"), |()| text);
        let same = same_everywhere(&*self.local.engine.workers.world, self.local.inner.options(), &told);
        called?;
        same
    }

    fn compare_all(&mut self) -> Result<(), Error> {
        self.tell()
    }

    fn end_all<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        if !matches!(result, Ok(_) | Err(Error::Disagree { .. } | Error::Checkpoint(_))) {
            self.local.engine.workers.world.abort();
            self.local.engine.workers.across.abort();
        }
        result
    }

    fn choose<'m>(
        &mut self,
        manifest: &'m Manifest,
        load: &Load,
    ) -> Result<Cow<'m, Manifest>, CheckpointError> {
        let settings = Settings::from_json(&manifest.settings)?;
        let Some(record) = settings.local else {
            self.choose_bare(settings.steps.unwrap_or(manifest.step))?;
            return Ok(Cow::Borrowed(manifest));
        };
        // Each worker has one tensor for each parameter; a record of far more workers than tensors is invalid.
        let rows = record.workers.len().saturating_mul(self.local.inner.params.entries.len());
        if rows > MOST_ROWS * manifest.tensors.len().max(1) {
            return Err(record.of_too_many());
        }
        self.choose_of(record, load)?;
        let Mode::Mean { anew, .. } = self.mode else { return Ok(Cow::Borrowed(manifest)) };
        let mut chosen = manifest.clone();
        chosen.tensors.retain(|name, _| is_of(name, &self.rows.workers, !anew));
        Ok(Cow::Owned(chosen))
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
                    self.local.inner.params.entries[*entry].t = t
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

    fn contents(&self, placing: &dyn ModelPlacement) -> Result<Vec<SavedTensor>, CheckpointError> {
        self.flights.iter().try_for_each(Flight::failure)?;
        let own = self.local.inner.contents(placing)?;
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

    fn settings(&self, tied: BTreeMap<String, String>) -> Settings {
        let local = Some(self.record.clone());
        Settings { local, ..self.local.inner.settings(tied) }
    }

    fn check(&self, settings: &Settings) -> Result<(), CheckpointError> {
        // Apply the limits on counts to the worker's counts too.
        let own = Settings::from_json(&self.own_settings(settings).to_json())?;
        self.local.inner.check(&own)
    }

    fn take_in(&mut self, settings: &Settings) -> Result<(), Error> {
        self.local.inner.take_in(&self.own_settings(settings))?;
        self.go_on()
    }
}

//! Agreement among the ranks of all workers on a save, and the state that each rank resumes from after a load.

use super::in_flight::updates;
use super::record::WorkerRecord;
use super::rows::Row;
use super::{AllWorkers, Mode};
use meshstep_checkpoint::extend::{SavedParts, Settings};
use meshstep_checkpoint::{self as checkpoint, CheckpointError};
use meshstep_shard::Error;
use meshstep_shard::extend::{OptimizerExchange, OptimizerShard};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use twox_hash::XxHash3_64;

/// Description of one rank's state.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    worker: usize,
    inside: usize,
    /// Digests of the state shared by all ranks of a worker, and of the state shared by all workers' ranks with the same shard.
    counters: u64,
    shared: u64,
    /// Digest of the state shared by all ranks: the step and the exchanges in flight.
    step: u64,
    record: WorkerRecord,
    /// Number of updates of each parameter, now and when each fragment in flight was sent.
    t: Vec<u64>,
    sent: Vec<Vec<u64>>,
}

impl AllWorkers<'_> {
    /// Exchanges the ranks' counts, and checks that state which is saved once is the same on all ranks. Collective.
    pub(super) fn tell(&mut self) -> Result<(), checkpoint::Error> {
        let own = self.told()?;
        let ranks = self.group();
        let all = ranks.gather(&serde_json::to_vec(&own).unwrap_or_default())?;
        let all: Result<Vec<Told>, _> = all.iter().map(|text| serde_json::from_slice(text)).collect();
        let all = ranks.agree(all.map_err(CheckpointError::memory))?;
        alike("counters on ranks of a worker", &all, |told| told.worker, |told| told.counters)?;
        alike("state shared by all workers", &all, |told| told.inside, |told| told.shared)?;
        alike("the step of workers", &all, |_| 0, |told| told.step)?;
        let workers = by_worker(all);
        let rows = self.all_rows((0..workers.len()).collect(), true);
        self.rows = ranks.agree(rows)?;
        self.t = self.rows.rows.iter().map(|row| self.updates(row, &workers)).collect();
        self.record.workers = workers.into_iter().map(|told| told.record).collect();
        Ok(())
    }

    fn told(&mut self) -> Result<Told, Error> {
        let inner = &mut self.local.inner;
        let counters = XxHash3_64::oneshot(inner.describe_counters()?.as_bytes());
        let shared = self.local.engine.digest(&self.flights, self.local.inner.options())?;
        let step = XxHash3_64::oneshot(&serde_json::to_vec(&self.record).unwrap_or_default());
        let (inner, engine) = (&self.local.inner, &self.local.engine);
        let (t, sent) = updates(inner, &engine.parts, &self.flights);
        let record = WorkerRecord::of(inner, engine, &self.flights);
        let (worker, inside) = (engine.workers.across.rank(), inner.comm().rank());
        Ok(Told { worker, inside, counters, shared, step, record, t, sent })
    }

    /// Returns the number of updates of a row.
    fn updates(&self, row: &Row, workers: &[Told]) -> u64 {
        match row {
            Row::Param { worker, entry } => workers[*worker].t[*entry],
            Row::Shared(elements) => self.record.outer_steps[elements.fragment],
            Row::Sent { worker, elements } => {
                let mut on_its_way = self.flights.iter().flat_map(|flight| &flight.fragments);
                let sent = on_its_way.position(|&f| f == elements.fragment);
                sent.map_or(0, |sent| workers[*worker].sent[sent][elements.entry])
            }
        }
    }

    /// Returns the settings that this worker's optimizer resumes from.
    pub(super) fn own_settings(&self, settings: &Settings) -> Settings {
        let own = self.record.workers.get(self.model());
        own.map_or_else(|| settings.clone(), |own| settings.clone().with(&own.progress))
    }

    /// Resumes from the record, after the vectors have been written.
    pub(super) fn go_on(&mut self) -> Result<(), Error> {
        let among = self.local.engine.workers.across.world_size();
        let own = match self.mode {
            Mode::Own => self.record.workers.get(self.worker()).cloned().unwrap_or_default(),
            Mode::Mean { anew: false, .. } => self.record.divided(&self.rows.workers, among),
            // Counts of another plan do not apply.
            Mode::Mean { .. } => WorkerRecord::default(),
        };
        let (inner, engine) = (&self.local.inner, &mut self.local.engine);
        for mut flight in std::mem::replace(&mut engine.flights, std::mem::take(&mut self.flights)) {
            // Wait for exchanges that were started, and discard their result.
            let _ = flight.land(inner.options());
        }
        engine.forget();
        engine.step = self.record.step;
        engine.again = self.record.again.iter().copied().collect();
        engine.active = true;
        if let Mode::Mean { anew: true, .. } = self.mode {
            engine.again.clear();
            return engine.parts.restart(inner.own_params());
        }
        engine.parts.outer_steps().zip(&self.record.outer_steps).for_each(|(t, saved)| *t = *saved);
        // The first rank holds the worker's sum.
        let first = inner.comm().rank() == 0;
        let counted = |tokens: u64| if first { tokens } else { 0 };
        for (f, &tokens) in own.tokens.iter().enumerate() {
            engine.parts.of_mut(f).tokens = counted(tokens);
        }
        let sent = engine.flights.iter_mut().flat_map(|flight| &mut flight.sent);
        sent.zip(&own.sent).for_each(|(sent, &tokens)| sent.tokens = counted(tokens));
        if let Mode::Own = self.mode {
            engine.active = own.active;
        }
        Ok(())
    }
}

/// Merges the descriptions of the ranks of each worker.
fn by_worker(all: Vec<Told>) -> Vec<Told> {
    let mut workers: BTreeMap<usize, Told> = BTreeMap::new();
    for told in all {
        let Some(so_far) = workers.remove(&told.worker) else {
            workers.insert(told.worker, told);
            continue;
        };
        // A rank has 0 for parameters that it has no part of.
        let known = |(own, other): (&u64, &u64)| *own.max(other);
        let sent = so_far.sent.iter().zip(&told.sent);
        let sent = sent.map(|(own, other)| own.iter().zip(other).map(known).collect()).collect();
        let record = so_far.record.clone().with(&told.record);
        workers.insert(told.worker, Told { record, sent, ..so_far });
    }
    workers.into_values().collect()
}

/// Checks that all ranks of a group have the same digest; the result is the same on every rank.
fn alike(
    what: &str,
    all: &[Told],
    group: impl Fn(&Told) -> usize,
    digest: impl Fn(&Told) -> u64,
) -> Result<(), Error> {
    let mut first = BTreeMap::new();
    for (rank, told) in all.iter().enumerate() {
        let (of, expected) = *first.entry(group(told)).or_insert((rank, digest(told)));
        if digest(told) != expected {
            let shown = |rank, digest| format!("digest {digest:016x} on rank {rank}");
            let (rank0, theirs) = (shown(of, expected), shown(rank, digest(told)));
            return Err(Error::Disagree { what: what.to_owned(), rank0, rank, theirs });
        }
    }
    Ok(())
}

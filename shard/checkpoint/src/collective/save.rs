//! Saving: every rank writes the elements it owns, and the step becomes the newest one when all ranks have written.

use super::background::Saver;
use super::ranks::{Ranks, Work};
use super::write::{WriteJob, Written};
use super::writer_election::{claims, elected, parts};
use crate::contents::Saveable;
use crate::error::CheckpointError;
use crate::failure::Error;
use crate::format::local_pieces::Part;
use crate::format::manifest::{FORMAT, Manifest, SlotEntry, TensorEntry};
use crate::format::placement::ModelPlacement;
use crate::format::run_id::{RunId, random};
use crate::format::settings::Settings;
use crate::parts::{Live, SavedParts};
use crate::store::Store;
use crate::store::draft::{Draft, Folder};
use crate::store::reader::of_rank;
use crate::tensors::{Named, ReadSource, SavedTensor};
use meshstep_shard::extend::OptimizerShard;
use std::collections::BTreeMap;
use std::fmt;

/// Options of a save. The same on every rank, except `own_blobs`, `progress` and the saver of `after`, which are each rank's own.
#[derive(Default)]
pub struct Save<'a> {
    /// Name of the checkpoint; `None` takes the number of steps so far.
    pub step: Option<u64>,
    /// Number of newest checkpoints to keep, this one included; `None` keeps all.
    pub keep: Option<usize>,
    /// Caller's bytes by name; rank 0's are saved.
    pub blobs: Vec<(&'a str, &'a [u8])>,
    /// Caller's bytes that differ by rank, such as the position of its data loader and its random number state.
    pub own_blobs: Vec<(&'a str, &'a [u8])>,
    /// Called after each write of this rank with the bytes written so far and the total. A background save refuses a hook; its
    /// [`Saving`](crate::Saving) reports progress.
    pub progress: Option<&'a mut dyn FnMut(u64, u64)>,
    /// Background saves that this save comes after: it waits for the last of them, and returns its error if that has not been reported.
    pub after: Option<&'a mut Saver>,
}

impl fmt::Debug for Save<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Save { step, keep, blobs, own_blobs, .. } = self;
        let mut shown = f.debug_struct("Save");
        shown.field("step", step).field("keep", keep).field("blobs", blobs).field("own_blobs", own_blobs);
        shown.finish_non_exhaustive()
    }
}

/// Word of a rank that knows no run.
const UNKNOWN: u64 = 0;

/// Save that all ranks have agreed on. It is of one moment: the source passed to it must hold the vectors of that moment.
#[derive(Debug)]
pub(crate) struct Agreed {
    pub(crate) contents: Vec<SavedTensor>,
    /// SavedParts of parameters that this rank writes.
    pub(crate) parts: Vec<(usize, Part)>,
    step: u64,
    keep: Option<usize>,
    mesh: String,
    settings: Settings,
    blobs: Vec<(String, Vec<u8>)>,
}

/// Saves parameters, state and progress between two steps; returns the step that names the checkpoint. Collective over all ranks of
/// `thing`, which may be several groups or workers.
///
/// Each rank writes one file with the elements it owns, through at most 16 MiB of additional memory, and waits for the other ranks up to
/// its communicator's deadline. An error is the same on every rank ([`Error::Failed`] names the lowest rank that failed), and changes
/// neither `thing` nor earlier checkpoints. Only an error in removing old checkpoints comes after the new one is complete. Two saves to one
/// folder at once are refused; pass the [`Saver`] of a background save as [`Save::after`].
///
/// | `thing` | saved |
/// |---|---|
/// | [`Optimizer`](meshstep_shard::Optimizer) | each element of each parameter once, with its state |
/// | [`ShardedLbfgs`](meshstep_shard::ShardedLbfgs) | also the directions `d0`, .., and `y0`, .., the gradients `g0`, .., and the point `x`; named by the iterations |
/// | [`CrossShard`](meshstep_shard::CrossShard) | what a single optimizer would save, if all groups have the same values by their hashes; otherwise tensors `group.<number>/<parameter>`, in the order in which the groups were given; steps, skips and loss scale of each group if they differ. Ranks of one group that differ are [`Disagree`](meshstep_shard::Error::Disagree) |
/// | `LocalOptimizer`, a worker | each worker's parameters, moments and `t`, the result of the last exchange, the outer optimizer's state, exchanges in flight (after waiting for their values), the step, and the plan |
pub fn save<T: Saveable + ?Sized>(thing: &mut T, store: &Store, mut save: Save<'_>) -> Result<u64, Error> {
    let mut nobody = |_, _| {};
    let (progress, after) = (save.progress.take(), save.after.take());
    let mut contents = thing.contents();
    let (parts, placing) = contents.all();
    let agreed =
        agree_to_save(parts, "save", &save, (&*placing, &mut after.into_iter().collect::<Vec<_>>()))?;
    let step = agreed.step;
    let ranks = parts.group();
    let progress = progress.unwrap_or(&mut nobody);
    parts.apart(|parts| agreed.carry_out(store, &ranks, &mut Live(parts), progress))?;
    Ok(step)
}

/// Agrees on the save and divides the writes among the ranks, after the last saves of `savers`. Collective.
pub(crate) fn agree_to_save(
    parts: &mut dyn SavedParts,
    how: &str,
    save: &Save<'_>,
    (placing, savers): (&dyn ModelPlacement, &mut [&mut Saver]),
) -> Result<Agreed, Error> {
    parts.begin_save()?;
    let opt = parts.optimizer();
    opt.healthy()?;
    savers.iter_mut().for_each(|saver| saver.finish());
    let ready = opt.between_two_steps();
    let (step, keep) = (save.step.unwrap_or_else(|| parts.name_by_steps()), save.keep);
    parts.call_all(&format!("{how}\nstep to save = {step}\ncheckpoints to keep = {keep:?}"), ready)?;
    let ranks = parts.group();
    parts.apart(|parts| {
        Saver::report(savers, &ranks, &parts.ranks())?;
        parts.compare_all()?;
        let blobs = blobs(save, ranks.rank());
        let contents = parts.tensors(placing).and_then(|contents| Ok((contents, blobs?)));
        let (contents, blobs) = ranks.agree(contents)?;
        let written = divide(&ranks, &contents)?;
        let (mesh, settings) = (placing.mesh(), parts.all_settings(placing));
        Ok(Agreed { contents, parts: written, step, keep, mesh, settings, blobs })
    })
}

/// Returns the parts that this rank writes. Collective.
fn divide(ranks: &Ranks, contents: &[SavedTensor]) -> Result<Vec<(usize, Part)>, Error> {
    let parts = parts(contents);
    let claims = ranks.gather(&serde_json::to_vec(&claims(contents, &parts)).unwrap_or_default())?;
    let claims: Result<Vec<_>, _> = claims.iter().map(|text| serde_json::from_slice(text)).collect();
    let claims = ranks.agree(claims.map_err(CheckpointError::memory))?;
    Ok(elected(claims, ranks.rank(), &parts))
}

impl Agreed {
    /// Returns the step that names the checkpoint.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Writes all files and makes the step the newest one. Collective over `ranks`.
    pub(crate) fn carry_out(
        &self,
        store: &Store,
        ranks: &Ranks,
        from: &mut dyn ReadSource,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Error> {
        let draft = self.open(store, ranks)?;
        let written = self.write(store, ranks, from, progress);
        self.close(ranks, draft, written)
    }

    /// Begins the step on rank 0, in a folder that all ranks see. Collective.
    pub(crate) fn open(&self, store: &Store, ranks: &Ranks) -> Result<Option<Draft>, Error> {
        let first = ranks.rank() == 0;
        // Rank 0 may have joined since the run's last save.
        let known = ranks.words(store.run().map_or(UNKNOWN, |run| run.0))?;
        let known = known.into_iter().find(|&run| run != UNKNOWN).map(RunId);
        store.follow(store.run().or(known));
        // Removing the remains of earlier attempts may take long.
        let draft =
            ranks.agree_on_first(first.then(|| Box::new(|| store.begin(self.step)) as Work<'_, _>))?;
        match prove(&store.folder(self.step), draft.as_ref(), ranks) {
            Ok(run) => {
                store.follow(Some(run));
                Ok(draft)
            }
            Err(error) => {
                draft.into_iter().for_each(Draft::discard);
                Err(error)
            }
        }
    }

    /// Writes this rank's file.
    pub(crate) fn write(
        &self,
        store: &Store,
        ranks: &Ranks,
        from: &mut dyn ReadSource,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Written, CheckpointError> {
        let Agreed { contents, parts, blobs, .. } = self;
        let job = WriteJob { rank: ranks.rank(), contents, parts, blobs, meter: ranks.memory().1 };
        job.write(&store.folder(self.step), from, progress)
    }

    /// Makes the step the newest one if every rank has written, and discards it otherwise. Collective.
    pub(crate) fn close(
        &self,
        ranks: &Ranks,
        draft: Option<Draft>,
        written: Result<Written, CheckpointError>,
    ) -> Result<(), Error> {
        let written = ranks.agree(written);
        let written =
            written.and_then(|written| Ok(ranks.gather(&serde_json::to_vec(&written).unwrap_or_default())?));
        let Some(draft) = draft else {
            return written.and_then(|_| ranks.agree_on_first::<()>(None)).map(drop);
        };
        match written {
            // Removing old steps may take long.
            Ok(written) => ranks.agree_on_first(Some(Box::new(|| self.publish(draft, &written)))).map(drop),
            Err(error) => {
                draft.discard();
                Err(error)
            }
        }
    }

    fn publish(&self, draft: Draft, written: &[Vec<u8>]) -> Result<(), CheckpointError> {
        let written: Result<Vec<Written>, _> =
            written.iter().map(|text| serde_json::from_slice(text)).collect();
        let manifest = self.manifest(draft.run(), written.map_err(CheckpointError::memory)?);
        match self.keep {
            Some(keep) => draft.publish_keeping(&manifest, keep),
            None => draft.publish(&manifest),
        }
    }

    fn manifest(&self, run: RunId, written: Vec<Written>) -> Manifest {
        let mut tensors: Vec<TensorEntry> = self.contents.iter().map(empty).collect();
        let (mut files, mut blobs) = (Vec::new(), BTreeMap::new());
        for own in written {
            files.push(own.file);
            blobs.extend(own.blobs);
            for (param, slot, piece) in own.pieces {
                if let Some(slot) = tensors.get_mut(param).and_then(|tensor| tensor.slots.get_mut(&slot)) {
                    slot.pieces.push(piece);
                }
            }
        }
        let names = self.contents.iter().map(|content| content.name.clone());
        Manifest {
            format: FORMAT,
            step: self.step,
            run: Some(run),
            mesh: self.mesh.clone(),
            files,
            tensors: names.zip(tensors).collect(),
            settings: self.settings.members().clone(),
            blobs,
        }
    }
}

/// Checks that all ranks see the same folder as rank 0, and returns the run of its draft. Collective.
fn prove(folder: &Folder, draft: Option<&Draft>, ranks: &Ranks) -> Result<RunId, Error> {
    let first = draft.is_some();
    let mut words = [random(), draft.map_or(UNKNOWN, |draft| draft.run().0)];
    ranks.first_words(&mut words)?;
    let [proof, run] = words;
    ranks.agree(if first { folder.show(proof) } else { Ok(()) })?;
    ranks.agree(folder.shows(proof))?;
    ranks.agree(if first { folder.hide() } else { Ok(()) })?;
    Ok(RunId(run))
}

/// Returns a parameter's entry without any pieces.
fn empty(content: &SavedTensor) -> TensorEntry {
    let slot = |vector: &Named| (vector.name.clone(), SlotEntry { dtype: vector.dtype, pieces: Vec::new() });
    let slots = content.vectors.iter().map(slot).collect();
    TensorEntry { shape: content.holding.shape.clone(), t: content.t, slots }
}

/// Returns the caller's bytes that this rank writes, by the names under which they are saved.
fn blobs(save: &Save<'_>, rank: usize) -> Result<Vec<(String, Vec<u8>)>, CheckpointError> {
    let all = if rank == 0 { &save.blobs[..] } else { &[] };
    let all = all.iter().map(|&(name, bytes)| (name, name.to_owned(), bytes));
    let own = save.own_blobs.iter().map(|&(name, bytes)| (name, of_rank(name, rank), bytes));
    let mut named: Vec<(String, Vec<u8>)> = Vec::new();
    for (given, name, bytes) in all.chain(own) {
        let reason = match () {
            () if given.contains('@') => "a blob's name must not contain '@'",
            () if named.iter().any(|(other, _)| *other == name) => "another blob has this name",
            () => {
                named.push((name, bytes.to_vec()));
                continue;
            }
        };
        return Err(CheckpointError::Blob { name: given.to_owned(), reason: reason.to_owned() });
    }
    Ok(named)
}

//! Saving: every rank writes the elements it owns, and the step becomes the newest one when all ranks have written.

use super::ranks::{Ranks, Work};
use super::write::{WriteJob, Written};
use super::writer_election::{claims, elected, parts};
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::format::local_pieces::Part;
use crate::checkpoint::format::manifest::{FORMAT, Manifest, SlotEntry, TensorEntry};
use crate::checkpoint::format::placement::{ModelPlacement, Unsharded};
use crate::checkpoint::format::settings::Settings;
use crate::checkpoint::saveable::{Named, Saveable, SavedTensor, Source};
use crate::checkpoint::store::reader::of_rank;
use crate::checkpoint::store::{Draft, Folder, Store};
use crate::{Error, Optimizer};
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{BuildHasher, Hasher};

/// Options of a save. The same on every rank, except `own_blobs` and `progress`, which are each rank's own.
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
    /// [`Saving`](crate::checkpoint::Saving) reports progress.
    pub progress: Option<&'a mut dyn FnMut(u64, u64)>,
}

impl fmt::Debug for Save<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Save { step, keep, blobs, own_blobs, .. } = self;
        let mut shown = f.debug_struct("Save");
        shown.field("step", step).field("keep", keep).field("blobs", blobs).field("own_blobs", own_blobs);
        shown.finish_non_exhaustive()
    }
}

/// Save that all ranks have agreed on. It is of one moment: the source passed to it must hold the vectors of that moment.
#[derive(Debug)]
pub(crate) struct Agreed {
    pub(crate) contents: Vec<SavedTensor>,
    /// Parts of parameters that this rank writes.
    pub(crate) parts: Vec<(usize, Part)>,
    step: u64,
    keep: Option<usize>,
    mesh: String,
    settings: Settings,
    blobs: Vec<(String, Vec<u8>)>,
}

impl Optimizer {
    /// Saves parameters, state and progress between two steps; returns the step that names the checkpoint. Collective.
    ///
    /// Each rank writes one file with the elements it owns, through at most 16 MiB of additional memory, and waits for the other ranks up
    /// to its communicator's deadline. An error is the same on every rank ([`Error::Checkpoint`] names the lowest rank that failed), and
    /// changes neither the optimizer nor earlier checkpoints. Only an error in removing old checkpoints comes after the new one is
    /// complete.
    pub fn save(&mut self, store: &Store, save: Save<'_>) -> Result<u64, Error> {
        let ranks = self.comm().world_size();
        self.save_placed(store, save, &Unsharded { ranks })
    }

    /// [`save`](Self::save) with parameters cut as `placing` describes.
    pub fn save_placed(
        &mut self,
        store: &Store,
        save: Save<'_>,
        placing: &dyn ModelPlacement,
    ) -> Result<u64, Error> {
        save_all(self, store, save, placing)
    }

    /// Checks that no step is in progress on this rank and that the outcome of every step is known.
    pub(crate) fn between_two_steps(&mut self) -> Result<(), Error> {
        self.reducer.finish_dropped()?;
        self.check_outcomes()?;
        self.params.check_some()?;
        self.reducer.check_idle()
    }
}

/// Saves the contents of `saveable`. Collective.
pub(crate) fn save_all<K: Saveable>(
    saveable: &mut K,
    store: &Store,
    mut save: Save<'_>,
    placing: &dyn ModelPlacement,
) -> Result<u64, Error> {
    let mut nobody = |_, _| {};
    let progress = save.progress.take();
    let agreed = agree_to_save(saveable, "save", &save, placing)?;
    let step = agreed.step;
    let ranks = Ranks::of(saveable);
    let progress = progress.unwrap_or(&mut nobody);
    apart(saveable, |saveable| agreed.carry_out(store, &ranks, saveable, progress))?;
    Ok(step)
}

/// Agrees on the save and divides the writes among the ranks. Collective.
pub(crate) fn agree_to_save<K: Saveable>(
    saveable: &mut K,
    how: &str,
    save: &Save<'_>,
    placing: &dyn ModelPlacement,
) -> Result<Agreed, Error> {
    let opt = saveable.optimizer();
    opt.reducer.healthy()?;
    opt.finish_last_save();
    let ready = opt.between_two_steps();
    let (step, keep) = (save.step.unwrap_or_else(|| saveable.name_by_steps()), save.keep);
    saveable.call_all(&format!("{how}\nstep to save = {step}\ncheckpoints to keep = {keep:?}"), ready)?;
    let ranks = Ranks::of(saveable);
    apart(saveable, |saveable| {
        saveable.optimizer().hear_of_last_save(&ranks)?;
        saveable.compare_all()?;
        let blobs = blobs(save, ranks.rank());
        let contents = saveable.contents(placing).and_then(|contents| Ok((contents, blobs?)));
        let (contents, blobs) = ranks.agree(contents)?;
        let parts = divide(&ranks, &contents)?;
        let (mesh, settings) = (placing.mesh(), saveable.settings(placing.tied()));
        Ok(Agreed { contents, parts, step, keep, mesh, settings, blobs })
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

/// [`Optimizer::apart_from_steps`] for a keeper.
pub(crate) fn apart<K: Saveable, T>(
    saveable: &mut K,
    call: impl FnOnce(&mut K) -> Result<T, Error>,
) -> Result<T, Error> {
    let before = saveable.optimizer().reducer.sent();
    let called = call(saveable);
    let opt = saveable.optimizer();
    opt.reducer.exclude_from_step(before);
    saveable.end_all(called)
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
        from: &mut dyn Source,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Error> {
        let draft = self.open(store, ranks)?;
        let written = self.write(store, ranks, from, progress);
        self.close(ranks, draft, written)
    }

    /// Begins the step on rank 0, in a folder that all ranks see. Collective.
    pub(crate) fn open(&self, store: &Store, ranks: &Ranks) -> Result<Option<Draft>, Error> {
        let first = ranks.rank() == 0;
        // Removing the remains of earlier attempts may take long.
        let draft =
            ranks.agree_on_first(first.then(|| Box::new(|| store.begin(self.step)) as Work<'_, _>))?;
        match prove(&store.folder(self.step), ranks) {
            Ok(()) => Ok(draft),
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
        from: &mut dyn Source,
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
            written.and_then(|written| ranks.gather(&serde_json::to_vec(&written).unwrap_or_default()));
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
        let manifest = self.manifest(written.map_err(CheckpointError::memory)?);
        match self.keep {
            Some(keep) => draft.publish_keeping(&manifest, keep),
            None => draft.publish(&manifest),
        }
    }

    fn manifest(&self, written: Vec<Written>) -> Manifest {
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
            mesh: self.mesh.clone(),
            files,
            tensors: names.zip(tensors).collect(),
            settings: self.settings.to_json(),
            blobs,
        }
    }
}

/// Checks that all ranks see the same folder as rank 0. Collective.
fn prove(folder: &Folder, ranks: &Ranks) -> Result<(), Error> {
    let first = ranks.rank() == 0;
    let proof = ranks.first_word(random())?;
    ranks.agree(if first { folder.show(proof) } else { Ok(()) })?;
    ranks.agree(folder.shows(proof))?;
    ranks.agree(if first { folder.hide() } else { Ok(()) })
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

/// Returns a random word that no other call is likely to return.
pub(crate) fn random() -> u64 {
    std::hash::RandomState::new().build_hasher().finish()
}

//! Saving: every rank writes what it owns, and the step becomes the newest one once all have.

use super::contents::{Content, Keeper, Named, Source};
use super::error::CheckpointError;
use super::holding::Part;
use super::manifest::{FORMAT, Manifest, SlotEntry, TensorEntry};
use super::owner::{claims, elected, parts};
use super::placing::{Alike, Placing};
use super::ranks::{Ranks, Work};
use super::saved::of_rank;
use super::settings::Settings;
use super::store::{Draft, Folder, Store};
use super::write::{Job, Written};
use crate::{Error, Optimizer};
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{BuildHasher, Hasher};

/// What is saved beside parameters and state, and how. The same on every rank, but for what is called a rank's own.
#[derive(Default)]
pub struct Save<'a> {
    /// What the checkpoint is called; `None`: the steps so far.
    pub step: Option<u64>,
    /// How many of the newest checkpoints stay, this one among them; `None`: all.
    pub keep: Option<usize>,
    /// The caller's bytes, by name: rank 0's are saved.
    pub blobs: Vec<(&'a str, &'a [u8])>,
    /// The caller's bytes that each rank has of its own: the position of its data loader, its random numbers.
    pub own_blobs: Vec<(&'a str, &'a [u8])>,
    /// Told after each write of this rank: bytes written, and bytes it writes. Of a background save its
    /// [`Saving`](super::Saving) tells, and a hook is refused.
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

/// A save that all ranks have agreed on. It is of one moment: who carries it out has vectors of that moment.
#[derive(Debug)]
pub(crate) struct Agreed {
    pub(crate) contents: Vec<Content>,
    /// What this rank writes.
    pub(crate) parts: Vec<(usize, Part)>,
    step: u64,
    keep: Option<usize>,
    mesh: String,
    settings: Settings,
    blobs: Vec<(String, Vec<u8>)>,
}

impl Optimizer {
    /// Saves parameters, state, and how far they are, between two steps; tells what the checkpoint is called. Collective.
    ///
    /// Each rank writes one file of what it owns, through at most 16 MiB of memory beside it, and waits for the others as long as
    /// its communicator's deadline lets it. An error is the same on every rank
    /// ([`Error::Checkpoint`] names the first rank that has one), changes nothing here, and leaves the checkpoints before as they
    /// were; only one in removing old ones comes after the new one is complete.
    pub fn save(&mut self, store: &Store, save: Save<'_>) -> Result<u64, Error> {
        let ranks = self.comm().world_size();
        self.save_placed(store, save, &Alike { ranks })
    }

    /// The same where parameters are parts of others.
    pub fn save_placed(
        &mut self,
        store: &Store,
        save: Save<'_>,
        placing: &dyn Placing,
    ) -> Result<u64, Error> {
        save_all(self, store, save, placing)
    }

    /// No step is under way on this rank, and none is unheard of.
    pub(crate) fn between_two_steps(&mut self) -> Result<(), Error> {
        self.finish_dropped()?;
        self.check_heard()?;
        self.check_some()?;
        self.check_idle()
    }
}

/// Saves whatever a keeper keeps. Collective.
pub(crate) fn save_all<K: Keeper>(
    keeper: &mut K,
    store: &Store,
    mut save: Save<'_>,
    placing: &dyn Placing,
) -> Result<u64, Error> {
    let mut nobody = |_, _| {};
    let progress = save.progress.take();
    let agreed = agree_to_save(keeper, "save", &save, placing)?;
    let step = agreed.step;
    let ranks = Ranks::of(keeper);
    let progress = progress.unwrap_or(&mut nobody);
    apart(keeper, |keeper| agreed.carry_out(store, &ranks, keeper, progress))?;
    Ok(step)
}

/// What every rank will write. Collective.
pub(crate) fn agree_to_save<K: Keeper>(
    keeper: &mut K,
    how: &str,
    save: &Save<'_>,
    placing: &dyn Placing,
) -> Result<Agreed, Error> {
    let opt = keeper.optimizer();
    opt.handover.healthy()?;
    opt.finish_last_save();
    let ready = opt.between_two_steps();
    let (step, keep) = (save.step.unwrap_or_else(|| keeper.name_by_steps()), save.keep);
    keeper.call_all(&format!("{how}\nstep to save = {step}\ncheckpoints to keep = {keep:?}"), ready)?;
    let ranks = Ranks::of(keeper);
    apart(keeper, |keeper| {
        keeper.optimizer().hear_of_last_save(&ranks)?;
        keeper.compare_all()?;
        let blobs = blobs(save, ranks.rank());
        let contents = keeper.contents(placing).and_then(|contents| Ok((contents, blobs?)));
        let (contents, blobs) = ranks.agree(contents)?;
        let parts = divide(&ranks, &contents)?;
        let (mesh, settings) = (placing.mesh(), keeper.settings(placing.tied()));
        Ok(Agreed { contents, parts, step, keep, mesh, settings, blobs })
    })
}

/// What this rank writes of what all ranks have. Collective.
fn divide(ranks: &Ranks, contents: &[Content]) -> Result<Vec<(usize, Part)>, Error> {
    let parts = parts(contents);
    let claims = ranks.gather(&serde_json::to_vec(&claims(contents, &parts)).unwrap_or_default())?;
    let claims: Result<Vec<_>, _> = claims.iter().map(|text| serde_json::from_slice(text)).collect();
    let claims = ranks.agree(claims.map_err(CheckpointError::memory))?;
    Ok(elected(claims, ranks.rank(), &parts))
}

/// [`Optimizer::apart_from_steps`] of a keeper.
pub(super) fn apart<K: Keeper, T>(
    keeper: &mut K,
    call: impl FnOnce(&mut K) -> Result<T, Error>,
) -> Result<T, Error> {
    let before = keeper.optimizer().handover.sent();
    let called = call(keeper);
    let opt = keeper.optimizer();
    opt.progress.sent_before += opt.handover.sent() - before;
    keeper.end_all(called)
}

impl Agreed {
    /// What the checkpoint is called.
    pub(super) fn step(&self) -> u64 {
        self.step
    }

    /// Writes everything and makes it the newest step. Collective over `ranks`.
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

    /// Rank 0 begins, where all others see it. Collective.
    pub(super) fn open(&self, store: &Store, ranks: &Ranks) -> Result<Option<Draft>, Error> {
        let first = ranks.rank() == 0;
        // What earlier attempts have left may take long to remove.
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
    pub(super) fn write(
        &self,
        store: &Store,
        ranks: &Ranks,
        from: &mut dyn Source,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Written, CheckpointError> {
        let Agreed { contents, parts, blobs, .. } = self;
        let job = Job { rank: ranks.rank(), contents, parts, blobs, meter: ranks.memory().1 };
        job.write(&store.folder(self.step), from, progress)
    }

    /// Makes what all ranks have written the newest step, or gives it up. Collective.
    pub(super) fn close(
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
            // Old steps may take long to remove.
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

/// Whether all ranks see the folder that rank 0 sees. Collective.
fn prove(folder: &Folder, ranks: &Ranks) -> Result<(), Error> {
    let first = ranks.rank() == 0;
    let proof = ranks.first_word(random())?;
    ranks.agree(if first { folder.show(proof) } else { Ok(()) })?;
    ranks.agree(folder.shows(proof))?;
    ranks.agree(if first { folder.hide() } else { Ok(()) })
}

/// A parameter's entry, of which nothing is written yet.
fn empty(content: &Content) -> TensorEntry {
    let slot = |vector: &Named| (vector.name.clone(), SlotEntry { dtype: vector.dtype, pieces: Vec::new() });
    let slots = content.vectors.iter().map(slot).collect();
    TensorEntry { shape: content.holding.shape.clone(), t: content.t, slots }
}

/// The caller's bytes that this rank writes, under the names they are saved by.
fn blobs(save: &Save<'_>, rank: usize) -> Result<Vec<(String, Vec<u8>)>, CheckpointError> {
    let all = if rank == 0 { &save.blobs[..] } else { &[] };
    let all = all.iter().map(|&(name, bytes)| (name, name.to_owned(), bytes));
    let own = save.own_blobs.iter().map(|&(name, bytes)| (name, of_rank(name, rank), bytes));
    let mut named: Vec<(String, Vec<u8>)> = Vec::new();
    for (given, name, bytes) in all.chain(own) {
        let reason = match () {
            () if given.contains('@') => "names of blobs have no '@'",
            () if named.iter().any(|(other, _)| *other == name) => "another one is called so",
            () => {
                named.push((name, bytes.to_vec()));
                continue;
            }
        };
        return Err(CheckpointError::Blob { name: given.to_owned(), reason: reason.to_owned() });
    }
    Ok(named)
}

/// A word that nobody else has.
pub(super) fn random() -> u64 {
    std::hash::RandomState::new().build_hasher().finish()
}

//! Loading: every rank reads its own elements; then all ranks take them in, or none does.

use super::compatibility::{Cast, Fitting};
use super::load_options::Load;
use super::ranks::Work;
use super::read::{Want, read_all};
use crate::contents::Saveable;
use crate::error::CheckpointError;
use crate::failure::Error;
use crate::format::catalog::SlotRef;
use crate::format::manifest::{WINDOW, Whose};
use crate::format::placement::ModelPlacement;
use crate::format::progress::SavedProgress;
use crate::format::settings::{Settings, TiedNames};
use crate::parts::SavedParts;
use crate::store::Store;
use crate::store::reader::Saved;
use crate::tensors::{PARAM, REMAINDER, Read, SavedTensor};
use meshstep_shard::extend::{OptimizerShard, VectorKind as Slot};
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Slice, SliceMut, Threads};
use std::collections::BTreeMap;
use std::ops::Range;

/// Result of a load.
#[derive(Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// The checkpoint, for its manifest and for the blobs of other ranks.
    pub saved: Saved,
    /// Vectors that the checkpoint lacks: parameters, or their states as `parameter:state`. They stay as they were, with two exceptions:
    /// vectors listed in `cast`, and remainders, which become zeros if their parameters were loaded.
    pub missing: Vec<String>,
    /// Vectors of the checkpoint that do not exist here.
    pub unexpected: Vec<String>,
    /// Vectors converted from another type, or from another vector.
    pub cast: Vec<Cast>,
    /// Caller's bytes by name.
    pub blobs: BTreeMap<String, Vec<u8>>,
    /// Caller's bytes that the rank of this number saved as its own; empty if there was no such rank.
    pub own_blobs: BTreeMap<String, Vec<u8>>,
}

/// Everything that is taken in once all ranks have read.
#[derive(Default)]
pub(crate) struct Staged {
    pub(crate) vectors: Vec<Read>,
    pub(crate) t: Vec<Option<u64>>,
    pub(crate) settings: Settings,
    pub(crate) missing: Vec<String>,
    pub(crate) unexpected: Vec<String>,
    pub(crate) cast: Vec<Cast>,
    pub(crate) blobs: [BTreeMap<String, Vec<u8>>; 2],
}

/// Loads parameters, state and progress onto any number of ranks, any stage and any buckets. Collective over all ranks of `thing`, between
/// two steps.
///
/// Rank 0 reads the manifest, and the others receive its contents, which take about 0.4 of the file's length on each. Each rank reads
/// the bytes it needs, and checks every window of 1 MiB that contains them. The values stay in host memory until every
/// rank has read its own; then they are copied, which does not fail. This takes as much additional memory as this rank's parameters and
/// state, and up to 32 MiB for reading (64 MiB if types change). An error is the same on every rank ([`Error::Failed`] names the lowest
/// rank that failed), and has changed nothing on any rank. Later steps are the same as without the interruption, and later saves to `store`
/// belong to the same run; a checkpoint of an earlier version has none, and only a store that
/// [adopts](crate::Store::adopting) it saves after it.
///
/// | `thing` | loads |
/// |---|---|
/// | [`CrossShard`](meshstep_shard::CrossShard) | with the same number of groups each group's state, onto any number of ranks. With another number, and from a checkpoint of an [`Optimizer`](meshstep_shard::Optimizer), the state that all groups shared, with the first group's steps, skips and loss scale; if the saved groups had diverged, this is [`CheckpointError::Groups`]: call [`synchronize_state`](meshstep_shard::CrossShard::synchronize_state) before saving |
/// | `LocalOptimizer`, a worker | with the same number of workers each worker's state, onto any ranks and stage. Another number merges the saved workers, and another plan begins anew, as below |
///
/// For another number of workers, parameters, masters, moments and sent values become the mean of the workers with values that count, in
/// f64, rounded once, weighted by tokens if the plan says so. Tokens since each fragment's last exchange are divided evenly, rounded up.
/// Shared state stays, and so do exchanges in flight and the step; `t`, the loss scale and skips are the first worker's. Merging takes
/// memory for 16 MiB of the saved workers' values, or 1 MiB of each worker's. Another plan is an error, unless
/// [`other_settings`](Load::other_settings) allows it: then the workers begin the plan together, from the mean, with a fresh outer
/// optimizer. They begin in the same way from a checkpoint of an [`Optimizer`](meshstep_shard::Optimizer).
pub fn load<T: Saveable + ?Sized>(thing: &mut T, store: &Store, load: Load) -> Result<Loaded, Error> {
    let mut contents = thing.contents();
    let (parts, placing) = contents.all();
    parts.begin_load()?;
    let opt = parts.optimizer();
    opt.healthy()?;
    let ready = opt.between_two_steps();
    parts.call_all(&format!("load\nwhat to load = {load:?}"), ready)?;
    let ranks = parts.group();
    parts.apart(|parts| {
        let found = ranks.agree(store.find(load.step))?;
        meshstep_shard::same_everywhere(&*parts.ranks(), parts.optimizer().options(), &found.line())?;
        let read: Option<Work<'_, _>> = (ranks.rank() == 0).then(|| Box::new(|| found.read()) as _);
        let read = ranks.agree_on_first(read)?;
        let saved = found.opened(ranks.share_catalog(read)?);
        let staged = ranks.agree(stage(parts, &saved, &load, &*placing))?;
        let Staged { vectors, t, settings, missing, unexpected, cast, blobs: [blobs, own_blobs] } = staged;
        take_in(parts, &vectors, &t, &settings)?;
        store.follow(saved.run());
        Ok(Loaded { saved, missing, unexpected, cast, blobs, own_blobs })
    })
}

/// Takes everything in: the vectors, the counts of updates, and the settings. A failure here is one of the device, and ends the run.
pub(crate) fn take_in(
    parts: &mut dyn SavedParts,
    vectors: &[Read],
    t: &[Option<u64>],
    settings: &Settings,
) -> Result<(), Error> {
    let queue = parts.queue();
    for (param, slot, values) in vectors {
        let into = parts.vector_mut(*param, *slot)?;
        match into.place() {
            Place::Cpu => copy(values.as_slice(), into, queue.threads())?,
            _ => queue.upload(values.as_slice(), into)?,
        }
    }
    parts.set_updates(t);
    parts.resume(settings)
}

/// Copies on several threads; one core does not saturate the memory bandwidth.
fn copy(from: Slice<'_>, mut into: SliceMut<'_>, threads: &Threads) -> Result<(), meshstep_shard::Error> {
    let (len, from, into) = (WINDOW as usize, from.bytes()?, into.bytes_mut()?);
    assert_eq!(from.len(), into.len(), "memory was made for all of a vector");
    let parts = into.chunks_mut(len).zip(from.chunks(len));
    threads.for_each(parts, |(into, from)| into.copy_from_slice(from));
    Ok(())
}

/// Reads this rank's vectors and blobs.
fn stage(
    parts: &mut dyn SavedParts,
    saved: &Saved,
    load: &Load,
    placing: &dyn ModelPlacement,
) -> Result<Staged, CheckpointError> {
    let chosen = parts.choose(saved.catalog(), load)?;
    let contents = parts.tensors(placing)?;
    let settings = Settings::new(saved.catalog().settings().clone());
    let progress = SavedProgress::read(&settings)?;
    let steps = progress.steps.or(Some(saved.step()));
    let settings = settings.with(&SavedProgress { steps, ..progress });
    let TiedNames { mut tied } = settings.section()?;
    tied.extend(placing.tied());
    let fitting = Fitting::new(&contents, &chosen, &tied, load)?;
    if !load.other_settings {
        parts.compare_settings(&settings, &parts.all_settings(placing))?;
    }
    parts.check(&settings)?;
    let vectors = parts.read(saved, &contents, &fitting)?;
    let blobs = blobs(saved, parts.ranks().rank())?;
    let Fitting { t, missing, unexpected, cast, .. } = fitting;
    Ok(Staged { vectors, t, settings, missing, unexpected, cast, blobs })
}

/// Reads this rank's elements of every vector.
pub fn read_own(
    parts: &mut (impl SavedParts + ?Sized),
    saved: &Saved,
    contents: &[SavedTensor],
    fitting: &Fitting<'_>,
) -> Result<Vec<Read>, CheckpointError> {
    let meter = parts.optimizer().options().meter.clone();
    let mut wants = wants(parts, contents, fitting, &meter)?;
    read_all(saved, &mut wants, &meter)?;
    let mut vectors: Vec<_> = wants.into_iter().map(|want| (want.param, want.slot, want.into)).collect();
    vectors.extend(cleared(parts, contents, fitting, &meter)?);
    Ok(vectors)
}

/// Reads elements `range` of the local part of a vector from each of several tensors.
pub fn read_same(
    saved: &Saved,
    from: &[(&SavedTensor, SlotRef<'_>)],
    (slot, range, dtype): (&str, Range<usize>, DType),
    meter: &Meter,
) -> Result<Vec<Buffer>, CheckpointError> {
    let mut wants = Vec::new();
    for (content, from) in from {
        wants.push(want(content, (0, Slot::Params), *from, slot, (range.clone(), dtype), meter)?);
    }
    read_all(saved, &mut wants, meter)?;
    Ok(wants.into_iter().map(|want| want.into).collect())
}

/// Returns the caller's bytes: those shared by all ranks, and those of this rank.
fn blobs(saved: &Saved, rank: usize) -> Result<[BTreeMap<String, Vec<u8>>; 2], CheckpointError> {
    let mut found = [BTreeMap::new(), BTreeMap::new()];
    for (name, _) in saved.catalog().blobs() {
        let (own, given) = match name.rsplit_once('@') {
            Some((given, of)) if of == rank.to_string() => (true, given),
            Some(_) => continue,
            None => (false, name),
        };
        let bytes = saved.blob(name)?.unwrap_or_default();
        found[usize::from(own)].insert(given.to_owned(), bytes);
    }
    Ok(found)
}

/// Returns zeros for remainders if their parameters were loaded without them: old remainders would change the loaded values.
fn cleared(
    parts: &mut (impl SavedParts + ?Sized),
    contents: &[SavedTensor],
    fitting: &Fitting<'_>,
    meter: &Meter,
) -> Result<Vec<Read>, CheckpointError> {
    let mut cleared = Vec::new();
    for (param, (content, sources)) in contents.iter().zip(&fitting.sources).enumerate() {
        let named = |name: &str| content.vectors.iter().position(|vector| vector.name == name);
        let Some(remainder) = named(REMAINDER).filter(|&i| sources[i].is_none()) else { continue };
        if named(PARAM).is_some_and(|i| sources[i].is_some()) {
            let slot = content.vectors[remainder].slot;
            let (_, values) = parts.vector(param, slot).map_err(CheckpointError::memory)?;
            let zeros = Buffer::zeroed(values.len(), values.dtype(), meter, Category::Staging);
            cleared.push((param, slot, zeros.map_err(CheckpointError::memory)?));
        }
    }
    Ok(cleared)
}

/// Returns a request with memory for this rank's part of each saved vector.
fn wants<'a>(
    parts: &mut (impl SavedParts + ?Sized),
    contents: &'a [SavedTensor],
    fitting: &Fitting<'a>,
    meter: &Meter,
) -> Result<Vec<Want<'a>>, CheckpointError> {
    let mut wants = Vec::new();
    // Ranks on one machine that read the same bytes share the page cache, so only bytes with one reader bypass it.
    let alone = parts.ranks().world_size() == 1;
    let cut = parts.optimizer().options().stage.cuts_params();
    for (param, (content, sources)) in contents.iter().zip(&fitting.sources).enumerate() {
        for (vector, source) in content.vectors.iter().zip(sources) {
            let Some(from) = *source else { continue };
            let (first, values) = parts.vector(param, vector.slot).map_err(CheckpointError::memory)?;
            let range = first..first + values.len();
            if range.is_empty() {
                continue;
            }
            let place = (param, vector.slot);
            let want = want(content, place, from, &vector.name, (range, values.dtype()), meter)?;
            let own = !content.shared && within(&want.range, &content.owned);
            wants.push(Want { once: alone || own && (cut || vector.slot != Slot::Params), ..want });
        }
    }
    Ok(wants)
}

/// Returns true if `these` lies within `those`.
fn within(these: &Range<usize>, those: &Range<usize>) -> bool {
    those.start <= these.start && these.end <= those.end
}

/// Returns a request for elements of the local part of a vector, with memory for them.
fn want<'a>(
    content: &'a SavedTensor,
    (param, slot): (usize, Slot),
    from: SlotRef<'a>,
    name: &str,
    (range, dtype): (Range<usize>, DType),
    meter: &Meter,
) -> Result<Want<'a>, CheckpointError> {
    let what = Whose::Slot { tensor: &content.name, slot: name }.to_string();
    let into = Buffer::zeroed(range.len(), dtype, meter, Category::Staging);
    Ok(Want {
        param,
        slot,
        content,
        from,
        range,
        once: false,
        what,
        into: into.map_err(CheckpointError::memory)?,
    })
}

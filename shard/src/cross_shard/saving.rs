//! Checkpoints of replicas in groups: one copy of the state if all groups agree, otherwise one for each group.

use super::CrossShard;
use crate::checkpoint::{
    CheckpointError, Load, Loaded, Manifest, ModelPlacement, Ranks, Save, Saveable, SavedTensor, Saving,
    Scale, Settings, Sink, Store, Vectors, load_all, save_all, save_all_async,
};
use crate::ranks::{agree, host_words};
use crate::reduce::together::objection;
use crate::update::params::Params;
use crate::update::values::VectorKind as Slot;
use crate::{Error, Optimizer};
use meshstep_comm::Communicator;
use meshstep_tensor::{Buffer, DType, Queue, Slice, SliceMut};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

impl CrossShard {
    /// Saves parameters, state and progress of all groups, between two steps. Collective over the world, and otherwise as
    /// [`Optimizer::save`].
    ///
    /// If all groups have the same values, which is decided by hashes, the checkpoint is the one a single [`Optimizer`] would save, and
    /// loads onto any ranks, groups and stages. Otherwise tensors are named `group.<number>/<parameter>`, in the order in which the groups
    /// were given. Each group's steps, skips and loss scale are saved if they differ. Ranks of one group that differ are
    /// [`Error::Disagree`].
    pub fn save(&mut self, store: &Store, save: Save<'_>) -> Result<u64, Error> {
        self.check_idle_everywhere()?;
        let placing = self.placing();
        save_all(&mut AllGroups::new(self), store, save, &placing)
    }

    /// [`Optimizer::save_async`] of all groups; see [`save`](Self::save).
    pub fn save_async(&mut self, store: &Store, save: Save<'_>) -> Result<Saving, Error> {
        self.check_idle_everywhere()?;
        let placing = self.placing();
        save_all_async(&mut AllGroups::new(self), store, save, &placing)
    }

    /// Frees the memory of the last [`save_async`](Self::save_async), if that has ended.
    pub fn release_snapshot(&mut self) {
        self.optimizer.release_snapshot();
    }

    /// Loads a checkpoint that [`save`](Self::save) wrote, or that an [`Optimizer`] wrote on any ranks. Collective over the world, and
    /// otherwise as [`Optimizer::load`].
    ///
    /// With the same number of groups, each group loads the state of its number, onto any number of ranks. With another number, every group
    /// loads the state that all groups shared, with the first group's steps, skips and loss scale. If the saved groups had diverged, this
    /// is [`CheckpointError::Groups`], as no single group's values represent all; call [`synchronize_state`](Self::synchronize_state)
    /// before saving to make them the same.
    pub fn load(&mut self, store: &Store, load: Load) -> Result<Loaded, Error> {
        self.check_idle_everywhere()?;
        let placing = self.placing();
        load_all(&mut AllGroups::new(self), store, load, &placing)
    }

    /// Returns this rank's part of its group's parameters and state as bytes ([`Optimizer::serialize`]). Collective over the group.
    pub fn serialize(&mut self) -> Result<Vec<u8>, Error> {
        self.optimizer.serialize()
    }

    /// Takes in the bytes of the same rank in the same groups ([`Optimizer::deserialize`]). Collective over the group.
    pub fn deserialize(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.optimizer.deserialize(bytes)
    }

    /// Passes this group's parameters and state to `sink` on its rank `to` ([`Optimizer::consolidate`]). Collective over the group.
    pub fn consolidate(&mut self, to: usize, sink: Sink<'_>) -> Result<(), Error> {
        self.optimizer.consolidate(to, sink)
    }

    fn placing(&self) -> Grouped {
        Grouped { groups: self.groups(), ranks: self.group.len() }
    }

    fn groups(&self) -> usize {
        self.world.world_size() / self.group.len()
    }

    /// Returns a digest of this rank's values.
    fn digest(&self) -> Result<u64, Error> {
        let Params { buckets, frozen, options, .. } = &self.optimizer.params;
        let mut digests = Vec::new();
        let mut add = |values: Slice<'_>| {
            let digest = host_words::digest(&options.queue, &options.meter, values)?;
            digests.extend(digest.to_le_bytes());
            Ok::<(), Error>(())
        };
        for bucket in buckets {
            let vectors = bucket.master().into_iter().chain(bucket.state());
            add(bucket.params()?)?;
            vectors.map(Buffer::as_slice).try_for_each(&mut add)?;
        }
        frozen.iter().map(Buffer::as_slice).try_for_each(&mut add)?;
        Ok(xxh3_64(&digests))
    }
}

/// Placement with a number of groups of equal size.
#[derive(Clone, Copy, Debug)]
struct Grouped {
    groups: usize,
    ranks: usize,
}

impl ModelPlacement for Grouped {
    fn mesh(&self) -> String {
        format!("groups={},ranks={}", self.groups, self.ranks)
    }
}

/// Progress of groups that have diverged.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct GroupsRecord {
    /// True if each group has tensors of its own.
    apart: bool,
    groups: Vec<GroupRecord>,
}

/// Progress of a group; the fields are those of [`Settings`].
#[derive(Clone, Debug, Serialize, Deserialize)]
struct GroupRecord {
    steps: u64,
    skips: u32,
    #[serde(rename = "hopeless")]
    skips_at_min_scale: u32,
    loss_scale: Option<Scale>,
}

impl GroupRecord {
    fn of(settings: Settings) -> Self {
        let Settings { steps, skips, skips_at_min_scale, loss_scale, .. } = settings;
        GroupRecord { steps: steps.unwrap_or_default(), skips, skips_at_min_scale, loss_scale }
    }

    /// Returns the settings that this group's optimizer resumes from.
    fn settings(&self, all: &Settings) -> Settings {
        let GroupRecord { steps, skips, skips_at_min_scale, loss_scale } = self.clone();
        Settings { steps: Some(steps), skips, skips_at_min_scale, loss_scale, ..all.clone() }
    }
}

/// Description of one rank's state.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    group: usize,
    /// Digests of the progress and of the values.
    counters: u64,
    values: u64,
    record: GroupRecord,
    t: Vec<u64>,
}

/// State to save or load, from the point of view of one rank of one group.
#[derive(Debug)]
struct AllGroups<'a> {
    cross: &'a mut CrossShard,
    /// True if each group has tensors of its own.
    apart: bool,
    /// Progress of each group; empty if it is the same in all groups.
    groups: Vec<GroupRecord>,
    /// Number of updates of each parameter, for every group if `apart`.
    t: Vec<u64>,
}

impl<'a> AllGroups<'a> {
    fn new(cross: &'a mut CrossShard) -> Self {
        AllGroups { cross, apart: false, groups: Vec::new(), t: Vec::new() }
    }

    /// Returns the local index of a parameter, if it belongs to this rank's group.
    fn own(&self, param: usize) -> Option<usize> {
        let params = self.cross.optimizer.params.entries.len();
        (!self.apart || param / params == self.cross.number).then(|| param % params)
    }

    fn told(&mut self) -> Result<Told, Error> {
        let CrossShard { optimizer, number, .. } = &mut *self.cross;
        let counters = xxh3_64(optimizer.describe_counters()?.as_bytes());
        let record = GroupRecord::of(optimizer.settings(BTreeMap::new()));
        let t = optimizer.params.entries.iter().map(|entry| entry.t).collect();
        Ok(Told { group: *number, counters, values: self.cross.digest()?, record, t })
    }

    /// Returns the settings that this group's optimizer resumes from.
    fn own_settings(&self, settings: &Settings) -> Settings {
        let own = self.groups.get(self.cross.number);
        own.map_or_else(|| settings.clone(), |own| own.settings(settings))
    }
}

impl Vectors for AllGroups<'_> {
    fn queue(&self) -> Queue {
        self.cross.optimizer.params.options.queue.clone()
    }

    fn vector(&mut self, param: usize, slot: Slot) -> Result<(usize, Slice<'_>), Error> {
        match self.own(param) {
            Some(param) => self.cross.optimizer.vector(param, slot),
            None => Ok((0, Slice::from(&[] as &[f32]))),
        }
    }
}

impl Saveable for AllGroups<'_> {
    fn optimizer(&mut self) -> &mut Optimizer {
        &mut self.cross.optimizer
    }

    fn ranks(&mut self) -> Arc<dyn Communicator> {
        Arc::clone(&self.cross.world)
    }

    /// Compares the call among all ranks; a rank that is not ready reports its error instead. All ranks are idle, which the callers check
    /// first.
    fn call_all(&mut self, what: &str, ready: Result<(), Error>) -> Result<(), Error> {
        let text = match &ready {
            Ok(()) => format!("this call = {what}\n"),
            Err(error) => objection(Some(error)),
        };
        let same = agree::same_everywhere(&*self.cross.world, &self.cross.optimizer.params.options, &text);
        ready.and(self.cross.end_if_alone(same))
    }

    fn compare_all(&mut self) -> Result<(), Error> {
        let own = self.told()?;
        let ranks = Ranks::of(self);
        let all = ranks.gather(&serde_json::to_vec(&own).unwrap_or_default())?;
        let all: Result<Vec<Told>, _> = all.iter().map(|text| serde_json::from_slice(text)).collect();
        let all = ranks.agree(all.map_err(CheckpointError::memory))?;
        alike("counters on ranks of a group", &all, |told| (told.counters, &[]))?;
        alike("values on ranks of a group", &all, |told| (told.values, &told.t))?;
        let differ = |of: fn(&Told) -> (u64, &[u64])| all.iter().any(|told| of(told) != of(&all[0]));
        self.apart = differ(|told| (told.values, &told.t));
        let counted = differ(|told| (told.counters, &[]));
        let mut groups: BTreeMap<usize, Told> = BTreeMap::new();
        all.into_iter().for_each(|told| _ = groups.entry(told.group).or_insert(told));
        let tensors = if self.apart { groups.len() } else { 1 };
        self.t = groups.values().take(tensors).flat_map(|told| told.t.clone()).collect();
        let kept = if self.apart || counted { groups.len() } else { 0 };
        self.groups = groups.into_values().take(kept).map(|told| told.record).collect();
        Ok(())
    }

    fn end_all<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        self.cross.end_if_alone(result)
    }

    fn choose<'m>(&mut self, manifest: &'m Manifest, _: &Load) -> Result<Cow<'m, Manifest>, CheckpointError> {
        let here = self.cross.groups();
        (self.apart, self.groups) = match Settings::from_json(&manifest.settings)?.groups {
            Some(GroupsRecord { apart, groups }) if groups.len() == here => (apart, groups),
            Some(GroupsRecord { apart: true, groups }) => {
                return Err(CheckpointError::Groups { saved: groups.len(), here });
            }
            _ => (false, Vec::new()),
        };
        Ok(Cow::Borrowed(manifest))
    }

    fn set_updates(&mut self, t: &[Option<u64>]) {
        for (param, t) in t.iter().enumerate() {
            if let (Some(own), Some(t)) = (self.own(param), t) {
                self.cross.optimizer.params.entries[own].t = *t;
            }
        }
    }

    fn contents(&self, placing: &dyn ModelPlacement) -> Result<Vec<SavedTensor>, CheckpointError> {
        let params = self.cross.optimizer.contents(placing)?;
        let mut contents = Vec::new();
        for group in 0..if self.apart { self.groups.len() } else { 1 } {
            for of in &params {
                let param = contents.len();
                let t = self.t.get(param).copied().unwrap_or(of.t);
                let name = match self.apart {
                    true => format!("group.{group}/{}", of.name),
                    false => of.name.clone(),
                };
                let owned = if self.own(param).is_some() { of.owned.clone() } else { 0..0 };
                contents.push(SavedTensor { name, t, owned, ..of.clone() });
            }
        }
        Ok(contents)
    }

    fn vector_mut(&mut self, param: usize, slot: Slot) -> Result<SliceMut<'_>, Error> {
        match self.own(param) {
            Some(param) => self.cross.optimizer.vector_mut(param, slot),
            None => Ok(SliceMut::empty(DType::F32, self.queue().place())),
        }
    }

    fn settings(&self, tied: BTreeMap<String, String>) -> Settings {
        let groups = GroupsRecord { apart: self.apart, groups: self.groups.clone() };
        let groups = Some(groups).filter(|record| !record.groups.is_empty());
        // On a load with another number of groups, every group resumes as the first one.
        let own = self.cross.optimizer.settings(tied);
        let first = self.groups.first().map_or_else(|| own.clone(), |first| first.settings(&own));
        Settings { groups, ..first }
    }

    fn check(&self, settings: &Settings) -> Result<(), CheckpointError> {
        // Apply the limits on counts to the group's counts too.
        let own = Settings::from_json(&self.own_settings(settings).to_json())?;
        self.cross.optimizer.check(&own)
    }

    fn take_in(&mut self, settings: &Settings) -> Result<(), Error> {
        let own = self.own_settings(settings);
        self.cross.optimizer.take_in(&own)
    }
}

/// Checks that all ranks of each group have the same digests; the result is the same on every rank.
fn alike(what: &str, all: &[Told], has: impl Fn(&Told) -> (u64, &[u64])) -> Result<(), Error> {
    for (rank, told) in all.iter().enumerate() {
        let first = all.iter().position(|other| other.group == told.group).unwrap_or(rank);
        if has(&all[first]) != has(told) {
            let of = |rank: usize| {
                format!("digest {:016x} on rank {rank} of group {}", digest(has(&all[rank])), told.group)
            };
            let (what, rank0, theirs) = (what.to_owned(), of(first), of(rank));
            return Err(Error::Disagree { what, rank0, rank, theirs });
        }
    }
    Ok(())
}

/// Combines a rank's digests into one word.
fn digest((own, t): (u64, &[u64])) -> u64 {
    t.iter().fold(own, |so_far, &t| crate::config::digest::digest(so_far, t, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, Stage};
    use meshstep_comm::loopback::spawn;
    use meshstep_optim::AdamW;
    use meshstep_tensor::Layout;

    #[test]
    fn ranks_of_a_group_with_other_values_are_told_of_and_nothing_is_saved() {
        let dir = tempfile::tempdir().unwrap();
        let (store, groups) = (Store::new(dir.path()), [vec![0, 2], vec![1, 3]]);
        for slot in ["param", "v"] {
            let told = spawn(4, |world| {
                let rank = world.rank();
                let layout = Layout::builder().param("w", &[5], DType::F32).build().unwrap();
                let options = Options { stage: Stage::Replicated, ..Options::default() };
                let rule = AdamW::default();
                let mut opt =
                    CrossShard::new(world, Some(&groups), layout, rule, |_, _| Ok(()), options).unwrap();
                let flip = |opt: &mut CrossShard| {
                    if rank == 3 {
                        opt.optimizer.flip_bit("w", slot, 2, 20).unwrap();
                    }
                };
                flip(&mut opt);
                let told = [
                    opt.save(&store, Save::default()).unwrap_err(),
                    opt.save_async(&store, Save::default()).map(drop).unwrap_err(),
                ];
                assert!(told.iter().all(|told| matches!(told, Error::Disagree { rank: 3, .. })), "{told:?}");
                assert!(store.latest().is_err());
                // The groups agree again, and the optimizer is usable.
                flip(&mut opt);
                assert!(opt.compare_state().unwrap().is_none());
                told.map(|told| told.to_string())
            });
            let told = told.unwrap();
            assert!(told.iter().all(|told| *told == [told[0].clone(), told[0].clone()]), "{told:?}");
            assert!(told.iter().all(|own| own == &told[0]), "{told:?}");
            assert!(told[0][0].contains("on rank 1 of group 1, rank 3 has digest"), "{told:?}");
        }
    }
}

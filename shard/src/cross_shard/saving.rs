//! Checkpoints of replicas in groups: once, where all groups have the same, otherwise each group's.

use super::CrossShard;
use crate::checkpoint::{
    CheckpointError, Content, Keeper, Load, Loaded, Manifest, Placing, Ranks, Save, Saving, Scale, Settings,
    Sink, Store, Vectors, load_all, save_all, save_all_async,
};
use crate::optimizer::layout_state;
use crate::ranks::{agree, host_words};
use crate::verify::Slot;
use crate::{Error, Optimizer};
use meshstep_comm::Communicator;
use meshstep_tensor::{Buffer, DType, Queue, Slice, SliceMut};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

impl CrossShard {
    /// Saves parameters, state, and how far they are, of all groups, between two steps. Collective over the world, and otherwise as
    /// [`Optimizer::save`].
    ///
    /// Where all groups have the same values, which hashes tell, it is what one [`Optimizer`] would save, and goes onto any ranks,
    /// groups and stages. Where they do not, tensors are `group.<number>/<parameter>`, in the order of the groups that were given.
    /// Each group's steps, skips and loss scale are saved wherever they differ. Ranks of one group that differ are
    /// [`Error::Disagree`].
    pub fn save(&mut self, store: &Store, save: Save<'_>) -> Result<u64, Error> {
        self.check_idle_everywhere()?;
        let placing = self.placing();
        save_all(&mut AllGroups::new(self), store, save, &placing)
    }

    /// [`Optimizer::save_async`] of the same.
    pub fn save_async(&mut self, store: &Store, save: Save<'_>) -> Result<Saving, Error> {
        self.check_idle_everywhere()?;
        let placing = self.placing();
        save_all_async(&mut AllGroups::new(self), store, save, &placing)
    }

    /// Frees what the last [`save_async`](Self::save_async) has copied to, if it has ended.
    pub fn release_snapshot(&mut self) {
        self.optimizer.release_snapshot();
    }

    /// Loads what was [saved](Self::save), or what an [`Optimizer`] has saved on any ranks. Collective over the world, and otherwise
    /// as [`Optimizer::load`].
    ///
    /// As many groups go on each from the one of its number, with any number of ranks. To another number of groups what was the same
    /// in all goes to every one, with the first one's steps, skips and loss scale; where they had parted that is
    /// [`CheckpointError::Groups`], as no one's values stand for all:
    /// [`synchronize_state`](Self::synchronize_state) before saving makes them the same.
    pub fn load(&mut self, store: &Store, load: Load) -> Result<Loaded, Error> {
        self.check_idle_everywhere()?;
        let placing = self.placing();
        load_all(&mut AllGroups::new(self), store, load, &placing)
    }

    /// This rank's parameters and state as bytes ([`Optimizer::serialize`]), those of its group. Collective over the group.
    pub fn serialize(&mut self) -> Result<Vec<u8>, Error> {
        self.optimizer.serialize()
    }

    /// Goes on from the bytes of the same rank in the same groups ([`Optimizer::deserialize`]). Collective over the group.
    pub fn deserialize(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.optimizer.deserialize(bytes)
    }

    /// Brings this group's parameters and state to its rank `to` ([`Optimizer::consolidate`]). Collective over the group.
    pub fn consolidate(&mut self, to: usize, sink: Sink<'_>) -> Result<(), Error> {
        self.optimizer.consolidate(to, sink)
    }

    fn placing(&self) -> Grouped {
        Grouped { groups: self.groups(), ranks: self.group.len() }
    }

    fn groups(&self) -> usize {
        self.world.world_size() / self.group.len()
    }

    /// A digest of all values here.
    fn digest(&self) -> Result<u64, Error> {
        let Optimizer { buckets, frozen, options, .. } = &self.optimizer;
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

/// So many groups of so many ranks.
#[derive(Clone, Copy, Debug)]
struct Grouped {
    groups: usize,
    ranks: usize,
}

impl Placing for Grouped {
    fn mesh(&self) -> String {
        format!("groups={},ranks={}", self.groups, self.ranks)
    }
}

/// Groups that are not as far as each other, or have other values.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct GroupsRecord {
    /// Whether there are tensors of each.
    apart: bool,
    groups: Vec<GroupRecord>,
}

/// How far a group is, as in [`Settings`].
#[derive(Clone, Debug, Serialize, Deserialize)]
struct GroupRecord {
    steps: u64,
    skips: u32,
    hopeless: u32,
    loss_scale: Option<Scale>,
}

impl GroupRecord {
    fn of(settings: Settings) -> Self {
        let Settings { steps, skips, hopeless, loss_scale, .. } = settings;
        GroupRecord { steps: steps.unwrap_or_default(), skips, hopeless, loss_scale }
    }

    /// What was saved beside the vectors, as this group's optimizer goes on with it.
    fn settings(&self, all: &Settings) -> Settings {
        let GroupRecord { steps, skips, hopeless, loss_scale } = self.clone();
        Settings { steps: Some(steps), skips, hopeless, loss_scale, ..all.clone() }
    }
}

/// What one rank tells.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    group: usize,
    /// Digests: of how far it is, and of what it has.
    counters: u64,
    values: u64,
    record: GroupRecord,
    t: Vec<u64>,
}

/// What is saved or loaded, as one rank of one group has it.
#[derive(Debug)]
struct AllGroups<'a> {
    cross: &'a mut CrossShard,
    /// Whether each group has tensors of its own.
    apart: bool,
    /// How far each group is; none where all are as far.
    groups: Vec<GroupRecord>,
    /// How many updates the parameters of each have seen, or of all.
    t: Vec<u64>,
}

impl<'a> AllGroups<'a> {
    fn new(cross: &'a mut CrossShard) -> Self {
        AllGroups { cross, apart: false, groups: Vec::new(), t: Vec::new() }
    }

    /// The number here of a parameter of one of the groups, if it is this one's.
    fn own(&self, param: usize) -> Option<usize> {
        let params = self.cross.optimizer.entries.len();
        (!self.apart || param / params == self.cross.number).then(|| param % params)
    }

    fn told(&mut self) -> Result<Told, Error> {
        let CrossShard { optimizer, number, .. } = &mut *self.cross;
        let counters = xxh3_64(optimizer.describe_counters()?.as_bytes());
        let record = GroupRecord::of(optimizer.settings(BTreeMap::new()));
        let t = optimizer.entries.iter().map(|entry| entry.t).collect();
        Ok(Told { group: *number, counters, values: self.cross.digest()?, record, t })
    }

    /// As this group's optimizer has it.
    fn own_settings(&self, settings: &Settings) -> Settings {
        let own = self.groups.get(self.cross.number);
        own.map_or_else(|| settings.clone(), |own| own.settings(settings))
    }
}

impl Vectors for AllGroups<'_> {
    fn queue(&self) -> Queue {
        self.cross.optimizer.options.queue.clone()
    }

    fn vector(&mut self, param: usize, slot: Slot) -> Result<(usize, Slice<'_>), Error> {
        match self.own(param) {
            Some(param) => self.cross.optimizer.vector(param, slot),
            None => Ok((0, Slice::from(&[] as &[f32]))),
        }
    }
}

impl Keeper for AllGroups<'_> {
    fn optimizer(&mut self) -> &mut Optimizer {
        &mut self.cross.optimizer
    }

    fn ranks(&mut self) -> Arc<dyn Communicator> {
        Arc::clone(&self.cross.world)
    }

    /// All are idle.
    fn call_all(&mut self, what: &str, ready: Result<(), Error>) -> Result<(), Error> {
        let text = match &ready {
            Ok(()) => format!("this call = {what}\n"),
            Err(error) => layout_state::objection(Some(error)),
        };
        let same = agree::same_everywhere(&*self.cross.world, &self.cross.optimizer.options, &text);
        ready.and(self.cross.end_if_alone(same))
    }

    fn compare_all(&mut self) -> Result<(), Error> {
        let own = self.told()?;
        let ranks = Ranks::of(self);
        let all = ranks.gather(&serde_json::to_vec(&own).unwrap_or_default())?;
        let all: Result<Vec<Told>, _> = all.iter().map(|text| serde_json::from_slice(text)).collect();
        let all = ranks.agree(all.map_err(CheckpointError::memory))?;
        alike("what counts on ranks of a group", &all, |told| (told.counters, &[]))?;
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
                self.cross.optimizer.entries[own].t = *t;
            }
        }
    }

    fn contents(&self, placing: &dyn Placing) -> Result<Vec<Content>, CheckpointError> {
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
                contents.push(Content { name, t, owned, ..of.clone() });
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
        // Who loads into other groups goes on as the first one.
        let own = self.cross.optimizer.settings(tied);
        let first = self.groups.first().map_or_else(|| own.clone(), |first| first.settings(&own));
        Settings { groups, ..first }
    }

    fn check(&self, settings: &Settings) -> Result<(), CheckpointError> {
        // A group's counts are bounded as those of all are.
        let own = Settings::from_json(&self.own_settings(settings).to_json())?;
        self.cross.optimizer.check(&own)
    }

    fn take_in(&mut self, settings: &Settings) -> Result<(), Error> {
        let own = self.own_settings(settings);
        self.cross.optimizer.take_in(&own)
    }
}

/// Whether all ranks of each group have the same: the same answer on every rank.
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

/// One word for what a rank has.
fn digest((own, t): (u64, &[u64])) -> u64 {
    t.iter().fold(own, |so_far, &t| crate::reduce::reducer::digest(so_far, t, 0))
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
                // As they are alike again, it goes on.
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

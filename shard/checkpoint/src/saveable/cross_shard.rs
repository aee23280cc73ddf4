//! Checkpoints of replicas in groups: one copy of the state if all groups agree, otherwise one for each group.

use crate::collective::load_options::Load;
use crate::contents::{Contents, Saveable};
use crate::error::CheckpointError;
use crate::failure;
use crate::format::catalog::Catalog;
use crate::format::placement::{Copies, ModelPlacement};
use crate::format::progress::SavedProgress;
use crate::format::settings::Settings;
use crate::parts::{CheckpointCall, SavedParts};
use crate::tensors::SavedTensor;
use meshstep_comm::Communicator;
use meshstep_shard::extend::{GroupShard, OptimizerShard, VectorKind as Slot, mix_digest};
use meshstep_shard::{CrossShard, Error, Optimizer, Step};
use meshstep_tensor::{DType, Queue, Slice, SliceMut};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use twox_hash::XxHash3_64;

impl Saveable for CrossShard {
    fn contents(&mut self) -> Contents<'_> {
        Contents::made(AllGroups { cross: self, apart: false, groups: Vec::new(), t: Vec::new() })
    }
}

/// Section of groups.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct GroupsSection {
    #[serde(skip_serializing_if = "Option::is_none")]
    groups: Option<GroupsRecord>,
}

/// Progress of groups that have diverged.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct GroupsRecord {
    /// True if each group has tensors of its own.
    apart: bool,
    groups: Vec<SavedProgress>,
}

/// Description of one rank's state.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    group: usize,
    /// Digests of the progress and of the values.
    counters: u64,
    values: u64,
    record: SavedProgress,
    t: Vec<u64>,
}

/// State to save or load, from the point of view of one rank of one group.
#[derive(Debug)]
struct AllGroups<'a> {
    cross: &'a mut CrossShard,
    /// True if each group has tensors of its own.
    apart: bool,
    /// Progress of each group; empty if it is the same in all groups.
    groups: Vec<SavedProgress>,
    /// Number of updates of each parameter, for every group if `apart`.
    t: Vec<u64>,
}

impl AllGroups<'_> {
    /// Returns the local index of a parameter, if it belongs to this rank's group.
    fn own(&self, param: usize) -> Option<usize> {
        let params = self.cross.optimizer().params().count();
        (!self.apart || param / params == self.cross.number()).then(|| param % params)
    }

    fn told(&mut self) -> Result<Told, Error> {
        let optimizer = self.cross.optimizer_mut();
        let counters = XxHash3_64::oneshot(optimizer.describe_counters()?.as_bytes());
        let record = SavedProgress::of(optimizer);
        let t = (0..optimizer.params().count()).map(|param| optimizer.param_shard(param).t).collect();
        Ok(Told { group: self.cross.number(), counters, values: self.cross.digest()?, record, t })
    }

    /// Returns the settings that this group's optimizer resumes from.
    fn own_settings(&self, settings: &Settings) -> Settings {
        let own = self.groups.get(self.cross.number());
        own.map_or_else(|| settings.clone(), |own| settings.clone().with(own))
    }
}

impl SavedParts for AllGroups<'_> {
    fn queue(&self) -> Queue {
        self.cross.optimizer().queue()
    }

    fn vector(&mut self, param: usize, slot: Slot) -> Result<(usize, Slice<'_>), Error> {
        match self.own(param) {
            Some(param) => self.cross.optimizer_mut().shard_vector(param, slot),
            None => Ok((0, Slice::from(&[] as &[f32]))),
        }
    }

    fn optimizer(&mut self) -> &mut Optimizer {
        self.cross.optimizer_mut()
    }

    fn inside(&mut self) -> &mut dyn SavedParts {
        self.cross.optimizer_mut()
    }

    fn placement<'p>(&self, inside: Box<dyn ModelPlacement + 'p>) -> Box<dyn ModelPlacement + 'p> {
        Box::new(Copies { of: "groups", count: self.cross.groups(), inside })
    }

    fn supports(&self, call: CheckpointCall) -> Result<(), CheckpointError> {
        match call {
            CheckpointCall::Serialize | CheckpointCall::Deserialize => Ok(()),
            CheckpointCall::Export | CheckpointCall::Import | CheckpointCall::Reshard => {
                Err(call
                    .unsupported("replicas in groups", "save a checkpoint, and load it into an optimizer"))
            }
        }
    }

    fn begin_save(&mut self) -> Result<(), Error> {
        self.cross.check_idle_everywhere()
    }

    fn begin_load(&mut self) -> Result<(), Error> {
        self.cross.check_idle_everywhere()
    }

    fn ranks(&mut self) -> Arc<dyn Communicator> {
        Arc::clone(self.cross.world())
    }

    fn call_all(&mut self, what: &str, ready: Result<(), Error>) -> Result<(), Error> {
        self.cross.call_together(what, ready)
    }

    fn compare_all(&mut self) -> Result<(), failure::Error> {
        let own = self.told()?;
        let ranks = self.group();
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

    fn end_all(&mut self, error: &Error) {
        self.cross.end_if_alone(error);
    }

    fn choose<'m>(&mut self, saved: &'m Catalog, _: &Load) -> Result<Cow<'m, Catalog>, CheckpointError> {
        let here = self.cross.groups();
        let section: GroupsSection = Settings::new(saved.settings().clone()).section()?;
        (self.apart, self.groups) = match section.groups {
            Some(GroupsRecord { apart, groups }) if groups.len() == here => (apart, groups),
            Some(GroupsRecord { apart: true, groups }) => {
                return Err(CheckpointError::Groups { saved: groups.len(), here });
            }
            _ => (false, Vec::new()),
        };
        Ok(Cow::Borrowed(saved))
    }

    fn set_updates(&mut self, t: &[Option<u64>]) {
        let params = self.cross.optimizer().params().count();
        let mut own = vec![None; params];
        for (param, t) in t.iter().enumerate() {
            if let Some(param) = self.own(param) {
                own[param] = t.or(own[param]);
            }
        }
        self.cross.optimizer_mut().set_t(&own);
    }

    fn tensors(&self, placing: &dyn ModelPlacement) -> Result<Vec<SavedTensor>, CheckpointError> {
        let params = self.cross.optimizer().tensors(placing)?;
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
            Some(param) => self.cross.optimizer_mut().shard_vector_mut(param, slot),
            None => Ok(SliceMut::empty(DType::F32, self.queue().place())),
        }
    }

    fn settings(&self) -> Settings {
        let own = self.cross.optimizer().settings();
        // On a load with another number of groups, every group resumes as the first one.
        let Some(first) = self.groups.first() else { return own };
        let groups = GroupsRecord { apart: self.apart, groups: self.groups.clone() };
        own.with(first).with(&GroupsSection { groups: Some(groups) })
    }

    fn check(&self, settings: &Settings) -> Result<(), CheckpointError> {
        self.cross.optimizer().check(&self.own_settings(settings))
    }

    fn resume(&mut self, settings: &Settings) -> Result<(), failure::Error> {
        let own = self.own_settings(settings);
        self.cross.optimizer_mut().resume(&own)
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
    t.iter().fold(own, |so_far, &t| mix_digest(so_far, t, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Save, Saver, Store, save, save_async};
    use meshstep_comm::loopback::spawn;
    use meshstep_optim::AdamW;
    use meshstep_shard::{Options, Stage};
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
                        opt.flip_bit("w", slot, 2, 20).unwrap();
                    }
                };
                flip(&mut opt);
                let told = [
                    save(&mut opt, &store, Save::default()).unwrap_err(),
                    save_async(&mut opt, &mut Saver::default(), &store, Save::default())
                        .map(drop)
                        .unwrap_err(),
                ];
                let disagree = |told: &failure::Error| {
                    matches!(told, failure::Error::Shard(Error::Disagree { rank: 3, .. }))
                };
                assert!(told.iter().all(disagree), "{told:?}");
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

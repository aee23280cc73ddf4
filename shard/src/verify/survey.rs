//! Survey of the vectors to compare, in one order on all ranks, and of the ranks that hold the same of each.

use super::Comparison;
use super::hash;
use crate::config::stage::Stage;
use crate::error::Error;
use crate::plan::overlap::overlap;
use crate::ranks::host_words;
use crate::ranks::roles::RankRoles;
use crate::update::params::ParamPlace;
use crate::update::values::VectorKind;
use meshstep_comm::Communicator;
use meshstep_tensor::{DType, Slice, SliceMut};
use std::ops::Range;
use std::sync::Arc;

/// Elements of a GPU vector that are copied to the host and hashed at a time.
const BLOCK: usize = 1 << 20;

/// A vector of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) param: usize,
    pub(crate) slot: Slot,
    /// Group of ranks that hold the same, in [`Survey::groups`]; `None` if no other rank does.
    pub(crate) group: Option<usize>,
}

/// Kind of a vector: one that a rank keeps, or reduced gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    Kept(VectorKind),
    Grads,
}

/// Kinds of vectors in a survey.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// Parameters and state.
    Held,
    /// Reduced gradients.
    Grads,
}

/// Vectors and groups of ranks: the same number on every rank, in the same order.
#[derive(Debug, Default)]
pub(super) struct Survey {
    pub(super) items: Vec<Item>,
    pub(super) groups: Vec<Arc<dyn Communicator>>,
}

impl Survey {
    fn add(&mut self, param: usize, slot: Slot, ranks: Option<Arc<dyn Communicator>>) {
        let ranks = ranks.filter(|ranks| ranks.world_size() > 1);
        let group = ranks.map(|ranks| {
            let known = self.groups.iter().position(|group| Arc::ptr_eq(group, &ranks));
            known.unwrap_or_else(|| {
                self.groups.push(ranks);
                self.groups.len() - 1
            })
        });
        self.items.push(Item { param, slot, group });
    }

    /// Returns the ranks that hold the same of `item` as this rank.
    pub(super) fn ranks(&self, item: &Item) -> Option<&Arc<dyn Communicator>> {
        item.group.map(|group| &self.groups[group])
    }
}

impl Comparison<'_> {
    /// Lists the vectors to compare. Collective if ranks that hold the same state have no communicator yet.
    pub(super) fn survey(&mut self, what: What) -> Result<Survey, Error> {
        let mut survey = Survey::default();
        for param in 0..self.params.entries.len() {
            let bucket = match (&self.params.entries[param].place, what) {
                (ParamPlace::Bucket { bucket, .. }, _) => *bucket,
                (ParamPlace::Frozen { vector, .. }, What::Held) => {
                    let replicas = Arc::clone(&self.verifier.frozen[*vector].replicas);
                    survey.add(param, Slot::Kept(VectorKind::Params), Some(replicas));
                    continue;
                }
                (ParamPlace::Frozen { .. }, What::Grads) => continue,
            };
            let among = Arc::clone(&self.reducer.config.buckets[bucket].among);
            match what {
                What::Held => self.survey_bucket(&mut survey, param, bucket, &among)?,
                What::Grads => survey.add(param, Slot::Grads, self.holders_of_grads(&among)?),
            }
        }
        Ok(survey)
    }

    fn survey_bucket(
        &mut self,
        survey: &mut Survey,
        param: usize,
        bucket: usize,
        among: &RankRoles,
    ) -> Result<(), Error> {
        survey.add(param, Slot::Kept(VectorKind::Params), self.holders_of_params(among)?);
        let holders = self.holders_of_state(among)?;
        let owned = &self.params.buckets[bucket];
        if owned.master().is_some() {
            survey.add(param, Slot::Kept(VectorKind::Master), holders.clone());
        }
        for state in 0..owned.state().len() {
            survey.add(param, Slot::Kept(VectorKind::State(state)), holders.clone());
        }
        Ok(())
    }

    fn holders_of_params(&mut self, among: &RankRoles) -> Result<Option<Arc<dyn Communicator>>, Error> {
        match self.params.options.stage {
            Stage::Replicated | Stage::Zero1 | Stage::Zero2 | Stage::WholeParams(_) => {
                Ok(Some(Arc::clone(&among.replicas)))
            }
            Stage::Zero3 => self.holders_of_part(among),
        }
    }

    fn holders_of_state(&mut self, among: &RankRoles) -> Result<Option<Arc<dyn Communicator>>, Error> {
        match self.params.options.stage {
            Stage::Replicated => Ok(Some(Arc::clone(&among.replicas))),
            Stage::Zero1 | Stage::Zero2 | Stage::Zero3 | Stage::WholeParams(_) => self.holders_of_part(among),
        }
    }

    /// Returns the ranks with the same gradients. Before the step's further reductions, ranks at different places along
    /// [`RankRoles::extra_reductions`] have different gradients.
    fn holders_of_grads(&mut self, among: &RankRoles) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let extra_reductions = among.extra_reductions.iter().map(|(comm, _)| comm);
        let apart: Vec<_> = match self.reducer.config.reduces_whole() {
            true => extra_reductions.collect(),
            false => [&among.shards].into_iter().chain(extra_reductions).collect(),
        };
        self.holders_of_place(&among.replicas, &apart)
    }

    /// Returns the ranks that hold the same part of divided vectors: ranks of equal place among the ranks that divide them.
    fn holders_of_part(&mut self, among: &RankRoles) -> Result<Option<Arc<dyn Communicator>>, Error> {
        self.holders_of_place(&among.replicas, &[&among.shards])
    }

    /// Returns the ranks of `replicas` that have this rank's place in each of `apart`, the groups of which lie across each other;
    /// `None` if this rank is the only one. Collective on the first such call.
    fn holders_of_place(
        &mut self,
        replicas: &Arc<dyn Communicator>,
        apart: &[&Arc<dyn Communicator>],
    ) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let apart: Vec<_> = apart.iter().copied().filter(|comm| comm.world_size() > 1).collect();
        let places: usize = apart.iter().map(|comm| comm.world_size()).product();
        if places == 1 {
            return Ok(Some(Arc::clone(replicas)));
        }
        if places == replicas.world_size() {
            return Ok(None);
        }
        let of: Vec<_> = [replicas].into_iter().chain(apart).map(Arc::clone).collect();
        let known = |made: &&Replicas| {
            made.of.len() == of.len() && made.of.iter().zip(&of).all(|(made, of)| Arc::ptr_eq(made, of))
        };
        if let Some(made) = self.verifier.replicas.iter().find(known) {
            return Ok(made.ranks.clone());
        }
        let place = of[1..].iter().fold(0, |place, comm| place * comm.world_size() + comm.rank());
        let ranks = replicas.split(Some(place as u32), 0)?;
        // Register the communicator, to abort it together with the optimizer's.
        self.reducer.config.comms.extend(ranks.clone());
        self.verifier.replicas.push(Replicas { of, ranks: ranks.clone() });
        Ok(ranks)
    }

    /// Returns this rank's part of a vector, and the index in the parameter of its first element.
    pub(super) fn piece(&mut self, item: &Item) -> Result<(usize, Slice<'_>), Error> {
        let kind = match item.slot {
            Slot::Kept(kind) => kind,
            Slot::Grads => return self.grads(item.param),
        };
        self.params.vector(item.param, kind)
    }

    /// Returns the same memory for writing.
    pub(super) fn piece_mut(&mut self, item: &Item) -> Result<SliceMut<'_>, Error> {
        let kind = match item.slot {
            Slot::Kept(kind) => kind,
            Slot::Grads => return self.grads_mut(item.param),
        };
        self.params.vector_mut(item.param, kind)
    }

    fn grads(&mut self, param: usize) -> Result<(usize, Slice<'_>), Error> {
        let nothing = Slice::from(&[] as &[f32]);
        let ParamPlace::Bucket { bucket, range, .. } = &self.params.entries[param].place else {
            return Ok((0, nothing));
        };
        let (first, part) = self.reduced(*bucket, range);
        let grads = self.reducer.grads(*bucket);
        grads.map_or(Ok((0, nothing)), |grads| Ok((first, grads.as_slice().slice(part)?)))
    }

    fn grads_mut(&mut self, param: usize) -> Result<SliceMut<'_>, Error> {
        let nothing = SliceMut::empty(DType::F32, self.params.options.queue.place());
        let ParamPlace::Bucket { bucket, range, .. } = &self.params.entries[param].place else {
            return Ok(nothing);
        };
        let (_, part) = self.reduced(*bucket, range);
        self.reducer.grads(*bucket).map_or(Ok(nothing), |grads| Ok(grads.as_mut().slice(part)?))
    }

    /// Returns this rank's reduced gradients of the parameter at `place` of a bucket: the index in the parameter of the first
    /// element, and their range in this rank's memory.
    fn reduced(&self, bucket: usize, place: &Range<usize>) -> (usize, Range<usize>) {
        let config = &self.reducer.config;
        if config.reduces_whole() {
            return (0, place.clone());
        }
        let chunk = config.buckets[bucket].counted.first();
        let Some((chunk, both)) = chunk.and_then(|chunk| Some((chunk, overlap(chunk, place)?))) else {
            return (0, 0..0);
        };
        let before = if config.options.cuts_grads() { chunk.start } else { 0 };
        (both.start - place.start, both.start - before..both.end - before)
    }

    /// Hashes the elements `part` of this rank's part of a vector.
    pub(super) fn hash(&mut self, item: &Item, part: Option<Range<usize>>) -> Result<u64, Error> {
        let (queue, meter) = (self.params.options.queue.clone(), self.params.options.meter.clone());
        let (first, values) = self.piece(item)?;
        let part = part.unwrap_or(0..values.len());
        let at_once = if values.place() == meshstep_tensor::Place::Cpu { part.len().max(1) } else { BLOCK };
        let mut sum = 0u64;
        for start in part.clone().step_by(at_once) {
            let block = values.slice(start..part.end.min(start + at_once))?;
            let hashed = host_words::read(&queue, &meter, block, |block| {
                hash::hash(block, first + start, queue.threads())
            })?;
            sum = sum.wrapping_add(hashed);
        }
        Ok(sum)
    }

    /// Returns the name of a vector.
    pub(super) fn slot_name(&self, item: &Item) -> &'static str {
        let rule = &self.params.group_of(item.param).rule;
        match item.slot {
            Slot::Kept(VectorKind::Params) => "param",
            Slot::Grads => "grad",
            Slot::Kept(VectorKind::Master) => "master",
            Slot::Kept(VectorKind::State(i)) => rule.state().get(i).copied().unwrap_or_default(),
        }
    }
}

/// Group of ranks that hold the same part of vectors that are divided.
#[derive(Debug)]
pub(crate) struct Replicas {
    /// Communicator of all ranks that hold any part, then those over which the parts are divided.
    of: Vec<Arc<dyn Communicator>>,
    ranks: Option<Arc<dyn Communicator>>,
}

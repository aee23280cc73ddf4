//! Survey of the vectors to compare, in one order on all ranks, and of the ranks that hold the same of each.

use super::hash;
use crate::optimizer::layout_state::ParamPlace;
use crate::ranks::host_words;
use crate::update::segments::overlap;
use crate::{Error, Optimizer, RankRoles, Stage};
use meshstep_comm::Communicator;
use meshstep_tensor::{Buffer, DType, Slice, SliceMut};
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

/// Kind of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Slot {
    Params,
    Grads,
    Master,
    State(usize),
}

/// Kinds of vectors in a survey.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
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

impl Optimizer {
    /// Lists the vectors to compare. Collective if ranks that hold the same state have no communicator yet.
    pub(super) fn survey(&mut self, what: What) -> Result<Survey, Error> {
        let mut survey = Survey::default();
        for param in 0..self.entries.len() {
            let bucket = match (&self.entries[param].place, what) {
                (ParamPlace::Bucket { bucket, .. }, _) => *bucket,
                (ParamPlace::Frozen { vector, .. }, What::Held) => {
                    let replicas = Arc::clone(&self.verifying.frozen[*vector].replicas);
                    survey.add(param, Slot::Params, Some(replicas));
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
        survey.add(param, Slot::Params, self.holders_of_params(among)?);
        let holders = self.holders_of_state(among)?;
        let owned = &self.buckets[bucket];
        if owned.master().is_some() {
            survey.add(param, Slot::Master, holders.clone());
        }
        for state in 0..owned.state().len() {
            survey.add(param, Slot::State(state), holders.clone());
        }
        Ok(())
    }

    fn holders_of_params(&mut self, among: &RankRoles) -> Result<Option<Arc<dyn Communicator>>, Error> {
        match self.options.stage {
            Stage::Replicated | Stage::Zero1 | Stage::Zero2 | Stage::WholeParams(_) => {
                Ok(Some(Arc::clone(&among.replicas)))
            }
            Stage::Zero3 => self.holders_of_part(among),
        }
    }

    fn holders_of_state(&mut self, among: &RankRoles) -> Result<Option<Arc<dyn Communicator>>, Error> {
        match self.options.stage {
            Stage::Replicated => Ok(Some(Arc::clone(&among.replicas))),
            Stage::Zero1 | Stage::Zero2 | Stage::Zero3 | Stage::WholeParams(_) => self.holders_of_part(among),
        }
    }

    /// Returns the ranks with the same gradients. Before the step's further reductions, ranks at different places along
    /// [`RankRoles::extra_reductions`] have different gradients.
    fn holders_of_grads(&mut self, among: &RankRoles) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let extra_reductions = among.extra_reductions.iter().map(|(comm, _)| comm);
        let apart: Vec<_> = match self.options.stage {
            Stage::Replicated | Stage::WholeParams(_) => extra_reductions.collect(),
            Stage::Zero1 | Stage::Zero2 | Stage::Zero3 => {
                [&among.shards].into_iter().chain(extra_reductions).collect()
            }
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
        if let Some(made) = self.verifying.replicas.iter().find(known) {
            return Ok(made.ranks.clone());
        }
        let place = of[1..].iter().fold(0, |place, comm| place * comm.world_size() + comm.rank());
        let ranks = replicas.split(Some(place as u32), 0)?;
        // Register the communicator, to abort it together with the optimizer's.
        self.reducer.config.comms.extend(ranks.clone());
        self.verifying.replicas.push(Replicas { of, ranks: ranks.clone() });
        Ok(ranks)
    }

    /// Returns this rank's part of a vector, and the index in the parameter of its first element.
    pub(crate) fn piece(&mut self, item: &Item) -> Result<(usize, Slice<'_>), Error> {
        let (bucket, place) = match &self.entries[item.param].place {
            ParamPlace::Frozen { vector, range } => {
                return Ok((0, self.frozen[*vector].as_slice().slice(range.clone())?));
            }
            ParamPlace::Bucket { bucket, range, .. } => (*bucket, range.clone()),
        };
        let (first, part) = self.part(item, bucket, &place);
        let owned = &self.buckets[bucket];
        let vector = match item.slot {
            Slot::Params => Some(owned.params()?),
            Slot::Grads => self.reducer.grads(bucket).map(|grads| grads.as_slice()),
            Slot::Master => owned.master().map(Buffer::as_slice),
            Slot::State(i) => owned.state().get(i).map(Buffer::as_slice),
        };
        let nothing = Slice::from(&[] as &[f32]);
        vector.map_or(Ok((0, nothing)), |vector| Ok((first, vector.slice(part)?)))
    }

    /// Returns the same memory for writing.
    pub(crate) fn piece_mut(&mut self, item: &Item) -> Result<SliceMut<'_>, Error> {
        // Values in flight to this memory must arrive first.
        self.piece(item)?;
        let (bucket, place) = match &self.entries[item.param].place {
            ParamPlace::Frozen { vector, range } => {
                return Ok(self.frozen[*vector].as_mut().slice(range.clone())?);
            }
            ParamPlace::Bucket { bucket, range, .. } => (*bucket, range.clone()),
        };
        let (_, part) = self.part(item, bucket, &place);
        let owned = &mut self.buckets[bucket];
        let vector = match item.slot {
            Slot::Params => Some(&mut owned.params),
            Slot::Grads => self.reducer.grads(bucket),
            Slot::Master => owned.master_mut(),
            Slot::State(i) => owned.state_mut().get_mut(i),
        };
        let nothing = SliceMut::empty(DType::F32, self.options.queue.place());
        vector.map_or(Ok(nothing), |vector| Ok(vector.as_mut().slice(part)?))
    }

    /// Returns this rank's part of a vector of the parameter at `place` of a bucket: the index in the parameter of its first
    /// element, and its range in this rank's memory of the bucket.
    fn part(&self, item: &Item, bucket: usize, place: &Range<usize>) -> (usize, Range<usize>) {
        match item.slot {
            Slot::Params if !self.options.stage.cuts_params() => (0, place.clone()),
            Slot::Grads => self.reduced(bucket, place),
            Slot::Params | Slot::Master | Slot::State(_) => {
                let part = self.buckets[bucket].part_of(place);
                let of = |state, params| if item.slot == Slot::Params { params } else { state };
                part.map_or((0, 0..0), |(within, state, params)| (within.start, of(state, params)))
            }
        }
    }

    /// Returns the same for reduced gradients.
    fn reduced(&self, bucket: usize, place: &Range<usize>) -> (usize, Range<usize>) {
        let chunk = self.reducer.config.buckets[bucket].owned.first();
        match (self.options.stage, chunk) {
            (Stage::Replicated | Stage::WholeParams(_), _) => (0, place.clone()),
            (stage @ (Stage::Zero1 | Stage::Zero2 | Stage::Zero3), Some(chunk)) => {
                let Some(both) = overlap(chunk, place) else { return (0, 0..0) };
                let before = if stage == Stage::Zero1 { 0 } else { chunk.start };
                (both.start - place.start, both.start - before..both.end - before)
            }
            (Stage::Zero1 | Stage::Zero2 | Stage::Zero3, None) => (0, 0..0),
        }
    }

    /// Hashes the elements `part` of this rank's part of a vector.
    pub(super) fn hash(&mut self, item: &Item, part: Option<Range<usize>>) -> Result<u64, Error> {
        let (queue, meter) = (self.options.queue.clone(), self.options.meter.clone());
        let (first, values) = self.piece(item)?;
        let part = part.unwrap_or(0..values.len());
        let at_once = if values.place() == meshstep_tensor::Place::Cpu { part.len().max(1) } else { BLOCK };
        let mut sum = 0u64;
        for start in part.clone().step_by(at_once) {
            let block = values.slice(start..part.end.min(start + at_once))?;
            let hashed = host_words::read(&queue, &meter, block, |block| hash::hash(block, first + start))?;
            sum = sum.wrapping_add(hashed);
        }
        Ok(sum)
    }

    /// Returns the name of a vector.
    pub(super) fn slot_name(&self, item: &Item) -> &'static str {
        let rule = &self.groups[self.entries[item.param].group].rule;
        match item.slot {
            Slot::Params => "param",
            Slot::Grads => "grad",
            Slot::Master => "master",
            Slot::State(i) => rule.state().get(i).copied().unwrap_or_default(),
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

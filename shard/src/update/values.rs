//! Values and state of each parameter on this rank.

use crate::error::{Error, ReadError, UnitError};
use crate::update::params::{ParamPlace, Params};
use meshstep_tensor::{Buffer, DType, Place, Slice, SliceMut};
use std::ops::Range;

/// This rank's part of one parameter, and of its state.
///
/// ```
/// use meshstep_shard::prelude::*;
/// use meshstep_shard::{ParamState, Traffic};
///
/// let ranks = loopback::spawn(2, |comm| -> Result<std::ops::Range<usize>, meshstep_shard::Error> {
///     let layout = Layout::builder().param("w", &[100], DType::F32).build()?;
///     let options = Options { stage: Stage::Zero1, ..Options::default() };
///     let mut opt = Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), options)?;
///     let mb: MicroBatch<'_> = opt.micro_batch(1)?;
///     let mut slot: Slot<'_> = mb.slot("w")?; // written in place, without a copy
///     slot.as_mut()?.typed_mut::<f32>()?.fill(1.0);
///     slot.fill()?;
///     mb.finish()?;
///     let pending: Pending = opt.step(StepArgs::default())?;
///     let Outcome::Applied { traffic: Traffic { copied, .. }, .. } = pending.outcome()? else { panic!("finite") };
///     let ParamState { range, slots, t, .. } = opt.state("w")?;
///     assert_eq!((copied, slots.len(), t), (0, 2, 1));
///     Ok(range) // of the elements that this rank updates
/// })?;
/// assert_eq!(ranks.into_iter().collect::<Result<Vec<_>, _>>()?, [0..64, 64..100]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ParamState<'a> {
    /// Elements of the parameter, in row-major order; empty if another rank owns all of them.
    pub range: Range<usize>,
    /// Values of the elements, as the model reads them.
    pub values: Slice<'a>,
    /// State vectors of the rule by name, each as long as `range`; none if that is empty.
    pub slots: Vec<(&'static str, Slice<'a>)>,
    /// The f32 master values, or the remainders (u16), if there are any: [`meshstep_optim::remainder::join_all`] joins those with
    /// `values` to masters.
    pub master: Option<Slice<'a>>,
    /// Number of the parameter's updates.
    pub t: u64,
}

/// Kind of a vector that a rank keeps of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VectorKind {
    /// The values, as the model reads them.
    Params,
    /// The f32 master, or the remainders.
    Master,
    /// State vector of the rule, by its index among the names of the rule's state.
    State(usize),
}

impl Params {
    /// Returns the values of a parameter, or an error if its unit is sharded.
    pub(crate) fn param(&self, name: &str) -> Result<Slice<'_>, Error> {
        let param = self.index(name)?;
        if self.options.stage.cuts_params() && !self.entries[param].param.frozen() {
            let unit = self.units.of(param).map_or(String::new(), |unit| self.units.name(unit).to_owned());
            return Err(UnitError::Sharded { name: name.to_owned(), unit }.into());
        }
        self.values(param)
    }

    /// Returns the values of a parameter that is whole on this rank.
    pub(crate) fn values(&self, param: usize) -> Result<Slice<'_>, Error> {
        Ok(match &self.entries[param].place {
            ParamPlace::Bucket { bucket, range, .. } => {
                self.buckets[*bucket].params()?.slice(range.clone())?
            }
            ParamPlace::Frozen { vector, range } => self.frozen[*vector].as_slice().slice(range.clone())?,
        })
    }

    /// Returns this rank's part of a parameter and its state: the elements it updates, none of a frozen parameter.
    pub(crate) fn state(&self, param: usize) -> Result<ParamState<'_>, Error> {
        let entry = &self.entries[param];
        let nothing = match &entry.place {
            ParamPlace::Bucket { bucket, .. } => self.buckets[*bucket].params()?.slice(0..0)?,
            ParamPlace::Frozen { vector, .. } => self.frozen[*vector].as_slice().slice(0..0)?,
        };
        let mut state =
            ParamState { range: 0..0, values: nothing, slots: Vec::new(), master: None, t: entry.t };
        let ParamPlace::Bucket { bucket, range, .. } = &entry.place else { return Ok(state) };
        let owned = &self.buckets[*bucket];
        let Some((within, kept, here)) = owned.part_of(range) else { return Ok(state) };
        for (slot, values) in self.groups[entry.group].rule.state().iter().zip(owned.state()) {
            state.slots.push((slot, values.as_slice().slice(kept.clone())?));
        }
        state.master = owned.master().map(|m| m.as_slice().slice(kept)).transpose()?;
        state.values = owned.params()?.slice(here)?;
        state.range = within;
        Ok(state)
    }

    /// Returns this rank's part of a vector, and the index in the parameter of its first element.
    pub(crate) fn vector(&self, param: usize, kind: VectorKind) -> Result<(usize, Slice<'_>), Error> {
        let (bucket, place) = match &self.entries[param].place {
            ParamPlace::Frozen { vector, range } => {
                return Ok((0, self.frozen[*vector].as_slice().slice(range.clone())?));
            }
            ParamPlace::Bucket { bucket, range, .. } => (*bucket, range),
        };
        let (first, part) = self.part(kind, bucket, place);
        let owned = &self.buckets[bucket];
        let vector = match kind {
            VectorKind::Params => Some(owned.params()?),
            VectorKind::Master => owned.master().map(Buffer::as_slice),
            VectorKind::State(i) => owned.state().get(i).map(Buffer::as_slice),
        };
        let nothing = Slice::from(&[] as &[f32]);
        vector.map_or(Ok((0, nothing)), |vector| Ok((first, vector.slice(part)?)))
    }

    /// Returns the same memory for writing.
    pub(crate) fn vector_mut(&mut self, param: usize, kind: VectorKind) -> Result<SliceMut<'_>, Error> {
        // Values in flight to this memory must arrive first.
        self.vector(param, kind)?;
        let (bucket, place) = match &self.entries[param].place {
            ParamPlace::Frozen { vector, range } => {
                return Ok(self.frozen[*vector].as_mut().slice(range.clone())?);
            }
            ParamPlace::Bucket { bucket, range, .. } => (*bucket, range.clone()),
        };
        let (_, part) = self.part(kind, bucket, &place);
        let owned = &mut self.buckets[bucket];
        let vector = match kind {
            VectorKind::Params => Some(&mut owned.params),
            VectorKind::Master => owned.master_mut(),
            VectorKind::State(i) => owned.state_mut().get_mut(i),
        };
        let nothing = SliceMut::empty(DType::F32, self.options.queue.place());
        vector.map_or(Ok(nothing), |vector| Ok(vector.as_mut().slice(part)?))
    }

    /// Returns this rank's part of a vector of the parameter at `place` of a bucket: the index in the parameter of its first
    /// element, and its range in this rank's memory of the bucket.
    fn part(&self, kind: VectorKind, bucket: usize, place: &Range<usize>) -> (usize, Range<usize>) {
        if kind == VectorKind::Params && !self.options.stage.cuts_params() {
            return (0, place.clone());
        }
        let part = self.buckets[bucket].part_of(place);
        let of = |state, params| if kind == VectorKind::Params { params } else { state };
        part.map_or((0, 0..0), |(within, state, params)| (within.start, of(state, params)))
    }

    /// Returns the parameter `name`, if `out` can take its values.
    pub(crate) fn readable(&self, name: &str, out: &SliceMut<'_>) -> Result<usize, Error> {
        let index = self.index(name)?;
        let (param, name, own) = (&self.entries[index].param, name.to_owned(), self.options.queue.place());
        let (expected, given) = (param.len(), out.len());
        if expected != given {
            return Err(ReadError::Len { name, shape: param.shape().to_vec(), expected, given }.into());
        }
        let (expected, given) = (param.dtype(), out.dtype());
        if expected != given {
            return Err(ReadError::DType { name, expected, given }.into());
        }
        match out.place() {
            Place::Cpu => Ok(index),
            given if given == own => Ok(index),
            given => Err(ReadError::Place { name, given, own }.into()),
        }
    }

    /// Copies values of this queue's place into memory of the caller.
    pub(crate) fn copy_out(&self, values: Slice<'_>, out: SliceMut<'_>) -> Result<(), Error> {
        let queue = &self.options.queue;
        match out.place() {
            Place::Cpu => queue.download(values, out)?,
            _ => queue.copy(values, out)?,
        }
        Ok(())
    }
}

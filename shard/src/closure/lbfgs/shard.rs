//! Point and history of L-BFGS on this rank, for crates that save or move them.

use super::ShardedLbfgs;
use crate::update::params::ParamPlace;
use crate::{Error, Optimizer};
use meshstep_optim::{Lbfgs, LbfgsState};
use meshstep_tensor::{DType, Slice, SliceMut};
use std::ops::Range;

/// Point and history of L-BFGS on this rank. Vector 0 is the point, and the others are [`LbfgsState::vectors`].
pub trait LbfgsShard {
    /// Returns the rule.
    fn rule(&self) -> &Lbfgs;

    /// Returns the optimizer that has the parameters.
    fn optimizer_mut(&mut self) -> &mut Optimizer;

    /// Returns history and progress.
    fn state_mut(&mut self) -> &mut LbfgsState;

    /// Returns the type of the point. A rounded history has rows of another type.
    fn dtype(&self) -> DType;

    /// Returns a parameter's elements of vector `i` on this rank, and the index in the parameter of the first; none if there is
    /// no such vector.
    ///
    /// # Panics
    /// If there is no such parameter.
    fn history(&self, param: usize, i: usize) -> Result<(usize, Slice<'_>), Error>;

    /// Returns the memory of [`history`](Self::history) for writing.
    ///
    /// # Panics
    /// If there is no such parameter.
    fn history_mut(&mut self, param: usize, i: usize) -> Result<SliceMut<'_>, Error>;

    /// Forgets the history, and makes the parameters the point.
    fn restart(&mut self) -> Result<(), Error>;
}

impl LbfgsShard for ShardedLbfgs {
    fn rule(&self) -> &Lbfgs {
        &self.rule
    }

    fn optimizer_mut(&mut self) -> &mut Optimizer {
        &mut self.opt
    }

    fn state_mut(&mut self) -> &mut LbfgsState {
        &mut self.state
    }

    fn dtype(&self) -> DType {
        self.x.dtype()
    }

    fn history(&self, param: usize, i: usize) -> Result<(usize, Slice<'_>), Error> {
        let (first, part) = self.part(param);
        let vector = match i.checked_sub(1) {
            None => Some(self.x.as_slice()),
            Some(i) => self.state.vectors().nth(i).map(|(_, vector)| vector),
        };
        vector.map_or(Ok((0, Slice::from(&[] as &[f32]))), |vector| Ok((first, vector.slice(part)?)))
    }

    fn history_mut(&mut self, param: usize, i: usize) -> Result<SliceMut<'_>, Error> {
        let (_, part) = self.part(param);
        let vector = match i.checked_sub(1) {
            None => Some(self.x.as_mut()),
            Some(i) => self.state.vectors_mut().nth(i).map(|(_, vector)| vector),
        };
        let nothing = SliceMut::empty(self.spread.dtype(), self.opt.params.options.queue.place());
        vector.map_or(Ok(nothing), |vector| Ok(vector.slice(part)?))
    }

    fn restart(&mut self) -> Result<(), Error> {
        self.state.reset();
        self.spread.read_params(&self.opt, self.x.as_mut())
    }
}

impl ShardedLbfgs {
    /// Returns this rank's part of a parameter, and its range in the rank's vectors.
    fn part(&self, param: usize) -> (usize, Range<usize>) {
        let ParamPlace::Bucket { bucket, range, .. } = &self.opt.params.entries[param].place else {
            return (0, 0..0);
        };
        let first = self.spread.first(*bucket);
        let part = self.opt.params.buckets[*bucket].part_of(range);
        part.map_or((0, 0..0), |(within, kept, _)| (within.start, first + kept.start..first + kept.end))
    }
}

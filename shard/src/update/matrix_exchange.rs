//! Update of matrices that several ranks hold: pieces of their steps travel to one rank each, are transformed there, and return.

#[cfg(feature = "cuda")]
mod gpu;

#[cfg(feature = "cuda")]
pub(crate) use gpu::GpuMatrixStep;

use crate::config::options::Options;
use crate::config::param_groups::{Groups, MAX_STATES, RuleGroup};
use crate::error::Error;
use crate::plan::layout_plan::Part;
use crate::plan::matrix_exchange::{self, ExchangeWindow, ExchangedMatrix, WindowShare, longest};
use crate::reduce::reducer::GradReducer;
use crate::update::owned_bucket::{Owned, ParamUpdate};
use crate::update::piece_travel::PieceTravel;
use crate::update::scatter;
use crate::update::segments::PieceIndex;
use arrayvec::ArrayVec;
use meshstep_comm::Communicator;
use meshstep_optim::{Flat, Isa, Rule, Scalars, Segment};
use meshstep_tensor::{Buffer, Category, DType, Queue, SliceMut};
use std::sync::Arc;

/// Matrices of all parts that are exchanged, with scratch memory that is kept from step to step.
#[derive(Debug, Default)]
pub(crate) struct MatrixUpdates {
    exchanges: Vec<Arc<PartExchange>>,
    /// True for each parameter of an exchange.
    params: Vec<bool>,
    /// Buckets of these parameters, ascending.
    buckets: Vec<usize>,
    /// Memory of each type.
    scratch: Vec<Buffer>,
    travel: PieceTravel,
}

/// This rank's exchange of one part.
#[derive(Debug)]
pub(crate) struct PartExchange {
    comm: Arc<dyn Communicator>,
    windows: Vec<RankWindow>,
}

#[derive(Debug)]
struct RankWindow {
    dtype: DType,
    share: WindowShare,
    matrices: Vec<Matrix>,
}

/// A matrix of a window; indices are the optimizer's.
#[derive(Debug)]
struct Matrix {
    bucket: usize,
    param: usize,
    /// Place of this rank's piece.
    piece: Option<PieceIndex>,
}

/// State of a step that an exchange works on.
pub(crate) struct MatrixStep<'s, D> {
    pub(crate) buckets: &'s mut [Owned],
    pub(crate) groups: &'s [RuleGroup],
    /// Group of each parameter.
    pub(crate) group: &'s dyn Fn(usize) -> usize,
    pub(crate) reducer: &'s mut GradReducer,
    /// Update of each parameter in this step.
    pub(crate) due: D,
    pub(crate) scalars: &'s Scalars,
    pub(crate) queue: &'s Queue,
}

impl PartExchange {
    /// Makes the exchange of a part's matrices, whose buckets have these `places` in the optimizer, on the ranks of `comm`; `None` without matrices. The first
    /// of the part's parameters has the index `first`.
    pub(crate) fn new(
        (part, rules): (&Part, &Groups),
        (owned, comm): (&[Owned], &Arc<dyn Communicator>),
        (places, first): (&[usize], usize),
    ) -> Result<Option<Arc<Self>>, Error> {
        if !rules.see_matrices() {
            return Ok(None);
        }
        let rules = rules.rules(part.layout())?;
        let exchange = part.exchange_by(|p| matrix_exchange::cost(&*rules[p], part.whole_shape(p)));
        if exchange.windows().is_empty() {
            return Ok(None);
        }
        let comm = Arc::clone(comm);
        let pieces: Vec<_> = owned.iter().map(Owned::piece_indices).collect();
        let matrix = |&ExchangedMatrix { bucket, param, .. }: &ExchangedMatrix| {
            let param = first + param;
            Matrix { bucket: places[bucket], param, piece: pieces[bucket].get(&param).copied() }
        };
        let window = |(window, share): (&ExchangeWindow, WindowShare)| RankWindow {
            dtype: window.dtype,
            share,
            matrices: window.matrices.iter().map(matrix).collect(),
        };
        let windows = exchange.shares(comm.rank()).map(window).collect();
        Ok(Some(Arc::new(PartExchange { comm, windows })))
    }
}

impl MatrixUpdates {
    /// Allocates the scratch memory of these exchanges.
    pub(crate) fn new(exchanges: Vec<Arc<PartExchange>>, options: &Options) -> Result<Self, Error> {
        let windows = || exchanges.iter().flat_map(|exchange| &exchange.windows);
        let lens = longest(windows().map(|window| (window.dtype, window.share.scratch)));
        let buffer =
            |(dtype, len)| Buffer::zeroed_on(&options.queue, len, dtype, &options.meter, Category::Staging);
        let scratch = lens.into_iter().map(buffer).collect::<Result<_, _>>()?;
        let messages = windows().map(|window| window.share.messages.len()).max().unwrap_or(0);
        let (mut params, mut buckets) = (Vec::new(), Vec::new());
        for matrix in windows().flat_map(|window| &window.matrices) {
            params.resize(params.len().max(matrix.param + 1), false);
            params[matrix.param] = true;
            buckets.push(matrix.bucket);
        }
        buckets.sort_unstable();
        buckets.dedup();
        Ok(MatrixUpdates { params, buckets, scratch, travel: PieceTravel::with_room(messages), exchanges })
    }

    /// Returns the exchanges, one for each part with matrices that chunks may cut.
    pub(crate) fn exchanges(&self) -> impl Iterator<Item = Arc<PartExchange>> {
        self.exchanges.iter().cloned()
    }

    /// Returns true if a parameter is updated here.
    pub(crate) fn updates(&self, param: usize) -> bool {
        self.params.get(param).copied().unwrap_or(false)
    }

    /// Returns the buckets of the parameters that are updated here.
    pub(crate) fn buckets(&self) -> &[usize] {
        &self.buckets
    }

    /// Updates all matrices that are due. Collective.
    pub(crate) fn run<D>(&mut self, step: &mut MatrixStep<'_, D>) -> Result<(), Error>
    where
        D: Fn(usize) -> Option<ParamUpdate>,
    {
        let MatrixUpdates { exchanges, scratch, travel, .. } = self;
        for exchange in &*exchanges {
            for window in &exchange.windows {
                let _span = tracing::debug_span!("matrices", count = window.matrices.len()).entered();
                match scratch.iter_mut().find(|scratch| scratch.dtype() == window.dtype) {
                    Some(scratch) => window.exchange(&*exchange.comm, (scratch, travel), step)?,
                    None => window.update_alone(step)?,
                }
            }
        }
        Ok(())
    }
}

impl RankWindow {
    /// Updates the matrices of the window that are due; those that this rank has alone while pieces of others travel.
    fn exchange<D>(
        &self,
        comm: &dyn Communicator,
        (scratch, travel): (&mut Buffer, &mut PieceTravel),
        step: &mut MatrixStep<'_, D>,
    ) -> Result<(), Error>
    where
        D: Fn(usize) -> Option<ParamUpdate>,
    {
        self.advance(scratch, step)?;
        let (messages, order) = (&self.share.messages, &self.share.order[..]);
        travel.start((comm, step.queue), scratch, (messages, order), |message| {
            (step.due)(self.matrices[message.matrix].param).is_some().then_some(!message.owned)
        })?;
        let updated = self.update_alone(step);
        travel.land(step.queue, scratch)?;
        updated?;
        self.transform(scratch, step)?;
        travel.start((comm, step.queue), scratch, (messages, order), |message| {
            (step.due)(self.matrices[message.matrix].param).is_some().then_some(message.owned)
        })?;
        travel.land(step.queue, scratch)?;
        self.apply(scratch, step)
    }

    /// Updates the matrices that this rank has alone.
    fn update_alone<D>(&self, step: &mut MatrixStep<'_, D>) -> Result<(), Error>
    where
        D: Fn(usize) -> Option<ParamUpdate>,
    {
        self.share.alone.iter().try_for_each(|&i| {
            step.piece(&self.matrices[i], |rule, flat, segment, scalars, queue| {
                rule.update(flat, segment, scalars, queue)
            })
        })
    }

    /// Writes this rank's pieces of the steps into the scratch memory.
    fn advance<D>(&self, scratch: &mut Buffer, step: &mut MatrixStep<'_, D>) -> Result<(), Error>
    where
        D: Fn(usize) -> Option<ParamUpdate>,
    {
        self.share.pieces.iter().try_for_each(|(i, place)| {
            let params = scratch.as_mut().slice(place.clone())?;
            step.piece(&self.matrices[*i], |rule, flat, segment, scalars, queue| {
                let Flat { grads, state, .. } = flat;
                let mut state: ArrayVec<_, MAX_STATES> = state.iter_mut().map(SliceMut::reborrow).collect();
                let flat = Flat { params, grads, state: &mut state, copy: None, remainder: None };
                let phases = rule.by_matrix();
                phases.map_or(Ok(()), |rule| rule.advance(Isa::detect(), flat, segment, scalars, queue))
            })
        })
    }

    /// Transforms the steps of the matrices that this rank owns.
    fn transform<D>(&self, scratch: &mut Buffer, step: &MatrixStep<'_, D>) -> Result<(), Error>
    where
        D: Fn(usize) -> Option<ParamUpdate>,
    {
        let is_due = |matrix: usize| (step.due)(self.matrices[matrix].param).is_some();
        let scattered = || self.share.scattered.iter().filter(|piece| is_due(piece.matrix));
        scattered().try_for_each(|piece| scatter::scatter(piece, scratch, step.queue))?;
        for (i, place) in &self.share.wholes {
            let param = self.matrices[*i].param;
            let rule = &*step.groups[(step.group)(param)].rule;
            let matrix = (step.due)(param).and_then(|update| update.matrix);
            if let (Some(matrix), Some(rule)) = (matrix, rule.by_matrix()) {
                rule.transform(Isa::detect(), scratch.as_mut().slice(place.clone())?, matrix, step.queue)?;
            }
        }
        scattered().try_for_each(|piece| scatter::collect(piece, scratch, step.queue))
    }

    /// Updates this rank's pieces of the parameters along the steps.
    fn apply<D>(&self, scratch: &mut Buffer, step: &mut MatrixStep<'_, D>) -> Result<(), Error>
    where
        D: Fn(usize) -> Option<ParamUpdate>,
    {
        self.share.pieces.iter().try_for_each(|(i, place)| {
            let grads = scratch.as_mut().slice(place.clone())?;
            step.piece(&self.matrices[*i], |rule, flat, segment, scalars, queue| {
                let Flat { params, copy, remainder, .. } = flat;
                let flat = Flat { params, grads, state: &mut [], copy, remainder };
                let phases = rule.by_matrix();
                phases.map_or(Ok(()), |rule| rule.apply(Isa::detect(), flat, segment, scalars, queue))
            })
        })
    }
}

impl<D> MatrixStep<'_, D>
where
    D: Fn(usize) -> Option<ParamUpdate>,
{
    /// Calls `then` with the vectors of this rank's piece of a matrix, if it has one and the matrix is due.
    fn piece(
        &mut self,
        matrix: &Matrix,
        then: impl FnOnce(
            &dyn Rule,
            Flat<'_, '_>,
            &[Segment],
            &Scalars,
            &Queue,
        ) -> Result<(), meshstep_optim::Error>,
    ) -> Result<(), Error> {
        let (Some(update), Some(piece)) = ((self.due)(matrix.param), matrix.piece) else { return Ok(()) };
        let Some(grads) = self.reducer.grads(matrix.bucket) else { return Ok(()) };
        self.buckets[matrix.bucket].on_piece(piece, grads, self.groups, update, self.scalars, then)
    }
}

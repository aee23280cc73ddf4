//! The exchange on a GPU. The device decides the update, so that all pieces travel in every step and the host does not wait.

use super::{Matrix, MatrixUpdates, RankWindow};
use crate::error::Error;
use crate::reduce::reducer::GradReducer;
use crate::update::gpu_matrices::GpuMatrices;
use crate::update::owned_bucket::Owned;
use crate::update::piece_travel::PieceTravel;
use crate::update::scatter;
use meshstep_comm::Communicator;
use meshstep_optim::Flat;
use meshstep_optim::cuda::{StepBlock, Update};
use meshstep_tensor::{Buffer, DType, Queue, SliceMut};

/// State of a step that an exchange on a GPU works on. All rows are prepared.
pub(crate) struct GpuMatrixStep<'s> {
    pub(crate) buckets: &'s mut [Owned],
    pub(crate) reducer: &'s mut GradReducer,
    pub(crate) step: &'s StepBlock,
    pub(crate) matrices: &'s GpuMatrices,
    pub(crate) queue: &'s Queue,
}

/// A matrix that visits this rank to be transformed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Visitor {
    /// Type that its rule computes in.
    pub(crate) dtype: DType,
    pub(crate) param: usize,
    /// Number of elements.
    pub(crate) len: usize,
}

impl MatrixUpdates {
    /// Returns the parameters of which this rank updates pieces.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = usize> {
        self.windows().flat_map(|window| window.share.pieces.iter().map(|(i, ..)| window.matrices[*i].param))
    }

    /// Returns the matrices that this rank transforms.
    pub(crate) fn visitors(&self) -> impl Iterator<Item = Visitor> {
        let of_window = |window: &RankWindow| {
            let visitor = |(i, place): &(usize, std::ops::Range<usize>)| Visitor {
                dtype: window.dtype,
                param: window.matrices[*i].param,
                len: place.len(),
            };
            window.share.wholes.iter().map(visitor).collect::<Vec<_>>()
        };
        self.windows().flat_map(of_window)
    }

    fn windows(&self) -> impl Iterator<Item = &RankWindow> {
        self.exchanges.iter().flat_map(|exchange| &exchange.windows)
    }

    /// Updates all matrices of which several ranks hold pieces. Collective.
    pub(crate) fn run_on_gpu(&mut self, step: &mut GpuMatrixStep<'_>) -> Result<(), Error> {
        let MatrixUpdates { exchanges, scratch, travel, .. } = self;
        for exchange in &*exchanges {
            for window in &exchange.windows {
                let _span = tracing::debug_span!("matrices", count = window.matrices.len()).entered();
                if let Some(scratch) = scratch.iter_mut().find(|scratch| scratch.dtype() == window.dtype) {
                    window.exchange_on_gpu(&*exchange.comm, (scratch, travel), step)?;
                }
            }
        }
        Ok(())
    }
}

impl RankWindow {
    fn exchange_on_gpu(
        &self,
        comm: &dyn Communicator,
        (scratch, travel): (&mut Buffer, &mut PieceTravel),
        step: &mut GpuMatrixStep<'_>,
    ) -> Result<(), Error> {
        let (messages, order) = (&self.share.messages, &self.share.order[..]);
        let (decided, queue) = (step.step, step.queue);
        for (i, place) in &self.share.pieces {
            let into = scratch.as_mut().slice(place.clone())?;
            step.piece(&self.matrices[*i], into, |update, row, flat, into| {
                update.advance(row, flat, into, decided, queue)
            })?;
        }
        travel.start((comm, queue), scratch, (messages, order), |message| Some(!message.owned))?;
        travel.land(queue, scratch)?;
        let scattered = &self.share.scattered;
        scattered.iter().try_for_each(|piece| scatter::scatter(piece, scratch, queue))?;
        for (i, place) in &self.share.wholes {
            let whole = scratch.as_mut().slice(place.clone())?;
            step.matrices.transform(self.matrices[*i].param, whole, decided, queue)?;
        }
        scattered.iter().try_for_each(|piece| scatter::collect(piece, scratch, queue))?;
        travel.start((comm, queue), scratch, (messages, order), |message| Some(message.owned))?;
        travel.land(queue, scratch)?;
        self.share.pieces.iter().try_for_each(|(i, place)| {
            let from = scratch.as_mut().slice(place.clone())?;
            step.piece(&self.matrices[*i], from, |update, row, flat, from| {
                update.apply(row, flat, from, decided, queue)
            })
        })
    }
}

impl GpuMatrixStep<'_> {
    /// Calls `phase` with each row of this rank's piece of a matrix, the vectors and the row's part of `step`, if it has one.
    fn piece(
        &mut self,
        matrix: &Matrix,
        step: SliceMut<'_>,
        phase: impl Fn(&mut Update, usize, Flat<'_, '_>, SliceMut<'_>) -> Result<(), meshstep_optim::Error>,
    ) -> Result<(), Error> {
        let Some(piece) = matrix.piece else { return Ok(()) };
        let Some(grads) = self.reducer.grads(matrix.bucket) else { return Ok(()) };
        self.buckets[matrix.bucket].on_gpu_piece(piece, grads, step, phase)
    }
}

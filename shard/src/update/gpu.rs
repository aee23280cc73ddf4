//! Updates on a GPU: tables of rows that launches read, and parameters that arrive while the host goes on.

use crate::config::param_groups::RuleGroup;
use crate::error::Error;
use crate::update::gpu_matrices::{GpuMatrices, computed_in};
use crate::update::owned_bucket::{Owned, ParamUpdate, cut};
use crate::update::segments::{OwnedRange, PieceIndex, SegmentPiece, UpdateTable};
use meshstep_optim::Flat;
use meshstep_optim::cuda::{Group, StepBlock, Tables, Update};
use meshstep_tensor::cuda::Event;
use meshstep_tensor::{Buffer, DType, Meter, Queue, SliceMut};
use std::sync::{Mutex, PoisonError};

/// Rows of one owned range, once there was an update.
#[derive(Debug, Default)]
pub(crate) struct GpuTable(pub(super) Option<Update>);

impl GpuTable {
    /// Drops the rows; the next update makes them again.
    pub(super) fn clear(&mut self) {
        self.0 = None;
    }
}

/// A step on a GPU, as its updates need it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GpuUpdate<'s> {
    /// The device's decision.
    pub(crate) step: &'s StepBlock,
    /// Rows that are ready for the step.
    pub(crate) prepared: Option<&'s Tables>,
    /// Memory for rules that see matrices.
    pub(crate) matrices: Option<&'s GpuMatrices>,
    pub(crate) meter: &'s Meter,
}

/// Event after which the parameters are those of the last step, if the queue has not waited for it.
#[derive(Debug, Default)]
pub(crate) struct ParamArrival(Mutex<Option<Event>>);

impl ParamArrival {
    /// Makes the queue wait for the parameters.
    pub(crate) fn wait(&self, queue: &Queue) -> Result<(), Error> {
        let mut expected = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(event), Some(stream)) = (&*expected, queue.stream()) {
            stream.wait(event).map_err(meshstep_tensor::Error::from)?;
        }
        *expected = None;
        Ok(())
    }
}

impl Owned {
    /// Makes later uses of the parameters wait for `event`.
    pub(crate) fn expect(&mut self, event: Event) {
        *self.arrival.0.get_mut().unwrap_or_else(PoisonError::into_inner) = Some(event);
    }

    /// Updates the owned parameters on a GPU as the device's step decides, per parameter if it counts them, except for pieces of matrices;
    /// `next` returns a parameter's next update.
    pub(crate) fn update_on_gpu(
        &mut self,
        grads: &mut Buffer,
        groups: &[RuleGroup],
        next: impl Fn(usize) -> ParamUpdate,
        at: GpuUpdate<'_>,
    ) -> Result<(), Error> {
        // The parameters have arrived: the communicator gathered them before it reduced these gradients.
        let (queue, GpuUpdate { step, prepared, .. }) = (&self.queue, at);
        for OwnedRange { range, kept, tables, gpu } in &mut self.runs {
            let mut state = cut(&mut self.state, kept)?;
            let vectors = [&mut self.params, &mut *grads];
            let flat = OwnedRange::flat(self.len, range, kept, vectors, self.master.as_mut(), &mut state)?;
            if gpu.0.is_none() && !tables.is_empty() {
                tables.iter_mut().for_each(|table| table.fill(|param| Some(next(param))));
                let counts =
                    |table: &UpdateTable| if step.counted() > 0 { params_of(table) } else { Vec::new() };
                let params: Vec<_> = tables.iter().map(counts).collect();
                let groups: Vec<_> =
                    tables.iter().zip(&params).map(|(table, params)| group(table, groups, params)).collect();
                let memory = at.matrices.and_then(|all| all.memory(computed_in(flat.params.dtype())));
                let made = Update::sharing(&flat, &groups, self.rounding, (queue, at.meter), memory);
                gpu.0 = Some(without_pieces(made?, tables, at.matrices));
            }
            match &mut gpu.0 {
                Some(update) if prepared.is_some_and(|tables| tables.has(update)) => {
                    update.sweep(flat, step, queue)?;
                }
                Some(update) => update.run(flat, step, queue)?,
                None => {}
            }
        }
        Ok(())
    }

    /// Calls `phase` with the rows of the owned range, the number of each row of a parameter's piece, the vectors and the row's part of
    /// `step`, for owners that have been updated.
    pub(crate) fn on_gpu_piece(
        &mut self,
        at: PieceIndex,
        grads: &mut Buffer,
        mut step: SliceMut<'_>,
        phase: impl Fn(&mut Update, usize, Flat<'_, '_>, SliceMut<'_>) -> Result<(), meshstep_optim::Error>,
    ) -> Result<(), Error> {
        let Some((OwnedRange { range, kept, tables, gpu }, _)) = at.of(&mut self.runs) else { return Ok(()) };
        let Some(update) = &mut gpu.0 else { return Ok(()) };
        for (row, elements) in at.rows(tables) {
            let mut state = cut(&mut self.state, kept)?;
            let vectors = [&mut self.params, &mut *grads];
            let flat = OwnedRange::flat(self.len, range, kept, vectors, self.master.as_mut(), &mut state)?;
            phase(update, row, flat, step.reborrow().slice(elements)?)?;
        }
        Ok(())
    }

    /// Returns the pieces that this rank updates, each with the group of its rule.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (usize, &SegmentPiece)> {
        let tables = self.runs.iter().flat_map(|run| &run.tables);
        tables.flat_map(|table| table.pieces.iter().map(|piece| (table.group, piece)))
    }

    /// Returns the type of the parameters.
    pub(crate) fn update_dtype(&self) -> DType {
        self.params.dtype()
    }

    /// Returns the tables on a GPU that exist so far.
    pub(crate) fn updates(&mut self) -> impl Iterator<Item = &mut Update> {
        self.runs.iter_mut().filter_map(|run| run.gpu.0.as_mut())
    }
}

/// Leaves pieces of matrices to their exchange.
fn without_pieces(mut update: Update, tables: &[UpdateTable], matrices: Option<&GpuMatrices>) -> Update {
    let params: Vec<_> = tables.iter().flat_map(|table| &table.pieces).map(|piece| piece.param).collect();
    update.leave_to_phases(|row| matrices.is_some_and(|matrices| matrices.is_piece(params[row])));
    update
}

/// Returns a table's segments with their group, as a GPU needs them; `params` are their parameters if the device counts them.
fn group<'a>(table: &'a UpdateTable, groups: &'a [RuleGroup], params: &'a [u32]) -> Group<'a> {
    let RuleGroup { rule, lr_scale, .. } = &groups[table.group];
    Group { rule: &**rule, lr_scale: *lr_scale, segments: &table.segments, params }
}

/// Returns the parameter of each piece of a table.
fn params_of(table: &UpdateTable) -> Vec<u32> {
    table.pieces.iter().map(|piece| piece.param as u32).collect()
}

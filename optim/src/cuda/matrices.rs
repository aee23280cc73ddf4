//! Updates of rules that see matrices: each tensor is advanced into scratch memory, transformed there, and applied.

use super::kernels::{Kernel, argument};
use super::matrix_arguments::Due;
use super::update::{Sweeps, Update, address_of_row, stream, waves};
use super::{Group, MatrixMemory, MatrixSizes, Orthogonalizer, StepBlock, Streams, format, suffix, tiles_of};
use crate::{Error, Flat, Rule, Segment};
use meshstep_tensor::{DType, Meter, Queue, SliceMut};
use std::ops::Range;
use std::sync::Arc;

/// Kernels and tensors of an update.
#[derive(Debug)]
pub(super) struct MatrixSweeps {
    advance: Kernel,
    apply: Kernel,
    /// One for each row.
    tensors: Vec<MatrixRow>,
    memory: Arc<MatrixMemory>,
}

/// Matrices of a row.
#[derive(Debug)]
struct MatrixRow {
    range: Range<usize>,
    tiles: u64,
    /// Launches of whole matrices; the error of pieces.
    whole: Result<Orthogonalizer, Error>,
    /// True for a row that is updated in phases alone.
    in_phases: bool,
}

impl MatrixSweeps {
    /// Makes the launches of the rows of `groups`, in `memory` or in memory of their own.
    pub(super) fn new(
        family: &str,
        flat: &Flat<'_, '_>,
        groups: &[Group<'_>],
        (queue, meter): (&Queue, &Meter),
        memory: Option<&Arc<MatrixMemory>>,
    ) -> Result<Self, Error> {
        let device = stream(queue)?.device();
        let (dtype, params) = (computed(flat.params.dtype()), flat.params.dtype());
        let mut tensors = Vec::new();
        for group in groups {
            for (index, segment) in group.segments.iter().enumerate() {
                tensors.push(MatrixRow::new(group.rule, (index, segment), params, queue, meter)?);
            }
        }
        let memory = match memory {
            Some(memory) => Arc::clone(memory),
            None => Arc::new(MatrixMemory::new(dtype, sizes(&tensors), queue, meter)?),
        };
        memory.check(dtype, &MatrixSizes::default(), queue)?;
        let narrow = flat.state.first().is_some_and(|state| state.dtype() == DType::BF16);
        let [advance, apply] = [
            format!("{family}_advance_{}", suffix(dtype, false, narrow)),
            format!("{family}_apply_{}", suffix(params, flat.remainder.is_some(), false)),
        ];
        let find = |name: &str| Ok::<_, Error>(Kernel::find(device, name)?.in_waves(waves(flat)));
        Ok(MatrixSweeps { advance: find(&advance)?, apply: find(&apply)?, tensors, memory })
    }

    fn tensor(&self, row: usize) -> Result<&MatrixRow, Error> {
        let expected = self.tensors.len();
        self.tensors.get(row).ok_or(Error::Len { what: "rows of an update", given: row + 1, expected })
    }
}

impl MatrixRow {
    /// Makes the launches of a segment, for parameters of this type.
    fn new(
        rule: &dyn Rule,
        (index, segment): (usize, &Segment),
        params: DType,
        queue: &Queue,
        meter: &Meter,
    ) -> Result<Self, Error> {
        let (range, matrix) = (segment.range.clone(), segment.matrix.unwrap_or_default());
        let whole = match Orthogonalizer::new(rule, (computed(params), range.len()), matrix, queue, meter) {
            Err(Error::NotAMatrix { rule, len, shape, blocks, .. }) => {
                Err(Error::NotAMatrix { rule, index, len, shape, blocks })
            }
            made => Ok(made?),
        };
        Ok(MatrixRow { tiles: tiles_of(&(0..range.len()), params), range, whole, in_phases: false })
    }
}

/// Returns the scratch memory of whole tensors.
fn sizes(tensors: &[MatrixRow]) -> MatrixSizes {
    let whole = tensors.iter().filter(|tensor| !tensor.in_phases).filter_map(|tensor| {
        let sizes = tensor.whole.as_ref().ok()?.sizes();
        Some(MatrixSizes { step: sizes.tensor, ..sizes })
    });
    whole.fold(MatrixSizes::default(), MatrixSizes::max)
}

/// Returns the type that a rule computes in, for parameters of this type.
fn computed(params: DType) -> DType {
    if params == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Phases of an update of matrices, for callers that hold them in pieces: [`MatrixRule`](crate::MatrixRule). Rows are numbered in the order
/// of the groups' segments.
impl Update {
    /// Selects the rows that [`run`](Self::run) leaves to [`advance`](Self::advance) and [`apply`](Self::apply), by number. They are
    /// prepared with the others.
    pub fn leave_to_phases(&mut self, in_phases: impl Fn(usize) -> bool) {
        let tensors = self.matrices_mut().map(|matrices| matrices.tensors.iter_mut());
        tensors.into_iter().flatten().enumerate().for_each(|(row, tensor)| tensor.in_phases = in_phases(row));
    }

    /// Works in other scratch memory from now on. Captured graphs must be captured again.
    pub fn use_memory(&mut self, memory: &Arc<MatrixMemory>, queue: &Queue) -> Result<(), Error> {
        let Some(matrices) = self.matrices_mut() else { return Ok(()) };
        memory.check(matrices.memory.dtype(), &sizes(&matrices.tensors), queue)?;
        matrices.memory = Arc::clone(memory);
        Ok(())
    }

    /// Advances the state of a prepared row, and writes its step before the transformation to `into`, which has its elements.
    pub fn advance(
        &mut self,
        row: usize,
        flat: Flat<'_, '_>,
        into: SliceMut<'_>,
        step: &StepBlock,
        queue: &Queue,
    ) -> Result<(), Error> {
        self.check(&flat, step, queue)?;
        self.check_phase(row, &into, queue)?;
        // SAFETY: `into` has the row's elements, checked above, and is borrowed exclusively.
        unsafe { self.launch_advance(row, &flat, into.address() as u64, step, queue) }
    }

    /// Updates the parameters of a prepared row along the transformed step `from`, which has its elements.
    pub fn apply(
        &mut self,
        row: usize,
        flat: Flat<'_, '_>,
        from: SliceMut<'_>,
        step: &StepBlock,
        queue: &Queue,
    ) -> Result<(), Error> {
        self.check(&flat, step, queue)?;
        self.check_phase(row, &from, queue)?;
        // SAFETY: `from` has the row's elements, checked above, and is borrowed exclusively.
        unsafe { self.launch_apply(row, &flat, from.address() as u64, step, queue) }
    }

    /// Checks the memory of a row's step.
    fn check_phase(&self, row: usize, memory: &SliceMut<'_>, queue: &Queue) -> Result<(), Error> {
        let matrices = self.matrices()?;
        memory.place().check(queue.place())?;
        let (expected, dtype) = (matrices.tensor(row)?.range.len(), matrices.memory.dtype());
        if memory.len() != expected {
            return Err(Error::Len { what: "a step", given: memory.len(), expected });
        }
        if memory.dtype() != dtype {
            return Err(Error::DType {
                what: "a step",
                given: memory.dtype(),
                works: "the type that the rule computes in",
            });
        }
        Ok(())
    }

    /// Checks that the rows which are not left to phases have whole matrices, and that the scratch memory is for these.
    pub(super) fn check_whole(&self, queue: &Queue) -> Result<(), Error> {
        let Sweeps::Matrices(MatrixSweeps { tensors, memory, .. }) = &self.sweeps else { return Ok(()) };
        let mut pieces =
            tensors.iter().filter_map(|tensor| tensor.whole.as_ref().err().filter(|_| !tensor.in_phases));
        pieces.next().map_or(Ok(()), |error| Err(error.clone()))?;
        memory.check(memory.dtype(), &sizes(tensors), queue)
    }

    /// Updates every row that is not left to phases; the callers have checked the arguments.
    pub(super) fn launch_matrices(
        &self,
        matrices: &MatrixSweeps,
        flat: &Flat<'_, '_>,
        step: &StepBlock,
        queue: &Queue,
    ) -> Result<(), Error> {
        let whole = matrices.tensors.iter().enumerate().filter(|(_, tensor)| !tensor.in_phases);
        for (row, tensor) in whole.filter(|(_, tensor)| !tensor.range.is_empty()) {
            let at = matrices.memory.step();
            let due = Due { step: step.address(), row: address_of_row(&self.rows, row) };
            // SAFETY: the scratch memory has the tensor's elements, checked by the callers. Only updates of this queue use it, in
            // whose order the launches are. The step and the row live as long as the launches.
            unsafe {
                self.launch_advance(row, flat, at, step, queue)?;
                if let Ok(whole) = &tensor.whole {
                    whole.launch(at, &matrices.memory, due, queue)?;
                }
                self.launch_apply(row, flat, at, step, queue)?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for [`launch_row`](Self::launch_row).
    unsafe fn launch_advance(
        &self,
        row: usize,
        flat: &Flat<'_, '_>,
        at: u64,
        step: &StepBlock,
        queue: &Queue,
    ) -> Result<(), Error> {
        let matrices = self.matrices()?;
        let from_row = self.streams(flat, matrices.tensor(row)?.range.start);
        let streams = Streams { params: at, copy: 0, remainder: 0, ..from_row };
        // SAFETY: the caller's promise.
        unsafe { self.launch_row(row, &matrices.advance, streams, step, queue) }
    }

    /// # Safety
    /// As for [`launch_row`](Self::launch_row).
    unsafe fn launch_apply(
        &self,
        row: usize,
        flat: &Flat<'_, '_>,
        at: u64,
        step: &StepBlock,
        queue: &Queue,
    ) -> Result<(), Error> {
        let matrices = self.matrices()?;
        let from_row = self.streams(flat, matrices.tensor(row)?.range.start);
        let streams = Streams { grads: at, grads_format: format(matrices.memory.dtype()), ..from_row };
        // SAFETY: the caller's promise.
        unsafe { self.launch_row(row, &matrices.apply, streams, step, queue) }
    }

    /// Sweeps over the elements of one row.
    ///
    /// # Safety
    /// The vectors of `streams` have the kernel's types and the row's elements, on the stream's device; work that touches them is in the
    /// stream's order.
    unsafe fn launch_row(
        &self,
        row: usize,
        kernel: &Kernel,
        mut streams: Streams,
        step: &StepBlock,
        queue: &Queue,
    ) -> Result<(), Error> {
        let mut tiles = self.matrices()?.tensor(row)?.tiles;
        let (mut rows, mut count, mut step) = (address_of_row(&self.rows, row), 1u64, step.address());
        let swept = &mut [
            argument(&mut streams),
            argument(&mut rows),
            argument(&mut count),
            argument(&mut tiles),
            argument(&mut step),
        ];
        // SAFETY: the row exists, and the step is one `StepScalars`, both on the stream's device; vectors are the caller's promise.
        unsafe { kernel.launch(stream(queue)?, tiles, swept) }
    }
}

//! Table of segments on a device, and the launches that advance them by one step.

use super::kernels::{Kernel, argument};
use super::matrices::MatrixSweeps;
use super::tables::Rows;
use super::{Hyper, MatrixMemory, Row, StepScalars, Streams};
use crate::engine::pass::{check_memory, check_segments};
use crate::{Error, Flat, Rounding, Rule, Sees, Segment};
use meshstep_tensor::cuda::Stream;
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Queue, SliceMut};
use std::sync::Arc;

/// Segments of one parameter group.
#[derive(Clone, Copy, Debug)]
pub struct Group<'a> {
    /// Update rule of the group.
    pub rule: &'a dyn Rule,
    /// The group's factor on the learning rate.
    pub lr_scale: f64,
    /// Segments, ascending, without overlap; `t` is that of the next step.
    pub segments: &'a [Segment],
    /// For each segment the index of its parameter among those that a [`Decision`](super::Decision) counts: the segment is updated if
    /// some rank has that parameter's gradient. Empty: every step updates all segments.
    pub params: &'a [u32],
}

/// Segments of flat memory on a GPU, of one or several parameter groups, with everything their updates need.
///
/// A step is two launches without waiting on the host: rates, factors and the decision to skip are read from device memory, and step
/// counts are kept there. [`Tables`](super::Tables) merge the first launches of several updates into one. Rules that see matrices have more
/// launches for each tensor, with scratch memory: their own, or memory that several updates [share](Self::sharing).
#[derive(Debug)]
pub struct Update {
    pub(super) family: &'static str,
    prepare: Kernel,
    pub(super) sweeps: Sweeps,
    pub(super) rows: Rows,
    /// Number of parameters that a step must have bytes for.
    pub(super) counted: usize,
    formats: Streams,
    types: Types,
}

/// Launches of a step.
#[derive(Debug)]
pub(super) enum Sweeps {
    /// One launch over so many tiles.
    Elements(Kernel, u64),
    Matrices(MatrixSweeps),
}

/// Memory layout that an update was made for.
#[derive(Clone, Debug, PartialEq)]
struct Types {
    len: usize,
    params: DType,
    grads: DType,
    state: Vec<DType>,
    copy: Option<DType>,
    remainder: bool,
}

impl Update {
    /// Uploads the table to the queue's device, for memory with the types and length of `flat`. All groups' rules must be of one family;
    /// rules that see sums of tensors are refused.
    pub fn new(
        flat: &Flat<'_, '_>,
        groups: &[Group<'_>],
        rounding: Rounding,
        queue: &Queue,
        meter: &Meter,
    ) -> Result<Self, Error> {
        Self::sharing(flat, groups, rounding, (queue, meter), None)
    }

    /// Same as [`new`](Self::new), with scratch memory that other updates of the queue use too, for rules that see matrices; `None`: memory of
    /// its own.
    pub fn sharing(
        flat: &Flat<'_, '_>,
        groups: &[Group<'_>],
        rounding: Rounding,
        (queue, meter): (&Queue, &Meter),
        memory: Option<&Arc<MatrixMemory>>,
    ) -> Result<Self, Error> {
        let stream = stream(queue)?;
        let mut table = Vec::new();
        for group in groups {
            check_memory(group.rule, flat, rounding)?;
            check_segments(group.segments, flat.params.len(), 0.0, f64::is_finite)?;
            let first = table.len();
            super::append(&mut table, flat.params.dtype(), group.rule, group.lr_scale, group.segments)?;
            number(&mut table[first..], group.params)?;
        }
        check_places(flat, queue.place())?;
        check_apart(groups)?;
        let family = family(groups)?;
        let find = |name: &str| Kernel::find(stream.device(), name);
        let sweeps = if groups.iter().any(|group| group.rule.sees() == Sees::Matrix) {
            // Each row has launches of its own, which are given the addresses of its elements.
            table.iter_mut().for_each(|row| {
                (row.start, row.end, row.tile) = (0, row.end - row.start, 0);
            });
            Sweeps::Matrices(MatrixSweeps::new(family, flat, groups, (queue, meter), memory)?)
        } else {
            let kernel = find(&super::kernel(family, flat))?.in_waves(waves(flat));
            Sweeps::Elements(kernel, super::tiles(&table, flat.params.dtype()))
        };
        let words: &[u64] = bytemuck::cast_slice(&table);
        let mut rows = Rows::room(table.len(), queue, meter)?;
        queue.upload(words.into(), rows.as_mut())?;
        Ok(Update {
            family,
            prepare: find(&super::prepare(family))?,
            sweeps,
            rows: Rows::whole(rows),
            counted: counted(&table),
            formats: Streams::of(flat, rounding),
            types: Types::of(flat),
        })
    }

    /// Advances every segment by one step with the values of `step`, which the device reads when the stream reaches it.
    pub fn run(&mut self, flat: Flat<'_, '_>, step: &StepBlock, queue: &Queue) -> Result<(), Error> {
        self.check(&flat, step, queue)?;
        self.check_whole(queue)?;
        self.rows.prepare(&self.prepare, self.counted, step, queue)?;
        self.launch(&flat, step, queue)
    }

    /// Same as [`run`](Self::run) if [`Tables::prepare`](super::Tables::prepare) has already prepared the rows for this step.
    pub fn sweep(&mut self, flat: Flat<'_, '_>, step: &StepBlock, queue: &Queue) -> Result<(), Error> {
        self.check(&flat, step, queue)?;
        self.check_whole(queue)?;
        self.launch(&flat, step, queue)
    }

    /// Updates the elements of all rows; the callers have checked the arguments.
    fn launch(&mut self, flat: &Flat<'_, '_>, step: &StepBlock, queue: &Queue) -> Result<(), Error> {
        let stream = stream(queue)?;
        let (kernel, mut tiles) = match &self.sweeps {
            Sweeps::Elements(kernel, tiles) => (kernel, *tiles),
            Sweeps::Matrices(matrices) => return self.launch_matrices(matrices, flat, step, queue),
        };
        let (mut streams, (mut rows, mut count)) = (self.streams(flat, 0), self.rows.at());
        let mut step = step.address();
        let swept = &mut [
            argument(&mut streams),
            argument(&mut rows),
            argument(&mut count),
            argument(&mut tiles),
            argument(&mut step),
        ];
        // SAFETY: the parameters have the kernel's types. There are `count` rows and one `StepScalars`, both on the stream's device.
        // Rows lie within `flat`; its vectors have the types that the kernel was chosen for, as the callers have checked, and are
        // borrowed exclusively by them. Later work on this stream runs after the kernel.
        unsafe { kernel.launch(stream, tiles, swept) }
    }

    /// Returns the launches of matrices, or an error for rules that see single elements.
    pub(super) fn matrices(&self) -> Result<&MatrixSweeps, Error> {
        match &self.sweeps {
            Sweeps::Matrices(matrices) => Ok(matrices),
            Sweeps::Elements(..) => Err(Error::NoKernels { rule: self.family }),
        }
    }

    pub(super) fn matrices_mut(&mut self) -> Option<&mut MatrixSweeps> {
        match &mut self.sweeps {
            Sweeps::Matrices(matrices) => Some(matrices),
            Sweeps::Elements(..) => None,
        }
    }

    pub(super) fn check(&self, flat: &Flat<'_, '_>, step: &StepBlock, queue: &Queue) -> Result<(), Error> {
        check_places(flat, queue.place())?;
        self.rows.table.place().check(queue.place())?;
        step.check(self.counted, queue)?;
        let given = Types::of(flat);
        if given != self.types {
            return Err(Error::OtherMemory {
                given: format!("{given:?}"),
                expected: format!("{:?}", self.types),
            });
        }
        Ok(())
    }

    /// Returns the steps done by each segment, group by group. Waits for the queue.
    pub fn steps(&self, queue: &Queue) -> Result<Vec<u64>, Error> {
        let rows = self.rows.slice()?;
        let mut words = vec![0u64; rows.len()];
        queue.download(rows, (&mut words[..]).into())?;
        let rows: &[Row] = bytemuck::cast_slice(&words);
        Ok(rows.iter().map(|row| row.t).collect())
    }

    /// Returns the vectors from element `first` on.
    pub(super) fn streams(&self, flat: &Flat<'_, '_>, first: usize) -> Streams {
        let from = |vector: &SliceMut<'_>| (vector.address() + first * vector.dtype().size()) as u64;
        let mut streams = Streams {
            params: from(&flat.params),
            grads: from(&flat.grads),
            copy: flat.copy.as_ref().map_or(0, from),
            remainder: flat.remainder.as_ref().map_or(0, from),
            ..self.formats
        };
        for (address, slot) in streams.state.iter_mut().zip(flat.state.iter()) {
            *address = from(slot);
        }
        streams
    }
}

impl Types {
    fn of(flat: &Flat<'_, '_>) -> Self {
        Types {
            len: flat.params.len(),
            params: flat.params.dtype(),
            grads: flat.grads.dtype(),
            state: flat.state.iter().map(|slot| slot.dtype()).collect(),
            copy: flat.copy.as_ref().map(|copy| copy.dtype()),
            remainder: flat.remainder.is_some(),
        }
    }
}

/// [`StepScalars`] in device memory.
#[derive(Debug)]
pub struct StepBlock {
    block: Buffer,
    /// Number of parameters with a byte.
    counted: usize,
}

impl StepBlock {
    /// Creates a step that skips.
    pub fn new(queue: &Queue, meter: &Meter) -> Result<Self, Error> {
        Self::of(0, queue, meter)
    }

    /// Creates a step that skips, with a byte for each of `counted` parameters.
    pub(super) fn of(counted: usize, queue: &Queue, meter: &Meter) -> Result<Self, Error> {
        let words = size_of::<StepScalars>() / size_of::<u64>() + counted.div_ceil(size_of::<u64>());
        let block = Buffer::zeroed_on(queue, words, DType::U64, meter, Category::Staging)?;
        let mut block = StepBlock { block, counted };
        block.set(&StepScalars { lr: 0.0, grad_scale: 0.0, skip: 1, zero_grads: 0 }, queue)?;
        Ok(block)
    }

    /// Returns the number of parameters that the step has a byte for.
    pub fn counted(&self) -> usize {
        self.counted
    }

    /// Checks the place, and that the step has a byte for every parameter that rows name.
    pub(super) fn check(&self, counted: usize, queue: &Queue) -> Result<(), Error> {
        self.block.place().check(queue.place())?;
        if self.counted < counted {
            let what = "a step with a byte for each parameter";
            return Err(Error::Len { what, given: self.counted, expected: counted });
        }
        Ok(())
    }

    pub(super) fn address(&self) -> u64 {
        self.block.as_slice().address() as u64
    }

    /// Writes `step` after all work of the queue so far.
    pub fn set(&mut self, step: &StepScalars, queue: &Queue) -> Result<(), Error> {
        let words: &[u64] = bytemuck::cast_slice(std::slice::from_ref(step));
        Ok(queue.upload(words.into(), self.block.as_mut().slice(0..words.len())?)?)
    }
}

/// Returns the address of a row of a table.
pub(super) fn address_of_row(rows: &Rows, row: usize) -> u64 {
    rows.at().0 + (row * size_of::<Row>()) as u64
}

pub(super) fn stream(queue: &Queue) -> Result<&Stream, Error> {
    let wrong = meshstep_tensor::Error::Place { given: queue.place(), expected: Place::Cuda(0) };
    queue.stream().ok_or(wrong.into())
}

/// Returns the waves of blocks in which a launch is fastest; `None`: a block for each tile. Measured with 2^30 parameters on an H100 and an
/// H200, beside one wave: a block for each tile takes 6 % and 3 % off the time of f32 kernels, sixteen waves 5 % and 9 % off that
/// of kernels that draw random bits, and 1 % off that of kernels with remainders.
pub(super) fn waves(flat: &Flat<'_, '_>) -> Option<u32> {
    let is_wide = |dtype| matches!(dtype, DType::F32 | DType::F64);
    let wide = is_wide(flat.params.dtype()) && flat.state.iter().all(|state| is_wide(state.dtype()));
    (!wide).then_some(16)
}

/// Returns the kernel family of all groups.
fn family(groups: &[Group<'_>]) -> Result<&'static str, Error> {
    let mut families =
        groups.iter().filter_map(|group| group.rule.on_device()).map(|Hyper { family, .. }| family);
    let first = families.next().ok_or(Error::NoKernels { rule: "no rule" })?;
    let other = families.find(|&other| other != first);
    other.map_or(Ok(first), |other| Err(Error::MixedKernels { first, other }))
}

/// Writes parameter indices into the rows, if given.
fn number(rows: &mut [Row], params: &[u32]) -> Result<(), Error> {
    if !params.is_empty() && params.len() != rows.len() {
        return Err(Error::Len { what: "params of segments", given: params.len(), expected: rows.len() });
    }
    rows.iter_mut().zip(params).for_each(|(row, &param)| row.param = param);
    Ok(())
}

/// Returns one more than the largest parameter index of any row.
fn counted(rows: &[Row]) -> usize {
    let named = rows.iter().map(|row| row.param).filter(|&param| param != Row::EVERY_STEP);
    named.max().map_or(0, |last| last as usize + 1)
}

/// Checks that no element is updated twice in one launch.
fn check_apart(groups: &[Group<'_>]) -> Result<(), Error> {
    let segments = groups.iter().flat_map(|group| group.segments);
    let mut ranges: Vec<_> = segments.map(|s| s.range.clone()).filter(|range| !range.is_empty()).collect();
    ranges.sort_by_key(|range| range.start);
    let twice = ranges.windows(2).find(|pair| pair[1].start < pair[0].end);
    twice.map_or(Ok(()), |pair| Err(Error::Overlap { one: pair[0].clone(), other: pair[1].clone() }))
}

fn check_places(flat: &Flat<'_, '_>, expected: Place) -> Result<(), Error> {
    let state = flat.state.iter().map(|slot| slot.place());
    let others = flat.copy.iter().chain(&flat.remainder).map(|vector| vector.place());
    let mut all = [flat.params.place(), flat.grads.place()].into_iter().chain(state).chain(others);
    Ok(all.try_for_each(|place| place.check(expected))?)
}

//! This rank's range of one bucket: its parameters and state, and the update over it.

use crate::config::options::Options;
use crate::config::param_groups::{MAX_STATES, RuleGroup};
use crate::error::Error;
use crate::plan::bucket::BucketPlan;
use crate::plan::bytes::VectorSpec;
use crate::plan::overlap::{overlap, overlapping};
use crate::update::gpu::ParamArrival;
use crate::update::segments::{OwnedRange, PieceIndex, UpdateTable, runs, within};
pub(crate) use crate::update::segments::{ParamKey, ParamUpdate};
use crate::update::vector_memory::{VectorMemory, zeroed_to_travel};
use arrayvec::ArrayVec;
use meshstep_comm::Communicator;
use meshstep_optim::{Flat, Isa, Rounding, Rule, Scalars, Sees, Segment, TensorSums, cast};
use meshstep_tensor::{Buffer, Category, DType, Queue, Slice, SliceMut};
use std::collections::HashMap;
use std::ops::Range;

/// Parameters of a bucket, whole, or sharded like the state; and the state of the ranges that this rank owns, laid end to end.
#[derive(Debug)]
pub(crate) struct Owned {
    pub(crate) params: Buffer,
    /// Elements of the bucket.
    pub(super) len: usize,
    pub(super) master: Option<Buffer>,
    pub(super) state: Vec<Buffer>,
    pub(super) runs: Vec<OwnedRange>,
    pub(super) rounding: Rounding,
    pub(super) queue: Queue,
    /// ParamArrival of the parameters of the last step, if the queue has not waited for it.
    pub(super) arrival: ParamArrival,
}

impl Owned {
    /// Takes memory for `ranges` of a bucket, with parameters that travel on `comm`; `of` returns each parameter's group and key.
    pub(crate) fn new<'p>(
        plan: &BucketPlan,
        ranges: &[Range<usize>],
        states: usize,
        of: impl Fn(usize) -> ParamKey<'p>,
        comm: &dyn Communicator,
        (memory, options): (&mut VectorMemory<'_>, &Options),
    ) -> Result<Self, Error> {
        let kept: usize = ranges.iter().map(|r| r.len()).sum();
        let spec = |dtype, category, len| VectorSpec { dtype, category, len };
        let params = match options.stage.cuts_params() {
            true => memory.zeroed(spec(plan.dtype, Category::Params, kept), Vec::new)?,
            false => zeroed_to_travel(comm, spec(plan.dtype, Category::Params, plan.len), options, &[])?,
        };
        let mut owned = Owned {
            len: plan.len,
            params,
            master: None,
            state: Vec::with_capacity(states),
            runs: runs(plan, ranges, of),
            rounding: options.precision.rounding,
            queue: options.queue.clone(),
            arrival: ParamArrival::default(),
        };
        let mut apart =
            |owned: &Owned, dtype, category| memory.zeroed(spec(dtype, category, kept), || owned.streams(0));
        if let Some(master) = plan.master {
            owned.master = Some(apart(&owned, master, Category::Master)?);
        }
        for _ in 0..states {
            owned.state.push(apart(&owned, plan.state, Category::State)?);
        }
        Ok(owned)
    }

    /// Returns the address at which an update starts reading each vector, less `offset` bytes. A vector read from that offset on
    /// is allocated apart from these addresses.
    pub(crate) fn streams(&self, offset: usize) -> Vec<usize> {
        let whole = self.params.len() == self.len;
        let first = if whole { self.first() * self.params.dtype().size() } else { 0 };
        let kept = self.state.iter().chain(&self.master).map(|b| b.as_ptr().addr().get());
        let params = self.params.as_ptr().addr().get() + first;
        kept.chain([params]).map(|address| address.wrapping_sub(offset)).collect()
    }

    /// Returns the parameters, after making the queue wait for them if it has not yet.
    pub(crate) fn params(&self) -> Result<Slice<'_>, Error> {
        self.arrival.wait(&self.queue)?;
        Ok(self.params.as_slice())
    }

    /// Makes the queue wait for the parameters of the last step, which may still be in flight.
    pub(crate) fn wait_for_params(&self) -> Result<(), Error> {
        self.params().map(drop)
    }

    /// Returns every owned range, and the range of its state.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (&Range<usize>, &Range<usize>)> {
        self.runs.iter().map(|run| (&run.range, &run.kept))
    }

    /// Copies the owned ranges of `from` end to end into `to`; `from` is the whole bucket or the owned ranges only.
    pub(crate) fn collect(&self, from: Slice<'_>, mut to: SliceMut<'_>) -> Result<(), Error> {
        for OwnedRange { range, kept, .. } in &self.runs {
            let from = from.slice(within(from.len(), self.len, range, kept))?;
            cast(from, to.reborrow().slice(kept.clone())?, &self.queue)?;
        }
        Ok(())
    }

    /// Overwrites the owned parameters with `values`, laid end to end.
    pub(crate) fn set_params(&mut self, values: Slice<'_>) -> Result<(), Error> {
        for OwnedRange { range, kept, .. } in &self.runs {
            let place = within(self.params.len(), self.len, range, kept);
            cast(values.slice(kept.clone())?, self.params.as_mut().slice(place)?, &self.queue)?;
        }
        Ok(())
    }

    /// Copies the owned parameters to their places in `whole`, the bucket's parameters.
    pub(crate) fn put_into(&self, mut whole: SliceMut<'_>) -> Result<(), Error> {
        for OwnedRange { range, kept, .. } in &self.runs {
            let own = self.params.as_slice().slice(within(self.params.len(), self.len, range, kept))?;
            self.queue.copy(own, whole.reborrow().slice(range.clone())?)?;
        }
        Ok(())
    }

    /// Keeps the owned elements of `values`, a whole parameter at `place` of the bucket.
    pub(crate) fn keep(&mut self, place: &Range<usize>, values: Slice<'_>) -> Result<(), Error> {
        let Some((within, _, here)) = self.part_of(place) else { return Ok(()) };
        Ok(self.queue.copy(values.slice(within)?, self.params.as_mut().slice(here)?)?)
    }

    /// Returns the first owned element.
    pub(crate) fn first(&self) -> usize {
        self.runs.first().map_or(0, |run| run.range.start)
    }

    /// Shifts parameter indices by `first`, the number of parameters in earlier layouts.
    pub(crate) fn shift_params(&mut self, first: usize) {
        let pieces = self.runs.iter_mut().flat_map(|r| &mut r.tables).flat_map(|t| &mut t.pieces);
        pieces.for_each(|piece| piece.param += first);
    }

    /// Fills the masters from the parameters. Remainders start as zeros.
    pub(crate) fn fill_masters(&mut self) -> Result<(), Error> {
        let Some(master) = self.master.as_mut().filter(|m| m.dtype() == DType::F32) else { return Ok(()) };
        for OwnedRange { range, kept, .. } in &self.runs {
            let place = within(self.params.len(), self.len, range, kept);
            let params = self.params.as_slice().slice(place)?;
            cast(params, master.as_mut().slice(kept.clone())?, &self.queue)?;
        }
        Ok(())
    }

    /// Updates every owned parameter that is due. `grads` is the whole bucket, or the owned ranges only.
    pub(crate) fn update(
        &mut self,
        grads: &mut Buffer,
        groups: &[RuleGroup],
        due: impl Fn(usize) -> Option<ParamUpdate>,
        scalars: &Scalars,
    ) -> Result<(), Error> {
        self.each_table(grads, groups, due, scalars, |rule, flat, table, scalars, queue| {
            Ok(rule.update(flat, &table.segments, scalars, queue)?)
        })
    }

    /// Returns the gradients of elements `part` of the only owned range.
    pub(crate) fn grads_of<'g>(
        &self,
        part: &Range<usize>,
        grads: &'g mut Buffer,
    ) -> Result<SliceMut<'g>, Error> {
        let run = self.runs.first().map_or(0..0, |run| within(grads.len(), self.len, &run.range, &run.kept));
        Ok(grads.as_mut().slice(run.start + part.start..run.start + part.end)?)
    }

    /// Updates elements `part` of the only owned range, with their parameters and gradients.
    pub(crate) fn update_part(
        &mut self,
        part: &Range<usize>,
        (mut params, mut grads): (SliceMut<'_>, SliceMut<'_>),
        groups: &[RuleGroup],
        due: impl Fn(usize) -> Option<ParamUpdate>,
        scalars: &Scalars,
    ) -> Result<(), Error> {
        for OwnedRange { kept, tables, .. } in &mut self.runs {
            let kept = kept.start + part.start..kept.start + part.end;
            for table in tables {
                table.fill_part(part, &due);
                if table.segments.is_empty() {
                    continue;
                }
                let mut state = cut(&mut self.state, &kept)?;
                let vectors = (params.reborrow(), grads.reborrow());
                let flat = OwnedRange::flat_of(&kept, vectors, self.master.as_mut(), &mut state)?;
                let RuleGroup { rule, lr_scale, .. } = &groups[table.group];
                let scalars = Scalars { lr: scalars.lr * lr_scale, rounding: self.rounding, ..*scalars };
                rule.update(flat, &table.segments, &scalars, &self.queue)?;
            }
        }
        Ok(())
    }

    /// Returns the place of this rank's elements of each parameter.
    pub(crate) fn piece_indices(&self) -> HashMap<usize, PieceIndex> {
        self.runs.iter().enumerate().flat_map(|(i, run)| run.pieces(i)).collect()
    }

    /// Calls `then` with the vectors and the segments of this rank's elements of a parameter.
    pub(crate) fn on_piece(
        &mut self,
        at: PieceIndex,
        grads: &mut Buffer,
        groups: &[RuleGroup],
        update: ParamUpdate,
        scalars: &Scalars,
        then: impl FnOnce(
            &dyn Rule,
            Flat<'_, '_>,
            &[Segment],
            &Scalars,
            &Queue,
        ) -> Result<(), meshstep_optim::Error>,
    ) -> Result<(), Error> {
        let Some((OwnedRange { range, kept, tables, .. }, table)) = at.of(&mut self.runs) else {
            return Ok(());
        };
        let table = &mut tables[table];
        let piece = table.fill_param(at, update);
        let within = |range: &Range<usize>| range.start + piece.start..range.start + piece.end;
        let (range, kept) = (within(range), within(kept));
        let mut state = cut(&mut self.state, &kept)?;
        let vectors = [&mut self.params, grads];
        let flat = OwnedRange::flat(self.len, &range, &kept, vectors, self.master.as_mut(), &mut state)?;
        let RuleGroup { rule, lr_scale, .. } = &groups[table.group];
        let scalars = Scalars { lr: scalars.lr * lr_scale, rounding: self.rounding, ..*scalars };
        Ok(then(&**rule, flat, &table.segments, &scalars, &self.queue)?)
    }

    /// Returns the elements of the bucket.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns true if this rank owns chunk `rank` of `ranks` in one range, and its rules update each element on its own.
    pub(crate) fn is_chunk(&self, rank: usize, ranks: usize, groups: &[RuleGroup]) -> bool {
        let [OwnedRange { range, tables, .. }] = &self.runs[..] else { return false };
        let chunk = range.len() * ranks == self.len && range.start == rank * range.len();
        chunk && tables.iter().all(|table| groups[table.group].rule.sees() != Sees::Matrix)
    }

    /// Adds the owned elements that are due to their tensors' `sums`, for an update with the same arguments.
    pub(crate) fn measure(
        &mut self,
        grads: &mut Buffer,
        groups: &[RuleGroup],
        due: impl Fn(usize) -> Option<ParamUpdate>,
        scalars: &Scalars,
        sums: &mut [TensorSums],
    ) -> Result<(), Error> {
        let is_due = |param: usize| due(param).is_some();
        self.each_table(grads, groups, &due, scalars, |rule, flat, table, scalars, queue| {
            let params = table.pieces.iter().map(|piece| piece.param).filter(|&p| is_due(p));
            for (segment, param) in table.segments.iter().zip(params) {
                let (segment, sums) = (std::slice::from_ref(segment), std::slice::from_mut(&mut sums[param]));
                rule.measure_on(Isa::detect(), &flat, segment, scalars, sums, queue)?;
            }
            Ok(())
        })
    }

    /// Calls `then` with the memory and the segments of each table.
    fn each_table(
        &mut self,
        grads: &mut Buffer,
        groups: &[RuleGroup],
        due: impl Fn(usize) -> Option<ParamUpdate>,
        scalars: &Scalars,
        mut then: impl FnMut(&dyn Rule, Flat<'_, '_>, &UpdateTable, &Scalars, &Queue) -> Result<(), Error>,
    ) -> Result<(), Error> {
        for OwnedRange { range, kept, tables, .. } in &mut self.runs {
            for table in tables {
                table.fill(&due);
                let mut state = cut(&mut self.state, kept)?;
                let vectors = [&mut self.params, &mut *grads];
                let flat =
                    OwnedRange::flat(self.len, range, kept, vectors, self.master.as_mut(), &mut state)?;
                let RuleGroup { rule, lr_scale, .. } = &groups[table.group];
                let scalars = Scalars { lr: scalars.lr * lr_scale, rounding: self.rounding, ..*scalars };
                then(&**rule, flat, table, &scalars, &self.queue)?;
            }
        }
        Ok(())
    }

    /// Takes back the next part of the parameters, in the order in which they were taken.
    pub(crate) fn put_back(&mut self, part: Buffer) {
        let so_far = self.params.take();
        // After all of `params` was sent, its empty rest lies behind its last element, and the first part replaces it.
        let whole = if so_far.is_empty() { Ok(part) } else { so_far.join(part) };
        self.params = whole.unwrap_or_else(|_| unreachable!("parts land in the order they were cut"));
    }

    /// Returns this rank's range of the parameter at `place`: its elements within the parameter, the range of their state, and
    /// their range in `params`.
    pub(crate) fn part_of(&self, place: &Range<usize>) -> Option<(Range<usize>, Range<usize>, Range<usize>)> {
        let OwnedRange { range, kept, .. } =
            overlapping(&self.runs, place, |run| run.range.clone()).first()?;
        let both = overlap(range, place)?;
        let first = kept.start + both.start - range.start;
        let state = first..first + both.len();
        let here = within(self.params.len(), self.len, &both, &state);
        Some((both.start - place.start..both.end - place.start, state, here))
    }

    /// Returns the vectors that an update starts from: the master (the parameters if there is none), then the state. For owners
    /// of the whole bucket.
    pub(crate) fn vectors_mut(&mut self) -> impl Iterator<Item = SliceMut<'_>> {
        let values = self.master.as_mut().unwrap_or(&mut self.params);
        std::iter::once(values).chain(&mut self.state).map(Buffer::as_mut)
    }

    /// Returns all vectors: parameters, master, state.
    pub(crate) fn vectors_whole(&mut self) -> impl Iterator<Item = &mut Buffer> {
        std::iter::once(&mut self.params).chain(&mut self.master).chain(&mut self.state)
    }

    /// Rounds the masters into the parameters.
    pub(crate) fn follow_master(&mut self) -> Result<(), Error> {
        let Some(master) = &self.master else { return Ok(()) };
        for OwnedRange { range, kept, .. } in &self.runs {
            let master = master.as_slice().slice(kept.clone())?;
            let place = within(self.params.len(), self.len, range, kept);
            cast(master, self.params.as_mut().slice(place)?, &self.queue)?;
        }
        Ok(())
    }

    /// Makes the next update on a GPU read each parameter's `t` again.
    pub(crate) fn recount(&mut self) {
        self.runs.iter_mut().for_each(|run| run.gpu.clear());
    }

    /// Returns the state vectors, in the rule's order.
    pub(crate) fn state(&self) -> &[Buffer] {
        &self.state
    }

    /// Returns the state vectors for writing.
    pub(crate) fn state_mut(&mut self) -> &mut [Buffer] {
        &mut self.state
    }

    /// Returns the masters or remainders for writing.
    pub(crate) fn master_mut(&mut self) -> Option<&mut Buffer> {
        self.master.as_mut()
    }

    /// Returns the masters of the owned ranges, or their remainders.
    pub(crate) fn master(&self) -> Option<&Buffer> {
        self.master.as_ref()
    }
}

/// Returns the range `kept` of each state vector.
pub(super) fn cut<'a>(
    state: &'a mut [Buffer],
    kept: &Range<usize>,
) -> Result<ArrayVec<SliceMut<'a>, MAX_STATES>, meshstep_tensor::Error> {
    state.iter_mut().map(|slot| slot.as_mut().slice(kept.clone())).collect()
}

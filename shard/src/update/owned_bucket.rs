//! What one rank keeps of one bucket, and one pass over it.

use crate::config::param_groups::{Group, MAX_STATES};
use crate::plan::bucket::BucketPlan;
pub(crate) use crate::update::segments::{Due, Of};
use crate::update::segments::{Run, Table, overlap, runs, within};
use crate::{Error, Options};
use arrayvec::ArrayVec;
use meshstep_comm::Communicator;
#[cfg(feature = "cuda")]
use meshstep_optim::cuda::{StepBlock, Tables, Update};
use meshstep_optim::{Flat, Isa, Rounding, Rule, Scalars, TensorSums, cast};
use meshstep_tensor::{Buffer, Category, DType, Place, Queue, Slice, SliceMut};
#[cfg(feature = "cuda")]
use meshstep_tensor::{Meter, cuda::Event};
use std::ops::Range;
#[cfg(feature = "cuda")]
use std::sync::{Mutex, PoisonError};

/// A bucket's parameters, whole or where they are sharded as the state is; and the state of the ranges this rank owns, laid end
/// to end.
#[derive(Debug)]
pub(crate) struct Owned {
    pub(crate) params: Buffer,
    /// The bucket's elements.
    len: usize,
    master: Option<Buffer>,
    state: Vec<Buffer>,
    runs: Vec<Run>,
    rounding: Rounding,
    queue: Queue,
    /// After what the parameters are those of the last step, where the queue has not waited for that.
    #[cfg(feature = "cuda")]
    expected: Mutex<Option<Event>>,
}

impl Owned {
    /// Memory for `ranges` of a bucket, whose parameters travel on `comm`; `of` tells each parameter's group and key.
    pub(crate) fn new(
        plan: &BucketPlan,
        ranges: Vec<Range<usize>>,
        states: usize,
        of: impl Fn(usize) -> Of,
        comm: &dyn Communicator,
        options: &Options,
    ) -> Result<Self, Error> {
        let kept: usize = ranges.iter().map(|r| r.len()).sum();
        let params = match options.stage.cuts_params() {
            true => zeroed(kept, plan.dtype, options, Category::Params, &[])?,
            false => zeroed_to_travel(comm, plan.len, plan.dtype, options, Category::Params, &[])?,
        };
        let mut owned = Owned {
            len: plan.len,
            params,
            master: None,
            state: Vec::new(),
            runs: runs(plan, ranges, of),
            rounding: options.precision.rounding,
            queue: options.queue.clone(),
            #[cfg(feature = "cuda")]
            expected: Mutex::default(),
        };
        let apart =
            |owned: &Owned, dtype, category| zeroed(kept, dtype, options, category, &owned.streams(0));
        if let Some(master) = plan.master {
            owned.master = Some(apart(&owned, master, Category::Master)?);
        }
        for _ in 0..states {
            owned.state.push(apart(&owned, plan.state, Category::State)?);
        }
        Ok(owned)
    }

    /// Where an update begins to read each vector, less `offset` bytes: what another vector, read from that offset on, keeps
    /// apart from.
    pub(crate) fn streams(&self, offset: usize) -> Vec<usize> {
        let whole = self.params.len() == self.len;
        let first = if whole { self.first() * self.params.dtype().size() } else { 0 };
        let kept = self.state.iter().chain(&self.master).map(|b| b.as_ptr().addr().get());
        let params = self.params.as_ptr().addr().get() + first;
        kept.chain([params]).map(|address| address.wrapping_sub(offset)).collect()
    }

    /// The parameters are there after `event`.
    #[cfg(feature = "cuda")]
    pub(crate) fn expect(&mut self, event: Event) {
        *self.expected.get_mut().unwrap_or_else(PoisonError::into_inner) = Some(event);
    }

    /// The parameters, which the queue waits for if it has not yet.
    pub(crate) fn params(&self) -> Result<Slice<'_>, Error> {
        #[cfg(feature = "cuda")]
        self.await_params()?;
        Ok(self.params.as_slice())
    }

    #[cfg(feature = "cuda")]
    fn await_params(&self) -> Result<(), Error> {
        let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(event), Some(stream)) = (&*expected, self.queue.stream()) {
            stream.wait(event).map_err(meshstep_tensor::Error::from)?;
        }
        *expected = None;
        Ok(())
    }

    /// The queue waits for the parameters of the last step, where they may still travel.
    pub(crate) fn wait_for_params(&self) -> Result<(), Error> {
        self.params().map(drop)
    }

    /// Every owned range, and where its state lies.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (&Range<usize>, &Range<usize>)> {
        self.runs.iter().map(|run| (&run.range, &run.kept))
    }

    /// What is owned of `from`, the whole bucket or just that, end to end into `to`.
    pub(crate) fn collect(&self, from: Slice<'_>, mut to: SliceMut<'_>) -> Result<(), Error> {
        for Run { range, kept, .. } in &self.runs {
            let from = from.slice(within(from.len(), self.len, range, kept))?;
            cast(from, to.reborrow().slice(kept.clone())?, &self.queue)?;
        }
        Ok(())
    }

    /// Overwrites the parameters that are owned with `values`, laid end to end.
    pub(crate) fn set_params(&mut self, values: Slice<'_>) -> Result<(), Error> {
        for Run { range, kept, .. } in &self.runs {
            let place = within(self.params.len(), self.len, range, kept);
            cast(values.slice(kept.clone())?, self.params.as_mut().slice(place)?, &self.queue)?;
        }
        Ok(())
    }

    /// Copies what is owned to its place in `whole`, the bucket's parameters.
    pub(crate) fn put_into(&self, mut whole: SliceMut<'_>) -> Result<(), Error> {
        for Run { range, kept, .. } in &self.runs {
            let own = self.params.as_slice().slice(within(self.params.len(), self.len, range, kept))?;
            self.queue.copy(own, whole.reborrow().slice(range.clone())?)?;
        }
        Ok(())
    }

    /// Keeps what is owned of `values`, a whole parameter at `place` of the bucket.
    pub(crate) fn keep(&mut self, place: &Range<usize>, values: Slice<'_>) -> Result<(), Error> {
        let Some((within, _, here)) = self.part_of(place) else { return Ok(()) };
        Ok(self.queue.copy(values.slice(within)?, self.params.as_mut().slice(here)?)?)
    }

    /// The first element owned.
    pub(crate) fn first(&self) -> usize {
        self.runs.first().map_or(0, |run| run.range.start)
    }

    /// Counts parameters from `first`, the ones of earlier layouts before them.
    pub(crate) fn shift_params(&mut self, first: usize) {
        let pieces = self.runs.iter_mut().flat_map(|r| &mut r.tables).flat_map(|t| &mut t.pieces);
        pieces.for_each(|piece| piece.param += first);
    }

    /// Fills the masters from the parameters. Remainders begin as zeros.
    pub(crate) fn fill_masters(&mut self) -> Result<(), Error> {
        let Some(master) = self.master.as_mut().filter(|m| m.dtype() == DType::F32) else { return Ok(()) };
        for Run { range, kept, .. } in &self.runs {
            let place = within(self.params.len(), self.len, range, kept);
            let params = self.params.as_slice().slice(place)?;
            cast(params, master.as_mut().slice(kept.clone())?, &self.queue)?;
        }
        Ok(())
    }

    /// One update of everything owned here that is due. `grads` is the whole bucket, or just what is owned.
    pub(crate) fn update(
        &mut self,
        grads: &mut Buffer,
        groups: &[Group],
        due: impl Fn(usize) -> Option<Due>,
        scalars: &Scalars,
    ) -> Result<(), Error> {
        self.each_table(grads, groups, due, scalars, |rule, flat, table, scalars| {
            Ok(rule.update(flat, &table.segments, scalars, &Queue::cpu())?)
        })
    }

    /// Adds what is owned here and due to its tensors' `sums`, as an update with the same arguments will need them.
    pub(crate) fn measure(
        &mut self,
        grads: &mut Buffer,
        groups: &[Group],
        due: impl Fn(usize) -> Option<Due>,
        scalars: &Scalars,
        sums: &mut [TensorSums],
    ) -> Result<(), Error> {
        let is_due = |param: usize| due(param).is_some();
        self.each_table(grads, groups, &due, scalars, |rule, flat, table, scalars| {
            let params = table.pieces.iter().map(|piece| piece.param).filter(|&p| is_due(p));
            for (segment, param) in table.segments.iter().zip(params) {
                let (segment, sums) = (std::slice::from_ref(segment), std::slice::from_mut(&mut sums[param]));
                rule.measure_on(Isa::detect(), &flat, segment, scalars, sums)?;
            }
            Ok(())
        })
    }

    /// Calls `then` with the memory and the segments of each table.
    fn each_table(
        &mut self,
        grads: &mut Buffer,
        groups: &[Group],
        due: impl Fn(usize) -> Option<Due>,
        scalars: &Scalars,
        mut then: impl FnMut(&dyn Rule, Flat<'_, '_>, &Table, &Scalars) -> Result<(), Error>,
    ) -> Result<(), Error> {
        for Run { range, kept, tables, .. } in &mut self.runs {
            for table in tables {
                table.fill(&due);
                let mut state = cut(&mut self.state, kept)?;
                let vectors = [&mut self.params, &mut *grads];
                let flat = Run::flat(self.len, range, kept, vectors, self.master.as_mut(), &mut state)?;
                let Group { rule, lr_scale, .. } = &groups[table.group];
                let scalars = Scalars { lr: scalars.lr * lr_scale, rounding: self.rounding, ..*scalars };
                then(&**rule, flat, table, &scalars)?;
            }
        }
        Ok(())
    }

    /// One update on a GPU of everything owned here, as `step` says there, of each parameter if it counts them; `next` is the `t` of
    /// a parameter's next update. Rows in `prepared` are prepared for the step.
    #[cfg(feature = "cuda")]
    pub(crate) fn update_there(
        &mut self,
        grads: &mut Buffer,
        groups: &[Group],
        next: impl Fn(usize) -> u64,
        (step, prepared): (&StepBlock, Option<&Tables>),
        meter: &Meter,
    ) -> Result<(), Error> {
        // The parameters are there: the communicator has gathered them before it reduced these gradients.
        let queue = &self.queue;
        for Run { range, kept, tables, there } in &mut self.runs {
            let mut state = cut(&mut self.state, kept)?;
            let vectors = [&mut self.params, &mut *grads];
            let flat = Run::flat(self.len, range, kept, vectors, self.master.as_mut(), &mut state)?;
            if there.is_none() && !tables.is_empty() {
                let due = |param: usize| Some(Due { t: next(param), ratio: 1.0, matrix: None });
                tables.iter_mut().for_each(|table| table.fill(due));
                let counts = |table: &Table| if step.counted() > 0 { table.params() } else { Vec::new() };
                let params: Vec<_> = tables.iter().map(counts).collect();
                let groups: Vec<_> =
                    tables.iter().zip(&params).map(|(table, params)| table.there(groups, params)).collect();
                *there = Some(Update::new(&flat, &groups, self.rounding, queue, meter)?);
            }
            match there {
                Some(update) if prepared.is_some_and(|tables| tables.has(update)) => {
                    update.sweep(flat, step, queue)?;
                }
                Some(update) => update.run(flat, step, queue)?,
                None => {}
            }
        }
        Ok(())
    }

    /// The tables on a GPU, as far as there are any.
    #[cfg(feature = "cuda")]
    pub(crate) fn updates(&mut self) -> impl Iterator<Item = &mut Update> {
        self.runs.iter_mut().filter_map(|run| run.there.as_mut())
    }

    /// Takes back the next part of the parameters, in the order they were taken.
    pub(crate) fn put_back(&mut self, part: Buffer) {
        let so_far = self.params.take();
        // What is left of `params` once all of it was sent lies behind its last element; the first part comes first.
        let whole = if so_far.is_empty() { Ok(part) } else { so_far.join(part) };
        self.params = whole.unwrap_or_else(|_| unreachable!("parts land in the order they were cut"));
    }

    /// What this rank owns of the parameter at `place`: its elements within the parameter, where their state is kept, and where
    /// they are themselves.
    pub(crate) fn part_of(&self, place: &Range<usize>) -> Option<(Range<usize>, Range<usize>, Range<usize>)> {
        self.runs.iter().find_map(|Run { range, kept, .. }| {
            let both = overlap(range, place)?;
            let first = kept.start + both.start - range.start;
            let state = first..first + both.len();
            let here = within(self.params.len(), self.len, &both, &state);
            Some((both.start - place.start..both.end - place.start, state, here))
        })
    }

    /// What an update starts from: the master, or the parameters where they have none, then the state. For owners of the
    /// whole bucket.
    pub(crate) fn vectors_mut(&mut self) -> impl Iterator<Item = SliceMut<'_>> {
        let values = self.master.as_mut().unwrap_or(&mut self.params);
        std::iter::once(values).chain(&mut self.state).map(Buffer::as_mut)
    }

    /// Everything: parameters, master, state.
    pub(crate) fn vectors_whole(&mut self) -> impl Iterator<Item = &mut Buffer> {
        std::iter::once(&mut self.params).chain(&mut self.master).chain(&mut self.state)
    }

    /// Rounds the masters into the parameters.
    pub(crate) fn follow_master(&mut self) -> Result<(), Error> {
        let Some(master) = &self.master else { return Ok(()) };
        for Run { range, kept, .. } in &self.runs {
            let master = master.as_slice().slice(kept.clone())?;
            let place = within(self.params.len(), self.len, range, kept);
            cast(master, self.params.as_mut().slice(place)?, &self.queue)?;
        }
        Ok(())
    }

    /// The next update on a GPU asks again for each parameter's `t`.
    #[cfg(feature = "cuda")]
    pub(crate) fn recount(&mut self) {
        self.runs.iter_mut().for_each(|run| run.there = None);
    }

    /// The state vectors, in the rule's order.
    pub(crate) fn state(&self) -> &[Buffer] {
        &self.state
    }

    /// The state vectors, to be written.
    pub(crate) fn state_mut(&mut self) -> &mut [Buffer] {
        &mut self.state
    }

    /// The masters or remainders, to be written.
    pub(crate) fn master_mut(&mut self) -> Option<&mut Buffer> {
        self.master.as_mut()
    }

    /// The masters of what is owned, or their remainders.
    pub(crate) fn master(&self) -> Option<&Buffer> {
        self.master.as_ref()
    }
}

/// What is kept of each state vector.
fn cut<'a>(
    state: &'a mut [Buffer],
    kept: &Range<usize>,
) -> Result<ArrayVec<SliceMut<'a>, MAX_STATES>, meshstep_tensor::Error> {
    state.iter_mut().map(|slot| slot.as_mut().slice(kept.clone())).collect()
}

/// Zeros where the options' queue works. On the CPU `apart` from addresses that are read together with them.
pub(crate) fn zeroed(
    len: usize,
    dtype: DType,
    options: &Options,
    category: Category,
    apart: &[usize],
) -> Result<Buffer, meshstep_tensor::Error> {
    match options.queue.place() {
        Place::Cpu => Buffer::zeroed_apart(len, dtype, &options.meter, category, apart),
        _ => Buffer::zeroed_on(&options.queue, len, dtype, &options.meter, category),
    }
}

/// The same for a vector that travels on `comm`, which may have memory of its own for that.
pub(crate) fn zeroed_to_travel(
    comm: &dyn Communicator,
    len: usize,
    dtype: DType,
    options: &Options,
    category: Category,
    apart: &[usize],
) -> Result<Buffer, meshstep_tensor::Error> {
    match options.queue.place() {
        Place::Cpu => zeroed(len, dtype, options, category, apart),
        _ => comm.zeroed_on(&options.queue, len, dtype, &options.meter, category),
    }
}

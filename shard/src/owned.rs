//! What one rank keeps of one bucket, and one pass over it.

use crate::bucket_plan::BucketPlan;
use crate::groups::{Group, MAX_STATES};
use crate::{Error, Options};
use arrayvec::ArrayVec;
use meshstep_optim::{Flat, Isa, Rule, Scalars, Segment, TensorSums};
use meshstep_tensor::{Buffer, Category, Queue, Slice, SliceMut};
use std::ops::Range;

/// A bucket's parameters, whole, and the state of the ranges this rank owns, laid end to end.
#[derive(Debug)]
pub(crate) struct Owned {
    pub(crate) params: Buffer,
    master: Option<Buffer>,
    state: Vec<Buffer>,
    runs: Vec<Run>,
}

/// How a parameter is updated in this step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Due {
    pub(crate) t: u64,
    /// Its own factor on the learning rate.
    pub(crate) ratio: f64,
    /// Its rows and columns, for rules that see whole matrices.
    pub(crate) matrix: Option<(usize, usize)>,
}

/// One owned range of the bucket.
#[derive(Debug)]
struct Run {
    range: Range<usize>,
    /// Where its state and master lie.
    kept: Range<usize>,
    tables: Vec<Table>,
}

/// The parameters of one group within one run.
#[derive(Debug)]
struct Table {
    group: usize,
    /// Parameter, and its elements counted from the range's start.
    pieces: Vec<(usize, Range<usize>)>,
    /// Room for this step's segments.
    segments: Vec<Segment>,
}

impl Owned {
    /// Memory for `ranges` of a bucket; `group` tells each parameter's group.
    pub(crate) fn new(
        plan: &BucketPlan,
        ranges: Vec<Range<usize>>,
        states: usize,
        group: impl Fn(usize) -> usize,
        options: &Options,
    ) -> Result<Self, Error> {
        let meter = &options.meter;
        let kept: usize = ranges.iter().map(|r| r.len()).sum();
        let mut owned = Owned {
            params: Buffer::zeroed(plan.len, plan.dtype, meter, Category::Params)?,
            master: None,
            state: Vec::new(),
            runs: runs(plan, ranges, group),
        };
        let apart = |owned: &Owned, category| {
            Buffer::zeroed_apart(kept, plan.update, meter, category, &owned.streams(0))
        };
        if plan.has_master() {
            owned.master = Some(apart(&owned, Category::Master)?);
        }
        for _ in 0..states {
            owned.state.push(apart(&owned, Category::State)?);
        }
        Ok(owned)
    }

    /// Where an update begins to read each vector, less `offset` bytes: what another vector, read from that offset on, keeps
    /// apart from.
    pub(crate) fn streams(&self, offset: usize) -> Vec<usize> {
        let first = self.first() * self.params.dtype().size();
        let kept = self.state.iter().chain(&self.master).map(|b| b.as_ptr().addr().get());
        let params = self.params.as_ptr().addr().get() + first;
        kept.chain([params]).map(|address| address.wrapping_sub(offset)).collect()
    }

    /// Every owned range, and where its state lies.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (&Range<usize>, &Range<usize>)> {
        self.runs.iter().map(|run| (&run.range, &run.kept))
    }

    /// What is owned of `from`, the whole bucket or just that, end to end into `to`.
    pub(crate) fn collect(&self, from: Slice<'_>, mut to: SliceMut<'_>) -> Result<(), Error> {
        let whole = from.len() == self.params.len();
        for Run { range, kept, .. } in &self.runs {
            let from = from.slice(if whole { range.clone() } else { kept.clone() })?;
            to.reborrow().slice(kept.clone())?.cast_from(from)?;
        }
        Ok(())
    }

    /// Overwrites the parameters that are owned with `values`, laid end to end.
    pub(crate) fn set_params(&mut self, values: Slice<'_>) -> Result<(), Error> {
        for Run { range, kept, .. } in &self.runs {
            self.params.as_mut().slice(range.clone())?.cast_from(values.slice(kept.clone())?)?;
        }
        Ok(())
    }

    /// The first element owned.
    pub(crate) fn first(&self) -> usize {
        self.runs.first().map_or(0, |run| run.range.start)
    }

    /// Counts parameters from `first`, the ones of earlier layouts before them.
    pub(crate) fn shift_params(&mut self, first: usize) {
        let pieces = self.runs.iter_mut().flat_map(|r| &mut r.tables).flat_map(|t| &mut t.pieces);
        pieces.for_each(|(param, _)| *param += first);
    }

    /// Fills the masters from the parameters.
    pub(crate) fn fill_masters(&mut self) -> Result<(), Error> {
        let Some(master) = &mut self.master else { return Ok(()) };
        for Run { range, kept, .. } in &self.runs {
            let params = self.params.as_slice().slice(range.clone())?;
            master.as_mut().slice(kept.clone())?.cast_from(params)?;
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
        queue: &Queue,
    ) -> Result<(), Error> {
        self.each_table(grads, groups, due, scalars, |rule, flat, table, scalars| {
            Ok(rule.update(flat, &table.segments, scalars, queue)?)
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
            let params = table.pieces.iter().map(|(param, _)| *param).filter(|&p| is_due(p));
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
        let whole = grads.len() == self.params.len();
        for Run { range, kept, tables } in &mut self.runs {
            for table in tables {
                table.fill(&due);
                let params = self.params.as_mut().slice(range.clone())?;
                let (params, copy) = match &mut self.master {
                    Some(master) => (master.as_mut().slice(kept.clone())?, Some(params)),
                    None => (params, None),
                };
                let mut state = ArrayVec::<SliceMut<'_>, MAX_STATES>::new();
                for slot in &mut self.state {
                    state.push(slot.as_mut().slice(kept.clone())?);
                }
                let grads = grads.as_mut().slice(if whole { range.clone() } else { kept.clone() })?;
                let Group { rule, lr_scale, .. } = &groups[table.group];
                let scalars = Scalars { lr: scalars.lr * lr_scale, ..*scalars };
                then(&**rule, Flat { params, grads, state: &mut state, copy }, table, &scalars)?;
            }
        }
        Ok(())
    }

    /// Takes back the next part of the parameters, in the order they were taken.
    pub(crate) fn put_back(&mut self, part: Buffer) {
        let so_far = self.params.take();
        // What is left of `params` once all of it was sent lies behind its last element; the first part comes first.
        let whole = if so_far.is_empty() { Ok(part) } else { so_far.join(part) };
        self.params = whole.unwrap_or_else(|_| unreachable!("parts land in the order they were cut"));
    }

    /// This rank's state of the parameter at `place`: its elements within the parameter, and where they are kept.
    pub(crate) fn state_of(&self, place: &Range<usize>) -> Option<(Range<usize>, Range<usize>)> {
        self.runs.iter().find_map(|Run { range, kept, .. }| {
            let both = overlap(range, place)?;
            let first = kept.start + both.start - range.start;
            Some((both.start - place.start..both.end - place.start, first..first + both.len()))
        })
    }

    /// What an update starts from: the master, or the parameters where they have none, then the state. For owners of the
    /// whole bucket.
    pub(crate) fn vectors_mut(&mut self) -> impl Iterator<Item = SliceMut<'_>> {
        let values = self.master.as_mut().unwrap_or(&mut self.params);
        std::iter::once(values).chain(&mut self.state).map(Buffer::as_mut)
    }

    /// Rounds the masters into the parameters.
    pub(crate) fn follow_master(&mut self) -> Result<(), Error> {
        let Some(master) = &self.master else { return Ok(()) };
        for Run { range, kept, .. } in &self.runs {
            let master = master.as_slice().slice(kept.clone())?;
            self.params.as_mut().slice(range.clone())?.cast_from(master)?;
        }
        Ok(())
    }

    /// The state vectors, in the rule's order.
    pub(crate) fn state(&self) -> &[Buffer] {
        &self.state
    }

    /// The masters of what is owned.
    pub(crate) fn master(&self) -> Option<&Buffer> {
        self.master.as_ref()
    }
}

impl Table {
    /// This step's segments: the pieces whose parameter is due.
    fn fill(&mut self, due: impl Fn(usize) -> Option<Due>) {
        let due = |(param, range): &(usize, Range<usize>)| {
            let Due { t, ratio, matrix } = due(*param)?;
            Some(Segment { ratio, matrix, ..Segment::new(range.clone(), t) })
        };
        self.segments.clear();
        self.segments.extend(self.pieces.iter().filter_map(due));
    }
}

fn runs(plan: &BucketPlan, ranges: Vec<Range<usize>>, group: impl Fn(usize) -> usize) -> Vec<Run> {
    let mut next = 0;
    let run = |range: Range<usize>| {
        let kept = next..next + range.len();
        next = kept.end;
        Run { tables: tables(plan, &range, &group), range, kept }
    };
    ranges.into_iter().map(run).collect()
}

fn tables(plan: &BucketPlan, range: &Range<usize>, group: impl Fn(usize) -> usize) -> Vec<Table> {
    let mut tables: Vec<Table> = Vec::new();
    for param in &plan.params {
        let Some(both) = overlap(range, &param.range()) else { continue };
        let piece = (param.param, both.start - range.start..both.end - range.start);
        let group = group(param.param);
        match tables.iter_mut().find(|t| t.group == group) {
            Some(table) => table.pieces.push(piece),
            None => tables.push(Table { group, pieces: vec![piece], segments: Vec::new() }),
        }
    }
    tables.iter_mut().for_each(|table| table.segments.reserve(table.pieces.len()));
    tables
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> Option<Range<usize>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (!both.is_empty()).then_some(both)
}

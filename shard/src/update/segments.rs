//! What of a bucket is owned, cut by parameter group: the tables that updates go by.

use crate::Parts;
#[cfg(feature = "cuda")]
use crate::config::param_groups::Group;
use crate::config::param_groups::MAX_STATES;
use crate::plan::bucket::BucketPlan;
use arrayvec::ArrayVec;
use meshstep_optim::{Flat, Segment, Strided};
use meshstep_tensor::{Buffer, DType, Error, SliceMut};
use std::ops::Range;

/// What of a parameter stays from step to step.
#[derive(Clone, Debug)]
pub(crate) struct Of {
    pub(crate) group: usize,
    /// For its random numbers.
    pub(crate) key: u64,
    /// Which elements of the whole tensor it has, one part after another.
    pub(crate) parts: Parts,
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
pub(crate) struct Run {
    pub(crate) range: Range<usize>,
    /// Where its state and master lie.
    pub(crate) kept: Range<usize>,
    pub(crate) tables: Vec<Table>,
    /// The tables on a GPU, once there was an update.
    #[cfg(feature = "cuda")]
    pub(crate) there: Option<meshstep_optim::cuda::Update>,
}

/// The parameters of one group within one run.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) group: usize,
    pub(crate) pieces: Vec<Piece>,
    /// Room for this step's segments.
    pub(crate) segments: Vec<Segment>,
}

/// Consecutive elements of one parameter.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) param: usize,
    /// Counted from the run's start.
    pub(crate) range: Range<usize>,
    /// The place of the first one among those that `strided` has.
    pub(crate) first: u64,
    pub(crate) strided: Strided,
    pub(crate) key: u64,
}

/// Where `range` lies in a vector of `len` elements: the whole bucket's, or just what is owned, of which it is `kept`.
pub(crate) fn within(
    len: usize,
    bucket_len: usize,
    range: &Range<usize>,
    kept: &Range<usize>,
) -> Range<usize> {
    if len == bucket_len { range.clone() } else { kept.clone() }
}

impl Run {
    /// This run of the vectors of a bucket of `len` elements; params and grads are the whole bucket's or just what is owned.
    pub(crate) fn flat<'a, 's>(
        len: usize,
        range: &Range<usize>,
        kept: &Range<usize>,
        [params, grads]: [&'a mut Buffer; 2],
        master: Option<&'a mut Buffer>,
        state: &'s mut ArrayVec<SliceMut<'a>, MAX_STATES>,
    ) -> Result<Flat<'a, 's>, Error> {
        let place = |vector: &Buffer| within(vector.len(), len, range, kept);
        let (grads_place, params_place) = (place(grads), place(params));
        let grads = grads.as_mut().slice(grads_place)?;
        let params = params.as_mut().slice(params_place)?;
        let master = master.map(|m| m.as_mut().slice(kept.clone())).transpose()?;
        let (params, copy, remainder) = match master {
            Some(master) if master.dtype() == DType::U16 => (params, None, Some(master)),
            Some(master) => (master, Some(params), None),
            None => (params, None, None),
        };
        Ok(Flat { params, grads, state, copy, remainder })
    }
}

impl Table {
    /// This step's segments with their group, as a GPU is told; `params` are their parameters, where that matters.
    #[cfg(feature = "cuda")]
    pub(crate) fn there<'a>(
        &'a self,
        groups: &'a [Group],
        params: &'a [u32],
    ) -> meshstep_optim::cuda::Group<'a> {
        let Group { rule, lr_scale, .. } = &groups[self.group];
        meshstep_optim::cuda::Group { rule: &**rule, lr_scale: *lr_scale, segments: &self.segments, params }
    }

    /// The parameter of each piece.
    #[cfg(feature = "cuda")]
    pub(crate) fn params(&self) -> Vec<u32> {
        self.pieces.iter().map(|piece| piece.param as u32).collect()
    }

    /// This step's segments: the pieces whose parameter is due.
    pub(crate) fn fill(&mut self, due: impl Fn(usize) -> Option<Due>) {
        let due = |&Piece { param, ref range, first, strided, key }: &Piece| {
            let Due { t, ratio, matrix } = due(param)?;
            Some(Segment { range: range.clone(), t, key, first, strided, ratio, matrix })
        };
        self.segments.clear();
        self.segments.extend(self.pieces.iter().filter_map(due));
    }
}

/// The owned `ranges` of a bucket; `of` tells each parameter's group and key.
pub(crate) fn runs(plan: &BucketPlan, ranges: Vec<Range<usize>>, of: impl Fn(usize) -> Of) -> Vec<Run> {
    let mut next = 0;
    let run = |range: Range<usize>| {
        let kept = next..next + range.len();
        next = kept.end;
        Run {
            tables: tables(plan, &range, &of),
            range,
            kept,
            #[cfg(feature = "cuda")]
            there: None,
        }
    };
    ranges.into_iter().map(run).collect()
}

fn tables(plan: &BucketPlan, range: &Range<usize>, of: impl Fn(usize) -> Of) -> Vec<Table> {
    let mut tables: Vec<Table> = Vec::new();
    for param in &plan.params {
        if overlap(range, &param.range()).is_none() {
            continue;
        }
        let Of { group, key, parts } = of(param.param);
        let piece = |(part, strided): (Range<usize>, Strided)| {
            let both = overlap(range, &(param.start + part.start..param.start + part.end))?;
            let first = (both.start - param.start - part.start) as u64;
            let range = both.start - range.start..both.end - range.start;
            Some(Piece { param: param.param, range, first, strided, key })
        };
        let pieces = parts.into_iter().filter_map(piece);
        match tables.iter_mut().find(|t| t.group == group) {
            Some(table) => table.pieces.extend(pieces),
            None => tables.push(Table { group, pieces: pieces.collect(), segments: Vec::new() }),
        }
    }
    tables.iter_mut().for_each(|table| table.segments.reserve(table.pieces.len()));
    tables
}

/// What two ranges have in common.
pub(crate) fn overlap(a: &Range<usize>, b: &Range<usize>) -> Option<Range<usize>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (!both.is_empty()).then_some(both)
}

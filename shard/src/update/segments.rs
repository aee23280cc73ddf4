//! Owned ranges of a bucket, cut by parameter group: the tables that updates use.

use crate::config::param_groups::MAX_STATES;
use crate::plan::bucket::{BucketPlan, Placed};
use crate::plan::overlap::{overlap, overlapping};
use crate::ranks::roles::Parts;
use crate::update::gpu::GpuTable;
use arrayvec::ArrayVec;
use meshstep_optim::{Flat, Segment, Strided};
use meshstep_tensor::{Buffer, DType, Error, SliceMut};
use std::collections::HashMap;
use std::ops::Range;

/// Facts about a parameter that stay from step to step.
#[derive(Clone, Debug)]
pub(crate) struct ParamKey<'p> {
    pub(crate) group: usize,
    /// Key of its random numbers.
    pub(crate) key: u64,
    /// Elements of the whole tensor that the parameter has, one part after another; all of them if `None`.
    pub(crate) parts: Option<&'p Parts>,
}

/// Update of a parameter in this step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ParamUpdate {
    pub(crate) t: u64,
    /// Factor on its learning rate.
    pub(crate) ratio: f64,
    /// Rows and columns, for rules that see whole matrices.
    pub(crate) matrix: Option<(usize, usize)>,
}

/// One owned range of the bucket.
#[derive(Debug)]
pub(crate) struct OwnedRange {
    pub(crate) range: Range<usize>,
    /// Range of its state and master.
    pub(crate) kept: Range<usize>,
    pub(crate) tables: Vec<UpdateTable>,
    /// Tables on a GPU, once there was an update.
    pub(crate) gpu: GpuTable,
}

/// Parameters of one group within one run.
#[derive(Debug)]
pub(crate) struct UpdateTable {
    pub(crate) group: usize,
    pub(crate) pieces: Vec<SegmentPiece>,
    /// Space for this step's segments.
    pub(crate) segments: Vec<Segment>,
}

/// Consecutive elements of one parameter.
#[derive(Debug)]
pub(crate) struct SegmentPiece {
    pub(crate) param: usize,
    /// Elements relative to the run's start.
    pub(crate) range: Range<usize>,
    /// Index of the first element among the elements of `strided`.
    pub(crate) first: u64,
    pub(crate) strided: Strided,
    pub(crate) key: u64,
}

/// Index of a parameter's first piece in the tables of the owned ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PieceIndex {
    run: usize,
    table: usize,
    piece: usize,
}

/// Returns the place of `range` in a vector of `len` elements: `range` in a whole bucket, `kept` in a vector of owned ranges.
pub(crate) fn within(
    len: usize,
    bucket_len: usize,
    range: &Range<usize>,
    kept: &Range<usize>,
) -> Range<usize> {
    if len == bucket_len { range.clone() } else { kept.clone() }
}

impl OwnedRange {
    /// Returns this run of the vectors of a bucket of `len` elements; params and grads are the whole bucket's or the owned ranges
    /// only.
    pub(crate) fn flat<'a, 's>(
        len: usize,
        range: &Range<usize>,
        kept: &Range<usize>,
        [params, grads]: [&'a mut Buffer; 2],
        master: Option<&'a mut Buffer>,
        state: &'s mut ArrayVec<SliceMut<'a>, MAX_STATES>,
    ) -> Result<Flat<'a, 's>, Error> {
        let place = within(params.len(), len, range, kept);
        let params = params.as_mut().slice(place)?;
        let place = within(grads.len(), len, range, kept);
        let grads = grads.as_mut().slice(place)?;
        Self::flat_of(kept, (params, grads), master, state)
    }

    /// Returns the vectors of a run, or of a part of one, with these parameters and gradients.
    pub(crate) fn flat_of<'a, 's>(
        kept: &Range<usize>,
        (params, grads): (SliceMut<'a>, SliceMut<'a>),
        master: Option<&'a mut Buffer>,
        state: &'s mut ArrayVec<SliceMut<'a>, MAX_STATES>,
    ) -> Result<Flat<'a, 's>, Error> {
        let master = master.map(|m| m.as_mut().slice(kept.clone())).transpose()?;
        let (params, copy, remainder) = match master {
            Some(master) if master.dtype() == DType::U16 => (params, None, Some(master)),
            Some(master) => (master, Some(params), None),
            None => (params, None, None),
        };
        Ok(Flat { params, grads, state, copy, remainder })
    }
}

impl OwnedRange {
    /// Returns each parameter of the range, the `run`th, with the index of its first piece.
    pub(crate) fn pieces(&self, run: usize) -> impl Iterator<Item = (usize, PieceIndex)> {
        let of = move |(table, one): (usize, &UpdateTable)| {
            let pieces = one.pieces.iter().enumerate().rev();
            pieces.map(move |(piece, at)| (at.param, PieceIndex { run, table, piece })).collect::<Vec<_>>()
        };
        self.tables.iter().enumerate().flat_map(of)
    }
}

impl PieceIndex {
    /// Returns the owned range and the table of the piece.
    pub(crate) fn of(self, runs: &mut [OwnedRange]) -> Option<(&mut OwnedRange, usize)> {
        runs.get_mut(self.run).map(|run| (run, self.table))
    }
}

impl UpdateTable {
    /// Collects the segments of a parameter's pieces from one on, for vectors that have them alone; returns their elements.
    pub(crate) fn fill_param(
        &mut self,
        at: PieceIndex,
        ParamUpdate { t, ratio, matrix }: ParamUpdate,
    ) -> Range<usize> {
        let UpdateTable { pieces, segments, .. } = self;
        let (param, start) = (pieces[at.piece].param, pieces[at.piece].range.start);
        let own = pieces[at.piece..].iter().take_while(|piece| piece.param == param);
        segments.clear();
        segments.extend(own.map(|&SegmentPiece { ref range, first, strided, key, .. }| {
            let range = range.start - start..range.end - start;
            Segment { range, t, key, first, strided, ratio, matrix }
        }));
        start..start + segments.last().map_or(0, |segment| segment.range.end)
    }

    /// Collects this step's segments: the pieces of parameters that are due.
    pub(crate) fn fill(&mut self, due: impl Fn(usize) -> Option<ParamUpdate>) {
        self.fill_part(&(0..usize::MAX), due);
    }

    /// Collects this step's segments within `part` of the run, relative to its start.
    pub(crate) fn fill_part(&mut self, part: &Range<usize>, due: impl Fn(usize) -> Option<ParamUpdate>) {
        let due = |&SegmentPiece { param, ref range, first, strided, key }: &SegmentPiece| {
            let ParamUpdate { t, ratio, matrix } = due(param)?;
            let both = overlap(range, part)?;
            let first = first + (both.start - range.start) as u64;
            let range = both.start - part.start..both.end - part.start;
            Some(Segment { range, t, key, first, strided, ratio, matrix })
        };
        let pieces = overlapping(&self.pieces, part, |piece| piece.range.clone());
        self.segments.clear();
        self.segments.extend(pieces.iter().filter_map(due));
    }
}

/// Cuts the owned `ranges` of a bucket into runs; `of` returns each parameter's group and key.
pub(crate) fn runs<'p>(
    plan: &BucketPlan,
    ranges: &[Range<usize>],
    of: impl Fn(usize) -> ParamKey<'p>,
) -> Vec<OwnedRange> {
    let mut next = 0;
    let run = |range: &Range<usize>| {
        let kept = next..next + range.len();
        next = kept.end;
        OwnedRange { tables: tables(plan, range, &of), range: range.clone(), kept, gpu: GpuTable::default() }
    };
    ranges.iter().map(run).collect()
}

fn tables<'p>(
    plan: &BucketPlan,
    range: &Range<usize>,
    of: impl Fn(usize) -> ParamKey<'p>,
) -> Vec<UpdateTable> {
    let (mut tables, mut of_group) = (Vec::with_capacity(1), HashMap::new());
    for param in overlapping(&plan.params, range, Placed::range).iter().filter(|param| param.len > 0) {
        let ParamKey { group, key, parts } = of(param.param);
        let piece = |(part, strided): &(Range<usize>, Strided)| {
            let both = overlap(range, &(param.start + part.start..param.start + part.end))?;
            let first = (both.start - param.start - part.start) as u64;
            let range = both.start - range.start..both.end - range.start;
            Some(SegmentPiece { param: param.param, range, first, strided: *strided, key })
        };
        let table = table_of(group, &mut tables, &mut of_group);
        let whole = [(0..param.len, Strided::WHOLE)];
        table.pieces.extend(parts.map_or(&whole[..], Vec::as_slice).iter().filter_map(piece));
    }
    for UpdateTable { pieces, segments, .. } in &mut tables {
        pieces.shrink_to_fit();
        segments.reserve_exact(pieces.len());
    }
    tables
}

/// Returns the table of a group, a new one if there is none. `of_group` has the index of every table, but the last one's only once
/// another group has come: most ranges have one group.
fn table_of<'t>(
    group: usize,
    tables: &'t mut Vec<UpdateTable>,
    of_group: &mut HashMap<usize, usize>,
) -> &'t mut UpdateTable {
    if tables.last().is_none_or(|last| last.group != group) {
        of_group.extend(tables.last().map(|last| (last.group, tables.len() - 1)));
        match of_group.get(&group) {
            Some(&known) => return &mut tables[known],
            None => tables.push(UpdateTable { group, pieces: Vec::with_capacity(1), segments: Vec::new() }),
        }
    }
    let last = tables.len() - 1;
    &mut tables[last]
}

#[cfg(feature = "cuda")]
impl PieceIndex {
    /// Returns the pieces of the parameter from this one on: the number of each among those of all tables, and its elements, from the
    /// first one's start.
    pub(crate) fn rows(self, tables: &[UpdateTable]) -> impl Iterator<Item = (usize, Range<usize>)> {
        let before = tables[..self.table].iter().map(|table| table.pieces.len()).sum::<usize>();
        let pieces = &tables[self.table].pieces;
        let SegmentPiece { param, range, .. } = &pieces[self.piece];
        let own = pieces.iter().enumerate().skip(self.piece).take_while(|(_, piece)| piece.param == *param);
        let within = |piece: &Range<usize>| piece.start - range.start..piece.end - range.start;
        own.map(move |(i, piece)| (before + i, within(&piece.range)))
    }
}

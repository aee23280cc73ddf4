//! Plan of one rank in detail: stored and updated parts of each parameter, and traffic by purpose and group.

use super::{PipelineStage, Plan, deciding};
use crate::{Axes, Coordinate, Error, Group, Parameter, Piece, Sharing};
use meshstep_local::Shares;
use meshstep_shard::{Memory, Part, Placed, PlanRules, Seat, Seats, Stage, Wire};
use std::fmt;
use std::ops::Range;

/// Memory, ownership and traffic of one rank of a [`Plan`]. Every method computes its answer on demand.
///
/// ```
/// use meshstep_optim::AdamW;
/// use meshstep_parallel3d::models::Gpt2;
/// use meshstep_parallel3d::{Holds, Mesh, PipelineStage, Plan, Purpose, RankPlan, Sends, TotalKind, Totals};
/// use meshstep_shard::{Options, Stage};
/// use meshstep_tensor::DType::F32;
///
/// let (mesh, options) = ("tp=2,dp=4".parse::<Mesh>()?, Options { stage: Stage::Zero2, ..Options::default() });
/// let plan = Plan::new(&mesh, &Gpt2 { vocab: 50_304, ..Gpt2::SMALL }.model(F32).build()?, AdamW::default(), &options)?;
/// let rank: RankPlan<'_> = plan.rank(5)?;
/// let Holds { parameter, used, .. } = rank.holds().next().ok_or("no parameters")?;
/// assert!(!parameter.name.is_empty() && !used.is_empty());
/// let reduced: u64 = rank.sends()?.iter().filter(|sent: &&Sends| sent.purpose == Purpose::Reduce).map(|sent| sent.bytes).sum();
/// assert_eq!(reduced, rank.wire().reduce);
/// let Totals { ranks, memory, .. } = plan.totals();
/// let kinds: Vec<TotalKind> = plan.kinds();
/// assert_eq!((ranks, kinds.iter().map(|kind| kind.ranks).sum()), (8, 8));
/// assert!(memory.total() > 8 * 4 * 62_000_000);
/// let stages: &[PipelineStage] = plan.pipeline();
/// assert_eq!(stages.len(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct RankPlan<'p> {
    plan: &'p Plan,
    rank: usize,
    coordinate: Coordinate,
    stage: &'p PipelineStage,
    seats: Seats,
}

/// A rank's part of one parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holds<'p> {
    /// The parameter.
    pub parameter: &'p Parameter,
    /// Sharing of the parameter among ranks.
    pub sharing: Sharing,
    /// Pieces the rank computes with: its part under the placement.
    pub used: Vec<Piece>,
    /// Pieces the rank stores between steps: all of `used`, or only `owned` at [`Stage::Zero3`].
    pub stored: Vec<Piece>,
    /// Pieces the rank holds optimizer state for and updates: boxes, in order.
    pub owned: Vec<Piece>,
    /// True if `owned` counts in the norm: of several ranks that own the same elements exactly one counts them.
    pub counts: bool,
    /// Bucket of the parameter's gradient, numbered over all families in travel order.
    pub bucket: usize,
    /// Element range of the parameter within the bucket.
    pub range: Range<usize>,
}

/// Purpose of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Purpose {
    /// Reduction of gradients over the ranks that divide the state.
    Reduce,
    /// Further reduction of reduced gradients, over replicas of the state or over partial gradients.
    Further,
    /// All-gather of parameters: once updated, or at [`Stage::Zero3`] each unit's before the forward and the backward pass.
    Gather,
    /// Steps of matrices that several ranks hold, as shards or as parts along `tp`: pieces to the rank that transforms the matrix, and back.
    Matrices,
    /// Exchange by which all ranks decide the step together.
    Decide,
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Purpose::Reduce => "reduce",
            Purpose::Further => "reduce further",
            Purpose::Gather => "gather",
            Purpose::Matrices => "matrices",
            Purpose::Decide => "decide",
        })
    }
}

/// Bytes a rank sends in a step with one micro-batch, by ring algorithms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sends {
    /// Purpose of the messages.
    pub purpose: Purpose,
    /// Axes that the group spans.
    pub axes: Axes,
    /// Group that communicates.
    pub group: Group,
    /// Bytes, summed over all parameters.
    pub bytes: u64,
}

impl<'p> RankPlan<'p> {
    pub(super) fn new(plan: &'p Plan, rank: usize) -> Result<Self, Error> {
        let coordinate = plan.mesh.coordinate(rank)?;
        let (stage, seats) = plan.seats(rank);
        Ok(RankPlan { plan, rank, coordinate, stage: &plan.pipeline[stage], seats })
    }

    /// Iterates over the rank's parts with their rules and its seat in the group that divides the state.
    pub(crate) fn shares(&self) -> impl Iterator<Item = Shares<'_>> {
        let of = |((_, part), seat): ((_, &'p Part), &Seat)| {
            let rules = self.plan.rules.within(part.layout());
            Shares { part, rules, shard: seat.shard }
        };
        self.stage.families().zip(&self.seats.parts).map(of)
    }

    pub(crate) fn model(&self) -> &'p crate::Model {
        &self.plan.model
    }

    /// Returns the rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the rank's coordinate.
    pub fn coordinate(&self) -> &Coordinate {
        &self.coordinate
    }

    /// Returns the rank's peak memory if one thread hands gradients over in bucket order. The words of a verification come on top.
    pub fn memory(&self) -> Memory {
        self.stage.plan.memory(self.seats.clone(), &self.plan.rules)
    }

    /// Returns the bytes that the rank sends in a step with one micro-batch.
    pub fn wire(&self) -> Wire {
        self.stage.plan.wire(self.seats.clone(), &self.plan.rules)
    }

    /// Returns the rank's traffic by purpose and axes. Messages with equal purpose and axes are summed; empty ones are left out.
    pub fn sends(&self) -> Result<Vec<Sends>, Error> {
        let mut bytes: Vec<(Purpose, Axes, u64)> = Vec::new();
        let mut add =
            |purpose, axes, more: u64| match bytes.iter_mut().find(|b| (b.0, b.1) == (purpose, axes)) {
                Some((.., bytes)) => *bytes += more,
                None if more > 0 => bytes.push((purpose, axes, more)),
                None => {}
            };
        for ((sharing, part), seat) in self.stage.families().zip(&self.seats.parts) {
            let mesh = &self.plan.mesh;
            add(Purpose::Reduce, sharing.shards(), part.reduce_bytes());
            for (round, axes) in sharing.extra_reductions(mesh).into_iter().enumerate() {
                add(Purpose::Further, axes, part.further_bytes(round, seat.extra_reductions[round]));
            }
            add(Purpose::Gather, sharing.shards(), part.gather_bytes(seat.shard));
            let exchange = PlanRules::matrix_exchange(&self.plan.rules, part);
            let (axes, rank) = match part.cuts() {
                Some(_) => (sharing.tensors(mesh, part.stage()), seat.tensors),
                None => (sharing.shards(), seat.shard),
            };
            add(Purpose::Matrices, axes, exchange.sent_bytes(rank));
        }
        let decide = self.stage.plan.exchange_bytes(self.seats.world, &self.plan.rules);
        add(Purpose::Decide, deciding(&self.plan.mesh), decide);
        bytes.sort();
        let sends = |(purpose, axes, bytes)| {
            let group = self.plan.mesh.group(self.rank, axes)?;
            Ok(Sends { purpose, axes, group, bytes })
        };
        bytes.into_iter().map(sends).collect()
    }

    /// Iterates over the rank's parts of all parameters, in the travel order of their gradients.
    pub fn holds(&self) -> impl Iterator<Item = Holds<'p>> {
        let (plan, stage, coordinate) = (self.plan, self.stage, self.coordinate.clone());
        let shards = self.seats.parts.iter().map(|seat| seat.shard);
        let families: Vec<_> = stage.families().zip(shards).collect();
        let placed = stage.plan.order().iter().enumerate().flat_map(move |(bucket, &(family, b))| {
            let ((sharing, part), shard) = families[family];
            part.buckets()[b].params.iter().map(move |placed| (bucket, sharing, part, b, shard, placed))
        });
        placed.filter_map(move |(bucket, sharing, part, b, shard, placed)| {
            let param = &part.layout().params()[placed.param];
            let parameter = plan.model.get(param.name())?;
            let Parameter { name, shape, placement, .. } = parameter;
            let used = placement.pieces(name, shape, &plan.mesh, &coordinate).ok()?;
            let owned = owned(part, b, shard, placed);
            let owned = owned.flat_map(|range| boxes(range, param.shape()));
            let owned: Vec<Piece> = owned.flat_map(|local| within(&used, &local)).collect();
            let stored = if plan.stage == Stage::Zero3 { &owned } else { &used }.clone();
            let counts = coordinate.is_first(sharing.replicas.without(sharing.shards()));
            let range = placed.range();
            Some(Holds { parameter, sharing, used, stored, owned, counts, bucket, range })
        })
    }
}

/// Iterates over the elements of a parameter that the rank owns, counted from the parameter's first element.
fn owned<'p>(
    part: &'p Part,
    bucket: usize,
    shard: usize,
    placed: &'p Placed,
) -> impl Iterator<Item = Range<usize>> + 'p {
    let own = placed.range();
    part.owned(bucket, shard).into_iter().filter_map(move |range| {
        let (start, end) = (range.start.max(own.start), range.end.min(own.end));
        (start < end).then(|| start - own.start..end - own.start)
    })
}

/// Splits elements `flat` of a row-major tensor into boxes, one index range for each dimension: part of a first row, whole rows, part of
/// a last row.
fn boxes(flat: Range<usize>, shape: &[usize]) -> Vec<Vec<Range<usize>>> {
    let Some((_, rest)) = shape.split_first() else { return vec![Vec::new()] };
    let row: usize = rest.iter().product();
    let (first, last) = (flat.start / row, (flat.end - 1) / row);
    let part_of = |index: usize, part: Range<usize>| {
        let inner = boxes(part, rest).into_iter();
        let row = index..index + 1;
        inner.map(move |inner| [std::slice::from_ref(&row), &inner].concat())
    };
    let whole = |rows: Range<usize>| [vec![rows], rest.iter().map(|&extent| 0..extent).collect()].concat();
    let (from, to) = (flat.start % row, (flat.end - 1) % row + 1);
    if first == last && to - from < row {
        return part_of(first, from..to).collect();
    }
    let mut found = Vec::new();
    let begins = if from == 0 { first } else { first + 1 };
    let ends = if to == row { last + 1 } else { last };
    if from > 0 {
        found.extend(part_of(first, from..row));
    }
    if begins < ends {
        found.push(whole(begins..ends));
    }
    if to < row {
        found.extend(part_of(last, 0..to));
    }
    found
}

/// Intersects a box of the rank's part with each piece.
fn within(pieces: &[Piece], local: &[Range<usize>]) -> Vec<Piece> {
    let cut = |piece: &Piece| {
        let mut cut = Piece { global: Vec::new(), local: Vec::new() };
        for ((own, global), range) in piece.local.iter().zip(&piece.global).zip(local) {
            let (start, end) = (own.start.max(range.start), own.end.min(range.end));
            if start >= end {
                return None;
            }
            cut.global.push(start - own.start + global.start..end - own.start + global.start);
            cut.local.push(start..end);
        }
        Some(cut)
    };
    pieces.iter().filter_map(cut).collect()
}

//! One rank of a plan in detail: what of each parameter it stores and updates, and what it sends to whom.

use super::{PipelineStage, Plan, deciding};
use crate::{Axes, Coordinate, Error, Group, Parameter, Piece, Sharing};
use meshstep_shard::local::Shares;
use meshstep_shard::{Memory, Part, Placed, Seat, Seats, Stage, Wire};
use std::fmt;
use std::ops::Range;

/// What one rank of a [`Plan`] holds, owns and sends. Each answer is computed when it is asked for.
#[derive(Clone, Debug)]
pub struct RankPlan<'p> {
    plan: &'p Plan,
    rank: usize,
    coordinate: Coordinate,
    stage: &'p PipelineStage,
    seats: Seats,
}

/// What a rank has of one parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holds<'p> {
    /// The parameter.
    pub parameter: &'p Parameter,
    /// Which ranks share it.
    pub sharing: Sharing,
    /// What of it the rank computes with: its part under the placement.
    pub used: Vec<Piece>,
    /// What of that it stores between steps: all of it, but at [`Stage::Zero3`] what it owns.
    pub stored: Vec<Piece>,
    /// What of that it keeps state of, and updates: boxes, in order.
    pub owned: Vec<Piece>,
    /// Whether what it owns counts in the norm: where other ranks own the same, one of them does.
    pub counts: bool,
    /// The bucket its gradient travels in, counted over those of all families in the order they travel.
    pub bucket: usize,
    /// Where in that bucket.
    pub range: Range<usize>,
}

/// What something is sent for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Purpose {
    /// Gradients become one over the ranks that divide the state.
    Reduce,
    /// Reduced gradients become one over replicas of the state, or over parts of a gradient.
    Further,
    /// Parameters go to everyone: updated, or at [`Stage::Zero3`] each unit's for the forward and for the backward pass.
    Gather,
    /// All ranks decide the step together.
    Decide,
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Purpose::Reduce => "reduce",
            Purpose::Further => "reduce further",
            Purpose::Gather => "gather",
            Purpose::Decide => "decide",
        })
    }
}

/// Bytes a rank sends in a step with one micro-batch, as ring algorithms send them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sends {
    /// What for.
    pub purpose: Purpose,
    /// Along which axes.
    pub axes: Axes,
    /// With whom.
    pub group: Group,
    /// How much, for all parameters together.
    pub bytes: u64,
}

impl<'p> RankPlan<'p> {
    pub(super) fn new(plan: &'p Plan, rank: usize) -> Result<Self, Error> {
        let coordinate = plan.mesh.coordinate(rank)?;
        let (stage, seats) = plan.seats(rank);
        Ok(RankPlan { plan, rank, coordinate, stage: &plan.pipeline[stage], seats })
    }

    /// What it shares with others, in which ways.
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

    /// Which one.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Where it sits.
    pub fn coordinate(&self) -> &Coordinate {
        &self.coordinate
    }

    /// The bytes it holds at its peak, when one thread hands gradients over in bucket order, without a verification, whose words
    /// come on top.
    pub fn memory(&self) -> Memory {
        self.stage.plan.memory(self.seats.clone(), self.plan.rules.rule())
    }

    /// The bytes it sends in a step with one micro-batch.
    pub fn wire(&self) -> Wire {
        self.stage.plan.wire(self.seats.clone(), self.plan.rules.rule())
    }

    /// The same by purpose and axes: what is sent for the same along the same axes is one, and what is nothing is left out.
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
        }
        let decide = self.stage.plan.exchange_bytes(self.seats.world, self.plan.rules.rule());
        add(Purpose::Decide, deciding(&self.plan.mesh), decide);
        bytes.sort();
        let sends = |(purpose, axes, bytes)| {
            let group = self.plan.mesh.group(self.rank, axes)?;
            Ok(Sends { purpose, axes, group, bytes })
        };
        bytes.into_iter().map(sends).collect()
    }

    /// What it has of each parameter, in the order the parameters' gradients travel.
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

/// Which elements of a parameter, counted from its first, a rank owns.
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

/// Elements `flat` of a tensor in row-major order as boxes, a range of indices for each dimension: part of a first row, whole
/// rows, part of a last one.
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

/// What of a box of a rank's part lies in each piece of it.
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

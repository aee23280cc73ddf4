//! Bytes held and sent by all ranks of a plan together. Each kind of rank is computed once.

use super::{PipelineStage, Plan};
use crate::Axis;
use meshstep_shard::{Memory, Part, PlanRules, Seat, Seats, Stage, Wire};
use std::collections::HashMap;

/// Ranks of one pipeline stage with equal memory use and equal traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TotalKind {
    /// Pipeline stage of the ranks.
    pub stage: usize,
    /// Lowest rank of this kind.
    pub first: usize,
    /// Number of ranks of this kind.
    pub ranks: usize,
    /// Memory of each rank.
    pub memory: Memory,
    /// Bytes that each rank sends in a step with one micro-batch.
    pub wire: Wire,
}

/// Byte totals over all ranks of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Totals {
    /// Number of ranks.
    pub ranks: usize,
    /// Memory of all ranks together.
    pub memory: Memory,
    /// Bytes that all ranks send in a step with one micro-batch.
    pub wire: Wire,
    /// First rank with the highest memory use, and its memory.
    pub most_held: (usize, Memory),
    /// First rank with the most bytes sent, and its traffic.
    pub most_sent: (usize, Wire),
}

impl Totals {
    /// Sums up the ranks of these kinds.
    pub(super) fn of(kinds: &[TotalKind]) -> Totals {
        let first = |best: &TotalKind| usize::MAX - best.first;
        let held = kinds.iter().max_by_key(|kind| (kind.memory.total(), first(kind)));
        let sent = kinds.iter().max_by_key(|kind| (kind.wire.total(), first(kind)));
        Totals {
            ranks: kinds.iter().map(|kind| kind.ranks).sum(),
            memory: kinds.iter().map(|kind| kind.memory * kind.ranks as u64).sum(),
            wire: kinds.iter().map(|kind| kind.wire * kind.ranks as u64).sum(),
            most_held: held.map_or((0, Memory::default()), |kind| (kind.first, kind.memory)),
            most_sent: sent.map_or((0, Wire::default()), |kind| (kind.first, kind.wire)),
        }
    }
}

impl Plan {
    /// Returns all kinds of ranks, in the order of their first ranks.
    pub fn kinds(&self) -> Vec<TotalKind> {
        let (mut kinds, mut known): (Vec<TotalKind>, HashMap<(usize, Seats), usize>) = Default::default();
        let stage_of = |rank: usize| self.mesh.seat(rank, Axis::Pp.into());
        let ranks = |stage| (0..self.mesh.world_size()).filter(move |&rank| stage_of(rank) == stage);
        let seats = |stage| ranks(stage).map(|rank| self.seats(rank).1);
        let plans = self.pipeline.iter().map(PipelineStage::plan).enumerate();
        let mut of_stages: Vec<_> =
            plans.map(|(stage, plan)| plan.kinds(seats(stage), &self.rules)).collect();
        for rank in 0..self.mesh.world_size() {
            let stage = stage_of(rank);
            let Some(seats) = of_stages[stage].next() else { continue };
            let kind = *known.entry((stage, seats)).or_insert(kinds.len());
            match kinds.get_mut(kind) {
                Some(kind) => kind.ranks += 1,
                None => kinds.push(self.kind(rank, stage)),
            }
        }
        kinds
    }

    fn kind(&self, rank: usize, stage: usize) -> TotalKind {
        let (seats, plan) = (self.seats(rank).1, self.pipeline[stage].plan());
        let memory = plan.memory(seats.clone(), &self.rules);
        TotalKind { stage, first: rank, ranks: 1, memory, wire: plan.wire(seats, &self.rules) }
    }

    /// Returns the byte totals over all ranks.
    pub fn totals(&self) -> Totals {
        Totals::of(&self.kinds())
    }

    /// Returns the highest memory use and the highest traffic of any rank. Without whole parameters or exchanged matrices no rank is visited:
    /// with equal chunks all ranks of a pipeline stage use the same memory, and the last rank sends most: it is the last of all its groups,
    /// and in a ring the first ranks own the longer chunks.
    pub(super) fn most(&self) -> (Memory, Wire) {
        let exchanges = |part: &Part| !PlanRules::matrix_exchange(&self.rules, part).windows().is_empty();
        let mut parts = self.pipeline.iter().flat_map(|stage| stage.plan().parts());
        if matches!(self.stage, Stage::WholeParams(_)) || parts.any(exchanges) {
            let Totals { most_held, most_sent, .. } = self.totals();
            return (most_held.1, most_sent.1);
        }
        let rule = &self.rules;
        let plans = || self.pipeline.iter().map(|stage| stage.plan());
        let held = plans().map(|plan| plan.memory(0, rule)).max_by_key(Memory::total);
        let sent = plans().map(|plan| plan.wire(last(plan), rule)).max_by_key(Wire::total);
        (held.unwrap_or_default(), sent.unwrap_or_default())
    }
}

/// Returns the last seat of every group.
fn last(plan: &meshstep_shard::Plan) -> Seats {
    let seat = |part: &Part| Seat {
        shard: part.sizes().shards - 1,
        extra_reductions: part.sizes().extra_reductions.iter().map(|ranks| ranks - 1).collect(),
        tensors: part.cuts().map_or(0, |cuts| cuts.ranks.len() - 1),
    };
    Seats { world: plan.world_size() - 1, parts: plan.parts().iter().map(seat).collect() }
}

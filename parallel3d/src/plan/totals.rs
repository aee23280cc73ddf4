//! What all ranks of a plan hold and send together. Ranks of a kind are looked at once.

use super::Plan;
use meshstep_shard::{Memory, Part, Seat, Seats, Stage, Wire};
use std::collections::HashMap;

/// Ranks of one pipeline stage that hold and send as many bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Their pipeline stage.
    pub stage: usize,
    /// The first of them.
    pub first: usize,
    /// How many there are.
    pub ranks: usize,
    /// What each of them holds.
    pub memory: Memory,
    /// What each of them sends in a step with one micro-batch.
    pub wire: Wire,
}

/// Bytes over all ranks of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Totals {
    /// Ranks.
    pub ranks: usize,
    /// What all of them hold.
    pub memory: Memory,
    /// What all of them send in a step with one micro-batch.
    pub wire: Wire,
    /// The first rank that holds most, and what.
    pub most_held: (usize, Memory),
    /// The first rank that sends most, and what.
    pub most_sent: (usize, Wire),
}

impl Totals {
    /// Of ranks of these kinds.
    pub(super) fn of(kinds: &[Kind]) -> Totals {
        let first = |best: &Kind| usize::MAX - best.first;
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
    /// All ranks by kind, in the order of their first ranks.
    pub fn kinds(&self) -> Vec<Kind> {
        let (mut kinds, mut known): (Vec<Kind>, HashMap<(usize, Seats), usize>) = Default::default();
        for rank in 0..self.mesh.world_size() {
            let (stage, seats) = self.seats(rank);
            let plan = self.pipeline[stage].plan();
            let kind = *known.entry((stage, plan.kind(seats, self.rules.rule()))).or_insert(kinds.len());
            match kinds.get_mut(kind) {
                Some(kind) => kind.ranks += 1,
                None => kinds.push(self.kind(rank, stage)),
            }
        }
        kinds
    }

    fn kind(&self, rank: usize, stage: usize) -> Kind {
        let (seats, plan) = (self.seats(rank).1, self.pipeline[stage].plan());
        let memory = plan.memory(seats.clone(), self.rules.rule());
        Kind { stage, first: rank, ranks: 1, memory, wire: plan.wire(seats, self.rules.rule()) }
    }

    /// Bytes over all ranks.
    pub fn totals(&self) -> Totals {
        Totals::of(&self.kinds())
    }

    /// What the rank holds that holds most, and what the rank sends that sends most, without a look at each. Where chunks are equal
    /// ranks hold alike, and the last of a pipeline stage sends most: it is the last of all its groups, and a ring's longer chunks
    /// are the first ones' own.
    pub(super) fn most(&self) -> (Memory, Wire) {
        if matches!(self.stage, Stage::WholeParams(_)) {
            let Totals { most_held, most_sent, .. } = self.totals();
            return (most_held.1, most_sent.1);
        }
        let rule = self.rules.rule();
        let plans = || self.pipeline.iter().map(|stage| stage.plan());
        let held = plans().map(|plan| plan.memory(0, rule)).max_by_key(Memory::total);
        let sent = plans().map(|plan| plan.wire(last(plan), rule)).max_by_key(Wire::total);
        (held.unwrap_or_default(), sent.unwrap_or_default())
    }
}

/// The last place in each group.
fn last(plan: &meshstep_shard::Plan) -> Seats {
    let seat = |part: &Part| Seat {
        shard: part.sizes().shards - 1,
        extra_reductions: part.sizes().extra_reductions.iter().map(|ranks| ranks - 1).collect(),
    };
    Seats { world: plan.world_size() - 1, parts: plan.parts().iter().map(seat).collect() }
}

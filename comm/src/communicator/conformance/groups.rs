//! Groups split by color and key.

use super::Nonconformance;
use super::seat::{CheckedCalls, RankChecks};
use crate::{Communicator, Reduction};
use std::sync::Arc;

/// Checks groups, groups of groups, and the parent beside them.
pub(super) fn check(rank: &RankChecks) -> CheckedCalls {
    let (me, n) = (rank.rank, rank.ranks);
    // Even ranks in reverse order, odd ones in theirs; the last rank is in no group, unless it is alone.
    let is_out = n > 1 && me + 1 == n;
    let members: Vec<usize> = (0..n).filter(|r| r % 2 == me % 2 && (n == 1 || r + 1 != n)).collect();
    let key = if me.is_multiple_of(2) { -(me as i64) } else { 0 };
    rank.begin("split by color and key");
    let group = rank.ok(rank.comm.split((!is_out).then_some(me as u32 % 2), key))?;
    rank.hold(group.is_none() == is_out, || "a group without a color, or none with one".to_owned())?;
    let mut calls = 1;
    if let Some(group) = &group {
        let place = members.iter().position(|r| *r == me).unwrap_or_default();
        let place = if me.is_multiple_of(2) { members.len() - 1 - place } else { place };
        let found = (group.rank(), group.world_size());
        rank.hold(found == (place, members.len()), || {
            format!("rank {} of {} instead of rank {place} of {}", found.0, found.1, members.len())
        })?;
        rank.begin("all_reduce(sum) in a group");
        let expected: u64 = members.iter().map(|r| *r as u64 + 1).sum();
        // Groups make different numbers of calls between two of the parent.
        for _ in 0..=me % 2 {
            sum(rank, group, me as u64 + 1, expected)?;
        }
        rank.begin("split of a group");
        let own = rank.ok(group.split(Some(group.rank() as u32), 0))?;
        let Some(own) = own else {
            return rank.hold(false, || "no group for a color".to_owned()).map(|()| 0);
        };
        sum(rank, &own, 7, 7)?;
        calls += 3;
    }
    rank.begin("all_reduce(sum) beside groups");
    sum(rank, &rank.comm, me as u64 + 1, (n * (n + 1) / 2) as u64)?;
    drop(group);
    rank.begin("all_reduce(sum) after groups");
    sum(rank, &rank.comm, 1, n as u64)?;
    Ok(calls + 2)
}

fn sum(
    rank: &RankChecks,
    comm: &Arc<dyn Communicator>,
    mine: u64,
    expected: u64,
) -> Result<(), Nonconformance> {
    let mut buffer = rank.buffer(&[mine])?;
    rank.ok(comm.all_reduce(&mut buffer, Reduction::Sum))?;
    rank.equal(&buffer, 0..1, &[expected])
}

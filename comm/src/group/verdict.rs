//! Decision for a group from the operation of each rank: go on, wait, or fail on a contradiction. Arithmetic only.

use crate::{Action, Called, Error};
use std::time::Duration;

/// State of a rank in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stand {
    /// The rank waits for nobody.
    Idle,
    /// The rank waits for others in an operation.
    Waiting(Called),
    /// The rank has left, before its operation of this number.
    Left(u64),
}

/// Ranks of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Party {
    All,
    Pair { from: usize, to: usize },
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Wait,
    Go(Party),
    Fail(Error),
}

impl Party {
    /// Returns the ranks of the party, in a group of `world_size`.
    pub(crate) fn ranks(self, world_size: usize) -> impl Iterator<Item = usize> {
        let (first, second, step) = match self {
            Party::All => (0, world_size.saturating_sub(1), 1),
            Party::Pair { from, to } => (from.min(to), from.max(to), from.abs_diff(to)),
        };
        (first..=second).step_by(step)
    }
}

impl Stand {
    fn waiting(&self) -> Option<&Called> {
        match self {
            Stand::Waiting(called) => Some(called),
            _ => None,
        }
    }

    /// Returns this rank's call if it waits in a collective.
    pub(crate) fn collective(&self) -> Option<&Called> {
        self.waiting().filter(|called| called.action.peer().is_none())
    }

    /// Returns the rank that this one waits for in a send or a receive.
    pub(crate) fn peer(&self) -> Option<usize> {
        self.waiting().and_then(|called| called.action.peer())
    }
}

/// Returns the decision after `last` arrived or left. It runs at each such event, so that the first call that completes a
/// contradiction detects it, even if other ranks are still missing.
pub(crate) fn verdict(stands: &[Stand], last: usize) -> Verdict {
    match collectives(stands, last) {
        Verdict::Wait => {}
        decided => return decided,
    }
    for rank in 0..stands.len() {
        match pairs(stands, rank, last) {
            Verdict::Wait => {}
            decided => return decided,
        }
    }
    Verdict::Wait
}

fn collectives(stands: &[Stand], last: usize) -> Verdict {
    let mut waiting = stands.iter().filter_map(Stand::collective);
    let Some(first) = waiting.next() else { return Verdict::Wait };
    let mut count = 1;
    for other in waiting {
        if !first.agrees_with(other) {
            return mismatch(stands, last);
        }
        count += 1;
    }
    if let Some(error) = stands.iter().enumerate().find_map(|(rank, stand)| left(rank, stand)) {
        return Verdict::Fail(error);
    }
    if count == stands.len() { Verdict::Go(Party::All) } else { Verdict::Wait }
}

fn pairs(stands: &[Stand], rank: usize, last: usize) -> Verdict {
    let (Some(mine), Some(peer)) = (stands[rank].waiting(), stands[rank].peer()) else {
        return Verdict::Wait;
    };
    if let Some(error) = left(peer, &stands[peer]) {
        return Verdict::Fail(error);
    }
    let theirs = stands[peer].waiting();
    if stands[peer].peer() == Some(rank) {
        return match (mine.action, theirs) {
            (Action::Send { to }, Some(theirs)) if mine.goes_to(theirs) => {
                Verdict::Go(Party::Pair { from: rank, to })
            }
            (Action::Recv { from }, Some(theirs)) if theirs.goes_to(mine) => {
                Verdict::Go(Party::Pair { from, to: rank })
            }
            _ => mismatch(stands, last),
        };
    }
    if never_answers(stands, peer) { mismatch(stands, last) } else { Verdict::Wait }
}

/// Returns true if the chain of ranks from `rank`, each waiting for the next, ends in a collective, which waits for all of them,
/// or in a cycle.
fn never_answers(stands: &[Stand], rank: usize) -> bool {
    let mut at = rank;
    for _ in 0..stands.len() {
        match stands[at].peer() {
            Some(next) if stands[next].peer() == Some(at) => return false,
            Some(next) => at = next,
            None => return stands[at].collective().is_some(),
        }
    }
    true
}

fn left(rank: usize, stand: &Stand) -> Option<Error> {
    match *stand {
        Stand::Left(op_number) => Some(Error::Left { rank, op_number }),
        _ => None,
    }
}

fn mismatch(stands: &[Stand], last: usize) -> Verdict {
    let calls: Vec<_> = stands.iter().map(|stand| stand.waiting().copied()).collect();
    let op_number =
        calls[last].or_else(|| calls.iter().flatten().next().copied()).map_or(0, |call| call.op_number);
    Verdict::Fail(Error::Mismatch { op_number, calls })
}

/// Returns a timeout of `rank` with the ranks that arrived and those that did not: all ranks for a collective; for a pair, the chain
/// of ranks that each wait for the next, down to the one that waits for none.
pub(crate) fn timeout(stands: &[Stand], rank: usize, called: Called, after: Duration) -> Error {
    let mut concerned: Vec<usize> = match called.action.peer() {
        None => (0..stands.len()).collect(),
        Some(peer) => vec![rank, peer],
    };
    while let Some(next) = stands[concerned[concerned.len() - 1]].peer() {
        if concerned.contains(&next) {
            break;
        }
        concerned.push(next);
    }
    let here = |&other: &usize| match called.action.peer() {
        None => stands[other].collective().is_some(),
        Some(_) => stands[other].peer().is_some(),
    };
    let (arrived, missing) = concerned.into_iter().partition(here);
    Error::Timeout { op_number: called.op_number, called: Box::new(called), arrived, missing, after }
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshstep_tensor::DType;

    fn in_(action: Action) -> Stand {
        Stand::Waiting(Called { op_number: 7, action, len: 8, dtype: DType::F32, by: None })
    }
    fn send(to: usize) -> Stand {
        in_(Action::Send { to })
    }
    fn recv(from: usize) -> Stand {
        in_(Action::Recv { from })
    }
    const GATHER: Action = Action::AllGather;
    const BARRIER: Action = Action::Barrier;

    fn fails(stands: &[Stand]) -> bool {
        matches!(verdict(stands, 0), Verdict::Fail(Error::Mismatch { op_number: 7, .. }))
    }

    #[test]
    fn a_collective_goes_when_all_agree() {
        assert_eq!(verdict(&[in_(GATHER), Stand::Idle], 0), Verdict::Wait);
        assert_eq!(verdict(&[in_(GATHER), in_(GATHER)], 0), Verdict::Go(Party::All));
        assert_eq!(verdict(&[in_(GATHER)], 0), Verdict::Go(Party::All));
        assert_eq!(verdict(&[Stand::Idle, in_(GATHER)], 0), Verdict::Wait);
    }

    #[test]
    fn a_contradiction_is_seen_before_everybody_has_come() {
        assert!(fails(&[in_(GATHER), in_(BARRIER), Stand::Idle]));
        let short =
            Stand::Waiting(Called { op_number: 7, action: GATHER, len: 7, dtype: DType::F32, by: None });
        assert!(fails(&[short, in_(GATHER), Stand::Idle]));
        let other_type =
            Stand::Waiting(Called { op_number: 7, action: GATHER, len: 8, dtype: DType::U64, by: None });
        assert!(fails(&[other_type, in_(GATHER)]));
    }

    #[test]
    fn only_operations_with_data_compare_lengths() {
        let long =
            Stand::Waiting(Called { op_number: 0, action: BARRIER, len: 9, dtype: DType::U64, by: None });
        assert_eq!(verdict(&[long, in_(BARRIER)], 0), Verdict::Go(Party::All));
    }

    #[test]
    fn pairs_meet_whatever_the_others_do() {
        assert_eq!(verdict(&[in_(GATHER), send(2), recv(1)], 1), Verdict::Go(Party::Pair { from: 1, to: 2 }));
        assert_eq!(verdict(&[recv(1), send(0)], 1), Verdict::Go(Party::Pair { from: 1, to: 0 }));
        assert_eq!(verdict(&[send(1), recv(2), Stand::Idle], 1), Verdict::Wait);
    }

    #[test]
    fn ranks_that_wait_for_each_other_fail() {
        assert!(fails(&[send(1), send(0)]));
        assert!(fails(&[send(1), in_(GATHER)]));
        assert!(fails(&[recv(1), recv(2), recv(0)]));
        assert!(fails(&[recv(1), recv(2), in_(GATHER)]));
    }

    #[test]
    fn a_chain_behind_a_pair_that_meets_only_waits() {
        let stands = [recv(1), send(2), recv(1)];
        assert_eq!(verdict(&stands, 2), Verdict::Go(Party::Pair { from: 1, to: 2 }));
        assert_eq!(verdict(&[recv(1), Stand::Idle, Stand::Idle], 0), Verdict::Wait);
    }

    #[test]
    fn a_rank_that_left_fails_only_operations_that_need_it() {
        let left = Verdict::Fail(Error::Left { rank: 1, op_number: 3 });
        assert_eq!(verdict(&[in_(GATHER), Stand::Left(3), Stand::Idle], 0), left);
        assert_eq!(verdict(&[recv(1), Stand::Left(3), Stand::Idle], 0), left);
        assert_eq!(verdict(&[recv(2), Stand::Left(3), Stand::Idle], 0), Verdict::Wait);
    }

    #[test]
    fn parties_name_their_ranks() {
        assert_eq!(Party::All.ranks(3).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(Party::Pair { from: 4, to: 1 }.ranks(8).collect::<Vec<_>>(), [1, 4]);
    }
}

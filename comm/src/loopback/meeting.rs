//! Meeting point of a group: each rank posts its call, the bytes move when all ranks have arrived, and all leave together.
//!
//! The lock is held while ranks compare what they call, never while bytes move.

use super::shared::View;
use crate::clock::Wake;
use crate::group::seat::Ended;
use crate::group::split_groups;
use crate::group::verdict::{Party, Stand, Verdict, timeout, verdict};
use crate::sync::{Condvar, Counter, Guard, Mutex};
use crate::{Action, Called, Clock, Error};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// State shared by the ranks of one communicator.
#[derive(Debug)]
pub(super) struct MeetingGroup {
    me: Weak<MeetingGroup>,
    /// Parent group, kept alive as long as this one, so that an abort of an ancestor reaches this group.
    _above: Option<Arc<MeetingGroup>>,
    world_size: usize,
    clock: Clock,
    timeout: Duration,
    /// Number of portions drawn, by the party's lowest rank.
    counters: Vec<Counter>,
    state: Mutex<MeetingState>,
    changed: Condvar,
}

#[derive(Debug)]
struct MeetingState {
    stands: Vec<Stand>,
    views: Vec<View>,
    /// New group of each rank, from the split that it is in.
    formed: Vec<Option<MeetingSeat>>,
    /// Groups split from this one that are still alive.
    below: Vec<Weak<MeetingGroup>>,
    /// First failure; once set, no rank begins an operation.
    cause: Option<Arc<Error>>,
    /// True if a transfer was interrupted.
    spoilt: bool,
    /// Non-finite elements that the ranks have found in the running collective's result.
    non_finite: u64,
}

/// Action of a rank once its party is complete.
#[derive(Debug)]
pub(super) enum Met {
    /// The rank moves its share of the bytes, and then leaves.
    Move,
    /// The rank has left: another rank has moved all bytes.
    Done(Ended<MeetingSeat>),
}

/// An operation that a rank has posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Posted {
    /// Time by the group's clock after which the rank waits no longer.
    pub(super) deadline: Duration,
    /// True if one rank moves all bytes: the last that comes.
    pub(super) carried: bool,
    /// True if that is this rank.
    pub(super) ends_here: bool,
}

/// Largest total of buffer bytes that one rank, the one that completes the party, moves alone: waking the others to help takes
/// longer. The shuttle tests have small buffers and cover both cases.
const MOVED_BY_ONE: usize = if cfg!(feature = "shuttle") { 100 } else { 64 << 10 };

/// A rank's seat in a group.
#[derive(Clone, Debug)]
pub(super) struct MeetingSeat {
    pub(super) group: Arc<MeetingGroup>,
    pub(super) rank: usize,
}

impl MeetingGroup {
    pub(super) fn new(world_size: usize, clock: Clock, timeout: Duration) -> Arc<Self> {
        Self::split_from(None, world_size, clock, timeout)
    }

    fn split_from(
        above: Option<Arc<MeetingGroup>>,
        world_size: usize,
        clock: Clock,
        timeout: Duration,
    ) -> Arc<Self> {
        let state = MeetingState {
            stands: vec![Stand::Idle; world_size],
            views: vec![View::empty(); world_size],
            formed: vec![None; world_size],
            below: Vec::new(),
            cause: None,
            spoilt: false,
            non_finite: 0,
        };
        let group = Arc::new_cyclic(|me| MeetingGroup {
            me: Weak::clone(me),
            _above: above,
            world_size,
            clock: clock.clone(),
            timeout,
            counters: (0..world_size).map(|_| Counter::new()).collect(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let weak: Weak<MeetingGroup> = Arc::downgrade(&group);
        clock.register(weak);
        group
    }

    pub(super) fn world_size(&self) -> usize {
        self.world_size
    }

    pub(super) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Default deadline of an operation.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Posts `rank`'s call, without waiting. [`meet`](MeetingGroup::meet) follows.
    pub(super) fn post(
        &self,
        rank: usize,
        called: Called,
        view: View,
        after: Duration,
    ) -> Result<Posted, Arc<Error>> {
        let deadline = self.clock.now().saturating_add(after);
        let mut state = self.state.lock();
        state.refuse_if_failed()?;
        state.stands[rank] = Stand::Waiting(called);
        state.views[rank] = view;
        // The others have as many bytes, or the calls do not agree.
        let members = if called.action.peer().is_some() { 2 } else { self.world_size };
        let carried = state.moved_bytes(rank) * members <= MOVED_BY_ONE;
        self.settle(&mut state, rank);
        let ends_here = carried && state.stands[rank] == Stand::Moving;
        Ok(Posted { deadline, carried, ends_here })
    }

    /// Returns true if `rank` would not wait for others in its posted operation.
    pub(super) fn is_ready(&self, rank: usize, deadline: Duration) -> bool {
        let state = self.state.lock();
        let arrived = matches!(state.stands[rank], Stand::Released | Stand::Moving);
        arrived || state.cause.is_some() || self.clock.now() >= deadline
    }

    /// Waits until the party of `rank`, which has posted its call, is complete, or, if another rank moves all bytes, until that is
    /// done. If this rank is to move bytes, `views` then holds the buffers by rank, and no member of the party gets its buffer back
    /// until [`leave`](MeetingGroup::leave).
    pub(super) fn meet(
        &self,
        rank: usize,
        called: Called,
        (after, deadline): (Duration, Duration),
        views: &mut Vec<View>,
    ) -> Result<Met, Arc<Error>> {
        let (mut state, mut tired) = (self.state.lock(), false);
        while let Stand::Waiting(_) = state.stands[rank] {
            if let Some(cause) = state.cause.clone() {
                state.stands[rank] = Stand::Idle;
                return Err(cause);
            }
            if self.clock.now() >= deadline {
                let error = timeout(&state.stands, rank, called, after);
                self.fail_locked(&mut state, error);
                continue;
            }
            state = self.changed.wait_awake(state, self.clock.sleep_for(deadline), &mut tired);
        }
        if state.stands[rank] != Stand::Moving {
            return self.released(state, rank).map(Met::Done);
        }
        views.clear();
        views.extend_from_slice(&state.views);
        Ok(Met::Move)
    }

    /// Returns the counter for a party's portions, which is zero when the party is complete. A rank is in one party at a time, so
    /// parties that move bytes at the same time have different lowest ranks.
    pub(super) fn counter(&self, party: Party) -> &Counter {
        let lowest = match party {
            Party::All => 0,
            Party::Pair { from, to } => from.min(to),
        };
        &self.counters[lowest]
    }

    /// Records that `rank` has moved its bytes and `found` non-finite elements in them, and waits until its whole party has.
    pub(super) fn leave(
        &self,
        rank: usize,
        party: Party,
        found: u64,
    ) -> Result<Ended<MeetingSeat>, Arc<Error>> {
        let mut state = self.state.lock();
        state.non_finite += found;
        state.stands[rank] = Stand::Moved;
        let done = |stand: &Stand| matches!(stand, Stand::Moved | Stand::Carried);
        if party.ranks(self.world_size).all(|member| done(&state.stands[member])) {
            party.ranks(self.world_size).for_each(|member| state.stands[member] = Stand::Released);
            self.changed.notify_all();
        }
        self.released(state, rank)
    }

    /// Waits until the whole party of `rank` has moved its bytes, and takes the rank out of the operation.
    fn released(
        &self,
        mut state: Guard<'_, MeetingState>,
        rank: usize,
    ) -> Result<Ended<MeetingSeat>, Arc<Error>> {
        let mut tired = false;
        while state.stands[rank] != Stand::Released {
            state = self.changed.wait_awake(state, None, &mut tired);
        }
        state.stands[rank] = Stand::Idle;
        state.views[rank] = View::empty();
        match &state.cause {
            Some(cause) if state.spoilt => Err(Arc::clone(cause)),
            // The next collective, which counts anew, begins when this rank has posted its call too.
            _ => Ok(Ended { formed: state.formed[rank].take(), non_finite: state.non_finite }),
        }
    }

    /// Records that `rank` panicked while it moved bytes: the running operations have no valid result.
    pub(super) fn spoil(&self, rank: usize) {
        let mut state = self.state.lock();
        state.spoilt = true;
        self.fail_locked(&mut state, Error::Panicked { rank, message: "while moving bytes".to_owned() });
    }

    /// Waits until `until` outside of any operation, or until the group has failed.
    pub(super) fn pause(&self, until: Duration) -> Result<(), Arc<Error>> {
        let mut state = self.state.lock();
        loop {
            state.refuse_if_failed()?;
            if self.clock.now() >= until {
                return Ok(());
            }
            state = self.changed.wait(state, self.clock.sleep_for(until));
        }
    }

    /// Fails the group because `rank` never arrived at the operation that it `called`.
    pub(super) fn miss(&self, rank: usize, called: Called, after: Duration) -> Arc<Error> {
        let mut state = self.state.lock();
        let error = timeout(&state.stands, rank, called, after);
        self.fail_locked(&mut state, error)
    }

    /// Records that `rank` has left, before its operation `op_number`.
    pub(super) fn depart(&self, rank: usize, op_number: u64) {
        let mut state = self.state.lock();
        state.stands[rank] = Stand::Left(op_number);
        self.settle(&mut state, rank);
    }

    /// Fails this group and all groups split from it. The lock is held until all have failed, so that a rank that gets the error
    /// here cannot abort a subgroup under its own rank first.
    pub(super) fn abort(&self, error: &Error) {
        let mut state = self.state.lock();
        self.fail_locked(&mut state, error.clone());
        let below = std::mem::take(&mut state.below);
        below.iter().filter_map(Weak::upgrade).for_each(|group| group.abort(error));
    }

    /// Fails every operation that has not begun to move bytes, now and later.
    pub(super) fn fail(&self, error: Error) {
        let mut state = self.state.lock();
        self.fail_locked(&mut state, error);
    }

    fn fail_locked(&self, state: &mut MeetingState, error: Error) -> Arc<Error> {
        let cause = Arc::clone(state.cause.get_or_insert_with(|| {
            tracing::warn!(%error, "communicator failed");
            Arc::new(error)
        }));
        self.changed.notify_all();
        cause
    }

    /// Applies the decision after `rank` has arrived or left.
    fn settle(&self, state: &mut MeetingState, rank: usize) {
        if state.cause.is_some() {
            return;
        }
        match verdict(&state.stands, rank) {
            Verdict::Wait => {}
            Verdict::Fail(error) => drop(self.fail_locked(state, error)),
            Verdict::Go(party) => {
                self.form(state);
                if let Party::All = party {
                    state.non_finite = 0;
                }
                self.counter(party).reset();
                let bytes: usize = party.ranks(self.world_size).map(|member| state.moved_bytes(member)).sum();
                let by_one =
                    bytes <= MOVED_BY_ONE && party.ranks(self.world_size).any(|member| member == rank);
                for member in party.ranks(self.world_size) {
                    let moves = member == rank || !by_one;
                    state.stands[member] = if moves { Stand::Moving } else { Stand::Carried };
                }
                // Carried ranks sleep on until `rank` has moved their bytes.
                if !by_one {
                    self.changed.notify_all();
                }
            }
        }
    }

    /// Creates the groups once all ranks are in a split.
    fn form(&self, state: &mut MeetingState) {
        let asked = |stand: &Stand| match stand.collective()?.action {
            Action::Split { color, key } => Some((color, key)),
            _ => None,
        };
        if state.stands.iter().any(|stand| asked(stand).is_none()) {
            return;
        }
        let asked: Vec<_> = state.stands.iter().filter_map(asked).collect();
        let mut groups: Vec<Option<Arc<MeetingGroup>>> = vec![None; self.world_size];
        for (rank, place) in split_groups::places(&asked).into_iter().enumerate() {
            state.formed[rank] = place.map(|place| {
                let above = self.me.upgrade();
                let new =
                    || MeetingGroup::split_from(above, place.world_size, self.clock.clone(), self.timeout);
                let group = Arc::clone(groups[place.group].get_or_insert_with(new));
                MeetingSeat { group, rank: place.rank }
            });
        }
        state.below.retain(|group| group.strong_count() > 0);
        state.below.extend(groups.iter().flatten().map(Arc::downgrade));
    }
}

impl MeetingState {
    /// Bytes of `rank`'s buffer that its operation moves or reduces.
    fn moved_bytes(&self, rank: usize) -> usize {
        let Stand::Waiting(Called { action, .. }) = self.stands[rank] else { return 0 };
        let done = action.is_done_alone(self.stands.len()) && !self.views[rank].keeps();
        if action.moves_data() && !done { self.views[rank].bytes() } else { 0 }
    }

    fn refuse_if_failed(&self) -> Result<(), Arc<Error>> {
        self.cause.clone().map_or(Ok(()), Err)
    }
}

impl Wake for MeetingGroup {
    fn wake(&self) {
        let _awake = self.state.lock();
        self.changed.notify_all();
    }
}

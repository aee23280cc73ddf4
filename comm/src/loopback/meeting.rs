//! Meeting point of a group: each rank posts its calls, and the bytes of an operation move when all its ranks have arrived.
//!
//! A rank may post further calls before its earlier ones have a party. Then operations overlap: threads that wait for one move the
//! bytes of any. The lock is held while calls are compared, never while bytes move.

mod posts;
mod writing;

use super::shared::{ChunkUse, View, move_bytes};
use super::transfers::{FinishedTransfer, TransferShare, Transfers};
use crate::clock::Wake;
use crate::group::seat::Ended;
use crate::group::split_groups;
use crate::group::verdict::{Party, Stand, Verdict, timeout, verdict};
use crate::sync::{Condvar, Guard, Mutex};
use crate::{Action, Called, Clock, Error};
use posts::{MeetingResult, Met, Posts};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
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
    state: Mutex<MeetingState>,
    changed: Condvar,
    /// Number of changes for which a thread that moves bytes looks at the state again.
    changes: AtomicUsize,
}

#[derive(Debug)]
struct MeetingState {
    /// First call of each rank that has no party yet.
    stands: Vec<Stand>,
    posts: Vec<Posts>,
    transfers: Transfers,
    /// New group of each rank, from the split that they are all in.
    formed: Vec<Option<MeetingSeat>>,
    /// Groups split from this one that are still alive.
    below: Vec<Weak<MeetingGroup>>,
    /// First failure; once set, no operation begins to move bytes.
    cause: Option<Arc<Error>>,
}

/// Largest total of buffer bytes that one thread moves alone: waking others to help takes longer. The shuttle tests have small
/// buffers and cover both cases.
pub(super) const MOVED_BY_ONE: usize = if cfg!(feature = "shuttle") { 100 } else { 64 << 10 };

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
            posts: (0..world_size).map(|_| Posts::new()).collect(),
            transfers: Transfers::new(world_size),
            formed: vec![None; world_size],
            below: Vec::new(),
            cause: None,
        };
        let group = Arc::new_cyclic(|me| MeetingGroup {
            me: Weak::clone(me),
            _above: above,
            world_size,
            clock: clock.clone(),
            timeout,
            state: Mutex::new(state),
            changed: Condvar::new(),
            changes: AtomicUsize::new(0),
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

    /// Posts `rank`'s next call without waiting; [`collect`](MeetingGroup::collect) follows. If this completes an operation that one
    /// thread moves, its bytes have moved on return. Returns true if no other thread is needed for the operation's bytes.
    pub(super) fn post(&self, rank: usize, called: Called, view: View) -> Result<bool, Arc<Error>> {
        let mut state = self.state.lock();
        if let Some(cause) = &state.cause {
            return Err(Arc::clone(cause));
        }
        // The others have as many bytes, or the calls do not agree.
        let members = if called.action.peer().is_some() { 2 } else { self.world_size };
        let carried = self.moved_bytes(&called, &view) * members <= MOVED_BY_ONE;
        state.posts[rank].waiting.push_back((called, view));
        if state.posts[rank].waiting.len() == 1 {
            state.turn(rank, self.clock.now());
            self.settle(&mut state, rank);
        }
        let carries = state.transfers.has_work(true);
        drop(state);
        while carries && self.work(rank, true, None) {}
        Ok(carried)
    }

    /// Waits for the operation that is next for `rank` to collect, and takes its result. Meanwhile this thread moves bytes of any
    /// operation of the group.
    pub(super) fn collect(&self, rank: usize, called: Called, after: Duration) -> MeetingResult {
        let (mut state, mut tired) = (self.state.lock(), false);
        loop {
            if let Some(result) = state.posts[rank].take_result(self.clock.now()) {
                return result;
            }
            if let (true, Some(cause)) = (state.posts[rank].met.is_empty(), state.cause.clone()) {
                state.posts[rank].waiting.pop_front();
                state.turn(rank, self.clock.now());
                return Err(cause);
            }
            // An operation that has a party waits only for ranks that write their chunks.
            let writers = state.writers(rank);
            let waits = writers.is_none_or(|mut writers| writers.next().is_some());
            let deadline = waits.then(|| state.posts[rank].next_since().saturating_add(after));
            if deadline.is_some_and(|deadline| self.clock.now() >= deadline) {
                let error = state.late(rank, called, after);
                self.fail_locked(&mut state, error);
                state.give_up_writers(rank);
            } else if state.transfers.has_work(false) {
                drop(state);
                self.work(rank, false, deadline);
                state = self.state.lock();
            } else {
                let left = deadline.and_then(|deadline| self.clock.sleep_for(deadline));
                state = self.changed.wait_awake(state, left, &mut tired);
            }
        }
    }

    /// Returns true if [`collect`](MeetingGroup::collect) would not wait for other ranks.
    pub(super) fn is_ready(&self, rank: usize, after: Duration) -> bool {
        let state = self.state.lock();
        let posts = &state.posts[rank];
        match posts.met.front() {
            Some(met) => met.result.is_some(),
            None => state.cause.is_some() || self.clock.now() >= posts.since.saturating_add(after),
        }
    }

    /// Moves bytes of the first transfer that has some left, on a thread of `rank`; with `solo`, of one that a single thread moves.
    /// It stops when none is left, and between two portions when any operation has ended or the clock has reached `deadline`.
    /// Returns false without such a transfer.
    fn work(&self, rank: usize, solo: bool, deadline: Option<Duration>) -> bool {
        let (work, seen) = {
            let mut state = self.state.lock();
            (state.transfers.join(solo), self.changes.load(Relaxed))
        };
        let Some(mut work) = work else { return false };
        let whole = work.solo;
        let is_late = || deadline.is_some_and(|deadline| self.clock.now() >= deadline);
        let stops = || !whole && (self.changes.load(Relaxed) != seen || is_late());
        let found = move_bytes(&mut work, self.world_size, &stops);
        self.leave(rank, work, found);
        true
    }

    /// Leaves a transfer after moving bytes on a thread of `rank`; `found` is `None` after a panic.
    fn leave(&self, rank: usize, work: TransferShare, found: Option<u64>) {
        let mut state = self.state.lock();
        if found.is_none() {
            let message = "while moving bytes".to_owned();
            self.fail_locked(&mut state, Error::Panicked { rank, message });
        }
        if let Some(moved) = state.transfers.leave(work, found) {
            state.end(&moved);
            self.announce(state);
        }
    }

    /// Notifies all threads that an operation has ended.
    fn announce(&self, state: Guard<'_, MeetingState>) {
        self.changes.fetch_add(1, Relaxed);
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until `until` outside of any operation, or until the group has failed.
    pub(super) fn pause(&self, until: Duration) -> Result<(), Arc<Error>> {
        let mut state = self.state.lock();
        loop {
            if let Some(cause) = &state.cause {
                return Err(Arc::clone(cause));
            }
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
        self.changes.fetch_add(1, Relaxed);
        self.changed.notify_all();
        cause
    }

    /// Applies the decisions after `rank` has arrived or left.
    fn settle(&self, state: &mut MeetingState, rank: usize) {
        while state.cause.is_none() {
            match verdict(&state.stands, rank) {
                Verdict::Wait => return,
                Verdict::Fail(error) => drop(self.fail_locked(state, error)),
                Verdict::Go(party) => self.meet(state, party),
            }
        }
    }

    /// Begins the transfer of an operation whose ranks have all arrived, or ends the operation if it has no bytes to move.
    fn meet(&self, state: &mut MeetingState, party: Party) {
        self.form(state);
        let MeetingState { posts, transfers, formed, .. } = &mut *state;
        let members = || party.ranks(self.world_size);
        let bytes = |member: usize| {
            let (called, view) = &posts[member].waiting[0];
            self.moved_bytes(called, view)
        };
        let bytes: usize = members().map(bytes).sum();
        let writes = members().any(|member| posts[member].waiting[0].1.chunk == ChunkUse::Written);
        let added = (bytes > 0).then(|| {
            let view_of = |rank: usize| {
                let posted = posts[rank].waiting.front().filter(|_| members().any(|member| member == rank));
                posted.map_or(View::empty(), |(_, view)| *view)
            };
            let numbers = members().map(|member| (member, posts[member].waiting[0].0.op_number));
            let first = members().next().unwrap_or(0);
            let called = posts[first].waiting[0].0;
            transfers.add((called, first), bytes, (0..self.world_size).map(view_of), numbers)
        });
        let now = self.clock.now();
        for member in members() {
            let Some((called, _)) = posts[member].waiting.pop_front() else { continue };
            let ended = || Ok(Ended { formed: formed[member].take(), non_finite: 0 });
            let (result, transfer) = ((bytes == 0).then(ended), added.map(|(index, _)| index));
            posts[member].met.push_back(Met { op_number: called.op_number, since: now, transfer, result });
        }
        members().for_each(|member| state.turn(member, now));
        // A rank that waits for a thread's transfer sleeps on, unless it has to write its chunk.
        if writes || added.is_none_or(|(_, shared)| shared) {
            self.changes.fetch_add(usize::from(bytes == 0), Relaxed);
            self.changed.notify_all();
        }
    }

    /// Bytes of a rank's buffer that its operation moves or reduces.
    fn moved_bytes(&self, called: &Called, view: &View) -> usize {
        let done = called.action.is_done_alone(self.world_size) && !view.keeps();
        if called.action.moves_data() && !done { view.bytes() } else { 0 }
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
    /// Shows the others the first call of `rank` that has no party, if any; it is this call's turn now.
    fn turn(&mut self, rank: usize, now: Duration) {
        let posts = &mut self.posts[rank];
        posts.since = now;
        self.stands[rank] = posts.waiting.front().map_or(Stand::Idle, |&(called, _)| Stand::Waiting(called));
    }

    /// Records the results of a transfer that has ended.
    fn end(&mut self, moved: &FinishedTransfer) {
        let MeetingState { transfers, posts, cause, .. } = self;
        let cause = cause.as_ref().filter(|_| moved.spoilt);
        transfers.end(moved, |(member, op_number)| {
            let ended = || Ok(Ended { formed: None, non_finite: moved.non_finite });
            posts[member].end(op_number, cause.map_or_else(ended, |cause| Err(Arc::clone(cause))));
        });
    }
}

impl Wake for MeetingGroup {
    fn wake(&self) {
        let _awake = self.state.lock();
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests;

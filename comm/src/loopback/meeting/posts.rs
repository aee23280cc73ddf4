//! Operations that a rank has posted and not collected.

use super::super::shared::View;
use super::MeetingSeat;
use crate::group::seat::Ended;
use crate::{Called, Error};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Result of an operation, or the group's failure.
pub(super) type MeetingResult = Result<Ended<MeetingSeat>, Arc<Error>>;

/// Operations that a rank has posted and not collected, in order.
#[derive(Debug)]
pub(super) struct Posts {
    /// Operations that have a party.
    pub(super) met: VecDeque<Met>,
    /// Calls after those, which wait for other ranks.
    pub(super) waiting: VecDeque<(Called, View)>,
    /// Time since which it is the turn of the first of these.
    pub(super) since: Duration,
}

/// Operation that has a party.
#[derive(Debug)]
pub(super) struct Met {
    pub(super) op_number: u64,
    /// Time since which it has a party, and is its rank's next.
    pub(super) since: Duration,
    /// Its transfer, if it has bytes to move.
    pub(super) transfer: Option<usize>,
    /// Its result, once it has ended.
    pub(super) result: Option<MeetingResult>,
}

/// Initial capacity for posted operations.
const ROOM: usize = 64;

impl Posts {
    pub(super) fn new() -> Self {
        let (met, waiting) = (VecDeque::with_capacity(ROOM), VecDeque::with_capacity(ROOM));
        Posts { met, waiting, since: Duration::ZERO }
    }

    /// Takes the first operation's result at `now`, once that has ended. The next operation's deadline does not count its bytes.
    pub(super) fn take_result(&mut self, now: Duration) -> Option<MeetingResult> {
        let result = self.met.front_mut()?.result.take()?;
        self.met.pop_front();
        let since = self.met.front_mut().map_or(&mut self.since, |next| &mut next.since);
        *since = now.max(*since);
        Some(result)
    }

    /// Returns the time from which the first operation's deadline counts.
    pub(super) fn next_since(&self) -> Duration {
        self.met.front().map_or(self.since, |met| met.since)
    }

    /// Records the result of an operation that has a party.
    pub(super) fn end(&mut self, op_number: u64, result: MeetingResult) {
        let at = self.met.partition_point(|met| met.op_number < op_number);
        self.met[at].result = Some(result);
    }
}

//! Failure of a group: a rank writes the cause that it knows to all others, and all ranks adopt the same one.

use super::cause::{Cause, Departure};
use super::engine::Engine;
use crate::Error;
use std::sync::Arc;
use std::thread::yield_now;
use std::time::{Duration, Instant};

/// Longest wait for the causes of the other ranks.
const GATHER: Duration = Duration::from_secs(1);
/// Longest wait for room for a cause that a rank writes outside of an operation.
const FLUSH: Duration = Duration::from_millis(200);
const NAP: Duration = Duration::from_millis(10);

/// Reason for the end of an operation.
#[derive(Debug)]
pub(super) enum Stop {
    /// This rank found an error.
    Found(Error),
    /// Another rank has written its cause.
    Heard,
}

/// State of a failure on this rank.
#[derive(Debug, Default)]
pub(super) struct Failure {
    /// This rank's own cause.
    found: Option<Cause>,
    /// True if this rank has written to the others that it failed.
    flooded: bool,
    /// The cause that all ranks adopt.
    pub(super) adopted: Option<Arc<Error>>,
}

impl Failure {
    /// Returns true if this rank has failed by itself or has adopted a cause.
    pub(super) fn is_known(&self) -> bool {
        self.flooded || self.adopted.is_some()
    }
}

impl Engine {
    /// Returns true if this rank has failed, or another one has written that it has.
    pub(super) fn has_failed(&self) -> bool {
        self.failure.is_known() || self.links.peers.iter().any(|peer| peer.notes.failed.is_some())
    }

    /// Ends the group: writes this rank's cause to all others, waits a second at most for theirs, and returns the one that all adopt.
    pub(super) fn settle(&mut self, stop: Stop) -> Arc<Error> {
        if let Some(adopted) = &self.failure.adopted {
            return Arc::clone(adopted);
        }
        self.links.drain();
        // Calls and results for all are of no use any more, and a rank that does not read blocks them.
        self.links.common.end();
        self.flood(stop);
        let begun = Instant::now();
        while begun.elapsed() < GATHER && !(self.all_have_failed() && self.links.is_flushed()) {
            if !self.links.poll() {
                yield_now();
                self.links.wait(NAP);
            }
        }
        self.links.abandon_spans();
        let adopted =
            Arc::new(self.earliest().map_or(Error::Aborted { rank: self.links.rank }, |cause| cause.error));
        tracing::warn!(error = %adopted, "communicator failed");
        Arc::clone(self.failure.adopted.insert(adopted))
    }

    /// Writes this rank's cause to all others, outside of any operation, and waits only for room.
    pub(super) fn fail_aside(&mut self, error: Error) {
        if self.has_failed() || self.left {
            return;
        }
        self.flood(Stop::Found(error));
        let begun = Instant::now();
        while !self.links.is_flushed() && begun.elapsed() < FLUSH {
            if !self.links.poll() {
                self.links.wait(NAP);
            }
        }
        self.links.poll();
    }

    fn flood(&mut self, stop: Stop) {
        if self.failure.flooded {
            return;
        }
        self.failure.flooded = true;
        if let Stop::Found(error) = stop {
            self.failure.found = Some(Cause { op_number: self.at, rank: self.links.rank, error });
        }
        if let Some(cause) = self.earliest() {
            self.links.transport.note_failure(&cause.error);
            self.links.flood(self.at, &cause);
        }
    }

    /// The smallest cause that this rank knows.
    fn earliest(&self) -> Option<Cause> {
        let heard = self.links.peers.iter().filter_map(|peer| peer.notes.failed.as_ref());
        let causes = heard.map(|(_, cause)| cause.clone()).chain(self.failure.found.clone());
        causes.reduce(Cause::earlier)
    }

    /// Returns true if no rank will write a cause any more.
    fn all_have_failed(&self) -> bool {
        self.links.others().all(|peer| {
            let links = &self.links.peers[peer];
            links.notes.failed.is_some() || links.notes.left.is_some() || links.lost.is_some()
        })
    }

    /// Returns the abort that another rank has written, if any.
    pub(super) fn abort_heard(&self) -> Option<Error> {
        let heard = self.links.peers.iter().filter_map(|peer| peer.notes.failed.as_ref());
        heard.map(|(_, cause)| &cause.error).find(|error| matches!(error, Error::Aborted { .. })).cloned()
    }

    /// Returns the failure of operation `op_number` that another rank has written, if any.
    pub(super) fn failure_heard(&self, op_number: u64) -> Option<Error> {
        let heard = self.links.peers.iter().filter_map(|peer| peer.notes.failed.as_ref());
        heard
            .map(|(_, cause)| cause)
            .find(|cause| cause.op_number == op_number)
            .map(|cause| cause.error.clone())
    }

    /// Writes to all others that this rank has left, and waits for room at most `within`. Whatever arrives is dropped.
    pub(super) fn leave(&mut self, op_number: u64, within: Duration) {
        self.left = true;
        // The others have had the cause of a failure, or cannot take it.
        let within = if self.has_failed() { within.min(FLUSH) } else { within };
        if !self.has_failed() {
            let departure = Departure { op_number, collectives: self.collectives };
            for peer in self.links.others() {
                if !self.links.outboxes[peer].has_ended() {
                    departure.put(self.links.outboxes[peer].frames());
                }
            }
        }
        let begun = Instant::now();
        self.links.poll();
        while !self.links.is_flushed() && begun.elapsed() < within {
            self.links.drain();
            if !self.links.poll() {
                self.links.wait(NAP);
            }
        }
        self.links.poll();
    }
}

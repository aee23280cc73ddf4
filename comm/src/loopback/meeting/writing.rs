//! All-gathers in which ranks still write their chunks: each copies its own chunk to the others, part by part.

use super::super::shared::{copy_part, reduce_part};
use super::{MeetingGroup, MeetingState, Met};
use crate::group::chunk_writer::ChunkWriter;
use crate::group::fold::{FoldInto, Tiles};
use crate::group::verdict::timeout;
use crate::{Called, Error};
use std::ops::Range;
use std::time::Duration;

/// Longest wait for the other ranks before the first part. They have just decided the step together.
const PATIENCE: Duration = Duration::from_millis(1);

/// State of a rank's operation while the rank writes its chunk.
enum Writing {
    /// Other ranks have not arrived.
    Alone,
    /// Bytes may move; this is the transfer.
    Met(usize),
    /// The operation has failed.
    Over,
}

impl MeetingGroup {
    /// Writes the chunk of `rank`, whose next operation is posted, and copies it to the other ranks. If they have not arrived when the
    /// chunk is written, it is left to the threads that wait.
    pub(in super::super) fn write_chunk(&self, rank: usize, writer: &mut ChunkWriter<'_>) {
        self.await_others(rank);
        let mut sent = 0;
        while let Some(part) = writer.write_next() {
            if self.send_part(rank, sent..part.end, writer) {
                sent = part.end;
            }
        }
        if !self.gives_up(rank, writer) && !self.stop_writing(rank, sent == writer.len()) {
            self.send_part(rank, sent..writer.len(), writer);
            self.stop_writing(rank, true);
        }
    }

    /// Reduces, writes and copies the chunk of `rank`, whose next operation is posted, part by part. Nothing is written if the operation
    /// fails before all ranks have arrived.
    pub(in super::super) fn reduce_chunk(
        &self,
        rank: usize,
        (called, after): (Called, Duration),
        writer: &mut ChunkWriter<'_>,
    ) {
        self.await_party(rank, (called, after));
        let next = |writer: &mut ChunkWriter<'_>| {
            // SAFETY: `reduce_source` writes values of the operation's type.
            unsafe { writer.reduce_next(|into, tiles| self.reduce_source(rank, into, tiles)) }
        };
        while let Some(part) = next(writer) {
            self.send_part(rank, part, writer);
        }
        if self.gives_up(rank, writer) {
            return;
        }
        if writer.is_written() {
            self.stop_writing(rank, true);
        } else {
            // The operation is over, or its reduction has panicked: then it ends without this chunk.
            let mut state = self.state.lock();
            state.give_up_writers(rank);
            self.announce(state);
        }
    }

    /// Reduces elements of the rank's chunk. Returns false if the operation does not run.
    fn reduce_source(&self, rank: usize, into: FoldInto, tiles: &mut Tiles) -> bool {
        let share = {
            let mut state = self.state.lock();
            let Writing::Met(transfer) = state.writing(rank) else { return false };
            state.transfers.share(transfer)
        };
        let reduced = reduce_part(&share, into, tiles);
        self.leave(rank, share, reduced);
        reduced.is_some()
    }

    /// Fails the group if a part could not be written.
    fn gives_up(&self, rank: usize, writer: &ChunkWriter<'_>) -> bool {
        let Some(error) = writer.failure() else { return false };
        if matches!(error, Error::Aborted { .. }) {
            self.abort(error)
        } else {
            self.fail(error.clone())
        }
        let mut state = self.state.lock();
        state.give_up_writers(rank);
        self.announce(state);
        true
    }

    /// Waits a short time for the ranks that have not arrived: parts that are written before leave the cache before they are sent.
    fn await_others(&self, rank: usize) {
        let until = self.clock.now().saturating_add(PATIENCE);
        let (mut state, mut tired) = (self.state.lock(), false);
        while matches!(state.writing(rank), Writing::Alone) && self.clock.now() < until {
            // A manual clock does not move by itself.
            let Some(left) = self.clock.sleep_for(until) else { return };
            state = self.changed.wait_awake(state, Some(left), &mut tired);
        }
    }

    /// Waits until all ranks have arrived, or the operation has failed: at its deadline at the latest.
    fn await_party(&self, rank: usize, (called, after): (Called, Duration)) {
        let (mut state, mut tired) = (self.state.lock(), false);
        while matches!(state.writing(rank), Writing::Alone) {
            let deadline = state.posts[rank].next_since().saturating_add(after);
            if self.clock.now() >= deadline {
                let error = state.late(rank, called, after);
                self.fail_locked(&mut state, error);
                return;
            }
            state = self.changed.wait_awake(state, self.clock.sleep_for(deadline), &mut tired);
        }
    }

    /// Copies a part of the rank's chunk to the others. Returns false if they have not arrived.
    fn send_part(&self, rank: usize, part: Range<usize>, writer: &ChunkWriter<'_>) -> bool {
        let share = {
            let mut state = self.state.lock();
            match state.writing(rank) {
                Writing::Alone => return false,
                Writing::Over => return true,
                Writing::Met(transfer) => state.transfers.share(transfer),
            }
        };
        let mut share = share;
        let found = copy_part(&mut share, (rank, self.world_size), part, &writer.threads);
        self.leave(rank, share, found);
        true
    }

    /// Notes that the rank's chunk is written, and if it has not been sent, that any thread may copy it. Returns false if the rank has to
    /// send it first.
    fn stop_writing(&self, rank: usize, sent: bool) -> bool {
        let mut state = self.state.lock();
        match state.writing(rank) {
            Writing::Met(_) if !sent => return false,
            Writing::Met(transfer) => {
                if let Some(moved) = state.transfers.stop_writing(transfer, rank) {
                    state.end(&moved);
                    self.announce(state);
                }
            }
            Writing::Alone => {
                let posted = state.posts[rank].waiting.front_mut();
                posted.into_iter().for_each(|(_, view)| *view = view.with_shared_chunk());
            }
            Writing::Over => {}
        }
        true
    }
}

impl MeetingState {
    /// Returns the state of the rank's next operation.
    fn writing(&self, rank: usize) -> Writing {
        match self.posts[rank].met.front() {
            Some(&Met { transfer: Some(transfer), result: None, .. }) => Writing::Met(transfer),
            Some(_) => Writing::Over,
            None if self.cause.is_some() => Writing::Over,
            None => Writing::Alone,
        }
    }

    /// Returns the ranks that still write their chunks in the rank's next operation; `None` if that has no party.
    pub(super) fn writers(&self, rank: usize) -> Option<impl Iterator<Item = usize>> {
        let met = self.posts[rank].met.front()?;
        Some(met.transfer.into_iter().flat_map(|transfer| self.transfers.writers(transfer)))
    }

    /// Ends the rank's next operation, which has failed, without the chunks that ranks have not written.
    pub(super) fn give_up_writers(&mut self, rank: usize) {
        let Writing::Met(transfer) = self.writing(rank) else { return };
        if let Some(moved) = self.transfers.give_up_writers(transfer) {
            self.end(&moved);
        }
    }

    /// Returns the error of the rank's next operation after its deadline.
    pub(super) fn late(&self, rank: usize, called: Called, after: Duration) -> Error {
        let Some(writers) = self.writers(rank) else { return timeout(&self.stands, rank, called, after) };
        let missing: Vec<usize> = writers.collect();
        let arrived = (0..self.stands.len()).filter(|rank| !missing.contains(rank)).collect();
        Error::Timeout { op_number: called.op_number, called: Box::new(called), arrived, missing, after }
    }
}

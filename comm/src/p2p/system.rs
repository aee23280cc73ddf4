//! Reductions by the transport's system: blocks of the buffer go to the system and come back reduced.

use super::engine::{Engine, Pace, Running};
use super::failure::Stop;
use super::memory::OpMemory;
use super::transport::{Lost, SystemReduction};
use crate::group::verdict::Party;
use crate::{Action, Error};
use std::ops::Range;

/// Bytes that a rank gives to one block, at most. It bounds the counts of the system's calls too.
const BLOCK: usize = 4 << 20;

/// Cuts an operation on `bytes` bytes into blocks: `pieces` equal chunks of the buffer, of each of which a block has one range.
fn blocks(bytes: usize, pieces: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let chunk = bytes / pieces;
    // A multiple of every element's size.
    let step = (most / pieces / 8 * 8).max(8);
    (0..chunk).step_by(step).map(move |start| start..chunk.min(start + step))
}

impl Engine {
    /// Reduces by the system of the transport.
    ///
    /// # Safety
    /// As for [`run`](Engine::run).
    pub(super) unsafe fn reduce_by_system(
        &mut self,
        running: Running<'_>,
        party: Party,
        memory: &OpMemory,
    ) -> Result<(), Stop> {
        let (me, n) = (self.links.rank, self.links.world_size());
        // A reduce-scatter's block has a piece for each rank.
        let (pieces, own) = match running.called.action {
            Action::ReduceScatter(_) => (n, me),
            _ => (1, 0),
        };
        let at = |piece: usize, range: &Range<usize>| {
            let offset = piece * (memory.bytes() / pieces);
            range.start + offset..range.end + offset
        };
        for range in blocks(memory.bytes(), pieces, BLOCK) {
            let input = self.system(running)?.input(pieces * range.len());
            for (piece, into) in input.chunks_exact_mut(range.len()).enumerate() {
                // SAFETY: the caller's promise; this thread alone accesses the buffer.
                into.copy_from_slice(unsafe { memory.slice(at(piece, &range)) });
            }
            self.system(running)?.begin(&running.called);
            self.await_block(running, party)?;
            // SAFETY: as above.
            let result = unsafe { memory.slice_mut(at(own, &range)) };
            let output = self.system(running)?.output();
            result.copy_from_slice(output.map_err(Self::lost_by_system)?.unwrap_or_default());
        }
        self.await_flush(running, party)
    }

    fn system(&mut self, running: Running<'_>) -> Result<&mut dyn SystemReduction, Stop> {
        let aborted = Stop::Found(Error::Aborted { rank: self.links.rank });
        self.links.transport.system_reduction(&running.called).ok_or(aborted)
    }

    fn lost_by_system(lost: Lost) -> Stop {
        Stop::Found(Error::Lost { rank: lost.peer, why: lost.why.to_string() })
    }

    /// Waits for the result of the block that has begun.
    fn await_block(&mut self, running: Running<'_>, party: Party) -> Result<(), Stop> {
        let (mut idle, mut pace) = (0, Pace::start());
        loop {
            let moved = self.links.poll();
            if self.system(running)?.output().map_err(Self::lost_by_system)?.is_some() {
                return Ok(());
            }
            self.look_at_party(running, party, false)?;
            let looked = self.look_at_clock(running, party, false, &mut pace);
            looked.map_err(|stop| any_other_may_be_late(stop, self.links.rank))?;
            self.rest(running, moved, &mut idle);
        }
    }

    /// Waits until this rank's call has been sent to all.
    fn await_flush(&mut self, running: Running<'_>, party: Party) -> Result<(), Stop> {
        let (mut idle, mut pace) = (0, Pace::start());
        while !self.links.is_flushed() {
            let moved = self.links.poll();
            pace.note(moved);
            self.look_at_clock(running, party, false, &mut pace)?;
            self.rest(running, moved, &mut idle);
        }
        Ok(())
    }
}

/// The system does not tell which ranks are late.
fn any_other_may_be_late(stop: Stop, me: usize) -> Stop {
    match stop {
        Stop::Found(Error::Timeout { op_number, called, arrived, after, .. }) => {
            let (arrived, missing) = arrived.into_iter().partition(|rank| *rank == me);
            Stop::Found(Error::Timeout { op_number, called, arrived, missing, after })
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_each_chunk_once() {
        for (bytes, pieces) in [(8, 1), (4000, 1), (4000, 4), (24_000, 3), (0, 2)] {
            for most in [1, 64, 100, 1 << 20] {
                let mut end = 0;
                for range in blocks(bytes, pieces, most) {
                    assert_eq!((range.start, range.start % 8), (end, 0));
                    assert!(!range.is_empty() && (range.len() * pieces <= most || range.len() <= 8));
                    end = range.end;
                }
                assert_eq!(end, bytes / pieces, "{bytes} bytes in {pieces} pieces");
            }
        }
    }
}

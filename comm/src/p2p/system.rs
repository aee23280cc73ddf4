//! Reductions by the transport's system: blocks of the buffer go to the system and come back reduced.

use super::engine::{Engine, Running};
use super::failure::Stop;
use super::memory::OpMemory;
use super::pace::Pace;
use super::transport::{LostWhy, SystemReduction};
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
        let mut pace = Pace::start();
        for range in blocks(memory.bytes(), pieces, BLOCK) {
            running.group.take_raised()?;
            self.look_at_block(running, party, &mut pace)?;
            let input = self.system(running)?.input(pieces * range.len());
            for (piece, into) in input.chunks_exact_mut(range.len()).enumerate() {
                // SAFETY: the caller's promise; this thread alone accesses the buffer.
                into.copy_from_slice(unsafe { memory.slice(at(piece, &range)) });
            }
            self.system(running)?.begin(&running.called);
            self.await_block(running, party, &mut pace)?;
            pace.note(true);
            // SAFETY: as above.
            let result = unsafe { memory.slice_mut(at(own, &range)) };
            result.copy_from_slice(self.output(running)?.unwrap_or_default());
        }
        self.await_flush(running, party, &mut pace)
    }

    fn system(&mut self, running: Running<'_>) -> Result<&mut dyn SystemReduction, Stop> {
        let aborted = Stop::Found(Error::Aborted { rank: self.links.rank });
        self.links.transport.system_reduction(&running.called).ok_or(aborted)
    }

    /// Returns the result of the block, if it has ended.
    fn output(&mut self, running: Running<'_>) -> Result<Option<&[u8]>, Stop> {
        let rank = self.links.rank;
        let failed = |why: LostWhy| Stop::Found(Error::Lost { rank, why: why.to_string() });
        self.system(running)?.output().map_err(failed)
    }

    /// Waits for the result of the block that has begun.
    fn await_block(&mut self, running: Running<'_>, party: Party, pace: &mut Pace) -> Result<(), Stop> {
        let mut idle = 0;
        loop {
            let moved = self.links.poll();
            if self.output(running)?.is_some() {
                return Ok(());
            }
            self.look_at_party(running, party, false)?;
            self.look_at_block(running, party, pace)?;
            self.rest(running, moved, &mut idle);
        }
    }

    /// Fails a reduction that stands still after its deadline or after an abort, or goes on block by block after its deadline.
    fn look_at_block(&self, running: Running<'_>, party: Party, pace: &mut Pace) -> Result<(), Stop> {
        let looked = self.look_at_clock(running, party, false, pace);
        looked.map_err(|stop| any_other_may_be_late(stop, self.links.rank))
    }

    /// Waits until this rank's call has been sent to all.
    fn await_flush(&mut self, running: Running<'_>, party: Party, pace: &mut Pace) -> Result<(), Stop> {
        let mut idle = 0;
        while !self.links.is_flushed() {
            let moved = self.links.poll();
            pace.note(moved);
            self.look_at_clock(running, party, false, pace)?;
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
pub(super) mod tests {
    use super::super::hosts::Hosts;
    use super::super::in_process::streams;
    use super::super::seat::communicator;
    use super::super::tests::{Illness, Sick, counters};
    use super::super::transport::Transport;
    use super::*;
    use crate::{Called, Clock, Communicator, Faults, Op, Reduction};
    use meshstep_tensor::{Buffer, Category, DType, Meter};
    use std::thread;
    use std::time::{Duration, Instant};

    /// System that takes its time for each block and returns this rank's values, or fails.
    #[derive(Debug, Default)]
    pub(in crate::p2p) struct SlowSystem {
        input: Vec<u8>,
        ends: Option<Instant>,
        takes: Duration,
        fault: Option<LostWhy>,
    }

    impl SystemReduction for SlowSystem {
        fn input(&mut self, len: usize) -> &mut [u8] {
            self.input.resize(len, 0);
            &mut self.input
        }

        fn begin(&mut self, _: &Called) {
            self.ends = Some(Instant::now() + self.takes);
        }

        fn output(&self) -> Result<Option<&[u8]>, LostWhy> {
            let ended = self.ends.is_some_and(|ends| Instant::now() >= ends);
            self.fault.clone().map_or(Ok(ended.then_some(&self.input)), Err)
        }
    }

    /// Blocks of an operation, and the time that each takes: shorter than a transfer may stand still.
    const BLOCKS: usize = 12;
    const TAKES: Duration = Duration::from_millis(250);

    /// Reduces `BLOCKS` blocks on the systems of all ranks; returns each rank's result and the time that it took. Rank 0 aborts after
    /// `abort_after`, if that is given.
    fn reduce(
        systems: Vec<SlowSystem>,
        deadline: Duration,
        abort_after: Option<Duration>,
    ) -> Vec<(Result<(), Error>, Duration)> {
        let (n, hosts) = (systems.len(), Hosts::blocks(systems.len(), 1));
        let transports = streams::world(n, 4096, hosts.clone()).into_iter().zip(systems);
        let ranks = transports.map(|(inner, system)| {
            let (healthy, system) = (usize::MAX, Some(system));
            let transport = Sick { inner, healthy, illness: Illness::Ends, sent: counters(n), system };
            let streams = (Box::new(transport) as Box<dyn Transport>, hosts.clone());
            let comm = communicator(streams, Clock::real(), deadline, Faults::none()).unwrap();
            thread::spawn(move || {
                let len = BLOCKS * BLOCK / size_of::<f32>();
                let buffer = Buffer::zeroed(len, DType::F32, &Meter::new(), Category::Grads).unwrap();
                let begun = Instant::now();
                thread::scope(|scope| {
                    if let Some(after) = abort_after.filter(|_| comm.rank() == 0) {
                        let comm = &comm;
                        scope.spawn(move || (thread::sleep(after), comm.abort()));
                    }
                    let result = comm.complete(Op::all_reduce(Reduction::Sum), buffer).1;
                    (result, begun.elapsed())
                })
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    fn slow(ranks: usize) -> Vec<SlowSystem> {
        (0..ranks).map(|_| SlowSystem { takes: TAKES, ..SlowSystem::default() }).collect()
    }

    #[test]
    fn many_slow_blocks_are_given_up_after_the_deadline() {
        let deadline = Duration::from_millis(300);
        for (result, took) in reduce(slow(2), deadline, None) {
            assert!(matches!(result, Err(Error::Timeout { .. })), "{result:?}");
            assert!(took < deadline + Duration::from_secs(2), "{took:?}");
        }
    }

    #[test]
    fn an_abort_ends_a_reduction_between_two_blocks() {
        for (result, took) in reduce(slow(2), Duration::from_secs(60), Some(2 * TAKES)) {
            assert_eq!(result, Err(Error::Aborted { rank: 0 }));
            assert!(took < TAKES * BLOCKS as u32, "{took:?}");
        }
    }

    #[test]
    fn a_fault_of_the_system_is_its_ranks() {
        let mut systems = slow(4);
        let message = "no communicator left".to_owned();
        systems[3].fault = Some(LostWhy::System { what: "MPI_Comm_create_group", message });
        for (result, _) in reduce(systems, Duration::from_secs(60), None) {
            assert!(matches!(result, Err(Error::Lost { rank: 3, .. })), "{result:?}");
        }
    }

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

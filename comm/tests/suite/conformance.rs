//! The conformance suite: this crate's backends pass it, and a backend with any of these faults does not.

use crate::backends::{BACKENDS, Backend};
use meshstep_comm::conformance::{Nonconformance, check, check_within};
use meshstep_comm::{Action, Communicator, Error, InFlight, Op, Reduction, Stats, loopback};
use meshstep_tensor::{Buffer, Queue};
use std::sync::Arc;
use std::time::Duration;

#[test]
fn this_crates_backends_conform() {
    // Loopback and messages; a long run takes all.
    let count = if meshstep_cases::long() { BACKENDS.len() } else { 2 };
    for &backend in &BACKENDS[..count] {
        let report = check(|ranks| Ok::<_, Error>(backend.world(ranks)))
            .unwrap_or_else(|error| panic!("{backend:?}: {error}"));
        println!("{backend:?} {report}");
        let parts: Vec<&str> = report.parts.iter().map(|part| part.name).collect();
        assert_eq!(parts.len(), 10);
        assert!(report.parts.iter().all(|part| part.calls > 0), "{report}");
        if backend == Backend::Loopback {
            assert!(report.parts[0].calls > 5000, "{report}");
        }
    }
}

/// A fault of a backend.
#[derive(Clone, Copy, Debug, PartialEq)]
enum BackendFault {
    /// The last element of a long sum is another on one rank.
    Sum,
    /// A mean of 16-bit numbers is the sum.
    Mean,
    /// The maximum is the minimum.
    Max,
    /// A broadcast leaves the buffers alone.
    Broadcast,
    /// A gather mixes up two chunks.
    Gather,
    /// The keys of a split do not count.
    Keys,
    /// A mistake of the caller is another error.
    Mistake,
    /// An abort is forgotten.
    Abort,
    /// Rank 0 waits without an end at a barrier.
    Barrier,
    /// Rank 1 panics in an all-to-all.
    Panic,
    /// Every rank returns rank 0.
    Rank,
}

#[derive(Debug)]
struct FaultyRank(Arc<dyn Communicator>, BackendFault);

impl FaultyRank {
    /// Changes the call.
    fn changed(&self, op: Op) -> Op {
        match (self.1, op.action()) {
            (BackendFault::Max, Action::AllReduce(Reduction::Max)) => Op::all_reduce(Reduction::Min),
            (BackendFault::Broadcast, Action::Broadcast { .. }) => Op::barrier(),
            _ => op,
        }
    }

    /// Changes the result.
    fn spoil(&self, op: Op, buffer: &mut Buffer) {
        let (n, me) = (self.world_size(), self.0.rank());
        match (self.1, op.action()) {
            (BackendFault::Sum, Action::AllReduce(Reduction::Sum)) if me == 1 && buffer.len() > 1000 => {
                if let Ok(values) = buffer.typed_mut::<f32>() {
                    *values.last_mut().unwrap() += 1.0;
                }
            }
            (BackendFault::Mean, Action::AllReduce(Reduction::Mean)) => {
                if let Ok(values) = buffer.typed_mut::<meshstep_tensor::bf16>() {
                    values.iter_mut().for_each(|x| *x *= meshstep_tensor::bf16::from_f32(n as f32));
                }
            }
            (BackendFault::Gather, Action::AllGather) if n == 3 => {
                if let Ok(values) = buffer.typed_mut::<f64>() {
                    let chunk = values.len() / n;
                    values.rotate_left(chunk);
                }
            }
            (BackendFault::Barrier, Action::Barrier) if me == 0 => std::thread::sleep(Duration::MAX),
            (BackendFault::Panic, Action::AllToAll) if me == 1 => panic!("out of luck"),
            _ => {}
        }
    }
}

impl Communicator for FaultyRank {
    fn rank(&self) -> usize {
        if self.1 == BackendFault::Rank { 0 } else { self.0.rank() }
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn start(&self, op: Op, buffer: Buffer, after: &Queue) -> Result<InFlight, (Buffer, Error)> {
        self.0.start(self.changed(op), buffer, after).map_err(|(buffer, error)| match error {
            Error::Uneven { .. } if self.1 == BackendFault::Mistake => (buffer, Error::ZeroRanks),
            error => (buffer, error),
        })
    }

    fn complete(&self, op: Op, buffer: Buffer) -> (Buffer, Result<(), Error>) {
        let (mut buffer, result) = self.0.complete(self.changed(op), buffer);
        if result.is_ok() {
            self.spoil(op, &mut buffer);
        }
        (buffer, result)
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let key = if self.1 == BackendFault::Keys { 0 } else { key };
        Ok(self.0.split(color, key)?.map(|group| Arc::new(FaultyRank(group, self.1)) as _))
    }

    fn abort(&self) {
        if self.1 != BackendFault::Abort {
            self.0.abort();
        }
    }

    fn stats(&self) -> Stats {
        self.0.stats()
    }
}

/// Checks a backend with this fault.
fn found(fault: BackendFault) -> Nonconformance {
    let world = |ranks| -> Result<Vec<Arc<dyn Communicator>>, Error> {
        let world = loopback::world(loopback::Config::new(ranks))?;
        Ok(world.into_iter().map(|inner| Arc::new(FaultyRank(inner, fault)) as _).collect())
    };
    // A rank that hangs is in the first world, which takes milliseconds.
    let limit = if fault == BackendFault::Barrier { 5 } else { 120 };
    match check_within(Duration::from_secs(limit), world) {
        Ok(report) => panic!("{fault:?}: {report}"),
        Err(error) => error,
    }
}

#[test]
fn a_wrong_value_is_named_by_operation_rank_and_element() {
    let expect = |fault, [call, dtype]: [&str; 2], of: usize| {
        let error = found(fault);
        let Nonconformance::Value { operation, ranks, rank, element, .. } = error else {
            panic!("{fault:?}: {error}")
        };
        assert!(operation.starts_with(call) && operation.ends_with(dtype), "{operation}");
        assert_eq!(ranks, of, "{operation}");
        (rank, element)
    };
    assert_eq!(expect(BackendFault::Sum, ["all_reduce(sum) of 1023 ", "f32"], 2), (1, 1022));
    expect(BackendFault::Mean, ["all_reduce(mean) of ", "bf16"], 2);
    expect(BackendFault::Max, ["all_reduce(max) of ", "f32"], 2);
    assert_eq!(expect(BackendFault::Broadcast, ["broadcast from 0 of ", "f32"], 2).0, 1);
    expect(BackendFault::Gather, ["all_gather of ", "f64"], 3);
}

#[test]
fn a_wrong_group_is_found() {
    let error = found(BackendFault::Keys);
    assert!(
        matches!(&error, Nonconformance::Broken { operation, ranks: 4, .. } if operation == "split by color and key"),
        "{error}"
    );
}

#[test]
fn a_wrong_error_is_found() {
    let error = found(BackendFault::Mistake);
    let Nonconformance::Unrefused { operation, ranks: 2, .. } = &error else { panic!("{error}") };
    assert_eq!(operation, "all_gather of 3 f32, which is a mistake");
    let error = found(BackendFault::Abort);
    let Nonconformance::Unrefused { found, ranks: 1, rank: 0, .. } = &error else { panic!("{error}") };
    assert_eq!(found, "success");
}

#[test]
fn ranks_that_hang_panic_or_are_others_are_found() {
    let error = found(BackendFault::Panic);
    let panics =
        |operation: &str, message: &str| operation.starts_with("all_to_all") && message == "out of luck";
    assert!(
        matches!(&error, Nonconformance::Panics { operation, rank: 1, message, .. } if panics(operation, message)),
        "{error}"
    );
    let error = found(BackendFault::Barrier);
    let Nonconformance::Hangs { part: "collectives", ranks: 1, waiting, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(waiting, &[(0, "barrier".to_owned())]);
    let error = found(BackendFault::Rank);
    assert!(matches!(&error, Nonconformance::Identity { ranks: 2, rank: 1, .. }), "{error}");
}

#[test]
fn a_backend_without_a_world_is_found() {
    let error = check(|_| Err("no network")).unwrap_err();
    assert_eq!(error.to_string(), "no world of 1 ranks: no network");
}

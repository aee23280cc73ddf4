//! Fault injection for tests: a rank's operation is delayed, dropped, or corrupted.

use std::time::Duration;

/// Faults to inject into the operations of a [loopback world](crate::loopback::world), each identified by rank and by the number
/// of the rank's earlier operations. Groups made by `split` have none.
///
/// ```
/// use meshstep_comm::{Action, Clock, Communicator, Error, Faults, Kind, Op, Reduction, Traffic, loopback};
/// use meshstep_tensor::{Buffer, Category, Meter};
/// use std::time::Duration;
///
/// let faults = Faults::none().drop_op(1, 1); // rank 1 never arrives at its second operation
/// let config = loopback::Config { timeout: Duration::from_millis(50), clock: Clock::real(), faults, ..loopback::Config::new(2) };
/// let ranks = loopback::spawn_with(config, |comm| -> Result<Traffic, Error> {
///     let mut ones = Buffer::from_slice(&[1f32; 8], &Meter::new(), Category::Grads)?;
///     let op: Op = Op::all_reduce(Reduction::Sum);
///     assert_eq!(op.action(), Action::AllReduce(Reduction::Sum));
///     comm.all_reduce(&mut ones, Reduction::Sum)?;
///     let sent = comm.stats().of(Kind::AllReduce);
///     assert!(comm.all_reduce(&mut ones, Reduction::Sum).is_err()); // on both ranks, within the deadline
///     Ok(sent)
/// })?;
/// for sent in ranks {
///     assert_eq!(sent?, Traffic { operations: 1, bytes: 2 * 4 * 4 });
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    planned: Vec<(usize, u64, Fault)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Delay(Duration),
    Drop,
    CorruptInput,
    CorruptResult,
}

impl Faults {
    /// Returns a plan without faults.
    pub fn none() -> Self {
        Self::default()
    }

    /// Delays the rank's arrival at the operation by `by`, on the communicator's clock.
    pub fn delay(self, rank: usize, op_number: u64, by: Duration) -> Self {
        self.plan(rank, op_number, Fault::Delay(by))
    }

    /// Keeps the rank from arriving at the operation.
    pub fn drop_op(self, rank: usize, op_number: u64) -> Self {
        self.plan(rank, op_number, Fault::Drop)
    }

    /// Flips one bit in the middle of the rank's input, so that every reader gets the same wrong result.
    pub fn corrupt_input(self, rank: usize, op_number: u64) -> Self {
        self.plan(rank, op_number, Fault::CorruptInput)
    }

    /// Flips one bit in the middle of the rank's result, which then differs from the others'.
    pub fn corrupt_result(self, rank: usize, op_number: u64) -> Self {
        self.plan(rank, op_number, Fault::CorruptResult)
    }

    fn plan(mut self, rank: usize, op_number: u64, fault: Fault) -> Self {
        self.planned.push((rank, op_number, fault));
        self
    }

    /// Returns the faults of one operation of one rank.
    pub(crate) fn at(&self, rank: usize, op_number: u64) -> impl Iterator<Item = Fault> {
        self.planned.iter().filter(move |&&(r, n, _)| (r, n) == (rank, op_number)).map(|&(_, _, fault)| fault)
    }
}

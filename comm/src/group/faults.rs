//! Fault injection for tests: a rank's operation is delayed, dropped, or corrupted.

use std::time::Duration;

/// Faults to inject into the operations of a [loopback world](crate::loopback::world), each identified by rank and by the number
/// of the rank's earlier operations. Groups made by `split` have none.
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

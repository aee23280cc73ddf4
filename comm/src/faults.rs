//! What tests let go wrong: an operation of one rank that is late, never comes, or is damaged on its way.

use std::time::Duration;

/// Faults to inject into the operations of a [loopback world](crate::loopback::world), each named by rank and by how
/// many operations that rank started before. Groups made by `split` have none.
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
    /// No faults.
    pub fn none() -> Self {
        Self::default()
    }

    /// The rank comes to the operation `by` late, on the communicator's clock.
    pub fn delay(self, rank: usize, op_number: u64, by: Duration) -> Self {
        self.plan(rank, op_number, Fault::Delay(by))
    }

    /// The rank never comes to the operation.
    pub fn drop_op(self, rank: usize, op_number: u64) -> Self {
        self.plan(rank, op_number, Fault::Drop)
    }

    /// One bit in the middle of what the rank brings is flipped, so that whoever reads it gets the same wrong result.
    pub fn corrupt_input(self, rank: usize, op_number: u64) -> Self {
        self.plan(rank, op_number, Fault::CorruptInput)
    }

    /// One bit in the middle of what the rank gets is flipped: its result differs from the others'.
    pub fn corrupt_result(self, rank: usize, op_number: u64) -> Self {
        self.plan(rank, op_number, Fault::CorruptResult)
    }

    fn plan(mut self, rank: usize, op_number: u64, fault: Fault) -> Self {
        self.planned.push((rank, op_number, fault));
        self
    }

    /// What is to go wrong with one operation of one rank.
    pub(crate) fn at(&self, rank: usize, op_number: u64) -> impl Iterator<Item = Fault> {
        self.planned.iter().filter(move |&&(r, n, _)| (r, n) == (rank, op_number)).map(|&(_, _, fault)| fault)
    }
}

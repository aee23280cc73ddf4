//! Operations as small `Copy` data, and the checks that need no other rank.

use crate::Error;
use crate::communicator::checks::{
    check_dtype, check_even, check_peer, check_rank, check_reduced, check_reduction,
};
use meshstep_tensor::DType;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::mem::{Discriminant, discriminant};
use std::time::Duration;

/// One operation for [`Communicator::start`](crate::Communicator::start).
///
/// Every operation is in place: there is no second length to get wrong. `S` below is the buffer, `n` the number of
/// ranks, `r` this rank; *chunk* `q` is the `q`th of `n` equal contiguous parts. In a group of one rank an operation leaves every
/// bit of the buffer as it is, except that a factor multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Op {
    action: Action,
    within: Option<Duration>,
}

/// Action of an [`Op`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Action {
    /// Reduces the elements over all ranks; any length.
    AllReduce(Reduction),
    /// Reduces chunk `r` over all ranks; the other chunks are unspecified afterwards.
    ReduceScatter(Reduction),
    /// Copies every rank's own chunk to all ranks.
    AllGather,
    /// Reduces chunk `r` of one buffer and gathers chunks of another that are computed with it:
    /// [`Communicator::reduce_and_gather`](crate::Communicator::reduce_and_gather) runs it.
    ReduceAndGather(Reduction),
    /// Exchanges chunk `q` of rank `r` with chunk `r` of rank `q`.
    AllToAll,
    /// Copies the root's buffer to all ranks.
    Broadcast {
        /// Source rank.
        root: usize,
    },
    /// Sends the buffer to one rank, which calls [`Action::Recv`].
    Send {
        /// Receiving rank.
        to: usize,
    },
    /// Overwrites the buffer with that of one rank, which calls [`Action::Send`].
    Recv {
        /// Sending rank.
        from: usize,
    },
    /// Waits until every rank has called it; the buffer is not touched.
    Barrier,
    /// Forms one group per color, for [`Communicator::split`](crate::Communicator::split).
    Split {
        /// Ranks of equal color form a group; `None` joins no group.
        color: Option<u32>,
        /// Order within the group; ties are broken by rank in this group.
        key: i64,
    },
}

/// Reduction of one element over the ranks, always in the order of the ranks, so that the bits do not depend on the order of
/// arrival.
///
/// Sums and means are accumulated in a type wider than the buffer's (f32 in f64; bf16 and f16 in f32; f64 in two f64, the second
/// for the rounding error of the first; u64 in itself). The mean is divided in the accumulator, and the result is rounded once,
/// to nearest, ties to even.
///
/// Two reductions are equal if their factors have the same bits.
#[derive(Clone, Copy, Debug)]
pub enum Reduction {
    /// Sum; for `u64` modulo 2^64.
    Sum,
    /// Sum divided by the number of ranks; an error for integers.
    Mean,
    /// Sum of each rank's values times the rank's own factor: a weighted mean if the factors are shares of 1. An error for
    /// integers. Products are taken in the accumulator, to which the factor is rounded; for f64 the rounding error of a product
    /// is kept. 0 times a non-finite value is NaN.
    PreMulSum {
        /// Factor for this rank's values.
        factor: f64,
    },
    /// Sum in a binary tree over the ranks, each node rounded to the buffer's type: node `i` of level `l` is the sum of nodes `2i` and
    /// `2i + 1` of level `l - 1`, of which a missing one is left out. Twice as many ranks, each with half of another's contributions, give the
    /// same bits. Only backends that say so have it ([`Communicator::reduces_pairwise`](crate::Communicator::reduces_pairwise)).
    Pairwise,
    /// Maximum; NaN if any value is NaN. Among equal values (`-0.0` and `0.0`) the lowest rank's.
    Max,
    /// Minimum; NaN if any value is NaN. Among equal values (`-0.0` and `0.0`) the lowest rank's.
    Min,
    /// Sum modulo 2^64 of each of the first `sums` elements, and maximum of each of the others: two small reductions in one
    /// operation. For an all-reduce of `u64`; else an error.
    SumThenMax {
        /// Number of elements that are summed; all of them, if the buffer has no more.
        sums: usize,
    },
}

impl Reduction {
    /// Returns true if `self` and `other` are the same reduction; factors may differ between ranks.
    pub(crate) fn agrees_with(self, other: Reduction) -> bool {
        match (self, other) {
            (Reduction::SumThenMax { sums: mine }, Reduction::SumThenMax { sums: theirs }) => mine == theirs,
            _ => discriminant(&self) == discriminant(&other),
        }
    }

    /// Returns the reduction of element `index`, and the end of the elements that it is for.
    #[inline(always)]
    pub(crate) fn of_element(self, index: usize) -> (Reduction, usize) {
        match self {
            Reduction::SumThenMax { sums } if index < sums => (Reduction::Sum, sums),
            Reduction::SumThenMax { .. } => (Reduction::Max, usize::MAX),
            other => (other, usize::MAX),
        }
    }

    /// What distinguishes this reduction from others of its kind, as a word: the bits of a factor, or a number of elements.
    pub(crate) fn detail(self) -> u64 {
        if let Reduction::SumThenMax { sums } = self { sums as u64 } else { self.factor().to_bits() }
    }

    /// Factor for this rank's values.
    pub(crate) fn factor(self) -> f64 {
        if let Reduction::PreMulSum { factor } = self { factor } else { 1.0 }
    }

    fn identity(self) -> (Discriminant<Self>, u64) {
        (discriminant(&self), self.detail())
    }
}

impl PartialEq for Reduction {
    fn eq(&self, other: &Self) -> bool {
        self.identity() == other.identity()
    }
}

impl Eq for Reduction {}

impl Hash for Reduction {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.identity().hash(state);
    }
}

impl Op {
    /// Reduces the elements over all ranks.
    pub const fn all_reduce(reduction: Reduction) -> Self {
        Self::of(Action::AllReduce(reduction))
    }

    /// Reduces chunk `r` over all ranks.
    pub const fn reduce_scatter(reduction: Reduction) -> Self {
        Self::of(Action::ReduceScatter(reduction))
    }

    /// Copies every rank's own chunk to all ranks.
    pub const fn all_gather() -> Self {
        Self::of(Action::AllGather)
    }

    /// Exchanges chunk `q` of rank `r` with chunk `r` of rank `q`.
    pub const fn all_to_all() -> Self {
        Self::of(Action::AllToAll)
    }

    /// Copies the root's buffer to all ranks.
    pub const fn broadcast(root: usize) -> Self {
        Self::of(Action::Broadcast { root })
    }

    /// Sends the buffer to rank `to`.
    pub const fn send(to: usize) -> Self {
        Self::of(Action::Send { to })
    }

    /// Overwrites the buffer with that of rank `from`.
    pub const fn recv(from: usize) -> Self {
        Self::of(Action::Recv { from })
    }

    /// Waits for every rank.
    pub const fn barrier() -> Self {
        Self::of(Action::Barrier)
    }

    /// Creates an operation of any action, with the communicator's deadline.
    pub const fn of(action: Action) -> Self {
        Op { action, within: None }
    }

    /// Sets a deadline: how long this rank, once it is the operation's turn, waits for the others.
    pub const fn within(mut self, deadline: Duration) -> Self {
        self.within = Some(deadline);
        self
    }

    /// Action of the operation.
    pub const fn action(self) -> Action {
        self.action
    }

    /// Deadline, if it differs from the communicator's.
    pub const fn deadline(self) -> Option<Duration> {
        self.within
    }

    /// Checks the operation for errors that need no other rank. A backend calls this first, so that caller errors leave the
    /// communicator usable.
    pub fn check(self, rank: usize, world_size: usize, len: usize, dtype: DType) -> Result<(), Error> {
        if self.action.moves_data() {
            check_dtype(dtype)?;
        }
        match self.action {
            Action::AllReduce(reduction) => check_reduction(reduction, dtype),
            Action::ReduceScatter(reduction) => check_reduced(reduction, dtype, len, world_size),
            Action::ReduceAndGather(_) => Err(Error::NeedsWriter),
            Action::AllGather | Action::AllToAll => check_even(len, world_size),
            Action::Broadcast { root } => check_rank(root, world_size),
            Action::Send { to: peer } | Action::Recv { from: peer } => check_peer(peer, rank, world_size),
            Action::Barrier | Action::Split { .. } => Ok(()),
        }
    }
}

impl Action {
    /// Checks an operation as [`Op::check`] does, which may be a reduction with a writer.
    pub(crate) fn check_written(
        self,
        rank: usize,
        world_size: usize,
        len: usize,
        dtype: DType,
    ) -> Result<(), Error> {
        let Action::ReduceAndGather(reduction) = self else {
            return Op::of(self).check(rank, world_size, len, dtype);
        };
        check_dtype(dtype)?;
        check_reduced(reduction, dtype, len, world_size)
    }

    /// Peer of a send or a receive; `None` for a collective.
    pub(crate) fn peer(self) -> Option<usize> {
        match self {
            Action::Send { to } => Some(to),
            Action::Recv { from } => Some(from),
            _ => None,
        }
    }

    /// Returns true if `self` and `other` are the same collective.
    pub(crate) fn agrees_with(self, other: Action) -> bool {
        match (self, other) {
            (Action::Split { .. }, Action::Split { .. }) => true,
            (Action::AllReduce(mine), Action::AllReduce(theirs))
            | (Action::ReduceScatter(mine), Action::ReduceScatter(theirs))
            | (Action::ReduceAndGather(mine), Action::ReduceAndGather(theirs)) => mine.agrees_with(theirs),
            _ => self == other,
        }
    }

    /// Reduction of the action, if any.
    pub(crate) fn reduction(self) -> Option<Reduction> {
        match self {
            Action::AllReduce(reduction)
            | Action::ReduceScatter(reduction)
            | Action::ReduceAndGather(reduction) => Some(reduction),
            _ => None,
        }
    }

    /// Factor for this rank's values.
    pub(crate) fn factor(self) -> f64 {
        self.reduction().map_or(1.0, Reduction::factor)
    }

    /// Returns true if the buffer is the result as it is: in a group of one rank, without a factor.
    pub(crate) fn is_done_alone(self, world_size: usize) -> bool {
        world_size == 1 && self.factor() == 1.0
    }

    /// Returns true if the action moves data, so that lengths and types of the buffers must agree.
    pub(crate) fn moves_data(self) -> bool {
        !matches!(self, Action::Barrier | Action::Split { .. })
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Reduction::Sum => "sum",
            Reduction::Mean => "mean",
            Reduction::Pairwise => "pairwise sum",
            Reduction::PreMulSum { factor } => return f.pad(&format!("pre_mul_sum by {factor:?}")),
            Reduction::Max => "max",
            Reduction::Min => "min",
            Reduction::SumThenMax { sums } => return f.pad(&format!("sum of {sums}, then max")),
        })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::AllReduce(reduction) => write!(f, "all_reduce({reduction})"),
            Action::ReduceScatter(reduction) => write!(f, "reduce_scatter({reduction})"),
            Action::AllGather => f.write_str("all_gather"),
            Action::ReduceAndGather(reduction) => write!(f, "reduce_and_gather({reduction})"),
            Action::AllToAll => f.write_str("all_to_all"),
            Action::Broadcast { root } => write!(f, "broadcast from {root}"),
            Action::Send { to } => write!(f, "send to {to}"),
            Action::Recv { from } => write!(f, "recv from {from}"),
            Action::Barrier => f.write_str("barrier"),
            Action::Split { .. } => f.write_str("split"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caller_errors_are_refused_by_name() {
        let sum = Op::reduce_scatter(Reduction::Sum);
        assert_eq!(
            sum.check(0, 4, 10, DType::F32),
            Err(Error::Uneven { len: 10, world_size: 4, padded: 12 })
        );
        let words = Reduction::SumThenMax { sums: 3 };
        assert_eq!(Op::all_reduce(words).check(0, 4, 10, DType::U64), Ok(()));
        assert_eq!(
            Op::all_reduce(words).check(0, 4, 8, DType::F64),
            Err(Error::WordsOnly { dtype: DType::F64 })
        );
        assert_eq!(Op::reduce_scatter(words).check(0, 4, 8, DType::U64), Err(Error::WholeOnly));
        let mean = Op::all_reduce(Reduction::Mean);
        assert_eq!(mean.check(0, 4, 8, DType::U64), Err(Error::MeanOfIntegers { dtype: DType::U64 }));
        let shares = Op::reduce_scatter(Reduction::PreMulSum { factor: 0.25 });
        assert_eq!(shares.check(0, 4, 8, DType::U64), Err(Error::FactorsOfIntegers { dtype: DType::U64 }));
        assert_eq!(
            Op::broadcast(4).check(0, 4, 8, DType::F32),
            Err(Error::InvalidRank { rank: 4, world_size: 4 })
        );
        assert_eq!(Op::send(2).check(2, 4, 8, DType::F32), Err(Error::ToSelf { rank: 2 }));
        assert_eq!(
            Op::recv(9).check(2, 4, 8, DType::F32),
            Err(Error::InvalidRank { rank: 9, world_size: 4 })
        );
    }

    #[test]
    fn nothing_is_even_and_any_length_reduces() {
        for op in [Op::all_gather(), Op::all_to_all(), Op::reduce_scatter(Reduction::Mean)] {
            assert_eq!(op.check(0, 7, 0, DType::F16), Ok(()));
        }
        assert_eq!(Op::all_reduce(Reduction::Max).check(0, 4, 10, DType::U64), Ok(()));
    }

    #[test]
    fn factors_are_each_ranks_own() {
        let by = |factor| Reduction::PreMulSum { factor };
        let (all, part) = (Action::AllReduce, Action::ReduceScatter);
        assert!(all(by(0.5)).agrees_with(all(by(-3.0))) && part(by(0.0)).agrees_with(part(by(f64::NAN))));
        assert!(!all(by(1.0)).agrees_with(all(Reduction::Sum)) && !all(by(1.0)).agrees_with(part(by(1.0))));
        assert!(by(f64::NAN) == by(f64::NAN) && by(0.5) != by(0.25) && by(1.0) != Reduction::Sum);
        let words = |sums| Action::AllReduce(Reduction::SumThenMax { sums });
        assert!(words(3).agrees_with(words(3)) && !words(3).agrees_with(words(4)) && words(3) != words(4));
        for (factor, shown) in [(0.25, "0.25"), (1.0, "1.0"), (1e300, "1e300"), (f64::NAN, "NaN")] {
            assert_eq!(all(by(factor)).to_string(), format!("all_reduce(pre_mul_sum by {shown})"));
        }
    }
}

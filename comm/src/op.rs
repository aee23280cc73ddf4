//! What a rank asks of its group, as small `Copy` data, and what can be refused without asking anybody.

use crate::Error;
use meshstep_tensor::DType;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::mem::{Discriminant, discriminant};
use std::time::Duration;

/// One operation, to be given to [`Communicator::start`](crate::Communicator::start) with the buffer it works on.
///
/// Every operation is in place: there is no second length to get wrong. `S` below is the buffer, `n` the number of
/// ranks, `r` this rank; *chunk* `q` is the `q`th of `n` equal contiguous parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Op {
    action: Action,
    within: Option<Duration>,
}

/// What an [`Op`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Action {
    /// Every element becomes the reduction of that element over all ranks; any length.
    AllReduce(Reduction),
    /// Chunk `r` becomes the reduction of chunk `r` over all ranks; the other chunks are unspecified afterwards.
    ReduceScatter(Reduction),
    /// Every rank's own chunk goes to all ranks.
    AllGather,
    /// Chunk `q` of rank `r` changes places with chunk `r` of rank `q`.
    AllToAll,
    /// The root's buffer goes to all ranks.
    Broadcast {
        /// Whose buffer is copied.
        root: usize,
    },
    /// The buffer goes to one rank, which calls [`Action::Recv`].
    Send {
        /// Who receives.
        to: usize,
    },
    /// The buffer is overwritten by that of one rank, which calls [`Action::Send`].
    Recv {
        /// Who sends.
        from: usize,
    },
    /// Returns once every rank has called it; the buffer is carried along untouched.
    Barrier,
    /// Forms one group per colour; [`Communicator::split`](crate::Communicator::split) calls it.
    Split {
        /// Ranks of equal colour form a group; `None` joins no group.
        color: Option<u32>,
        /// Order within the group; ties by rank in this one.
        key: i64,
    },
}

/// How elements of several ranks become one, always in the order of the ranks, so that the bits do not depend on who
/// arrives first.
///
/// Sums and means are accumulated wider than the buffer's type (f32 in f64; bf16 and f16 in f32; f64 in two f64, the second
/// of what the first rounds off; u64 in itself), the mean is divided in the accumulator, and the result is rounded once, to
/// nearest, ties to even.
///
/// Two are equal where their factors have the same bits.
#[derive(Clone, Copy, Debug)]
pub enum Reduction {
    /// The sum; of `u64` modulo 2^64.
    Sum,
    /// The sum divided by the number of ranks; refused for integers.
    Mean,
    /// The sum of each rank's values times its own factor, which need not be the other ranks': a weighted mean where factors are
    /// shares of 1. Refused for integers. Products are taken in the accumulator, to which the factor is rounded; of f64 they
    /// keep what they round off. 0 times what is not finite is NaN.
    PreMulSum {
        /// What this rank's values are multiplied by.
        factor: f64,
    },
    /// The largest; NaN if any is NaN. Of equal values (`-0.0` and `0.0`) the lowest rank's.
    Max,
    /// The smallest; NaN if any is NaN. Of equal values (`-0.0` and `0.0`) the lowest rank's.
    Min,
}

impl Reduction {
    /// Whether ranks that reduce by `self` and `other` do the same: each has its own factor.
    pub(crate) fn agrees_with(self, other: Reduction) -> bool {
        discriminant(&self) == discriminant(&other)
    }

    /// What a rank's values are multiplied by.
    pub(crate) fn factor(self) -> f64 {
        if let Reduction::PreMulSum { factor } = self { factor } else { 1.0 }
    }

    fn identity(self) -> (Discriminant<Self>, u64) {
        (discriminant(&self), self.factor().to_bits())
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
    /// Every element becomes its reduction over all ranks.
    pub const fn all_reduce(reduction: Reduction) -> Self {
        Self::of(Action::AllReduce(reduction))
    }

    /// Chunk `r` becomes its reduction over all ranks.
    pub const fn reduce_scatter(reduction: Reduction) -> Self {
        Self::of(Action::ReduceScatter(reduction))
    }

    /// Every rank's own chunk goes to all ranks.
    pub const fn all_gather() -> Self {
        Self::of(Action::AllGather)
    }

    /// Chunk `q` of rank `r` changes places with chunk `r` of rank `q`.
    pub const fn all_to_all() -> Self {
        Self::of(Action::AllToAll)
    }

    /// The root's buffer goes to all ranks.
    pub const fn broadcast(root: usize) -> Self {
        Self::of(Action::Broadcast { root })
    }

    /// The buffer goes to rank `to`.
    pub const fn send(to: usize) -> Self {
        Self::of(Action::Send { to })
    }

    /// The buffer is overwritten by that of rank `from`.
    pub const fn recv(from: usize) -> Self {
        Self::of(Action::Recv { from })
    }

    /// Waits for every rank.
    pub const fn barrier() -> Self {
        Self::of(Action::Barrier)
    }

    /// Any action, with the communicator's own deadline.
    pub const fn of(action: Action) -> Self {
        Op { action, within: None }
    }

    /// The same with a deadline of its own: how long this rank, once the operation's turn has come, waits for others.
    pub const fn within(mut self, deadline: Duration) -> Self {
        self.within = Some(deadline);
        self
    }

    /// What is done.
    pub const fn action(self) -> Action {
        self.action
    }

    /// The deadline, where it is not the communicator's.
    pub const fn deadline(self) -> Option<Duration> {
        self.within
    }

    /// Refuses what is wrong whatever the other ranks do. A backend calls this first, so that caller errors leave the
    /// communicator as it was.
    pub fn check(self, rank: usize, world_size: usize, len: usize, dtype: DType) -> Result<(), Error> {
        if self.action.moves_data() {
            check_dtype(dtype)?;
        }
        match self.action {
            Action::AllReduce(reduction) => check_reduction(reduction, dtype),
            Action::ReduceScatter(reduction) => {
                check_reduction(reduction, dtype)?;
                check_even(len, world_size)
            }
            Action::AllGather | Action::AllToAll => check_even(len, world_size),
            Action::Broadcast { root } => check_rank(root, world_size),
            Action::Send { to: peer } | Action::Recv { from: peer } => check_peer(peer, rank, world_size),
            Action::Barrier | Action::Split { .. } => Ok(()),
        }
    }
}

impl Action {
    /// The one rank this waits for, where it waits for one rather than for all.
    pub(crate) fn peer(self) -> Option<usize> {
        match self {
            Action::Send { to } => Some(to),
            Action::Recv { from } => Some(from),
            _ => None,
        }
    }

    /// Whether ranks that call `self` and `other` call the same collective.
    pub(crate) fn agrees_with(self, other: Action) -> bool {
        match (self, other) {
            (Action::Split { .. }, Action::Split { .. }) => true,
            (Action::AllReduce(mine), Action::AllReduce(theirs))
            | (Action::ReduceScatter(mine), Action::ReduceScatter(theirs)) => mine.agrees_with(theirs),
            _ => self == other,
        }
    }

    /// How it reduces, if it does.
    pub(crate) fn reduction(self) -> Option<Reduction> {
        match self {
            Action::AllReduce(reduction) | Action::ReduceScatter(reduction) => Some(reduction),
            _ => None,
        }
    }

    /// What this rank's values are multiplied by on the way.
    pub(crate) fn factor(self) -> f64 {
        self.reduction().map_or(1.0, Reduction::factor)
    }

    /// Whether the length and type of the buffers must agree.
    pub(crate) fn moves_data(self) -> bool {
        !matches!(self, Action::Barrier | Action::Split { .. })
    }
}

fn check_dtype(dtype: DType) -> Result<(), Error> {
    match dtype {
        DType::F32 | DType::F64 | DType::BF16 | DType::F16 | DType::U64 => Ok(()),
        _ => Err(Error::UnsupportedDType { dtype }),
    }
}

fn check_reduction(reduction: Reduction, dtype: DType) -> Result<(), Error> {
    match reduction {
        Reduction::Mean if !dtype.is_float() => Err(Error::MeanOfIntegers { dtype }),
        Reduction::PreMulSum { .. } if !dtype.is_float() => Err(Error::FactorsOfIntegers { dtype }),
        _ => Ok(()),
    }
}

fn check_even(len: usize, world_size: usize) -> Result<(), Error> {
    if len.is_multiple_of(world_size) {
        return Ok(());
    }
    Err(Error::Uneven { len, world_size, padded: len.next_multiple_of(world_size) })
}

fn check_rank(rank: usize, world_size: usize) -> Result<(), Error> {
    if rank < world_size { Ok(()) } else { Err(Error::InvalidRank { rank, world_size }) }
}

fn check_peer(peer: usize, rank: usize, world_size: usize) -> Result<(), Error> {
    check_rank(peer, world_size)?;
    if peer == rank { Err(Error::ToSelf { rank }) } else { Ok(()) }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Reduction::Sum => "sum",
            Reduction::Mean => "mean",
            Reduction::PreMulSum { factor } => return f.pad(&format!("pre_mul_sum by {factor:?}")),
            Reduction::Max => "max",
            Reduction::Min => "min",
        })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::AllReduce(reduction) => write!(f, "all_reduce({reduction})"),
            Action::ReduceScatter(reduction) => write!(f, "reduce_scatter({reduction})"),
            Action::AllGather => f.write_str("all_gather"),
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
    fn what_one_rank_can_see_is_refused_by_name() {
        let sum = Op::reduce_scatter(Reduction::Sum);
        assert_eq!(
            sum.check(0, 4, 10, DType::F32),
            Err(Error::Uneven { len: 10, world_size: 4, padded: 12 })
        );
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
        for (factor, shown) in [(0.25, "0.25"), (1.0, "1.0"), (1e300, "1e300"), (f64::NAN, "NaN")] {
            assert_eq!(all(by(factor)).to_string(), format!("all_reduce(pre_mul_sum by {shown})"));
        }
    }
}

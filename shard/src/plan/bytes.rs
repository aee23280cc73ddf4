//! Bytes that a rank holds and sends, by purpose.

use crate::config::stage::Stage;
use meshstep_optim::{Sees, TensorSums};
use meshstep_tensor::{Category, DType};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul};

/// Bytes one rank holds, by category.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Memory {
    /// Parameters.
    pub params: u64,
    /// Sharded parameters that are gathered: room for any two consecutive units, one being read and the next in flight.
    pub gathered: u64,
    /// Gradients that are kept.
    pub grads: u64,
    /// Optimizer state.
    pub state: u64,
    /// f32 masters of 16-bit parameters, or the remainders kept instead.
    pub master: u64,
    /// Gradients in flight, when gradients are handed over in bucket order.
    pub buckets: u64,
    /// Vectors of the step's exchange, and steps of matrices that several ranks hold ([`MatrixExchange`](crate::MatrixExchange)).
    pub staging: u64,
}

/// Type, purpose and number of elements of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VectorSpec {
    pub(crate) dtype: DType,
    pub(crate) category: Category,
    pub(crate) len: usize,
}

impl Memory {
    /// Returns the sum of all categories.
    pub fn total(&self) -> u64 {
        self.by_category().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns the bytes by the names that a meter counts under.
    pub fn by_category(&self) -> [(Category, u64); 7] {
        [
            (Category::Params, self.params),
            (Category::Gathered, self.gathered),
            (Category::Grads, self.grads),
            (Category::State, self.state),
            (Category::Master, self.master),
            (Category::Buckets, self.buckets),
            (Category::Staging, self.staging),
        ]
    }
}

impl Add for Memory {
    type Output = Memory;

    fn add(self, other: Memory) -> Memory {
        Memory {
            params: self.params + other.params,
            gathered: self.gathered + other.gathered,
            grads: self.grads + other.grads,
            state: self.state + other.state,
            master: self.master + other.master,
            buckets: self.buckets + other.buckets,
            staging: self.staging + other.staging,
        }
    }
}

/// Memory of `ranks` ranks that hold this much each.
impl Mul<u64> for Memory {
    type Output = Memory;

    fn mul(self, ranks: u64) -> Memory {
        Memory {
            params: self.params * ranks,
            gathered: self.gathered * ranks,
            grads: self.grads * ranks,
            state: self.state * ranks,
            master: self.master * ranks,
            buckets: self.buckets * ranks,
            staging: self.staging * ranks,
        }
    }
}

/// Bytes one rank sends in a step with one micro-batch, as ring algorithms send them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Wire {
    /// Reduction of gradients over the ranks that divide the state.
    pub reduce: u64,
    /// Further reductions, over replicas of the state and over parts of a gradient.
    pub extra_reductions: u64,
    /// Gathers of updated parameters; at stage 3 two of each unit, for the forward and for the backward pass.
    pub gather: u64,
    /// Steps of matrices that several ranks hold: pieces to the rank that transforms the matrix, and back.
    pub matrices: u64,
    /// Decision of the step: the exchange of scalars, two with [`NonFinite::Propagate`](crate::NonFinite::Propagate), and the
    /// sums over whole tensors that some rules need.
    pub exchange: u64,
}

impl Wire {
    /// Returns the sum of all purposes.
    pub fn total(&self) -> u64 {
        self.reduce + self.extra_reductions + self.gather + self.matrices + self.exchange
    }
}

impl Add for Wire {
    type Output = Wire;

    fn add(self, other: Wire) -> Wire {
        Wire {
            reduce: self.reduce + other.reduce,
            extra_reductions: self.extra_reductions + other.extra_reductions,
            gather: self.gather + other.gather,
            matrices: self.matrices + other.matrices,
            exchange: self.exchange + other.exchange,
        }
    }
}

/// Bytes of `ranks` ranks that send this much each.
impl Mul<u64> for Wire {
    type Output = Wire;

    fn mul(self, ranks: u64) -> Wire {
        Wire {
            reduce: self.reduce * ranks,
            extra_reductions: self.extra_reductions * ranks,
            gather: self.gather * ranks,
            matrices: self.matrices * ranks,
            exchange: self.exchange * ranks,
        }
    }
}

/// Implements `AddAssign` and `Sum`.
macro_rules! sums {
    ($($bytes:ident),*) => {$(
        impl AddAssign for $bytes {
            fn add_assign(&mut self, other: $bytes) {
                *self = *self + other;
            }
        }

        impl Sum for $bytes {
            fn sum<I: Iterator<Item = $bytes>>(all: I) -> $bytes {
                all.fold($bytes::default(), Add::add)
            }
        }
    )*};
}

sums!(Memory, Wire);

/// Returns the bytes that `rank` of `n` sends to all-reduce `len` elements on a ring: all chunks except its own, twice; `len`
/// need not divide.
pub fn ring_all_reduce(len: usize, n: usize, rank: usize, size: usize) -> u64 {
    let own = len / n + usize::from(rank < len % n);
    (2 * (len - own) * size) as u64
}

/// Returns the bytes that `rank` of `n` forwards of a broadcast: all of it, unless it is the last of the ring.
pub(crate) fn ring_broadcast(owner: usize, len: usize, n: usize, rank: usize, size: usize) -> u64 {
    let last = (owner + n - 1) % n;
    if rank == last { 0 } else { (len * size) as u64 }
}

/// Returns the first rank of `n` that sends as much as `rank` to all-reduce each of these lengths.
pub(crate) fn alike(lens: impl IntoIterator<Item = usize>, n: usize, rank: usize) -> usize {
    lens.into_iter().map(|len| len % n).filter(|&longer| longer <= rank).max().unwrap_or(0)
}

/// Returns the words of the fold for `count` parameters if their rule needs sums; 0 if tensors are whole.
pub(crate) fn fold_words(sees: Sees, stage: Stage, count: usize) -> usize {
    if stage.cuts_state() && sees == Sees::TensorSums { count * TensorSums::WORDS } else { 0 }
}

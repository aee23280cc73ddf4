//! Norms of gradients whose bits do not depend on how the gradients are cut, ordered, spread over cores or ranks.

mod block;
mod dot;
mod exact;
mod extent;
mod lanes;
mod sum;

use crate::check::check_isa;
use crate::number::Stored;
use crate::{Error, Isa};
pub(crate) use block::{Adder, Ahead, Blocks, LEN as BLOCK_LEN, Source, Wide};
pub(crate) use extent::Extent;
use meshstep_tensor::{DType, Slice, bf16, f16};

pub(crate) use dot::{CHUNK, Chunk, add_dot};
pub use exact::ExactSum;
pub use sum::NormSum;

/// Which norm of a vector.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Norm {
    /// The sum of magnitudes.
    L1,
    /// The root of the sum of squares.
    #[default]
    L2,
    /// The largest magnitude.
    Inf,
    /// `(sum |x|^p)^(1/p)` for a finite `p > 0`. Not fast, and powers round, alike everywhere; an element whose power is
    /// beyond f64 counts as not finite.
    P(f64),
}

impl Norm {
    /// Whether there is such a norm.
    pub fn check(&self) -> Result<(), Error> {
        match *self {
            Norm::P(p) if !(p > 0.0 && p.is_finite()) => {
                Err(Error::Scalar { name: "p of a p-norm", value: p, works: "a finite p > 0, or Norm::Inf" })
            }
            _ => Ok(()),
        }
    }
}

/// A norm on its way: integers only, so adding in any order, in any split, on any number of ranks gives the same bits.
///
/// Elements that are not finite are counted and otherwise left out.
///
/// ```
/// use meshstep_optim::{Norm, NormAccumulator};
///
/// let grads = [3f32, -4.0, f32::NAN];
/// let mut norm = NormAccumulator::new(Norm::L2);
/// norm.add(grads[..].into())?;
/// assert_eq!((norm.finish(), norm.non_finite()), (5.0, 1));
/// # Ok::<(), meshstep_optim::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct NormAccumulator {
    norm: Norm,
    sum: ExactSum,
    max_bits: u64,
    non_finite: u64,
}

/// Above this many elements an addition is split in two; below, starting a second thread costs more than it saves.
const SPLIT_FROM: usize = 128 << 10;

impl NormAccumulator {
    /// The norm of nothing.
    pub fn new(norm: Norm) -> Self {
        NormAccumulator { norm, sum: ExactSum::new(), max_bits: 0, non_finite: 0 }
    }

    /// An accumulator out of its parts, added over ranks (`max_bits`: the largest).
    pub fn from_parts(norm: Norm, sum: ExactSum, max_bits: u64, non_finite: u64) -> Self {
        NormAccumulator { norm, sum, max_bits, non_finite }
    }

    /// Forgets what was added.
    pub fn reset(&mut self) {
        *self = NormAccumulator::new(self.norm);
    }

    /// Adds every element of `values`: f32, f64, bf16 or f16.
    pub fn add(&mut self, values: Slice<'_>) -> Result<(), Error> {
        self.add_on(Isa::detect(), values)
    }

    /// [`add`](Self::add) with given instructions, for tests and benches: the bits are the same with any.
    pub fn add_on(&mut self, isa: Isa, values: Slice<'_>) -> Result<(), Error> {
        check_isa(isa)?;
        self.norm.check()?;
        match values.dtype() {
            DType::F32 => self.spread::<f32>(isa, values.typed()?),
            DType::F64 => self.spread::<f64>(isa, values.typed()?),
            DType::BF16 => self.spread::<bf16>(isa, values.typed()?),
            DType::F16 => self.spread::<f16>(isa, values.typed()?),
            given => {
                return Err(Error::DType {
                    what: "what a norm is of",
                    given,
                    works: "f32, f64, bf16 or f16",
                });
            }
        }
        Ok(())
    }

    /// Counts what of `values` is not finite, and adds nothing: for elements that count in the norm elsewhere.
    pub fn watch(&mut self, values: Slice<'_>) -> Result<(), Error> {
        let mut seen = NormAccumulator::new(Norm::Inf);
        seen.add(values)?;
        self.non_finite += seen.non_finite;
        Ok(())
    }

    /// Adds what another accumulator of the same norm has.
    ///
    /// # Panics
    /// If the norms differ.
    pub fn merge(&mut self, other: &NormAccumulator) {
        assert_eq!(self.norm, other.norm, "accumulators of one norm merge");
        self.sum.merge(&other.sum);
        self.max_bits = self.max_bits.max(other.max_bits);
        self.non_finite += other.non_finite;
    }

    /// The norm of all finite elements added; 0 of none.
    pub fn finish(&self) -> f64 {
        match self.norm {
            Norm::L1 => self.sum.to_f64(),
            Norm::L2 => self.sum.sqrt(),
            Norm::Inf => f64::from_bits(self.max_bits),
            Norm::P(p) => libm::pow(self.sum.to_f64(), p.recip()),
        }
    }

    /// Which norm this is.
    pub fn norm(&self) -> Norm {
        self.norm
    }

    /// The sum of magnitudes, squares or powers; nothing for [`Norm::Inf`].
    pub fn sum(&self) -> &ExactSum {
        &self.sum
    }

    /// The largest finite magnitude as the bits of an f64, which order as unsigned integers.
    pub fn max_bits(&self) -> u64 {
        self.max_bits
    }

    /// Elements that were infinite or NaN.
    pub fn non_finite(&self) -> u64 {
        self.non_finite
    }

    /// Adds every element of `values`: halves them until there are few, the halves side by side.
    pub(crate) fn spread<X: Source>(&mut self, isa: Isa, values: &[X]) {
        if values.len() <= SPLIT_FROM || rayon::current_num_threads() == 1 {
            return self.inline(isa, values);
        }
        let (left, right) = values.split_at((values.len() / 2).next_multiple_of(block::LEN));
        let mut other = NormAccumulator::new(self.norm);
        rayon::join(|| self.spread(isa, left), || other.spread(isa, right));
        self.merge(&other);
    }

    fn inline<X: Source>(&mut self, isa: Isa, values: &[X]) {
        match (isa, self.norm) {
            (Isa::Reference, _) | (_, Norm::P(_)) => {
                values.iter().for_each(|x| self.add_plainly(x.exactly()))
            }
            _ => isa.run(Blocks { values, into: self }),
        }
    }

    /// One element, slow and obvious: the definition.
    pub(crate) fn add_plainly(&mut self, x: f64) {
        let power = if let Norm::P(p) = self.norm { libm::pow(x.abs(), p) } else { 0.0 };
        if !x.is_finite() || !power.is_finite() {
            self.non_finite += 1;
            return;
        }
        self.max_bits = self.max_bits.max(x.abs().to_bits());
        match self.norm {
            Norm::L1 => self.sum.add(x.abs()),
            Norm::L2 => self.sum.add_square(x),
            Norm::Inf => (),
            Norm::P(_) => self.sum.add(power),
        }
    }
}

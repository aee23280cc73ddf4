//! Norms of gradients with bits that do not depend on cuts, order, cores or ranks.

mod block;
pub(crate) mod clip;
mod dot;
mod exact;
mod extent;
mod lanes;
mod row_dots;
pub(crate) mod tensor_sums;

use crate::engine::check::check_isa;
use crate::engine::cpu::Cpu;
use crate::precision::number::Stored;
use crate::{Error, Isa};
pub(crate) use block::{Adder, Ahead, Blocks, LEN as BLOCK_LEN, Source, Wide};
pub(crate) use extent::Extent;
use meshstep_tensor::{DType, Slice, Threads, bf16, f16};

pub(crate) use dot::{CHUNK, Chunk, add_dot};
pub use exact::ExactSum;
pub(crate) use row_dots::{Both, PIECE, RowElement};

/// Norm of a vector.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Norm {
    /// The sum of magnitudes.
    L1,
    /// The root of the sum of squares.
    #[default]
    L2,
    /// The largest magnitude.
    Inf,
    /// `(sum |x|^p)^(1/p)` for a finite `p > 0`. Slow, and powers are rounded, equally everywhere. An element with a power beyond f64
    /// counts as not finite.
    P(f64),
}

impl Norm {
    /// Checks that the norm is defined.
    pub fn check(&self) -> Result<(), Error> {
        match *self {
            Norm::P(p) if !(p > 0.0 && p.is_finite()) => {
                Err(Error::Scalar { name: "p of a p-norm", value: p, works: "a finite p > 0, or Norm::Inf" })
            }
            _ => Ok(()),
        }
    }
}

/// Norm in progress: integers only, so the bits do not depend on order, splits or number of ranks.
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

/// Least number of elements of a part: waking a second thread costs more than shorter ones save.
const PART: usize = 64 << 10;

impl NormAccumulator {
    /// Creates the norm of no elements.
    pub fn new(norm: Norm) -> Self {
        NormAccumulator { norm, sum: ExactSum::new(), max_bits: 0, non_finite: 0 }
    }

    /// Creates an accumulator from its parts, summed over ranks (`max_bits`: the maximum).
    pub fn from_parts(norm: Norm, sum: ExactSum, max_bits: u64, non_finite: u64) -> Self {
        NormAccumulator { norm, sum, max_bits, non_finite }
    }

    /// Resets the accumulator.
    pub fn reset(&mut self) {
        *self = NormAccumulator::new(self.norm);
    }

    /// Adds every element of `values`, f32, f64, bf16 or f16, on the threads that the process shares.
    pub fn add(&mut self, values: Slice<'_>) -> Result<(), Error> {
        self.add_on(Isa::detect(), &Threads::shared(), values)
    }

    /// Same as [`add`](Self::add) with given instructions, for tests and benches, and threads: the bits are the same with any.
    pub fn add_on(&mut self, isa: Isa, threads: &Threads, values: Slice<'_>) -> Result<(), Error> {
        check_isa(isa)?;
        self.norm.check()?;
        let on = Cpu { isa, threads };
        match values.dtype() {
            DType::F32 => self.spread::<f32>(on, values.typed()?),
            DType::F64 => self.spread::<f64>(on, values.typed()?),
            DType::BF16 => self.spread::<bf16>(on, values.typed()?),
            DType::F16 => self.spread::<f16>(on, values.typed()?),
            given => {
                return Err(Error::DType {
                    what: "the input of a norm",
                    given,
                    works: "f32, f64, bf16 or f16",
                });
            }
        }
        Ok(())
    }

    /// Counts the non-finite elements of `values` and adds nothing: for elements that another rank counts in the norm.
    pub fn watch(&mut self, values: Slice<'_>) -> Result<(), Error> {
        self.watch_on(&Threads::shared(), values)
    }

    /// Same as [`watch`](Self::watch) with given threads.
    pub fn watch_on(&mut self, threads: &Threads, values: Slice<'_>) -> Result<(), Error> {
        let mut seen = NormAccumulator::new(Norm::Inf);
        seen.add_on(Isa::detect(), threads, values)?;
        self.non_finite += seen.non_finite;
        Ok(())
    }

    /// Adds the content of another accumulator of the same norm.
    ///
    /// # Panics
    /// If the norms differ.
    pub fn merge(&mut self, other: &NormAccumulator) {
        assert_eq!(self.norm, other.norm, "accumulators of one norm merge");
        self.sum.merge(&other.sum);
        self.max_bits = self.max_bits.max(other.max_bits);
        self.non_finite += other.non_finite;
    }

    /// Returns the norm of all finite elements added; 0 if there are none.
    pub fn finish(&self) -> f64 {
        match self.norm {
            Norm::L1 => self.sum.to_f64(),
            Norm::L2 => self.sum.sqrt(),
            Norm::Inf => f64::from_bits(self.max_bits),
            Norm::P(p) => libm::pow(self.sum.to_f64(), p.recip()),
        }
    }

    /// Returns the kind of norm.
    pub fn norm(&self) -> Norm {
        self.norm
    }

    /// Returns the sum of magnitudes, squares or powers; zero for [`Norm::Inf`].
    pub fn sum(&self) -> &ExactSum {
        &self.sum
    }

    /// Returns the largest finite magnitude as the bits of an f64, which order as unsigned integers.
    pub fn max_bits(&self) -> u64 {
        self.max_bits
    }

    /// Returns the number of infinite and NaN elements.
    pub fn non_finite(&self) -> u64 {
        self.non_finite
    }

    /// Adds every element of `values`, on several threads if there are many.
    fn spread<X: Source>(&mut self, Cpu { isa, threads }: Cpu<'_>, values: &[X]) {
        let part = threads.part_len(values.len(), PART).next_multiple_of(block::LEN);
        if values.len() <= part {
            return self.inline(isa, values);
        }
        let norm = self.norm;
        let zero = || NormAccumulator::new(norm);
        let work = |sum: &mut NormAccumulator, part: &[X]| sum.inline(isa, part);
        self.merge(&threads.fold(values.chunks(part), zero, work, |sum, other| sum.merge(&other)));
    }

    /// Adds every element of `values` on this thread.
    pub(crate) fn inline<X: Source>(&mut self, isa: Isa, values: &[X]) {
        match (isa, self.norm) {
            (Isa::Reference, _) | (_, Norm::P(_)) => {
                values.iter().for_each(|x| self.add_plainly(x.exactly()))
            }
            _ => isa.run(Blocks { values, into: self }),
        }
    }

    /// Adds one element, slow and obvious: the definition.
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

//! One loop body compiled for several instruction sets; the set is chosen at run time.
//!
//! The compiler may use wider registers but never another rounding: Rust neither contracts nor reorders floating-point
//! operations, and `mul_add`, `sqrt` and division are correctly rounded everywhere. All versions give the same bits.

use std::fmt;

/// Instruction set to run with. It changes the speed of a result, never its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// The slow and obvious loop that defines each result.
    Reference,
    /// The fast loop with the instructions that every machine of this architecture has. On x86-64 that is SSE2, where a fused
    /// multiply-add is a function call: slow but correct.
    Baseline,
    /// 256-bit registers: AVX2 and FMA.
    Avx2,
    /// 512-bit registers: AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Isa {
    const ALL: [Isa; 4] = [Isa::Reference, Isa::Baseline, Isa::Avx2, Isa::Avx512];

    /// Returns the fastest instruction set of this machine.
    pub fn detect() -> Isa {
        let fastest = Isa::ALL.into_iter().rev().find(|isa| isa.is_available());
        fastest.unwrap_or(Isa::Baseline)
    }

    /// Returns the instruction sets that this machine can run, slowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// Returns true if this machine can run this instruction set.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        match self {
            Isa::Reference | Isa::Baseline => true,
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }

    /// Returns true if this machine can run this instruction set.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        matches!(self, Isa::Reference | Isa::Baseline)
    }

    /// Runs `body` with these instructions, or with the baseline's if the machine lacks them.
    pub fn run<B: Body>(self, body: B) -> B::Output {
        match self {
            // SAFETY: the guard has just checked that the machine has every feature that the function enables.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if self.is_available() => unsafe { avx512(body) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if self.is_available() => unsafe { avx2(body) },
            _ => body.run(),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Isa::Reference => "reference",
            Isa::Baseline => "baseline",
            Isa::Avx2 => "AVX2",
            Isa::Avx512 => "AVX-512",
        })
    }
}

/// Work that is compiled for every instruction set. `run` and all functions it calls per element are `#[inline(always)]`: only
/// code that is inlined into the functions below is compiled with their instructions.
///
/// ```
/// use meshstep_tensor::simd::{Body, Isa};
///
/// /// Sum of squares.
/// struct Squares<'a>(&'a [f32]);
///
/// impl Body for Squares<'_> {
///     type Output = f32;
///
///     #[inline(always)]
///     fn run(self) -> f32 {
///         self.0.iter().map(|x| x * x).sum()
///     }
/// }
/// assert_eq!(Isa::detect().run(Squares(&[3.0, 4.0])), 25.0);
/// ```
pub trait Body {
    /// Result of [`run`](Self::run).
    type Output;
    /// Does the work.
    fn run(self) -> Self::Output;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn avx512<B: Body>(body: B) -> B::Output {
    body.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2<B: Body>(body: B) -> B::Output {
    body.run()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_available_is_detected() {
        let all: Vec<Isa> = Isa::available().collect();
        assert_eq!(all[..2], [Isa::Reference, Isa::Baseline]);
        assert_eq!(all.last(), Some(&Isa::detect()));
        assert!(Isa::ALL.into_iter().all(|isa| isa.is_available() == all.contains(&isa)));
    }
}

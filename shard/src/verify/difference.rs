//! Differences found between ranks that should hold the same, or on a rank that no longer holds the values it wrote.

use meshstep_tensor::{DType, bf16, f16};
use std::fmt;

/// A vector of a parameter that differs between ranks that should hold the same; or one that a single rank holds, and that
/// changed since its last update. All ranks return the same report.
///
/// ```
/// use meshstep_shard::prelude::*;
/// use meshstep_shard::{Apart, Difference, Error, Held, Repaired, Verified, VerifyError};
///
/// let ranks = loopback::spawn(3, |comm| -> Result<(), Error> {
///     let rank = comm.rank();
///     let layout = Layout::builder().param("w", &[4], DType::F32).build()?;
///     let ones = |p: &Param, mut out: SliceMut| out.copy_from((&vec![1f32; p.len()]).into());
///     let mut opt = Optimizer::new(comm, layout, Sgd::default(), ones, Options::default())?;
///     let fine: Verified = opt.verify()?;
///     assert_eq!(fine.compared, 1);
///     if rank == 2 {
///         opt.flip_bit("w", "param", 3, 0)?; // failing memory
///     }
///     let Err(Error::Differs(found)) = opt.verify() else { panic!("the ranks differ") };
///     let Difference { element, ref held, .. } = *found;
///     assert_eq!((element, found.odd()), (Some(3), vec![2]));
///     assert!(matches!(held[..], [Held { rank: 0, .. }, _, _]));
///     assert!(matches!(found.apart(), Some(Apart { ulps: 1, .. })));
///     let repaired: Vec<Repaired> = opt.repair()?; // by the majority
///     assert_eq!((repaired.len(), repaired[0].ranks.clone()), (1, vec![2]));
///     opt.verify()?;
///     // A bit that does not exist cannot be flipped.
///     assert!(matches!(opt.flip_bit("w", "param", 9, 0), Err(Error::Verify(VerifyError::NoSuchBit { .. }))));
///     Ok(())
/// })?;
/// ranks.into_iter().collect::<Result<(), Error>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Difference {
    /// The parameter.
    pub param: String,
    /// `param`, `master`, `grad`, or the state's name.
    pub slot: &'static str,
    /// The element type.
    pub dtype: DType,
    /// First element that differs, by its row-major index in the parameter (on a mesh: in these ranks' cut of it). `None` if a
    /// single rank holds the vector, and the change is not a single element, or cannot be found.
    pub element: Option<usize>,
    /// Ranks of the optimizer's communicator that should hold the same, ascending, with their values.
    pub held: Vec<Held>,
    /// Bits that the single rank wrote there, if no other rank holds the same.
    pub wrote: Option<u64>,
    /// Number of other vectors that differ, over all groups of ranks.
    pub more: u64,
}

/// Value of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The rank.
    pub rank: usize,
    /// Bits of the element.
    pub bits: u64,
    /// Hash of the whole vector.
    pub hash: u64,
}

/// Distance of two values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Apart {
    /// Steps between representable numbers of the type; 1 between the two zeros.
    pub ulps: u64,
    /// Magnitude of the difference.
    pub abs: f64,
}

impl Difference {
    /// Returns the hash of the vector that more than half of the ranks hold.
    pub fn majority(&self) -> Option<u64> {
        majority(&self.held)
    }

    /// Returns the ranks that disagree with the majority, or the single rank that holds the vector. Empty without a majority.
    pub fn odd(&self) -> Vec<usize> {
        if let [alone] = self.held[..] {
            return vec![alone.rank];
        }
        let most = self.majority();
        let odd = |held: &&Held| most.is_some_and(|most| held.hash != most);
        self.held.iter().filter(odd).map(|held| held.rank).collect()
    }

    /// Returns two values of the element: the expected one (written before, else held by the majority, else by the lowest rank),
    /// and the first that differs from it.
    pub fn values(&self) -> Option<[u64; 2]> {
        self.element?;
        let most = self.majority();
        let usual = self.held.iter().find(|held| Some(held.hash) == most).or(self.held.first());
        let expected = self.wrote.or(usual.map(|held| held.bits))?;
        let other = self.held.iter().find(|held| held.bits != expected)?;
        Some([expected, other.bits])
    }

    /// Returns the distance of these two values.
    pub fn apart(&self) -> Option<Apart> {
        let [a, b] = self.values()?;
        let abs = (value(self.dtype, a) - value(self.dtype, b)).abs();
        Some(Apart { ulps: place(self.dtype, a).abs_diff(place(self.dtype, b)), abs })
    }
}

/// Returns the hash that more than half of the ranks hold.
pub(super) fn majority(held: &[Held]) -> Option<u64> {
    let count = |hash: u64| held.iter().filter(|other| other.hash == hash).count();
    held.iter().map(|held| held.hash).find(|&hash| 2 * count(hash) > held.len())
}

/// Returns the number with these bits.
fn value(dtype: DType, bits: u64) -> f64 {
    match dtype {
        DType::F32 => f32::from_bits(bits as u32).into(),
        DType::F64 => f64::from_bits(bits),
        DType::BF16 => bf16::from_bits(bits as u16).to_f64(),
        DType::F16 => f16::from_bits(bits as u16).to_f64(),
        _ => bits as f64,
    }
}

/// Formats that number in as few digits as distinguish it from its neighbours.
fn number(dtype: DType, bits: u64) -> String {
    match dtype {
        DType::F64 => format!("{:?}", f64::from_bits(bits)),
        _ if dtype.is_float() => format!("{:?}", value(dtype, bits) as f32),
        _ => bits.to_string(),
    }
}

/// Maps bits to integers in the order of their numbers.
fn place(dtype: DType, bits: u64) -> i64 {
    if !dtype.is_float() {
        return bits as i64;
    }
    // Shift the sign to the highest bit; below zero, magnitudes count downwards.
    let unused = 64 - 8 * dtype.size() as u32;
    let high = (bits << unused) as i64;
    (if high < 0 { !high ^ i64::MIN } else { high }) >> unused
}

impl std::error::Error for Difference {}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { param, slot, element, held, .. } = self;
        if let [alone] = held[..] {
            write!(f, "{slot} of {param:?} on rank {} is not what its last update wrote", alone.rank)?;
        } else {
            write!(f, "{slot} of {param:?} differs between {} ranks", held.len())?;
        }
        match element {
            Some(element) => write!(f, ", first at element {element}")?,
            None => write!(f, ", in more than one element")?,
        }
        self.fmt_values(f)?;
        match self.more {
            0 => Ok(()),
            1 => write!(f, "; one more vector differs"),
            more => write!(f, "; {more} more vectors differ"),
        }
    }
}

impl Difference {
    fn fmt_values(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Some([expected, other]), Some(apart)) = (self.values(), self.apart()) else { return Ok(()) };
        let digits = 2 * self.dtype.size();
        let shown = |bits: u64| format!("{} (0x{bits:0digits$x})", number(self.dtype, bits));
        let ranks = |ranks: &[usize]| match ranks {
            [rank] => format!("rank {rank} has"),
            ranks => format!("ranks {ranks:?} have"),
        };
        let (odd, first) = (self.odd(), self.held.first().map_or(0, |held| held.rank));
        match (self.wrote, &odd[..]) {
            (Some(_), _) => write!(f, ": it wrote {} and has {}", shown(expected), shown(other))?,
            (None, []) => {
                let with = |held: &&Held| held.bits == other;
                let theirs: Vec<usize> = self.held.iter().filter(with).map(|held| held.rank).collect();
                write!(f, ": rank {first} has {}, {} {}", shown(expected), ranks(&theirs), shown(other))?;
            }
            (None, odd) => write!(f, ": {} {}, most have {}", ranks(odd), shown(other), shown(expected))?,
        }
        let plural = if apart.ulps == 1 { "" } else { "s" };
        write!(f, "; {} ulp{plural} or {:?} apart", apart.ulps, apart.abs)
    }
}

/// Reason why a verification or repair is not possible.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// The call came between a step's first micro-batch and its end.
    #[error(
        "{batches} micro-batches of a step are begun; verify before the first, or after `step` or `discard_gradients`"
    )]
    Midway {
        /// Number of micro-batches begun.
        batches: u64,
    },
    /// There are no reduced gradients.
    #[error("there are no reduced gradients; verify them between the last micro-batch's `finish` and `step`")]
    NoGradients,
    /// Gradients are reduced in the step itself.
    #[error(
        "Clip::BeforeReduce and Options::reduce_in_step keep gradients back until `step`; none are reduced before"
    )]
    HeldBack,
    /// No majority of ranks agrees on the vector.
    #[error("{0}; repair needs three ranks or more, and more than half of them alike; nothing was changed")]
    NoMajority(Box<Difference>),
    /// The bit does not exist.
    #[error("no bit {bit} of element {element} of {slot} of {param:?} on this rank")]
    NoSuchBit {
        /// The parameter.
        param: String,
        /// The vector.
        slot: String,
        /// The element.
        element: usize,
        /// The bit.
        bit: u32,
    },
}

meshstep_tensor::debug_is_display!(VerifyError);

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(dtype: DType, bits: &[u64]) -> Difference {
        let held = bits.iter().enumerate();
        let held = held.map(|(rank, &bits)| Held { rank, bits, hash: bits.wrapping_mul(3) }).collect();
        let (param, slot) = ("ln".to_owned(), "m");
        Difference { param, slot, dtype, element: Some(4), held, wrote: None, more: 0 }
    }

    #[test]
    fn numbers_are_ordered_as_they_count() {
        let rising =
            [-f32::INFINITY, -1.0, -f32::MIN_POSITIVE, -0.0, 0.0, f32::MIN_POSITIVE, 1.0, f32::INFINITY];
        let places: Vec<i64> = rising.iter().map(|x| place(DType::F32, x.to_bits().into())).collect();
        assert!(places.is_sorted_by(|a, b| a < b), "{places:?}");
        let apart = |dtype, a, b| difference(dtype, &[a, b]).apart().unwrap();
        let bits = |x: f32| u64::from(x.to_bits());
        assert_eq!(apart(DType::F32, bits(0.0), bits(-0.0)), Apart { ulps: 1, abs: 0.0 });
        assert_eq!(apart(DType::F32, bits(1.0), bits(1.0) + 1), Apart { ulps: 1, abs: f32::EPSILON.into() });
        assert_eq!(apart(DType::F64, 1f64.to_bits(), (-1f64).to_bits()).abs, 2.0);
        assert_eq!(apart(DType::BF16, 0x3f80, 0x3f82), Apart { ulps: 2, abs: 1.0 / 64.0 });
        assert_eq!(apart(DType::F64, (-0f64).to_bits(), f64::MAX.to_bits()).ulps, f64::MAX.to_bits() + 1);
        assert_eq!(apart(DType::U16, 5, 65_535), Apart { ulps: 65_530, abs: 65_530.0 });
    }

    #[test]
    fn most_are_believed_and_a_tie_is_not() {
        let one = 1f32.to_bits().into();
        let of = |bits: &[u64]| difference(DType::F32, bits);
        assert_eq!(of(&[one, one, one + 1]).odd(), [2]);
        assert_eq!(of(&[one + 2, one, one + 1, one, one]).odd(), [0, 2]);
        assert_eq!(of(&[one, one + 1]).odd(), [0; 0]);
        assert_eq!(of(&[one + 2, one, one]).values(), Some([one, one + 2]));
        assert_eq!(
            of(&[one, one, one + 1]).to_string(),
            "m of \"ln\" differs between 3 ranks, first at element 4: rank 2 has 1.0000001 (0x3f800001), \
             most have 1.0 (0x3f800000); 1 ulp or 1.1920928955078125e-7 apart"
        );
        assert_eq!(
            Difference { more: 2, ..of(&[one, one + 2]) }.to_string(),
            "m of \"ln\" differs between 2 ranks, first at element 4: rank 0 has 1.0 (0x3f800000), rank 1 has \
             1.0000002 (0x3f800002); 2 ulps or 2.384185791015625e-7 apart; 2 more vectors differ"
        );
        let alone = Difference { wrote: Some(one + 1), ..of(&[one]) };
        assert_eq!(alone.odd(), [0]);
        assert_eq!(
            alone.to_string(),
            "m of \"ln\" on rank 0 is not what its last update wrote, first at element 4: it wrote \
             1.0000001 (0x3f800001) and has 1.0 (0x3f800000); 1 ulp or 1.1920928955078125e-7 apart"
        );
        let much = Difference { element: None, ..alone };
        assert_eq!(
            much.to_string(),
            "m of \"ln\" on rank 0 is not what its last update wrote, in more than one element"
        );
    }
}

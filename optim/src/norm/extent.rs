//! Largest and smallest magnitude of some numbers, in a form that vectorises.

/// Number with magnitudes that order like their bits.
pub(crate) trait Magnitude: Copy {
    /// Integers as wide as the number.
    type Bits: Bits;
    /// Returns the bits of the magnitude.
    fn bits(self) -> Self::Bits;
    /// Returns the bits of the same magnitude as f64.
    fn wide(bits: Self::Bits) -> u64;
}

/// Integer type of a magnitude's bits.
pub(crate) trait Bits: Copy + Ord {
    const ZERO: Self;
    const MOST: Self;
    /// Returns the value minus 1, wrapping from zero to the maximum.
    fn before(self) -> Self;
    /// Returns the value plus 1, saturating.
    fn after(self) -> Self;
}

macro_rules! bits {
    ($t:ty) => {
        impl Bits for $t {
            const ZERO: $t = 0;
            const MOST: $t = <$t>::MAX;

            #[inline(always)]
            fn before(self) -> $t {
                self.wrapping_sub(1)
            }
            #[inline(always)]
            fn after(self) -> $t {
                self.saturating_add(1)
            }
        }
    };
}
bits!(u32);
bits!(u64);

impl Magnitude for f32 {
    type Bits = u32;

    #[inline(always)]
    fn bits(self) -> u32 {
        self.abs().to_bits()
    }
    #[inline(always)]
    fn wide(bits: u32) -> u64 {
        f64::from(f32::from_bits(bits)).to_bits()
    }
}

impl Magnitude for f64 {
    type Bits = u64;

    #[inline(always)]
    fn bits(self) -> u64 {
        self.abs().to_bits()
    }
    #[inline(always)]
    fn wide(bits: u64) -> u64 {
        bits
    }
}

/// Range of the magnitudes seen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent<W: Magnitude> {
    largest: W::Bits,
    /// Smallest magnitude's bits minus 1, so that zero wraps to the maximum and is ignored.
    least: W::Bits,
}

impl<W: Magnitude> Extent<W> {
    /// Creates the extent of no numbers.
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Extent { largest: W::Bits::ZERO, least: W::Bits::MOST }
    }

    #[inline(always)]
    pub(crate) fn of(numbers: &[W]) -> Self {
        let mut extent = Extent::new();
        numbers.iter().for_each(|&x| extent.see(x));
        extent
    }

    #[inline(always)]
    pub(crate) fn see(&mut self, x: W) {
        self.largest = x.bits().max(self.largest);
        self.least = x.bits().before().min(self.least);
    }

    /// Returns the largest magnitude's bits as f64; at least those of infinity if a number is not finite.
    #[inline(always)]
    pub(crate) fn largest(self) -> u64 {
        W::wide(self.largest)
    }

    /// Returns the smallest nonzero magnitude's bits as f64.
    #[inline(always)]
    pub(crate) fn least(self) -> u64 {
        W::wide(self.least.after())
    }
}

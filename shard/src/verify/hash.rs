//! A 64-bit hash of the bits of flat memory: a sum over its elements, so that parts may be hashed separately and in any order.

use meshstep_tensor::simd::{Body, Isa};
use meshstep_tensor::{Error, Slice, Threads};

/// Least number of bytes of a part for one thread.
const PART: usize = 1 << 18;

/// Keys of positions are multiples of this odd number: 2^64 over the golden ratio.
const STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;
/// The factors of SplitMix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number generators*, 2014).
const FACTORS: [u64; 2] = [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];
const INVERSES: [u64; 2] = [inverse(FACTORS[0]), inverse(FACTORS[1])];

/// Returns the sum over all elements of `mix(bits ^ key(i))`, modulo 2^64, with `i` counted from `first`: hashes of parts add up
/// to the hash of the whole. `mix` is a bijection, so a change of one element always changes the hash; any other change goes
/// unnoticed in one of 2^64 cases.
pub(crate) fn hash(values: Slice<'_>, first: usize, threads: &Threads) -> Result<u64, Error> {
    Ok(spread(Isa::detect(), values.bytes()?, (values.dtype().size(), first as u64), threads))
}

fn spread(isa: Isa, bytes: &[u8], (size, first): (usize, u64), threads: &Threads) -> u64 {
    let part = threads.part_len(bytes.len(), PART).next_multiple_of(size);
    let work = |sum: &mut u64, (i, bytes): (usize, &[u8])| {
        let first = first.wrapping_add((i * (part / size)) as u64);
        *sum = sum.wrapping_add(isa.run(Sum { bytes, size, first }));
    };
    let merge = |sum: &mut u64, other: u64| *sum = sum.wrapping_add(other);
    threads.fold(bytes.chunks(part).enumerate(), || 0, work, merge)
}

/// The loop, compiled for the machine's instructions: its 64-bit products are slow without AVX-512.
struct Sum<'a> {
    bytes: &'a [u8],
    size: usize,
    first: u64,
}

impl Body for Sum<'_> {
    type Output = u64;

    #[inline(always)]
    fn run(self) -> u64 {
        let Sum { bytes, size, first } = self;
        match size {
            2 => sum(bytes, first, |bits| u16::from_ne_bytes(bits).into()),
            4 => sum(bytes, first, |bits| u32::from_ne_bytes(bits).into()),
            _ => sum(bytes, first, u64::from_ne_bytes),
        }
    }
}

#[inline(always)]
fn sum<const N: usize>(bytes: &[u8], first: u64, bits: impl Fn([u8; N]) -> u64) -> u64 {
    let (mut sum, mut key) = (0u64, key(first));
    for element in bytes.as_chunks::<N>().0 {
        sum = sum.wrapping_add(mix(bits(*element) ^ key));
        key = key.wrapping_add(STRIDE);
    }
    sum
}

/// A change of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    /// Index in `values`.
    pub(crate) index: usize,
    pub(crate) was: u64,
    pub(crate) is: u64,
}

/// Finds the change of one element that explains why `values`, counted from `first`, no longer have the hash `was`. `mix` is
/// invertible, so the hash gives each element's hypothetical old value; one that exceeds its type is ruled out. A change of a
/// single bit is preferred; `None` if no change, or more than one, explains it.
pub(crate) fn change(
    values: Slice<'_>,
    first: usize,
    was: u64,
    threads: &Threads,
) -> Result<Option<Change>, Error> {
    let (bytes, size) = (values.bytes()?, values.dtype().size());
    let off = spread(Isa::detect(), bytes, (size, first as u64), threads).wrapping_sub(was);
    let (mut fits, mut found) = (None, 0u64);
    for (index, element) in bytes.chunks_exact(size).enumerate() {
        let (is, key) = (bits(element), key((first + index) as u64));
        let change = Change { index, was: unmix(mix(is ^ key).wrapping_sub(off)) ^ key, is };
        if change.was.checked_shr(8 * size as u32).unwrap_or(0) != 0 {
            continue;
        }
        if (change.was ^ is).count_ones() == 1 {
            return Ok(Some(change));
        }
        found += 1;
        fits = fits.or(Some(change));
    }
    Ok(fits.filter(|_| found == 1))
}

/// Returns the bits of one element.
pub(crate) fn bits(element: &[u8]) -> u64 {
    match *element {
        [a, b] => u16::from_ne_bytes([a, b]).into(),
        [a, b, c, d] => u32::from_ne_bytes([a, b, c, d]).into(),
        [a, b, c, d, e, f, g, h] => u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
        _ => unreachable!("elements have 2, 4 or 8 bytes"),
    }
}

fn key(i: u64) -> u64 {
    i.wrapping_add(1).wrapping_mul(STRIDE)
}

#[inline(always)]
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(FACTORS[0]);
    let x = (x ^ (x >> 27)).wrapping_mul(FACTORS[1]);
    x ^ (x >> 31)
}

/// Inverts [`mix`].
fn unmix(x: u64) -> u64 {
    // Each line inverts one of its lines; bits shifted by more than 63 are gone.
    let x = (x ^ (x >> 31) ^ (x >> 62)).wrapping_mul(INVERSES[1]);
    let x = (x ^ (x >> 27) ^ (x >> 54)).wrapping_mul(INVERSES[0]);
    x ^ (x >> 30) ^ (x >> 60)
}

/// Returns the inverse of an odd number modulo 2^64, by Newton's iteration: each round doubles the number of correct bits.
const fn inverse(odd: u64) -> u64 {
    let (mut x, mut round) = (odd, 0);
    while round < 5 {
        x = x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x)));
        round += 1;
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hash(values: Slice<'_>, first: usize) -> Result<u64, Error> {
        super::hash(values, first, &Threads::shared())
    }

    fn change(values: Slice<'_>, first: usize, was: u64) -> Result<Option<Change>, Error> {
        super::change(values, first, was, &Threads::shared())
    }

    /// Hashes one element at a time, by the formula.
    fn naive(values: &[u32], first: usize) -> u64 {
        let term = |(i, &bits): (usize, &u32)| mix(u64::from(bits) ^ key((first + i) as u64));
        values.iter().enumerate().map(term).fold(0, u64::wrapping_add)
    }

    fn floats(bits: &[u32]) -> Vec<f32> {
        bits.iter().map(|&bits| f32::from_bits(bits)).collect()
    }

    fn of(bits: &[u32], first: usize) -> u64 {
        hash(Slice::from(&floats(bits)[..]), first).unwrap()
    }

    fn words() -> impl Strategy<Value = Vec<u32>> {
        prop::collection::vec(prop_oneof![any::<u32>(), Just(0), Just(0x3f80_0000)], 2..300)
    }

    proptest! {
        #[test]
        fn parts_add_up(bits in words(), first in 0usize..1 << 40, cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6)) {
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(bits.len() + 1)).chain([0, bits.len()]).collect();
            ends.sort();
            let parts = ends.windows(2).map(|w| of(&bits[w[0]..w[1]], first + w[0]));
            prop_assert_eq!(parts.rev().fold(0, u64::wrapping_add), naive(&bits, first));
            prop_assert_eq!(of(&bits, first), naive(&bits, first));
        }

        #[test]
        fn a_flipped_bit_is_noticed_and_found(bits in words(), at in any::<prop::sample::Index>(), bit in 0u32..32) {
            let (was, index) = (of(&bits, 7), at.index(bits.len()));
            let mut now = bits.clone();
            now[index] ^= 1 << bit;
            prop_assert_ne!(of(&now, 7), was);
            let change = change(Slice::from(&floats(&now)[..]), 7, was).unwrap();
            prop_assert_eq!(change, Some(Change { index, was: bits[index].into(), is: now[index].into() }));
        }

        #[test]
        fn another_element_is_found_and_two_are_not(bits in words(), at in any::<prop::sample::Index>(), other in any::<u32>()) {
            let (was, index) = (of(&bits, 0), at.index(bits.len()));
            let mut now = bits.clone();
            now[index] = other;
            prop_assume!(other != bits[index]);
            let found = change(Slice::from(&floats(&now)[..]), 0, was).unwrap();
            prop_assert_eq!(found.map(|change| (change.index, change.was)), Some((index, bits[index].into())));
            let second = (index + 1) % bits.len();
            now[second] = !now[second];
            prop_assert_eq!(change(Slice::from(&floats(&now)[..]), 0, was).unwrap(), None);
        }

        #[test]
        fn order_and_place_matter(bits in words(), at in any::<(prop::sample::Index, prop::sample::Index)>(), by in 1usize..50) {
            let (i, j) = (at.0.index(bits.len()), at.1.index(bits.len()));
            let mut swapped = bits.clone();
            swapped.swap(i, j);
            prop_assert_eq!(of(&swapped, 0) == of(&bits, 0), bits[i] == bits[j]);
            prop_assert_ne!(of(&bits, by), of(&bits, 0));
            let mut turned = bits.clone();
            turned.rotate_left(by % bits.len());
            prop_assert_eq!(of(&turned, 0) == of(&bits, 0), turned == bits);
        }

        #[test]
        fn mixing_is_undone(x in any::<u64>()) {
            prop_assert_eq!(unmix(mix(x)), x);
        }
    }

    #[test]
    fn threads_and_instructions_do_not_show() {
        let values: Vec<f32> = (0..700_001u32).map(|i| i as f32).collect();
        let bits: Vec<u32> = values.iter().map(|x| x.to_bits()).collect();
        assert_eq!(hash(Slice::from(&values[..]), 3).unwrap(), naive(&bits, 3));
        let bytes = Slice::from(&values[..]).bytes().unwrap().to_vec();
        for isa in Isa::available() {
            for threads in [Threads::caller(), Threads::new(3).unwrap()] {
                assert_eq!(spread(isa, &bytes, (4, 3), &threads), naive(&bits, 3), "{isa} {threads:?}");
            }
        }
    }

    /// Values that compare equal, or never do, are distinguished by their bits.
    #[test]
    fn bits_are_what_counts() {
        let hash = |x: f32| of(&[x.to_bits()], 0);
        assert_ne!(hash(0.0), hash(-0.0));
        let nan = f32::from_bits(0x7fc0_0001);
        assert_ne!(hash(nan), hash(f32::NAN));
        assert_eq!(hash(nan), hash(nan));
        // Flips two signs, which are the highest bits of their numbers.
        let of = |values: [f64; 3]| super::tests::hash(Slice::from(&values[..]), 0).unwrap();
        assert_ne!(of([1.0, 2.0, 3.0]), of([-1.0, 2.0, -3.0]));
        assert_eq!(super::tests::hash(Slice::from(&[] as &[f64]), 5).unwrap(), 0);
    }

    #[test]
    fn every_width_is_searched() {
        let wide = [1.5f64, -2.0, 1e300];
        let was = hash(Slice::from(&wide[..]), 0).unwrap();
        let mut now = wide;
        now[2] = f64::from_bits(now[2].to_bits() ^ 1 << 63);
        let found = change(Slice::from(&now[..]), 0, was).unwrap().unwrap();
        assert_eq!((found.index, found.was), (2, wide[2].to_bits()));
        // Any 64-bit element could have had any value.
        now[2] = 7.0;
        assert_eq!(change(Slice::from(&now[..]), 0, was).unwrap(), None);
        let narrow = [3u16, 9, 3];
        let was = hash(Slice::from(&narrow[..]), 0).unwrap();
        assert_eq!(
            change(Slice::from(&[3u16, 9, 12][..]), 0, was).unwrap().map(|c| (c.index, c.was)),
            Some((2, 3))
        );
    }
}

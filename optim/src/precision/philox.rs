//! Random bits as a function of position: Philox4x32-10 of Salmon et al., *Parallel random numbers: as easy as 1, 2, 3* (2011).
//!
//! There is no generator state: the bits of an element depend on the tensor's key, the step, the vector and the element's index in the
//! whole tensor, so they do not depend on cuts, shards or order.

use meshstep_tensor::simd::{Body, Isa};

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Number of counters computed side by side.
const LANES: usize = 16;

/// Words of a counter's output, each with bits for two elements.
const WORDS: usize = 4;

/// Number of elements that share a row of counters.
pub(crate) const GROUP: usize = 2 * WORDS * LANES;

/// Sixteen random bits for each element of a tensor, for one vector of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bits {
    key: [u32; 2],
    /// Upper half of every counter.
    place: [u32; 2],
}

impl Bits {
    /// Creates the bits of the tensor with this `key` in step `t`, of which 48 bits count. `stream` distinguishes vectors: 0 for
    /// parameters, k + 1 for state k.
    pub(crate) fn new(key: u64, t: u64, stream: u16) -> Self {
        Bits { key: halves(key), place: [t as u32, ((t >> 32) as u32) << 16 | u32::from(stream)] }
    }

    /// Returns the bits of element `index`, by the obvious way.
    ///
    /// Elements `32 w + 2 l + h` of a group of 128 have half `h` of word `w` of counter `l`: the words of sixteen consecutive counters
    /// are stored as they are, so no vector instruction has to split one.
    pub(crate) fn plainly(&self, index: u64) -> u16 {
        let (group, within) = (index / GROUP as u64, index as usize % GROUP);
        let (word, lane, half) = (within / (2 * LANES), within / 2 % LANES, within % 2);
        let [low, high] = halves(group * LANES as u64 + lane as u64);
        let words = philox([low, high, self.place[0], self.place[1]], self.key);
        (words[word] >> (16 * half)) as u16
    }

    /// Writes the bits of the elements from `first` on, the start of a group.
    pub(crate) fn fill(&self, isa: Isa, first: u64, bits: &mut [u16]) {
        debug_assert!(first.is_multiple_of(GROUP as u64), "whole groups");
        isa.run(Fill { bits: *self, first, into: bits });
    }
}

fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// Computes the definition, as published.
fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut c0, mut c1, mut c2, mut c3], [mut k0, mut k1]) = (counter, key);
    for _ in 0..ROUNDS {
        let [low0, high0] = halves(u64::from(MULTIPLIERS[0]) * u64::from(c0));
        let [low1, high1] = halves(u64::from(MULTIPLIERS[1]) * u64::from(c2));
        (c0, c1, c2, c3) = (high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0);
        (k0, k1) = (k0.wrapping_add(WEYL[0]), k1.wrapping_add(WEYL[1]));
    }
    [c0, c1, c2, c3]
}

/// Fast loop.
struct Fill<'a> {
    bits: Bits,
    first: u64,
    into: &'a mut [u16],
}

impl Body for Fill<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut counter = self.first / (2 * WORDS) as u64;
        let (whole, rest) = self.into.as_chunks_mut::<GROUP>();
        for group in whole {
            group.copy_from_slice(bytemuck::cast_slice(row(&self.bits, counter).as_flattened()));
            counter += LANES as u64;
        }
        if !rest.is_empty() {
            let last = row(&self.bits, counter);
            rest.copy_from_slice(&bytemuck::cast_slice(last.as_flattened())[..rest.len()]);
        }
    }
}

/// Computes sixteen counters from `counter` on, a multiple of 16, so that they share one upper half. One lane at a time and without an
/// inner loop, so that the compiler turns lanes into vector elements.
#[inline(always)]
fn row(bits: &Bits, counter: u64) -> [[u32; LANES]; WORDS] {
    let mut row = [[0; LANES]; WORDS];
    let ([k0, k1], [place0, place1]) = (bits.key, bits.place.map(u64::from));
    for lane in 0..LANES {
        let mut words = [counter + lane as u64, counter >> 32, place0, place1];
        macro_rules! rounds {
            ($($n:literal)*) => {$(
                words = round(words, k0.wrapping_add(WEYL[0].wrapping_mul($n)), k1.wrapping_add(WEYL[1].wrapping_mul($n)));
            )*};
        }
        rounds!(0 1 2 3 4 5 6 7 8 9);
        for (words, word) in row.iter_mut().zip(words) {
            // The lower half comes first in memory.
            words[lane] =
                if cfg!(target_endian = "little") { word as u32 } else { (word as u32).rotate_left(16) };
        }
    }
    row
}

/// Computes one round. A word is the low half of 64 bits, where the products are; the high half is ignored.
#[inline(always)]
fn round([c0, c1, c2, c3]: [u64; 4], k0: u32, k1: u32) -> [u64; 4] {
    const LOW: u64 = 0xFFFF_FFFF;
    let product0 = (c0 & LOW) * u64::from(MULTIPLIERS[0]);
    let product1 = (c2 & LOW) * u64::from(MULTIPLIERS[1]);
    [(product1 >> 32) ^ c1 ^ u64::from(k0), product1, (product0 >> 32) ^ c3 ^ u64::from(k1), product0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Vectors published with the generator (Random123, kat_vectors).
    #[test]
    fn the_published_answers() {
        let ones = u32::MAX;
        let table = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([ones; 4], [ones; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, words) in table {
            assert_eq!(philox(counter, key), words);
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        for (key, t, stream) in [(0, 1, 0), (u64::MAX, u64::MAX, 7), (0x0123_4567_89ab_cdef, 1 << 40, 2)] {
            let bits = Bits::new(key, t, stream);
            for first in [0, 128, 1 << 20, (1 << 39) - 256] {
                for len in [0, 1, 16, 127, 128, 129, 600] {
                    let expected: Vec<u16> = (first..first + len).map(|i| bits.plainly(i)).collect();
                    for isa in Isa::available().filter(|&isa| isa != Isa::Reference) {
                        let mut filled = vec![0; len as usize];
                        bits.fill(isa, first, &mut filled);
                        assert_eq!(filled, expected, "{isa} from {first}");
                    }
                }
            }
        }
    }

    #[test]
    fn key_step_stream_and_index_all_count() {
        let first = |bits: Bits, from: u64| (from..from + 8).map(|i| bits.plainly(i)).collect::<Vec<_>>();
        let one = first(Bits::new(1, 1, 0), 0);
        for other in [(2, 1, 0), (1 << 32 | 1, 1, 0), (1, 2, 0), (1, 1 << 32 | 1, 0), (1, 1, 1)] {
            assert_ne!(first(Bits::new(other.0, other.1, other.2), 0), one, "{other:?}");
        }
        for from in [8, 16, 128, 1 << 35, 1 << 36] {
            assert_ne!(first(Bits::new(1, 1, 0), from), one, "{from}");
        }
    }
}

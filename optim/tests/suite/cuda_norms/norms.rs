//! Norms: words, largest magnitude and non-finite count equal those of [`NormAccumulator`].

use super::{SIZES, Sizes, address, arg, carry_with, values};
use crate::common::{Random, Values, long, tried};
use meshstep_optim::cuda::{self, CARRY_SUMS, NormAt, THREADS, WRITE_SUM};
use meshstep_optim::{ExactSum, Isa, Norm, NormAccumulator};
use meshstep_simt::{self as simt, Device};
use meshstep_tensor::{DType, Threads};
use std::collections::BTreeSet;
use std::ops::Range;

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];
const NORMS: [Norm; 3] = [Norm::L1, Norm::L2, Norm::Inf];

/// Output of a launch.
#[derive(Clone, Debug, PartialEq)]
struct Words {
    non_finite: u64,
    words: Vec<u64>,
    max_bits: u64,
}

impl Words {
    fn of(norm: &NormAccumulator) -> Words {
        let words = norm.sum().words().to_vec();
        Words { non_finite: norm.non_finite(), words, max_bits: norm.max_bits() }
    }
}

fn reference(norm: Norm, values: &Values, ranges: &[Range<usize>]) -> Words {
    let mut sum = NormAccumulator::new(norm);
    for range in ranges {
        sum.add_on(Isa::Reference, &Threads::caller(), values.slice().slice(range.clone()).unwrap()).unwrap();
    }
    Words::of(&sum)
}

/// Adds the ranges of a vector to `to`, not carried; `first` is the index of the element at its address.
fn add(
    device: &Device,
    norm: Norm,
    (values, first): (&Values, u64),
    ranges: &[Range<usize>],
    blocks: u32,
    to: &mut Words,
) -> String {
    let dtype = values.slice().dtype();
    let kernel = cuda::norm_kernel(norm, dtype).unwrap();
    let (mut table, mut tiles) = cuda::spans(ranges.iter().cloned(), cuda::norm_tile(dtype));
    table.iter_mut().for_each(|span| (span.start, span.end) = (span.start + first, span.end + first));
    let mut at = NormAt {
        non_finite: &raw mut to.non_finite as u64,
        words: to.words.as_mut_ptr() as u64,
        max_bits: &raw mut to.max_bits as u64,
    };
    let mut base = address(values).wrapping_sub(first * dtype.size() as u64);
    let (mut rows, mut count) = (table.as_ptr(), table.len() as u64);
    let mut args = [arg(&mut base), arg(&mut rows), arg(&mut count), arg(&mut tiles), arg(&mut at)];
    // SAFETY: the ranges lie in `values`, with element `first` at its address, and `to` has all words.
    unsafe { device.launch(&kernel, blocks, THREADS, &mut args) }.unwrap();
    kernel
}

fn zero() -> Words {
    Words { non_finite: 0, words: vec![0; ExactSum::WORDS], max_bits: 0 }
}

/// Compares one launch over one range; returns the kernel's name.
fn compare(
    device: &Device,
    norm: Norm,
    (dtype, sizes): (DType, Sizes),
    (len, offset): (usize, usize),
    blocks: u32,
) -> String {
    let values = values(dtype, offset + len, sizes, (len + offset) as u64);
    let range = &(offset..offset + len);
    let range = std::slice::from_ref(range);
    let mut found = zero();
    let kernel = add(device, norm, (&values, 0), range, blocks, &mut found);
    carry_with(device, &mut found.words, blocks);
    let expected = reference(norm, &values, range);
    assert!(found == expected, "{kernel} {sizes:?}: {len} elements from {offset} in {blocks} blocks");
    kernel
}

#[test]
fn norms_equal_their_reference() {
    let Some(device) = Device::of("norm") else { return };
    let mut used = BTreeSet::from([CARRY_SUMS, WRITE_SUM].map(str::to_owned));
    let short = [0, 1, 127, 128, 129, 2047, 2049, 4100];
    for (i, norm) in NORMS.into_iter().enumerate() {
        for (j, dtype) in DTYPES.into_iter().enumerate() {
            let cell = i * DTYPES.len() + j;
            for (k, sizes) in SIZES.into_iter().enumerate() {
                let first = (cell * SIZES.len() + k) * short.len();
                // One length or more, so that all kernels run.
                let chosen = |l: usize| (k == cell % SIZES.len() && l == 7) || tried(first + l, 3);
                for (l, len) in short.into_iter().enumerate().filter(|(l, _)| chosen(*l)) {
                    let row = i + j + k + l;
                    device.reverse(row.is_multiple_of(2));
                    let place = (len, [0, 1, 4, 8][row / 2 % 4]);
                    used.insert(compare(&device, norm, (dtype, sizes), place, [1, 2, 7][row % 3]));
                }
            }
            let lens = [65_535, 65_537, 278_011].into_iter().enumerate();
            for (k, len) in lens.filter(|(k, _)| tried(3 * cell + k, 6)) {
                let sizes = SIZES[(3 * i + j + k) % SIZES.len()];
                for offset in if long() { &[0, 1, 4, 8][..] } else { &[0, 1, 4, 8][k..=k] } {
                    compare(&device, norm, (dtype, sizes), (len, *offset), [1, 5, 300][(i + j + k) % 3]);
                }
            }
        }
    }
    assert_eq!(used, device.kernels().into_iter().collect(), "every kernel has run, and no other");
}

#[test]
fn launches_add_up_over_ranges() {
    let Some(device) = Device::of("norm") else { return };
    for (i, dtype) in DTYPES.into_iter().enumerate() {
        for (_, norm) in NORMS.into_iter().enumerate().filter(|(j, _)| tried(NORMS.len() * i + j, 1)) {
            let values = values(dtype, 20_000, Sizes::Odd, 3);
            let ranges = [3..10, 10..10, 17..90, 6000..15_000, 100..5999, 19_999..20_000];
            let mut found = zero();
            device.shuffle(i as u64 + 1);
            device.interleave(3);
            for (i, part) in ranges.chunks(2).enumerate() {
                add(&device, norm, (&values, 0), part, [1, 3, 100][i], &mut found);
            }
            carry_with(&device, &mut found.words, 1);
            assert_eq!(found, reference(norm, &values, &ranges), "{norm:?} of {dtype}");
        }
    }
}

/// Words may be sums over several ranks, added with wrapping; carried, they are those of the total.
#[test]
fn carried_words_are_canonical() {
    let Some(device) = Device::of("norm") else { return };
    let mut random = Random::new(5);
    let mut sums = vec![0u64; 7 * ExactSum::WORDS];
    let mut expected = Vec::new();
    for sum in sums.chunks_mut(ExactSum::WORDS) {
        for (i, word) in sum.iter_mut().enumerate() {
            // Words of either sign, some of which carry through many others.
            *word = match random.next() % 8 {
                0 => random.next() >> 2,
                1 => (random.next() >> 2).wrapping_neg(),
                _ => u64::from(u32::MAX) * u64::from(i > 50),
            };
        }
        expected.extend(ExactSum::from_words(sum).words());
    }
    carry_with(&device, &mut sums, 3);
    assert_eq!(sums, expected);
}

/// The count, the carried words and the largest magnitude go to their places in an exchange; everything else stays unchanged.
#[test]
fn a_sum_is_written_into_an_exchange() {
    let Some(device) = Device::of("norm") else { return };
    for seed in 0..4 {
        let mut random = Random::new(seed);
        let mut from: Vec<u64> = (0..2 + ExactSum::WORDS).map(|_| random.next() >> 2).collect();
        let (mut sum, mut max) = (vec![7u64; 3 + ExactSum::WORDS], vec![9u64; 2]);
        let mut at = [from.as_mut_ptr(), sum.as_mut_ptr(), max.as_mut_ptr()];
        let [from_at, sum_at, max_at] = &mut at;
        device.reverse(seed % 2 == 1);
        // SAFETY: `from` holds a count, the words and the largest magnitude, and both vectors are longer than the output.
        unsafe { device.launch(WRITE_SUM, 1, THREADS, &mut [arg(from_at), arg(sum_at), arg(max_at)]) }
            .unwrap();
        let words = ExactSum::from_words(&from[1..1 + ExactSum::WORDS]);
        let expected: Vec<u64> =
            [from[0], 7].into_iter().chain(words.words().iter().copied()).chain([7]).collect();
        assert_eq!((sum, max), (expected, vec![from[1 + ExactSum::WORDS], 9]));
    }
}

#[test]
fn offsets_have_64_bits() {
    let Some(device) = Device::of("norm") else { return };
    for dtype in DTYPES {
        for far in [(1 << 31) - 1000, 1 << 32, (1 << 33) + 8, (1 << 40) + 4099] {
            let values = values(dtype, 9000, Sizes::Ordinary, far);
            let mut found = zero();
            add(&device, Norm::L2, (&values, far), std::slice::from_ref(&(0..9000)), 2, &mut found);
            carry_with(&device, &mut found.words, 1);
            assert_eq!(
                found,
                reference(Norm::L2, &values, std::slice::from_ref(&(0..9000))),
                "{dtype} from {far}"
            );
        }
    }
}

/// Blocks move their sums to the device before words overflow, and threads before integers do: with limits so small that both happen, the
/// result is the same.
#[test]
fn carries_come_in_time() {
    let text = simt::text("norm").replace("DRAIN_AFTER = 1 << 16", "DRAIN_AFTER = 2");
    let text = text.replace("MOST_SUMS = 64", "MOST_SUMS = 3").replace("MOST_TILES = 64", "MOST_TILES = 3");
    assert!(
        ["DRAIN_AFTER = 2", "MOST_SUMS = 3", "MOST_TILES = 3"].iter().all(|number| text.contains(number))
    );
    let Some(device) = Device::compile(&text, "") else { return };
    for dtype in DTYPES {
        for sizes in [Sizes::Ordinary, Sizes::Odd, Sizes::Full] {
            for norm in [Norm::L1, Norm::L2] {
                compare(&device, norm, (dtype, sizes), (21_000, 0), 2);
            }
        }
    }
}

/// If a block's words are read before all threads have added, or cleared before all have read, some terms are lost.
#[test]
fn a_missing_barrier_is_noticed() {
    let text = text_of("norm_l2_f32, 3, add_norm<SAME, L2>");
    let drain = text.find("void drain(").unwrap();
    let mut barriers = text.match_indices("__syncthreads();").filter(|(at, _)| *at > drain);
    let barriers = [barriers.next().unwrap(), barriers.next().unwrap()].into_iter().enumerate();
    for (_, (at, barrier)) in barriers.filter(|(i, _)| tried(*i, 1)) {
        let without = format!("{}{}", &text[..at], &text[at + barrier.len()..]);
        let Some(device) = Device::compile(&without, "") else { return };
        let noticed = [false, true].into_iter().any(|reverse| {
            device.reverse(reverse);
            let values = values(DType::F32, 5000, Sizes::Ordinary, 1);
            let mut found = zero();
            add(&device, Norm::L2, (&values, 0), std::slice::from_ref(&(0..5000)), 1, &mut found);
            carry_with(&device, &mut found.words, 1);
            found != reference(Norm::L2, &values, std::slice::from_ref(&(0..5000)))
        });
        assert!(noticed, "the barrier at {at}");
    }
}

/// Threads add to the same words, counts and maxima: if updates are not atomic, some are lost.
#[test]
fn a_missing_atomic_is_noticed() {
    let text = text_of("norm_l2_f32, 3, add_norm<SAME, L2>");
    let torn = [
        ("atomicAdd(low, part)", "simt_torn_add(low, part)"),
        ("atomicAdd(high, rest)", "simt_torn_add(high, rest)"),
        ("atomicAdd(sums.non_finite, non_finite)", "simt_torn_add(sums.non_finite, non_finite)"),
        ("atomicMax(sums.max_bits, max_bits)", "simt_torn_max(sums.max_bits, max_bits)"),
    ];
    for (i, (whole, part)) in torn.into_iter().enumerate() {
        assert_eq!(text.matches(whole).count(), 1, "{whole}");
        // Short runs try sums and maxima; long runs try each.
        if !tried(i, 4) {
            continue;
        }
        let Some(device) = Device::compile(&text.replace(whole, part), "") else { return };
        let noticed = SIZES.into_iter().any(|sizes| {
            let values = values(DType::F32, 5000, sizes, 1);
            let mut found = zero();
            add(&device, Norm::L2, (&values, 0), std::slice::from_ref(&(0..5000)), 1, &mut found);
            carry_with(&device, &mut found.words, 1);
            found != reference(Norm::L2, &values, std::slice::from_ref(&(0..5000)))
        });
        assert!(noticed, "{whole}");
    }
}

/// Each thread of a block adds to a different word in device memory: only another block can interfere.
#[test]
fn a_missing_atomic_between_blocks_is_noticed() {
    let text = text_of("norm_l2_f32, 3, add_norm<SAME, L2>");
    let whole = "atomicAdd(to + i, kept + risen)";
    assert_eq!(text.matches(whole).count(), 1);
    let torn = text.replace(whole, "simt_torn_add(to + i, kept + risen)");
    let (Some(right), Some(torn)) = (Device::compile(&text, ""), Device::compile(&torn, "")) else { return };
    let values = values(DType::F32, 5000, Sizes::Ordinary, 1);
    let range = &(0..5000);
    let is_wrong = |device: &Device, in_flight: u32, seed: u64| {
        device.shuffle(seed);
        device.interleave(in_flight);
        let mut found = zero();
        add(device, Norm::L2, (&values, 0), std::slice::from_ref(range), 4, &mut found);
        carry_with(device, &mut found.words, 1);
        found != reference(Norm::L2, &values, std::slice::from_ref(range))
    };
    let any_wrong = |device, in_flight| (1..=16).any(|seed| is_wrong(device, in_flight, seed));
    assert_eq!([any_wrong(&right, 1), any_wrong(&right, 4)], [false, false]);
    assert_eq!([any_wrong(&torn, 1), any_wrong(&torn, 4)], [false, true]);
}

/// Returns the source with one kernel, by the arguments of `NORM`, and the carry kernel; the others take long to compile.
fn text_of(kernel: &str) -> String {
    let text = simt::text("norm").replace("\nNORMS(", "\n// NORMS(").replace("\nNORM(", "\n// NORM(");
    format!("{text}\nNORM({kernel})\n")
}

/// Asserts that the suite detects these bugs in a kernel of norms.
fn all_are_noticed(kernel: &str, (norm, dtype): (Norm, DType), mistakes: &[(&str, &str)]) {
    let text = text_of(kernel);
    for (i, &(right, wrong)) in mistakes.iter().enumerate() {
        assert_eq!(text.matches(right).count(), 1, "{right}");
        // Long runs try each.
        if !tried(i, 3) {
            continue;
        }
        let Some(device) = Device::compile(&text.replace(right, wrong), "") else { return };
        let noticed = SIZES.into_iter().rev().any(|sizes| {
            let values = values(dtype, 64_000, sizes, 7);
            let range = &(0..63_001);
            let mut found = zero();
            add(&device, norm, (&values, 0), std::slice::from_ref(range), 1, &mut found);
            carry_with(&device, &mut found.words, 1);
            found != reference(norm, &values, std::slice::from_ref(range))
        });
        assert!(noticed, "{kernel}: {right} -> {wrong}");
    }
}

#[test]
fn mistakes_in_sums_of_magnitudes_are_noticed() {
    let mistakes = [
        ("non_finite += grids.add(x, peak, words);", "grids.add(x, peak, words);"),
        ("L2 ? x : x < 0 ? -1 : 1", "L2 ? x : 1"),
        ("u32 bits = at < end ?", "u32 bits = at <= end ?"),
        (
            "if (end - start >= TILE && ((u64)base + start * BYTES) % 16 == 0) return load_whole(base",
            "if (end - start >= TILE / 2) return load_whole(base",
        ),
        ("peak = most > peak ? most : peak;\n        if (++tiles", "peak = most;\n        if (++tiles"),
        ("i ? 0x0000FFFFu : 0xFFFF0000u", "i ? 0xFFFF0000u : 0x0000FFFFu"),
        ("fits = most < above && least", "fits = least"),
        ("highs += (u64)high, lows += (u64)(long long)low;", "highs += (u64)high, lows += (u32)low;"),
    ];
    all_are_noticed("norm_l1_bf16, 4, add_norm<BF16, L1>", (Norm::L1, DType::BF16), &mistakes);
}

#[test]
fn mistakes_in_sums_of_squares_are_noticed() {
    let mistakes = [
        (
            "from_two = F::least_of(grid - BITS + F::FRACTION)",
            "from_two = F::least_of(grid - BITS + F::FRACTION - 1)",
        ),
        ("bring(words, mixed, 2 * grid - BITS + 1)", "bring(words, mixed, 2 * grid - BITS)"),
        ("above = F::least_of(grid + BITS)", "above = F::least_of(grid + BITS + 1)"),
        ("HIGHEST_GRID = 103", "HIGHEST_GRID = 104"),
        ("bool fits = !magnitude || fits_two(magnitude, magnitude);", "bool fits = true;"),
        ("lows += (u64)((long long)low * low);", "lows += (u32)low * (u32)low;"),
    ];
    all_are_noticed("norm_l2_f32, 3, add_norm<SAME, L2>", (Norm::L2, DType::F32), &mistakes);
    let one =
        [("from_one = F::least_of(grid + F::FRACTION)", "from_one = F::least_of(grid + F::FRACTION - 1)")];
    all_are_noticed("norm_l2_bf16, 4, add_norm<BF16, L2>", (Norm::L2, DType::BF16), &one);
}

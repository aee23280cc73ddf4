//! L-BFGS: products of rows equal [`ExactSum::add_dot`]'s, and vectors equal the host's sequence of operations.

use super::{SIZES, Sizes, address, arg, carry_with, values};
use crate::common::{Random, Values, tried};
use meshstep_optim::cuda::{Combination, Products, THREADS, dot_tile, spans};
use meshstep_optim::{ExactSum, Isa};
use meshstep_simt::{self as simt, Device};
use meshstep_tensor::DType;
use std::ffi::c_void;
use std::ops::Range;

const DTYPES: [DType; 2] = [DType::F32, DType::F64];

fn name(kernel: &str, dtype: DType) -> String {
    format!("lbfgs_{kernel}_{}", if dtype == DType::F64 { "f64" } else { "f32" })
}

fn launch(device: &Device, kernel: &str, blocks: u32, args: &mut [*mut c_void]) {
    // SAFETY: each test passes the addresses of vectors of the given length.
    unsafe { device.launch(kernel, blocks, THREADS, args) }.unwrap();
}

fn vectors(dtype: DType, count: usize, len: usize, sizes: &[Sizes], seed: u64) -> Vec<Values> {
    (0..count).map(|i| values(dtype, len, sizes[i % sizes.len()], seed + i as u64)).collect()
}

fn part(values: &Values, range: &Range<usize>) -> Vec<f64> {
    values.f64()[range.clone()].to_vec()
}

/// Returns the products of each row with a vector over some ranges.
fn reference(x: &Values, rows: &[Values], ranges: &[Range<usize>]) -> Vec<u64> {
    let product = |row: &Values| {
        let mut sum = ExactSum::new();
        for range in ranges {
            let [x, y] = [x, row].map(|values| values.slice().slice(range.clone()).unwrap());
            sum.add_dot_on(Isa::Reference, x, y).unwrap();
        }
        sum.words()
    };
    rows.iter().flat_map(product).collect()
}

/// Returns the sums that a kernel, `dot` or `gram`, computes.
fn products(
    device: &Device,
    kernel: &str,
    x: &Values,
    rows: &[Values],
    ranges: &[Range<usize>],
    blocks: u32,
) -> Vec<u64> {
    let dtype = x.slice().dtype();
    let (table, tiles) = spans(ranges.iter().cloned(), dot_tile(dtype));
    let addresses: Vec<u64> = rows.iter().map(address).collect();
    let mut sums = vec![0; rows.len() * ExactSum::WORDS];
    let mut given = Products {
        x: address(x),
        rows: addresses.as_ptr() as u64,
        count: rows.len() as u64,
        spans: table.as_ptr() as u64,
        span_count: table.len() as u64,
        tiles,
        sums: sums.as_mut_ptr() as u64,
    };
    launch(device, &name(kernel, dtype), blocks, &mut [arg(&mut given)]);
    sums
}

#[test]
fn products_equal_their_reference() {
    let (Some(device), Some(norms)) = (Device::of("lbfgs"), Device::of("norm")) else { return };
    // Number of rows, length and number of blocks: fewer blocks than packs of rows, and several for each.
    let cases = [
        (0, 9, 1),
        (1, 0, 1),
        (1, 1, 2),
        (2, 129, 1),
        (3, 4100, 1),
        (5, 2049, 2),
        (4, 9001, 9),
        (7, 5000, 30),
    ];
    for (row, dtype) in DTYPES.into_iter().enumerate() {
        for (column, kernel) in ["dot", "gram"].into_iter().enumerate() {
            for (i, sizes) in SIZES.iter().enumerate() {
                let first = ((2 * row + column) * SIZES.len() + i) * cases.len();
                for (j, (rows, len, blocks)) in cases.into_iter().enumerate() {
                    if ((i + j) % 3 != 0 && len > 4000) || !tried(first + j, 2) {
                        continue;
                    }
                    let seed = (100 * i + 10 * j) as u64;
                    let x = values(dtype, len, *sizes, seed);
                    let rows =
                        vectors(dtype, rows, len, &[Sizes::Ordinary, *sizes, Sizes::Layers], seed + 50);
                    let ranges = [len.min(1)..len.div_ceil(2), len / 2..len / 2, len - len / 3..len];
                    device.reverse((i + j) % 2 == 0);
                    let mut found = products(&device, kernel, &x, &rows, &ranges, blocks);
                    carry_with(&norms, &mut found, 3);
                    let case = format!("{} rows of {len} in {blocks}", rows.len());
                    let expected = reference(&x, &rows, &ranges);
                    assert!(found == expected, "{kernel} {dtype} {sizes:?}: {case}");
                }
            }
        }
    }
}

/// A long vector of numbers with all bits set, times itself with alternating signs: sums that rise and fall.
#[test]
fn long_products_equal_their_reference() {
    let (Some(device), Some(norms)) = (Device::of("lbfgs"), Device::of("norm")) else { return };
    for dtype in DTYPES {
        for (len, blocks) in [(65_535, 3), (65_537, 1), (278_011, 7)] {
            let full = values(dtype, len, Sizes::Full, 0);
            let mut i = 0;
            let signs = full.f64();
            let row = Values::new(dtype, len, || {
                i += 1;
                if i % 5 == 0 { -signs[i - 1] } else { signs[i - 1] }
            });
            let range = &(0..len);
            let range = std::slice::from_ref(range);
            for kernel in ["dot", "gram"] {
                let rows = std::slice::from_ref(&row);
                let mut found = products(&device, kernel, &full, rows, range, blocks);
                carry_with(&norms, &mut found, 1);
                assert!(found == reference(&full, rows, range), "{kernel} {dtype} of {len}");
            }
        }
    }
}

/// Returns expected values, computed one by one in the type `dtype`.
fn expect(dtype: DType, len: usize, value: impl Fn(usize) -> f64) -> Values {
    let mut i = 0;
    Values::new(dtype, len, || {
        i += 1;
        value(i - 1)
    })
}

#[test]
fn vectors_equal_their_reference() {
    let Some(device) = Device::of("lbfgs") else { return };
    let mut random = Random::new(9);
    for dtype in DTYPES {
        let single = dtype == DType::F32;
        // One operation of the type, rounded once.
        let fused = move |a: f64, b: f64, c: f64| {
            if single { f64::from((a as f32).mul_add(b as f32, c as f32)) } else { a.mul_add(b, c) }
        };
        for len in [0usize, 1, 3, 127, 128, 129, 65_537] {
            for (offset, blocks) in [(0, 1), (1, 3), (4, 300)] {
                let all = offset..offset + len;
                let of =
                    vectors(dtype, 9, offset + len, &[Sizes::Ordinary, Sizes::Odd, Sizes::Ramp], len as u64);
                let at = |i: usize| address(&of[i]) + (offset * dtype.size()) as u64;
                let parts: Vec<Vec<f64>> = of.iter().map(|vector| part(vector, &all)).collect();
                let (mut t, mut n) = (random.unit(), len as u64);
                let step = if single { f64::from(t as f32) } else { t };
                let case = format!("{dtype}: {len} from {offset} in {blocks}");
                let room = || vectors(dtype, 1, offset + len, &[Sizes::Ordinary], 3).remove(0);
                let check = |found: &Values, expected: Values, what: &str| {
                    assert_eq!(found.bits()[offset..], expected.bits(), "{what} of {case}");
                };
                let (x, y, d) = (room(), room(), room());
                let into = |values: &Values| address(values) + (offset * dtype.size()) as u64;

                let (mut to, mut start, mut along) = (into(&x), at(0), at(1));
                let mut args = [arg(&mut to), arg(&mut start), arg(&mut along), arg(&mut t), arg(&mut n)];
                launch(&device, &name("walk", dtype), blocks, &mut args);
                check(&x, expect(dtype, len, |i| fused(step, parts[1][i], parts[0][i])), "walk");

                // `leave` starts from the point that `walk` reached, and keeps it.
                let (walked, left) = (x.f64()[offset..].to_vec(), room());
                let mut start = into(&left);
                let mut args = [arg(&mut to), arg(&mut start), arg(&mut along), arg(&mut t), arg(&mut n)];
                launch(&device, &name("leave", dtype), blocks, &mut args);
                check(&left, expect(dtype, len, |i| walked[i]), "what leave leaves");
                check(&x, expect(dtype, len, |i| fused(step, parts[1][i], walked[i])), "leave");

                let (mut y_at, mut g, mut before) = (into(&y), at(2), at(3));
                let mut args = [arg(&mut y_at), arg(&mut g), arg(&mut before), arg(&mut n)];
                launch(&device, &name("difference", dtype), blocks, &mut args);
                check(&y, expect(dtype, len, |i| fused(1.0, parts[2][i], -parts[3][i])), "y");

                let rows: Vec<u64> = (4..9).map(at).collect();
                let coefs: Vec<f64> = rows.iter().map(|_| random.unit()).collect();
                let mut given = Combination {
                    d: into(&d),
                    g,
                    rows: rows.as_ptr() as u64,
                    coefs: coefs.as_ptr() as u64,
                    count: rows.len() as u64,
                    len: n,
                    coef: t,
                };
                launch(&device, &name("combine", dtype), blocks, &mut [arg(&mut given)]);
                let sum = |i: usize| {
                    let terms = coefs.iter().zip(&parts[4..]);
                    terms.fold(t * parts[2][i], |sum, (coef, row)| coef.mul_add(row[i], sum))
                };
                check(&d, expect(dtype, len, sum), "combine");
            }
        }
    }
}

/// The suite detects bugs in sums of terms: a grid that is off by one, a lost rest of a term, a wrong sign, one term too many before
/// integers are read, a dropped rounding error, an extent that ignores small numbers.
#[test]
fn mistakes_are_noticed() {
    let mistakes = [
        ("FIRST_GRID = 47", "FIRST_GRID = 46"),
        ("second = plus(second, fused(x, y, minus(first, next)));", ""),
        ("bool negative = integer < 0;", "bool negative = false;"),
        ("return exponents >= bound - K::WINDOW;", "return true;"),
        ("return exponents + 2 <= bound;", "return exponents <= bound + 3;"),
        ("+ (before + part < part)", ""),
        ("SUBNORMAL = -5000", "SUBNORMAL = -1023"),
        ("lanes[1].add(fused(x[i], y[i], -product));", ""),
        ("x[i] = counts ? given[i] : 0, y[i] = counts ? with[i] : 0;", "x[i] = given[i], y[i] = with[i];"),
    ];
    let Some(norms) = Device::of("norm") else { return };
    // Without the kernels that are not launched here and take long to compile.
    let text = simt::text("lbfgs").replace("\nPRODUCTS(lbfgs_gram", "\n// PRODUCTS(lbfgs_gram");
    let text = text.replace("\nVECTORS(", "\n// VECTORS(");
    for (i, (right, wrong)) in mistakes.into_iter().enumerate() {
        assert_eq!(text.matches(right).count(), 1, "{right}");
        // Short runs try a grid, its bounds, and code for f64 only; long runs try each.
        if !tried(i, 4) {
            continue;
        }
        let Some(device) = Device::compile(&text.replace(right, wrong), "") else { return };
        let noticed = DTYPES.into_iter().any(|dtype| {
            SIZES.into_iter().any(|sizes| {
                let x = values(dtype, 5000, sizes, 1);
                let rows = vectors(dtype, 3, 5000, &[sizes, Sizes::Ordinary, Sizes::Huge], 1);
                let ranges = [0..100, 200..5000];
                let mut found = products(&device, "dot", &x, &rows, &ranges, 1);
                carry_with(&norms, &mut found, 1);
                found != reference(&x, &rows, &ranges)
            })
        });
        assert!(noticed, "{right} -> {wrong}");
    }
}

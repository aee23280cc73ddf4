//! Dot products: every instruction set, split and order gives the words of the plain definition.

use crate::common::{LENGTHS, Random, Values, fast};
use meshstep_optim::{Error, ExactSum, Isa};
use meshstep_tensor::DType;

fn dot(isa: Isa, x: &Values, y: &Values) -> ExactSum {
    let mut sum = ExactSum::new();
    sum.add_dot_on(isa, x.slice(), y.slice()).unwrap();
    sum
}

/// Returns values of one kind: ordinary, of very different sizes, with some not finite, or so small or large that products exceed f64.
fn values(dtype: DType, len: usize, kind: u64, random: &mut Random) -> Values {
    Values::new(dtype, len, || match kind {
        0 => random.unit(),
        1 => random.unit() * 2f64.powi((random.next() % 200) as i32 - 100),
        2 => random.any(),
        3 => random.unit() * 1e-170,
        5 => random.unit() * 1e-310 * 2f64.powi(-((random.next() % 44) as i32)),
        6 => 0.0,
        7 => random.unit() * 1e300 / 3.0,
        _ => random.unit() * 1e170,
    })
}

#[test]
fn every_instruction_set_gives_the_definitions_words() {
    let mut random = Random::new(11);
    for dtype in [DType::F32, DType::F64] {
        for len in LENGTHS.into_iter().filter(|&len| len < 100_000).chain([1023, 1024, 1025, 8192, 8193]) {
            for kinds in [
                (0, 0),
                (1, 1),
                (2, 2),
                (0, 2),
                (3, 3),
                (4, 4),
                (3, 4),
                (1, 3),
                (5, 7),
                (5, 5),
                (6, 2),
                (2, 6),
            ] {
                let (x, y) =
                    (values(dtype, len, kinds.0, &mut random), values(dtype, len, kinds.1, &mut random));
                let plain = dot(Isa::Reference, &x, &y);
                for isa in fast() {
                    assert!(dot(isa, &x, &y) == plain, "{dtype} {len} {kinds:?} {isa}");
                }
            }
        }
    }
}

#[test]
fn sizes_just_within_and_just_beyond_what_is_summed_at_once_make_no_difference() {
    let mut random = Random::new(13);
    for dtype in [DType::F32, DType::F64] {
        for spread in 10..80 {
            let of = [spread, 10 + 7 * spread % 67];
            let scales = if dtype == DType::F32 { [-100, 100] } else { [-940, 990] };
            for scale in [1.0 / 3.0].into_iter().chain(scales.map(|power| 2f64.powi(power) / 3.0)) {
                let mut vector = |kind, scale: f64| {
                    let power = |random: &mut Random| 2f64.powi(-((random.next() % kind) as i32));
                    Values::new(dtype, 2100, || random.unit() * power(&mut random) * scale)
                };
                let (x, y) = (vector(of[0], scale), vector(of[1], 3e10));
                let plain = dot(Isa::Reference, &x, &y);
                for isa in fast() {
                    assert!(dot(isa, &x, &y) == plain, "{dtype} {of:?} {scale} {isa}");
                }
            }
        }
    }
}

#[test]
fn where_it_is_cut_does_not_show() {
    let mut random = Random::new(12);
    for dtype in [DType::F32, DType::F64] {
        let (x, y) = (values(dtype, 5000, 1, &mut random), values(dtype, 5000, 1, &mut random));
        let whole = dot(Isa::detect(), &x, &y);
        assert!(dot(Isa::detect(), &y, &x) == whole);
        for cut in [0, 1, 63, 1024, 2500, 4999] {
            let mut sum = ExactSum::new();
            for range in [cut..5000, 0..cut] {
                let parts = [&x, &y].map(|v| v.slice().slice(range.clone()).unwrap());
                sum.add_dot(parts[0], parts[1]).unwrap();
            }
            assert!(sum == whole, "{dtype} cut at {cut}");
        }
    }
}

#[test]
fn a_vector_with_itself_is_its_sum_of_squares() {
    let x = [3f64, -4.0, 1e-200, 1e200];
    let mut dot = ExactSum::new();
    dot.add_dot((&x[..]).into(), (&x[..]).into()).unwrap();
    let mut squares = ExactSum::new();
    x.iter().for_each(|&x| squares.add_square(x));
    assert_eq!(dot, squares);
}

#[test]
fn what_does_not_go_together_is_refused() {
    let (f32s, f64s, words) = ([1f32; 3], [1f64; 3], [1u64; 3]);
    let mut sum = ExactSum::new();
    let len = sum.add_dot((&f32s[..]).into(), (&f32s[..2]).into());
    assert!(matches!(len, Err(Error::Len { given: 2, expected: 3, .. })));
    let dtype = sum.add_dot((&f32s[..]).into(), (&f64s[..]).into());
    assert!(matches!(dtype, Err(Error::DType { given: DType::F64, .. })));
    let integers = sum.add_dot((&words[..]).into(), (&words[..]).into());
    assert!(matches!(integers, Err(Error::DType { given: DType::U64, .. })));
    assert_eq!(sum, ExactSum::new());
}

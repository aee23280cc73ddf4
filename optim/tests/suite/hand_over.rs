//! Weighted addition: every body equals the definition, and weight 1 is a plain copy or addition.

use crate::common::{LENGTHS, Random, Values, fast};
use meshstep_optim::{Isa, accumulate_on};
use meshstep_tensor::{DType, Threads};

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

fn random(dtype: DType, len: usize, seed: u64) -> Values {
    let mut random = Random::new(seed);
    Values::new(dtype, len, || random.any())
}

fn result(isa: Isa, dst: &Values, src: &Values, offset: usize, weight: f64, first: bool) -> Values {
    let mut dst = dst.clone();
    let range = offset..src.slice().len();
    let to = dst.slice_mut().slice(range.clone()).unwrap();
    accumulate_on(isa, &Threads::shared(), to, src.slice().slice(range).unwrap(), weight, first).unwrap();
    dst
}

#[test]
fn all_instruction_sets_give_the_reference_bits() {
    let isas = fast();
    for dtype in DTYPES {
        for len in LENGTHS {
            for offset in if len < 1000 { 0..18 } else { 17..18 } {
                let (dst, src) = (random(dtype, len + offset, 1), random(dtype, len + offset, 2));
                for (weight, first) in [(1.0, true), (1.0, false), (3.0, true), (0.1, false), (-2.5, false)] {
                    let expected = result(Isa::Reference, &dst, &src, offset, weight, first).bits();
                    for &isa in &isas {
                        let bits = result(isa, &dst, &src, offset, weight, first).bits();
                        assert!(bits == expected, "{dtype} {len} from {offset} on {isa}: {weight} {first}");
                    }
                }
            }
        }
    }
}

#[test]
fn weight_one_is_a_copy_or_an_addition() {
    for dtype in DTYPES {
        let (dst, src) = (random(dtype, 5000, 3), random(dtype, 5000, 4));
        assert_eq!(result(Isa::detect(), &dst, &src, 0, 1.0, true).slice().bytes(), src.slice().bytes());
        let mut sums = dst.f64().into_iter().zip(src.f64()).map(|(d, s)| match dtype {
            DType::F64 => d + s,
            _ => (d as f32 + s as f32).into(),
        });
        let sums = Values::new(dtype, 5000, || sums.next().unwrap());
        assert_eq!(result(Isa::detect(), &dst, &src, 0, 1.0, false).bits(), sums.bits());
    }
}

#[test]
fn sixteen_bit_sums_round_once() {
    // 256 + 3 * 1.0078125 is 259.02...; bf16 has steps of 2 there, so the nearest is 260.
    let (dst, src) = (Values::new(DType::BF16, 1, || 256.0), Values::new(DType::BF16, 1, || 1.007_812_5));
    for isa in Isa::available() {
        assert_eq!(result(isa, &dst, &src, 0, 3.0, false).f64(), [260.0]);
    }
}

//! Merges on the CPU, against one element at a time.

use crate::common::Random;
use meshstep_optim::{Merge, OuterStep, Sgd, mix_zeros, pack};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Slice, SliceMut, bf16};

/// Lengths around those of blocks, of the split among threads, and of non-temporal copies of f32.
const LENS: [usize; 12] = [0, 1, 31, 1023, 1024, 1025, 65_536, 65_537, 65_538, 200_001, 262_143, 262_145];

fn values(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|_| (random.next() % 2_000_001) as f32 / 1000.0 - 1000.0).collect()
}

/// Mixes one element.
fn mixed(taken: f64, own: f64, result: f64) -> f32 {
    (if taken == 1.0 { result } else { own + taken * (result - own) }) as f32
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn means_are_merged_as_one_element_is() {
    let (queue, mut random) = (Queue::cpu(), Random::new(7));
    for len in LENS {
        let [own, mean, from, gone] = [0; 4].map(|_| values(&mut random, len));
        let narrow: Vec<bf16> = mean.iter().map(|&x| bf16::from_f32(x)).collect();
        for (taken, late, differences, anchored, squares) in [
            (1.0, None, false, false, false),
            (1.0, None, false, true, false),
            (0.3, None, false, true, false),
            (1.0, None, true, true, false),
            (0.6, Some(0.7), false, false, false),
            (1.0, Some(0.7), true, true, true),
        ] {
            for wire in [DType::F32, DType::BF16] {
                let (mut values, mut anchor) = (own.clone(), from.clone());
                let merge = Merge {
                    mean: if wire == DType::F32 { Slice::from(&mean[..]) } else { Slice::from(&narrow[..]) },
                    differences,
                    anchor: anchored.then(|| SliceMut::from(&mut anchor[..])),
                    sent: late.map(|left| (Slice::from(&gone[..]), left)),
                    taken,
                    squares,
                };
                merge.mean(SliceMut::from(&mut values[..]), &queue).unwrap();
                let element = |i: usize| {
                    let arrived = if wire == DType::F32 { mean[i].into() } else { narrow[i].to_f64() };
                    let result = arrived + if differences { f64::from(from[i]) } else { 0.0 };
                    let x = match late {
                        None => mixed(taken, own[i].into(), result),
                        Some(left) => {
                            let x = f64::from(own[i]) + taken * left * (result - f64::from(gone[i]));
                            (if squares { x.max(0.0) } else { x }) as f32
                        }
                    };
                    (x, if anchored { result as f32 } else { from[i] })
                };
                let (expected, kept): (Vec<f32>, Vec<f32>) = (0..len).map(element).unzip();
                let what = format!("{len} by {wire}, {taken} {late:?} {differences} {anchored}");
                assert!(bits(&values) == bits(&expected), "{what}");
                assert!(bits(&anchor) == bits(&kept), "anchor, {what}");
            }
        }
    }
}

/// Returns the nearest bf16, in one rounding.
fn rounded(x: f64) -> bf16 {
    let mut one = [bf16::from_f32(0.0)];
    meshstep_tensor::cast(Slice::from(&[x][..]), SliceMut::from(&mut one[..])).unwrap();
    one[0]
}

#[test]
fn differences_are_packed_as_one_element_is() {
    let (queue, mut random) = (Queue::cpu(), Random::new(8));
    for len in LENS {
        let [own, from] = [0; 2].map(|_| values(&mut random, len));
        let mut same = vec![0.0; len];
        pack(Slice::from(&own[..]), None, SliceMut::from(&mut same[..]), &queue).unwrap();
        assert!(bits(&same) == bits(&own), "{len}");
        let mut packed = vec![bf16::from_f32(0.0); len];
        for anchored in [false, true] {
            let anchor = anchored.then(|| Slice::from(&from[..]));
            pack(Slice::from(&own[..]), anchor, SliceMut::from(&mut packed[..]), &queue).unwrap();
            let less = |i: usize| if anchored { f64::from(from[i]) } else { 0.0 };
            let expected = (0..len).map(|i| rounded(f64::from(own[i]) - less(i)).to_bits());
            assert!(packed.iter().map(|x| x.to_bits()).eq(expected), "{len}, {anchored}");
        }
    }
}

#[test]
fn outer_steps_and_zeros_are_taken_as_one_element_is() {
    let (queue, meter, mut random) = (Queue::cpu(), Meter::new(), Random::new(9));
    for len in LENS {
        let [own, mean, from] = [0; 3].map(|_| values(&mut random, len));
        let (mut values, mut anchor) = (own.clone(), from.clone());
        let rule = Sgd { momentum: 0.9, ..Sgd::default() };
        let mut state = vec![Buffer::zeroed(len, DType::F64, &meter, Category::State).unwrap()];
        let (mean_of, anchored) = (Slice::from(&mean[..]), Some(SliceMut::from(&mut anchor[..])));
        let merge = Merge {
            mean: mean_of,
            differences: false,
            anchor: anchored,
            sent: None,
            taken: 0.5,
            squares: false,
        };
        let step = OuterStep { rule: &rule, lr: 0.7, state: &mut state, t: 1 };
        merge.outer(SliceMut::from(&mut values[..]), step, &queue, &meter).unwrap();
        let element = |i: usize| {
            let (a, m) = (f64::from(from[i]), f64::from(mean[i]));
            let result = m + ((a - 0.7 * (a - m)) - (a - (a - m)));
            (mixed(0.5, own[i].into(), result), result)
        };
        for i in 0..len {
            let (x, result) = element(i);
            let near = |a: f32, b: f64| (f64::from(a) - b).abs() <= 1e-3 * b.abs().max(1.0) / 4096.0;
            assert!(near(values[i], x.into()) && near(anchor[i], result), "{len}, {i}");
        }
        let mut zeros = own.clone();
        mix_zeros(SliceMut::from(&mut zeros[..]), 0.25, &queue).unwrap();
        let expected: Vec<f32> = own.iter().map(|&x| mixed(0.25, x.into(), 0.0)).collect();
        assert!(bits(&zeros) == bits(&expected), "{len}");
    }
}

#[test]
fn rounding_takes_no_square_below_zero_and_what_is_nan_stays_so() {
    let merged = |values: &mut [f32], squares| {
        let merge = Merge {
            mean: Slice::from(&[0.0f32, 0.0][..]),
            differences: false,
            anchor: None,
            sent: Some((Slice::from(&[1.0f32, 1.0][..]), 0.9)),
            taken: 1.0,
            squares,
        };
        merge.mean(SliceMut::from(values), &Queue::cpu()).unwrap();
    };
    // Value left of 1 after an update that adds nothing, in f32.
    let mut values = [0.9f32.next_down(), f32::NAN];
    merged(&mut values, true);
    assert!(values[0] == 0.0 && values[1].is_nan(), "{values:?}");
    let mut values = [0.9f32.next_down(), f32::NAN];
    merged(&mut values, false);
    assert!(values[0] < 0.0 && values[1].is_nan(), "{values:?}");
}

//! Every kind of number is stored as on the CPU.

use crate::common::{Memory, Values, difference};
use crate::cuda_kernels::{KEY, launch, recipes};
use meshstep_cases::stride;
use meshstep_optim::{Isa, Rule, Scalars, Segment, Sgd};
use meshstep_simt::Device;
use meshstep_tensor::{DType, bf16, cast, f16};

/// Lower halves to combine with every upper half: ties of bf16 and f16, their neighbours, and others.
const LOWS: [u16; 14] =
    [0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xEFFF, 0xF000, 0xFFFF];

/// Returns all numbers with lower half 0, and every third with another; all in a long run, a tenth for `cargo xtask check`.
fn hard() -> Vec<f32> {
    let number = |low: u16| move |high: u16| f32::from_bits(u32::from(high) << 16 | u32::from(low));
    let step = |low: u16| stride(if low == 0 { 1 } else { 3 });
    LOWS.into_iter().flat_map(|low| (0..=u16::MAX).step_by(step(low)).map(number(low))).collect()
}

#[test]
fn casts_are_those_of_the_cpu() {
    let Some(device) = Device::of("cuda/cast") else { return };
    let bf16 = Values::BF16((0..=u16::MAX).map(bf16::from_bits).collect());
    let f16 = Values::F16((0..=u16::MAX).map(f16::from_bits).collect());
    let f32 = Values::F32(hard());
    for (src, to) in [
        (&bf16, DType::F32),
        (&bf16, DType::F16),
        (&f16, DType::F32),
        (&f16, DType::BF16),
        (&f32, DType::BF16),
        (&f32, DType::F16),
    ] {
        let src = src.slice();
        let zeros = || Values::new(to, src.len(), || 0.0);
        let (mut expected, mut found) = (zeros(), zeros());
        cast(src, expected.slice_mut()).unwrap();
        crate::cuda_kernels::vectors::cast_on(&device, src, found.slice_mut());
        assert_eq!(found.first_other(&expected), None, "{} to {to}", src.dtype());
    }
}

/// A step of length 1 from parameters and momentum of zero: parameters become the negated gradient, momentum the gradient, the copy the
/// negated gradient, each in the recipe's type.
#[test]
fn results_are_written_as_by_the_cpu() {
    let rule = Sgd { momentum: 0.9, ..Sgd::default() };
    let Some(device) = Device::of("sgd") else { return };
    let hard = hard();
    for recipe in recipes().iter().filter(|recipe| recipe.suits(&rule) && recipe.grads == DType::F32) {
        let zeros = |dtype| Values::new(dtype, hard.len(), || 0.0);
        let start = Memory {
            params: zeros(recipe.params),
            grads: Values::F32(hard.clone()),
            state: vec![zeros(recipe.state)],
            copy: recipe.copy.map(zeros),
            remainder: recipe.remainder.then(|| Values::U16(vec![0; hard.len()])),
        };
        let (mut expected, mut found) = (start.clone(), start);
        let segments = [Segment { key: KEY, ..Segment::new(0..hard.len(), 2) }];
        let scalars = Scalars { lr: 1.0, rounding: recipe.rounding, ..Scalars::default() };
        expected.update(&rule, Isa::Reference, 0, &segments, &scalars).unwrap();
        let group: [(&dyn Rule, _); 1] = [(&rule, segments.to_vec())];
        let kernel = launch(&device, &group, &mut found, &scalars, 5).unwrap();
        assert_eq!(difference(&found, &expected), None, "{kernel} {recipe:?}");
    }
}

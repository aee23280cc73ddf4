//! The source of the CUDA sum kernels, run on the CPU, gives the words of the CPU's exact sums. These tests neither need nor verify a
//! GPU.

mod decide;
mod lbfgs;
mod norms;

use crate::common::{Random, Values};
use meshstep_optim::ExactSum;
use meshstep_optim::cuda::{CARRY_SUMS, THREADS};
use meshstep_simt::Device;
use meshstep_tensor::DType;
use std::ffi::c_void;

/// Returns a pointer to an argument.
fn arg<T>(value: &mut T) -> *mut c_void {
    (&raw mut *value).cast()
}

/// Returns the address of the first element.
fn address(values: &Values) -> u64 {
    values.slice().bytes().unwrap().as_ptr() as u64
}

/// Carries sums laid end to end, with the kernels of norms.
fn carry_with(device: &Device, sums: &mut [u64], blocks: u32) {
    let mut count = (sums.len() / ExactSum::WORDS) as u64;
    let mut at = sums.as_mut_ptr();
    // SAFETY: `at` points at `count` sums.
    unsafe { device.launch(CARRY_SUMS, blocks, THREADS, &mut [arg(&mut at), arg(&mut count)]) }.unwrap();
}

/// Distribution of the sizes in a vector.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sizes {
    /// As in gradients.
    Ordinary,
    /// Random bits: every size, subnormal numbers, infinities, NaN.
    AnyBits,
    /// Ordinary, with occasional special numbers.
    Odd,
    /// From the smallest to the largest in turn.
    Ramp,
    /// Below the smallest normal number.
    Subnormal,
    /// The largest possible.
    Huge,
    /// Zeros and a few ordinary numbers.
    Sparse,
    /// Layers of very different sizes.
    Layers,
    /// All equal, with every bit of the significand set: grids fill up, and rests of terms are as large as possible.
    Full,
    /// Within a range of powers of two that one or two grids just hold, or just fail to hold.
    Near,
    /// On both sides of the largest power of two of f32: sums with it overflow.
    Brink,
}

const SIZES: [Sizes; 11] = [
    Sizes::Ordinary,
    Sizes::AnyBits,
    Sizes::Odd,
    Sizes::Ramp,
    Sizes::Subnormal,
    Sizes::Huge,
    Sizes::Sparse,
    Sizes::Layers,
    Sizes::Full,
    Sizes::Near,
    Sizes::Brink,
];

fn values(dtype: DType, len: usize, sizes: Sizes, seed: u64) -> Values {
    let mut random = Random::new(seed);
    let wide = dtype == DType::F64;
    let powers = match dtype {
        DType::F16 => 10,
        DType::BF16 => 13,
        _ => 20,
    };
    let mut i = 0u64;
    Values::new(dtype, len, move || {
        i += 1;
        match sizes {
            Sizes::Ordinary => random.unit() * random.unit() * 1e-3,
            Sizes::AnyBits if wide => f64::from_bits(random.next()),
            Sizes::AnyBits => f32::from_bits(random.next() as u32).into(),
            Sizes::Odd => random.any(),
            Sizes::Ramp if wide => random.unit() * f64::from_bits((i / 8 % 2046 + 1) << 52),
            Sizes::Ramp => random.unit() * 2f64.powi((i / 8 % 277) as i32 - 149),
            Sizes::Subnormal if wide => random.unit() * f64::MIN_POSITIVE / 2f64.powi((i % 50) as i32),
            Sizes::Subnormal if dtype == DType::F16 => random.unit() * 2f64.powi(-14 - (i % 9) as i32),
            Sizes::Subnormal => random.unit() * 2f64.powi(-126 - (i % 22) as i32),
            Sizes::Huge if wide => random.unit() * f64::MAX,
            Sizes::Huge if dtype == DType::F16 => random.unit() * 65_504.0,
            Sizes::Huge => random.unit() * f64::from(f32::MAX),
            Sizes::Sparse if random.next().is_multiple_of(17) => random.any(),
            Sizes::Sparse => 0.0,
            Sizes::Layers => random.unit() * 10f64.powi(-3 * (i / 3000 % 7) as i32),
            Sizes::Full if wide => -(2.0 - f64::EPSILON),
            Sizes::Full => 2.0 - f64::from(f32::EPSILON),
            Sizes::Brink if wide || dtype == DType::F16 => random.unit() * 65_504.0,
            Sizes::Brink => {
                let bits = [0x7EFF_FFFF, 0x7EFF_FFFE, 0x7F00_0000, 0x7F7F_FFFF, 0x7E80_0000, 0x7E7F_FFFF];
                f32::from_bits(bits[i as usize / 2000 % bits.len()] - (i as u32 & 1)).into()
            }
            Sizes::Near => {
                let power = random.next() % (powers + i / 9000 % 6);
                (1.0 + random.unit().abs()) * 0.5f64.powi(power as i32)
            }
        }
    })
}

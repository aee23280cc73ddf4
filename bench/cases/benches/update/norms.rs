//! Exact norms compared with a plain sum of the same values.

use crate::race::race;
use meshstep_optim::{Norm, NormAccumulator};
use meshstep_tensor::Threads;
use meshstep_tensor::simd::{Body, Isa};
use std::hint::black_box;

pub(crate) fn races(len: usize, rounds: usize) {
    let mut values: Vec<f32> = (0..len).map(|i| (i % 1021) as f32 * 1e-3 - 0.5).collect();
    let norm = |norm: Norm| {
        move |values: &mut Vec<f32>| {
            let mut accumulator = NormAccumulator::new(norm);
            accumulator.add(values[..].into()).unwrap();
            black_box(accumulator.finish());
        }
    };
    let plain = |values: &mut Vec<f32>| {
        black_box(sum(values));
    };
    let names = ["plain f32 sum", "exact L2 norm", "exact L1 norm", "Inf norm"];
    let times = race(&mut values, rounds, [&plain, &norm(Norm::L2), &norm(Norm::L1), &norm(Norm::Inf)]);
    for (name, time) in names.iter().zip(times) {
        let speed = (4 * len) as f64 / time / 1e9;
        println!("{name:44} {:6} {:8.2} {speed:8.1} {:6.1}%", 4, time * 1e3, 100.0 * times[0] / time);
    }
}

/// Sums into 64 f32 lanes, in the same parts as a norm.
fn sum(x: &[f32]) -> f32 {
    let threads = Threads::shared();
    let parts = x.chunks(threads.part_len(x.len(), 64 << 10));
    threads.fold(parts, || 0.0, |sum, part| *sum += Isa::detect().run(Sum(part)), |sum, other| *sum += other)
}

struct Sum<'a>(&'a [f32]);

impl Body for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        let mut lanes = [0f32; 64];
        for chunk in self.0.as_chunks::<64>().0 {
            lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane += x);
        }
        lanes.iter().sum()
    }
}

//! Benefit of fusing: one norm and one update that scales, updates, copies and resets, against one pass for each.
//!
//! Both sides use the same threads and vector instructions, interleaved round by round; results are medians.
//! `FUSED_BENCH_LOG2` sets the number of parameters (26: 64 Mi), `FUSED_BENCH_ROUNDS` the rounds.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program that measures and prints")]

use meshstep_optim::{AdamW, Flat, Isa, Norm, NormAccumulator, Rule, Scalars, Segment, clip_coef};
use meshstep_tensor::simd::Body;
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Threads, bf16, narrow};
use std::time::Instant;

/// Elements of a thread's chunk.
const CHUNK: usize = 64 << 10;

/// Parameters, gradients, moments, and the low-precision copy of the model.
struct Vectors {
    params: Buffer,
    grads: Buffer,
    m: Buffer,
    v: Buffer,
    copy: Buffer,
}

impl Vectors {
    fn new(len: usize) -> Self {
        let meter = Meter::new();
        let mut apart = Vec::new();
        let mut vector = |dtype, category| {
            let buffer = Buffer::zeroed_apart(len, dtype, &meter, category, &apart).unwrap();
            apart.push(buffer.as_ptr().addr().get());
            buffer
        };
        let mut vectors = Vectors {
            params: vector(DType::F32, Category::Params),
            grads: vector(DType::F32, Category::Grads),
            m: vector(DType::F32, Category::State),
            v: vector(DType::F32, Category::State),
            copy: vector(DType::BF16, Category::Params),
        };
        vectors.fill();
        vectors
    }

    fn fill(&mut self) {
        let mut seed = 1u32;
        let mut next = |size: f32| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 24) as f32 * size
        };
        self.params.typed_mut::<f32>().unwrap().iter_mut().for_each(|x| *x = next(1.0));
        self.m.typed_mut::<f32>().unwrap().iter_mut().for_each(|x| *x = next(1e-2));
        self.v.typed_mut::<f32>().unwrap().iter_mut().for_each(|x| *x = next(1e-4));
        self.new_grads();
    }

    /// Refills the gradients; both sides reset them to zero.
    fn new_grads(&mut self) {
        let grads = self.grads.typed_mut::<f32>().unwrap();
        grads.iter_mut().enumerate().for_each(|(i, g)| *g = (i % 1000) as f32 * 1e-5);
    }

    fn coef(&self) -> f64 {
        let mut norm = NormAccumulator::new(Norm::L2);
        norm.add(self.grads.as_slice()).unwrap();
        clip_coef(norm.finish(), 1.0).unwrap()
    }

    fn update(&mut self, grad_scale: f64, fused: bool) {
        let range = 0..self.params.len();
        let mut state = [self.m.as_mut(), self.v.as_mut()];
        let copy = fused.then(|| self.copy.as_mut());
        let (params, grads) = (self.params.as_mut(), self.grads.as_mut());
        let flat = Flat { params, grads, state: &mut state, copy, remainder: None };
        let scalars = Scalars { lr: 1e-9, grad_scale, zero_grads: fused, ..Scalars::default() };
        AdamW::default().update(flat, &[Segment::new(range, 100)], &scalars, &Queue::cpu()).unwrap();
    }

    fn fused(&mut self) {
        let coef = self.coef();
        self.update(coef, true);
    }

    fn separate(&mut self) {
        let (isa, threads) = (Isa::detect(), Threads::shared());
        let coef = self.coef() as f32;
        let grads = self.grads.typed_mut::<f32>().unwrap();
        threads.for_each(grads.chunks_mut(CHUNK), |g| isa.run(Scale(g, coef)));
        self.update(1.0, false);
        let params = self.params.typed::<f32>().unwrap().chunks(CHUNK);
        let copy = self.copy.typed_mut::<bf16>().unwrap().chunks_mut(CHUNK);
        threads.for_each(params.zip(copy), |(p, c)| isa.run(Cast(p, c)));
        let grads = self.grads.typed_mut::<f32>().unwrap();
        threads.for_each(grads.chunks_mut(CHUNK), |g| g.fill(0.0));
    }
}

struct Scale<'a>(&'a mut [f32], f32);

impl Body for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.0.iter_mut().for_each(|g| *g *= self.1);
    }
}

struct Cast<'a>(&'a [f32], &'a mut [bf16]);

impl Body for Cast<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.0.iter().zip(self.1).for_each(|(p, c)| *c = narrow::to_bf16(*p));
    }
}

fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn main() {
    // `cargo test --benches` only checks that the program runs.
    let trial = !std::env::args().any(|arg| arg == "--bench");
    let log2 = if trial { 12 } else { setting("FUSED_BENCH_LOG2", 26) };
    let rounds = if trial { 1 } else { setting("FUSED_BENCH_ROUNDS", 21) };
    let mut vectors = Vectors::new(1 << log2);
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..=rounds {
        for (work, times) in [Vectors::fused, Vectors::separate].iter().zip(&mut times) {
            vectors.new_grads();
            let start = Instant::now();
            work(&mut vectors);
            // The first round is a warm-up: it touches the memory and starts the threads.
            if round > 0 {
                times.push(start.elapsed().as_secs_f64());
            }
        }
    }
    let [fused, separate] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[rounds / 2]
    });
    println!("{} parameters, {} threads, medians of {rounds} rounds", 1 << log2, Threads::shared().count());
    println!("norm, then one fused pass                {:7.2} ms", fused * 1e3);
    println!("norm, scale, update, cast, zero          {:7.2} ms", separate * 1e3);
    println!("fused is {:.2} times as fast", separate / fused);
}

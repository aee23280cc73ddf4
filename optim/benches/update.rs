//! How close an update is to memory speed: against a loop that only moves the same bytes, in the same run.
//!
//! The machine's speed wanders, so what is compared is interleaved: round by round all contestants in turn, the median
//! of each. `UPDATE_BENCH_LOG2` sets the number of parameters (26: 64 Mi), `UPDATE_BENCH_ROUNDS` the rounds.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program that measures and prints")]

use criterion::Criterion;
use meshstep_optim::{AdamW, Flat, Norm, NormAccumulator, Rule, Scalars, Segment, Sgd};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Four vectors of the same length: params, grads, and two states.
struct Vectors([Buffer; 4]);

impl Vectors {
    fn new(len: usize) -> Self {
        let meter = Meter::new();
        let mut vectors = [Category::Params, Category::Grads, Category::State, Category::State]
            .map(|category| Buffer::zeroed(len, DType::F32, &meter, category).unwrap());
        for (k, vector) in vectors.iter_mut().enumerate() {
            let mut seed = k as u32 + 1;
            for x in vector.typed_mut::<f32>().unwrap() {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *x = (seed >> 8) as f32 / (1 << 24) as f32 * if k == 3 { 1e-4 } else { 1e-2 };
            }
        }
        Vectors(vectors)
    }

    fn update(&mut self, rule: &dyn Rule) {
        let len = self.0[0].len();
        let [p, g, m, v] = &mut self.0;
        let mut state = [m.as_mut(), v.as_mut()];
        let state = &mut state[..rule.state().len()];
        let flat = Flat { params: p.as_mut(), grads: g.as_mut(), state, copy: None };
        let scalars = Scalars { lr: 1e-9, grad_scale: 0.5, zero_grads: false, ..Scalars::default() };
        rule.update(flat, &[Segment::new(0..len, 100)], &scalars, &Queue::cpu()).unwrap();
    }

    /// Reads four streams and writes three of them, as AdamW does: 28 bytes an element.
    fn copy_four(&mut self) {
        let vectors = self.0.each_mut().map(|b| b.typed_mut::<f32>().unwrap());
        split(vectors, &|[p, g, m, v]| wide(|| mix_four(p, g, m, v, black_box(0))));
    }

    /// Reads three streams and writes two of them, as SGD with momentum does: 20 bytes an element.
    fn copy_three(&mut self) {
        let [p, g, m, v] = self.0.each_mut().map(|b| b.typed_mut::<f32>().unwrap());
        split([p, g, m, &mut v[..0]], &|[p, g, m, _]| wide(|| mix_three(p, g, m, black_box(0))));
    }

    fn norm(&self, norm: Norm) -> f64 {
        let mut accumulator = NormAccumulator::new(norm);
        accumulator.add(self.0[1].as_slice()).unwrap();
        accumulator.finish()
    }

    fn plain_sum(&self) -> f64 {
        sum(self.0[1].typed().unwrap())
    }
}

/// Moves the bytes and, with a mask of zero that the compiler does not know, changes none: an update measured next works
/// on numbers as ordinary as before.
fn mix_four(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], mask: u32) {
    for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
        let mixed = |x: f32| f32::from_bits(x.to_bits() ^ (g.to_bits() & mask));
        (*p, *m, *v) = (mixed(*p), mixed(*m), mixed(*v));
    }
}

fn mix_three(p: &mut [f32], g: &[f32], m: &mut [f32], mask: u32) {
    for ((p, g), m) in p.iter_mut().zip(g).zip(m) {
        let mixed = |x: f32| f32::from_bits(x.to_bits() ^ (g.to_bits() & mask));
        (*p, *m) = (mixed(*p), mixed(*m));
    }
}

/// The same halving, down to the same size, on the same threads as an update.
fn split(vectors: [&mut [f32]; 4], work: &(impl Fn([&mut [f32]; 4]) + Sync)) {
    let len = vectors[0].len();
    if len <= 64 << 10 {
        return work(vectors);
    }
    let mut halves = vectors.map(|x| x.split_at_mut(len.div_ceil(2).min(x.len())));
    let left = halves.each_mut().map(|(left, _)| std::mem::take(left));
    let right = halves.map(|(_, right)| right);
    rayon::join(|| split(left, work), || split(right, work));
}

/// Sixteen partial sums of f32, halved like a norm.
fn sum(x: &[f32]) -> f64 {
    if x.len() > 128 << 10 {
        let (left, right) = x.split_at(x.len() / 2);
        let (left, right) = rayon::join(|| sum(left), || sum(right));
        return left + right;
    }
    let mut total = 0.0;
    wide(|| {
        let mut lanes = [0f32; 64];
        for chunk in x.as_chunks::<64>().0 {
            lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane += x);
        }
        total = lanes.iter().sum::<f32>().into();
    });
    total
}

/// Compiles `work` for the registers the updates use, so that neither side is slowed by narrow ones.
fn wide(work: impl FnOnce()) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512vl")]
        fn avx512(work: impl FnOnce()) {
            work();
        }
        #[target_feature(enable = "avx2")]
        fn avx2(work: impl FnOnce()) {
            work();
        }
        if is_x86_feature_detected!("avx512vl") && is_x86_feature_detected!("avx512f") {
            // SAFETY: the machine has just said that it has both.
            return unsafe { avx512(work) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the machine has just said that it has it.
            return unsafe { avx2(work) };
        }
    }
    work();
}

fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn time(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// A name, and what is timed.
type Contestant = (&'static str, fn(&mut Vectors));

/// Contestants in turn, `rounds` times; prints each one's median and best time, the median's bytes per second, and both
/// as shares of the first one's speed.
fn race(vectors: &mut Vectors, rounds: usize, bytes: usize, contestants: &[Contestant]) {
    let mut times = vec![Vec::new(); contestants.len()];
    for round in 0..=rounds {
        for ((_, work), times) in contestants.iter().zip(&mut times) {
            let took = time(|| work(vectors));
            // The first round touches the memory and starts the threads.
            if round > 0 {
                times.push(took.as_secs_f64());
            }
        }
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    let (first_median, first_best) = (times[0][rounds / 2], times[0][0]);
    for ((name, _), times) in contestants.iter().zip(&times) {
        let (median, best) = (times[rounds / 2], times[0]);
        let speed = (bytes * vectors.0[0].len()) as f64 / median / 1e9;
        let (share, of_best) = (100.0 * first_median / median, 100.0 * first_best / best);
        let (median, best) = (median * 1e3, best * 1e3);
        println!(
            "{name:20} median {median:7.2} ms {speed:5.1} GB/s {share:6.1}%   best {best:7.2} ms {of_best:6.1}%"
        );
    }
}

fn adamw(vectors: &mut Vectors) {
    vectors.update(&AdamW::default());
}

fn sgd(vectors: &mut Vectors) {
    vectors.update(&Sgd { momentum: 0.9, weight_decay: 1e-4, ..Sgd::default() });
}

/// Needs the result, so that it is computed.
fn keep(result: f64) {
    black_box(result);
}

fn races(len: usize, rounds: usize) {
    let mut vectors = Vectors::new(len);
    println!("{len} parameters, {} threads, medians of {rounds} rounds", rayon::current_num_threads());
    race(&mut vectors, rounds, 28, &[("copy of 4 streams", Vectors::copy_four), ("AdamW f32", adamw)]);
    race(&mut vectors, rounds, 20, &[("copy of 3 streams", Vectors::copy_three), ("SGD momentum f32", sgd)]);
    let norms: [Contestant; 4] = [
        ("plain f32 sum", |v| keep(v.plain_sum())),
        ("exact L2 norm", |v| keep(v.norm(Norm::L2))),
        ("exact L1 norm", |v| keep(v.norm(Norm::L1))),
        ("Inf norm", |v| keep(v.norm(Norm::Inf))),
    ];
    let mut vectors = Vectors::new(len);
    race(&mut vectors, rounds, 4, &norms);
}

/// Small work, inline on one thread: what a step costs per call.
fn small(c: &mut Criterion) {
    for len in [1 << 10, 32 << 10] {
        let mut vectors = Vectors::new(len);
        c.bench_function(&format!("AdamW f32 {len}"), |b| b.iter(|| adamw(&mut vectors)));
        c.bench_function(&format!("exact L2 norm {len}"), |b| b.iter(|| black_box(vectors.norm(Norm::L2))));
    }
}

fn main() {
    // `cargo test --benches` only wants to know that it runs.
    let trial = !std::env::args().any(|arg| arg == "--bench");
    let log2 = if trial { 12 } else { setting("UPDATE_BENCH_LOG2", 26) };
    races(1 << log2, if trial { 1 } else { setting("UPDATE_BENCH_ROUNDS", 21) });
    small(&mut Criterion::default().configure_from_args());
    Criterion::default().configure_from_args().final_summary();
}

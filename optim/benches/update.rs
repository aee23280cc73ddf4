//! How close an update is to memory speed: against a loop that only moves the same bytes, in the same run.
//!
//! The machine's speed wanders, so what is compared is interleaved: round by round all contestants in turn, the median
//! of each. `UPDATE_BENCH_LOG2` sets the number of parameters (26: 64 Mi), `UPDATE_BENCH_ROUNDS` the rounds.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program that measures and prints")]

use criterion::Criterion;
use meshstep_optim::{
    Adagrad, Adam, AdamW, Adopt, Flat, Lion, Moments, Momentum, Norm, NormAccumulator, QhAdamW, QhAdopt,
    RmsProp, Rule, Scalars, Segment, Sgd,
};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Vectors of the same length: params, grads, and states.
struct Vectors(Vec<Buffer>);

impl Vectors {
    fn new(len: usize, states: usize) -> Self {
        let meter = Meter::new();
        let categories = [Category::Params, Category::Grads].into_iter().chain([Category::State; 5]);
        let new = |category| Buffer::zeroed(len, DType::F32, &meter, category).unwrap();
        let mut vectors: Vec<Buffer> = categories.take(2 + states).map(new).collect();
        for (k, vector) in vectors.iter_mut().enumerate() {
            let mut seed = k as u32 + 1;
            for x in vector.typed_mut::<f32>().unwrap() {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *x = (seed >> 8) as f32 / (1 << 24) as f32 * if k >= 3 { 1e-4 } else { 1e-2 };
            }
        }
        Vectors(vectors)
    }

    fn update(&mut self, rule: &dyn Rule) {
        let (params, rest) = self.0.split_first_mut().unwrap();
        let (grads, state) = rest.split_first_mut().unwrap();
        let len = params.len();
        let mut state: Vec<_> = state.iter_mut().take(rule.state().len()).map(|s| s.as_mut()).collect();
        let flat = Flat { params: params.as_mut(), grads: grads.as_mut(), state: &mut state, copy: None };
        let scalars = Scalars { lr: 1e-9, grad_scale: 0.5, ..Scalars::default() };
        rule.update(flat, &[Segment::new(0..len, 100)], &scalars, &Queue::cpu()).unwrap();
    }

    /// Reads `N` streams and writes all but the second, as a rule with `N - 2` states does: `8 N - 4` bytes an element.
    fn copy<const N: usize>(&mut self) {
        let mut vectors = self.0.iter_mut().map(|b| b.typed_mut::<f32>().unwrap());
        let vectors: [&mut [f32]; N] = std::array::from_fn(|_| vectors.next().unwrap());
        split(vectors, &|mut vectors| wide(|| mix(&mut vectors)));
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

/// A loop that moves the bytes and, with a mask of zero that the compiler does not know, changes none: an update measured
/// next works on numbers as ordinary as before. Each vector is an argument, so that none may alias another.
macro_rules! mix {
    ($name:ident $($written:ident)*) => {
        #[inline(always)]
        fn $name(g: &[f32], $($written: &mut [f32]),*) {
            let mask = black_box(0);
            $(let $written = &mut $written[..g.len()];)*
            for i in 0..g.len() {
                let bits = g[i].to_bits() & mask;
                $($written[i] = f32::from_bits($written[i].to_bits() ^ bits);)*
            }
        }
    };
}
mix!(mix_two p);
mix!(mix_three p a);
mix!(mix_four p a b);
mix!(mix_five p a b c);
mix!(mix_seven p a b c d e);

#[inline(always)]
fn mix(vectors: &mut [&mut [f32]]) {
    match vectors {
        [p, g] => mix_two(g, p),
        [p, g, a] => mix_three(g, p, a),
        [p, g, a, b] => mix_four(g, p, a, b),
        [p, g, a, b, c] => mix_five(g, p, a, b, c),
        [p, g, a, b, c, d, e] => mix_seven(g, p, a, b, c, d, e),
        _ => unreachable!("no copy of {} streams", vectors.len()),
    }
}

/// The same halving, down to the same size, on the same threads as an update.
fn split<const N: usize>(vectors: [&mut [f32]; N], work: &(impl Fn([&mut [f32]; N]) + Sync)) {
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
type Contestant<'a> = (&'static str, Box<dyn Fn(&mut Vectors) + 'a>);

/// Contestants in turn, `rounds` times; prints each one's median and best time, the median's bytes per second, and both
/// as shares of the first one's speed.
fn race(vectors: &mut Vectors, rounds: usize, bytes: usize, contestants: &[Contestant<'_>]) {
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

/// Needs the result, so that it is computed.
fn keep(result: f64) {
    black_box(result);
}

/// Races a copy of `N` streams with rules that keep `N - 2` states.
fn rules<const N: usize>(len: usize, rounds: usize, rules: &[(&'static str, &dyn Rule)]) {
    let name = [
        "copy of 2 streams",
        "copy of 3 streams",
        "copy of 4 streams",
        "copy of 5 streams",
        "",
        "copy of 7 streams",
    ];
    let copy: Contestant<'_> = (name[N - 2], Box::new(Vectors::copy::<N>));
    let rules = rules.iter().map(|&(name, rule)| -> Contestant<'_> { (name, Box::new(|v| v.update(rule))) });
    let mut vectors = Vectors::new(len, N - 2);
    race(&mut vectors, rounds, 8 * N - 4, &[copy].into_iter().chain(rules).collect::<Vec<_>>());
}

fn races(len: usize, rounds: usize) {
    println!("{len} parameters, {} threads, medians of {rounds} rounds", rayon::current_num_threads());
    rules::<2>(len, rounds, &[("SGD", &Sgd { weight_decay: 1e-4, ..Sgd::default() })]);
    let momentum = Sgd { momentum: 0.9, weight_decay: 1e-4, ..Sgd::default() };
    let average = Sgd { form: Momentum::Average { debias: true }, ..momentum.clone() };
    rules::<3>(
        len,
        rounds,
        &[
            ("SGD momentum", &momentum),
            ("SGD average", &average),
            ("RMSprop", &RmsProp::default()),
            ("Adagrad", &Adagrad::default()),
            ("Lion", &Lion::default()),
        ],
    );
    rules::<4>(
        len,
        rounds,
        &[
            ("AdamW", &AdamW::default()),
            ("Adam", &Adam { weight_decay: 0.1, ..Adam::default() }),
            ("ADOPT", &Adopt::default()),
            ("QHADOPT", &QhAdopt::default()),
            ("QHAdamW", &QhAdamW::default()),
        ],
    );
    rules::<5>(
        len,
        rounds,
        &[
            ("AdamW amsgrad", &AdamW { amsgrad: true, ..AdamW::default() }),
            ("RMSprop centered", &RmsProp { centered: true, momentum: 0.9, ..RmsProp::default() }),
        ],
    );
    let moments = Moments::new(&[(0.9, 0.25); 4]).unwrap();
    rules::<7>(len, rounds, &[("QHAdamW 4 moments", &QhAdamW { moments, ..QhAdamW::default() })]);
    let norms: [Contestant<'_>; 4] = [
        ("plain f32 sum", Box::new(|v| keep(v.plain_sum()))),
        ("exact L2 norm", Box::new(|v| keep(v.norm(Norm::L2)))),
        ("exact L1 norm", Box::new(|v| keep(v.norm(Norm::L1)))),
        ("Inf norm", Box::new(|v| keep(v.norm(Norm::Inf)))),
    ];
    race(&mut Vectors::new(len, 0), rounds, 4, &norms);
}

/// Small work, inline on one thread: what a step costs per call.
fn small(c: &mut Criterion) {
    for len in [1 << 10, 32 << 10] {
        let (mut vectors, rule) = (Vectors::new(len, 2), AdamW::default());
        c.bench_function(&format!("AdamW f32 {len}"), |b| b.iter(|| vectors.update(&rule)));
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

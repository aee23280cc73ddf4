//! L-BFGS on a device: every iterate, loss and report equals the CPU's, bit for bit.

use crate::common::Random;
use crate::cuda::gpu::{all, queue};
use meshstep_optim::{
    Alone, Error, History, Iterate, Lbfgs, LbfgsError, LbfgsReport, LineSearch, Loss, Reduce, ReduceError,
    Stop,
};
use meshstep_tensor::cuda;
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Slice, SliceMut, cast};
use std::sync::{Barrier, Mutex};

/// Returns the loss and writes the gradient.
type Problem = fn(&[f64], &mut [f64]) -> f64;

/// sum of 100 (x[i+1] - x[i]^2)^2 + (1 - x[i])^2.
fn rosenbrock(x: &[f64], g: &mut [f64]) -> f64 {
    g.fill(0.0);
    let mut f = 0.0;
    for i in 1..x.len() {
        let (a, b) = (x[i] - x[i - 1] * x[i - 1], 1.0 - x[i - 1]);
        f += 100.0 * a * a + b * b;
        g[i - 1] += -400.0 * x[i - 1] * a - 2.0 * b;
        g[i] += 200.0 * a;
    }
    f
}

/// sum of c (x - b)^2 / 2, with c from 1 to 50.
fn quadratic(x: &[f64], g: &mut [f64]) -> f64 {
    let terms = x.iter().zip(g).enumerate().map(|(i, (x, g))| {
        let (c, away) = (1.0 + (i % 50) as f64, x - (i % 7) as f64 / 7.0);
        *g = c * away;
        c * away * away / 2.0
    });
    terms.sum()
}

/// The quadratic, a million times as steep.
fn steep(x: &[f64], g: &mut [f64]) -> f64 {
    let loss = quadratic(x, g);
    g.iter_mut().for_each(|g| *g *= 1e6);
    1e6 * loss
}

/// Waves in a bowl: the curvature along a step has either sign.
fn waves(x: &[f64], g: &mut [f64]) -> f64 {
    let terms = x.iter().zip(g).enumerate().map(|(i, (x, g))| {
        let steep = 1.0 + 0.3 * i as f64;
        *g = 0.1 * x - steep * libm::sin(steep * x);
        0.05 * x * x + libm::cos(steep * x)
    });
    terms.sum()
}

/// sum of x - log x, which is undefined for x <= 0.
fn barrier(x: &[f64], g: &mut [f64]) -> f64 {
    g.iter_mut().zip(x).for_each(|(g, x)| *g = if *x > 0.0 { 1.0 - 1.0 / x } else { f64::NAN });
    x.iter().map(|&x| if x > 0.0 { x - libm::log(x) } else { f64::NAN }).sum()
}

/// sum of 1e37 x^2 / 2 at even and of 3e38 |x| at odd indices: the change of the gradient exceeds f32.
fn cliffs(x: &[f64], g: &mut [f64]) -> f64 {
    let terms = x.iter().zip(g).enumerate().map(|(i, (x, g))| {
        let even = i % 2 == 0;
        *g = if even { 1e37 * x } else { 3e38 * x.signum() };
        if even { 5e36 * x * x } else { 3e38 * x.abs() }
    });
    terms.sum()
}

/// 1e38 x[0] + x[1]^2 / 20: once the curvature of x[1] is known, directions exceed f32.
fn ledge(x: &[f64], g: &mut [f64]) -> f64 {
    g.copy_from_slice(&[1e38, x[1] / 10.0]);
    1e38 * x[0] + x[1] * x[1] / 20.0
}

/// Place of a run, through which the closure reads and writes vectors.
struct Ground<'q> {
    queue: &'q Queue,
    dtype: DType,
}

impl Ground<'_> {
    fn read(&self, x: Slice<'_>) -> Vec<f64> {
        let mut here = Buffer::zeroed(x.len(), self.dtype, &Meter::new(), Category::Staging).unwrap();
        self.queue.download(x, here.as_mut()).unwrap();
        let mut wide = vec![0.0; x.len()];
        cast(here.as_slice(), (&mut wide[..]).into()).unwrap();
        wide
    }

    fn write(&self, values: &[f64], into: SliceMut<'_>) {
        let mut here = Buffer::zeroed(values.len(), self.dtype, &Meter::new(), Category::Staging).unwrap();
        cast(values.into(), here.as_mut()).unwrap();
        self.queue.upload(here.as_slice(), into).unwrap();
    }

    fn vector(&self, values: &[f64]) -> Buffer {
        let meter = Meter::new();
        let mut buffer =
            Buffer::zeroed_on(self.queue, values.len(), self.dtype, &meter, Category::Params).unwrap();
        self.write(values, buffer.as_mut());
        buffer
    }

    fn evaluate(&self, problem: Problem, x: Slice<'_>, g: SliceMut<'_>) -> Result<Loss, String> {
        let x = self.read(x);
        let mut grad = vec![0.0; x.len()];
        let loss = problem(&x, &mut grad);
        self.write(&grad, g);
        Ok(Loss::Whole(loss))
    }
}

/// Complete record of a run.
#[derive(Debug, Default, PartialEq)]
struct Trace {
    /// Iteration, evaluations, bits of loss, norm and largest gradient, and bits of every element.
    iterates: Vec<(u64, u64, [u64; 3], Vec<u64>)>,
    /// Bits of every evaluated point.
    tried: Vec<Vec<u64>>,
    reports: Vec<Result<LbfgsReport, String>>,
    x: Vec<u64>,
    pairs: usize,
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Runs several steps, each in new memory; only the state is kept.
fn run(queue: &Queue, dtype: DType, rule: &Lbfgs, problem: Problem, x0: &[f64], steps: usize) -> Trace {
    let (ground, meter) = (Ground { queue, dtype }, Meter::new());
    let mut state = rule.state_on(x0.len(), dtype, queue, &meter).unwrap();
    let mut trace = Trace::default();
    let mut at = x0.to_vec();
    for _ in 0..steps {
        let mut x = ground.vector(&at);
        let (tried, iterates) = (&mut trace.tried, &mut trace.iterates);
        let closure = |x: Slice<'_>, g: SliceMut<'_>| {
            tried.push(bits(&ground.read(x)));
            ground.evaluate(problem, x, g)
        };
        let each = |at: &Iterate<'_>| {
            let numbers = [at.loss, at.grad_norm, at.grad_max].map(f64::to_bits);
            iterates.push((at.iteration, at.evaluations, numbers, bits(&ground.read(at.x))));
        };
        let report = rule.step_with(x.as_mut(), closure, &Alone, &mut state, each);
        trace.reports.push(report.map_err(|error| error.to_string()));
        at = ground.read(x.as_slice());
    }
    (trace.x, trace.pairs) = (bits(&at), state.pairs());
    drop(state);
    assert_eq!(meter.live_total(), 0);
    trace
}

fn rule(line_search: LineSearch, history_len: usize) -> Lbfgs {
    let base = Lbfgs { line_search, history_len, max_iter: 24, max_eval: Some(200), ..Lbfgs::default() };
    let lr = if line_search == LineSearch::None { 0.3 } else { 1.0 };
    Lbfgs { lr, tolerance_change: 0.0, tolerance_grad: 0.0, ..base }
}

const SEARCHES: [LineSearch; 2] = [LineSearch::None, LineSearch::StrongWolfe];
const DTYPES: [DType; 2] = [DType::F32, DType::F64];

fn start(len: usize) -> Vec<f64> {
    let mut random = Random::new(len as u64);
    (0..len).map(|_| 0.8 + 0.1 * random.unit()).collect()
}

/// Runs on the CPU and on the device, asserts equality, and returns the CPU's trace.
fn both(
    case: &str,
    queue: &Queue,
    dtype: DType,
    rule: &Lbfgs,
    (problem, x0): (Problem, &[f64]),
    steps: usize,
) -> Trace {
    let case = format!("{case} of {} in {dtype}, {:?}", x0.len(), rule.line_search);
    let here = run(&Queue::cpu(), dtype, rule, problem, x0, steps);
    let there = run(queue, dtype, rule, problem, x0, steps);
    println!("{case}: {} iterates, {:?}", here.iterates.len(), here.reports);
    assert_eq!(there.reports, here.reports, "{case}");
    for (i, (there, here)) in there.tried.iter().zip(&here.tried).enumerate() {
        let differs = there.iter().zip(here).position(|(a, b)| a != b);
        assert_eq!(differs, None, "{case}: element of point {i}");
    }
    assert!(there == here, "{case}");
    here
}

#[test]
fn iterates_are_the_cpus() {
    let Some(queue) = queue() else { return };
    let mut most = 0;
    // Settings with which the longest vectors are tried.
    let (fixed, searched) = ((LineSearch::None, DType::F64), (LineSearch::StrongWolfe, DType::F32));
    let problems = [("rosenbrock", rosenbrock as Problem, fixed), ("quadratic", quadratic, searched)];
    let lens = [(0, 3), (1, 3), (127, 100), (1000, 4), (65_537, 2)];
    for (i, (len, history_len)) in lens.into_iter().enumerate() {
        for (j, (name, problem, longest)) in problems.into_iter().enumerate() {
            let ways = SEARCHES.into_iter().flat_map(|s| DTYPES.map(|d| (s, d)));
            for (k, (search, dtype)) in ways.enumerate() {
                if len > 60_000 && (search, dtype) != longest {
                    continue;
                }
                // Short runs try one problem of each length with one setting; the history grows reliably without a line search.
                let one = (i + j) % 2 == 0 && (len > 60_000 || k == (3 * i + 2) % 4);
                if !one && !all() {
                    continue;
                }
                let rule = rule(search, history_len);
                let here = both(name, &queue, dtype, &rule, (problem, &start(len)), 1);
                assert!(len < 2 || here.iterates.len() > 20, "{:?}", here.reports);
                most = most.max(here.pairs);
            }
        }
    }
    assert!(most > 20, "a history that grows: {most}");
}

/// A refused pair with a full history: the pair that it would have pushed out is measured too.
#[test]
fn refused_pairs_are_the_cpus() {
    let Some(queue) = queue() else { return };
    let x0: Vec<f64> = (0..6).map(|i| 0.3 + 0.4 * f64::from(i)).collect();
    for (dtype, history_len) in DTYPES.into_iter().flat_map(|d| [1, 2, 3].map(|h| (d, h))) {
        let rule = Lbfgs { lr: 1.0, max_iter: 13, ..rule(LineSearch::None, history_len) };
        let here = both("waves", &queue, dtype, &rule, (waves, &x0), 1);
        let refused = here.reports[0].as_ref().map(|report| report.folds - report.evaluations);
        assert!(matches!(refused, Ok(1..)), "{:?}", here.reports);
    }
}

/// Steps of a few iterations, each on parameters in different memory.
#[test]
fn a_state_is_gone_on_from() {
    let Some(queue) = queue() else { return };
    for (search, dtype) in SEARCHES.into_iter().flat_map(|s| DTYPES.map(|d| (s, d))) {
        let rule = Lbfgs { max_iter: 4, ..rule(search, 5) };
        let here = both("resumed rosenbrock", &queue, dtype, &rule, (rosenbrock, &start(300)), 6);
        assert!(here.iterates.len() > 20 && here.pairs == 5, "{:?}", here.reports);
    }
}

#[test]
fn reasons_to_stop_and_what_is_not_finite_are_the_cpus() {
    let Some(queue) = queue() else { return };
    for (i, (search, dtype)) in SEARCHES.into_iter().flat_map(|s| DTYPES.map(|d| (s, d))).enumerate() {
        let rule = rule(search, 4);
        let stop = |here: &Trace| here.reports[0].as_ref().ok().map(|report| report.stop);
        // Short runs try each case with one of the four settings; overflow of f32 only with f32.
        let chosen = |way: usize| i == way || all();
        if chosen(3) {
            let close = Lbfgs { tolerance_change: 1e-3, max_iter: 60, ..rule.clone() };
            let here = both("steep", &queue, dtype, &close, (steep, &start(50)), 1);
            assert!(here.iterates.len() > 6 && stop(&here) == Some(Stop::Parameters), "{:?}", here.reports);
        }
        if chosen(1) {
            let near = Lbfgs { tolerance_grad: 0.5, max_iter: 60, ..rule.clone() };
            let here = both("quadratic", &queue, dtype, &near, (quadratic, &start(50)), 1);
            assert_eq!(stop(&here), Some(Stop::Gradient));
            let first = both("barrier", &queue, dtype, &rule, (barrier, &[1.0, -1.0]), 1);
            assert!(first.reports[0].as_ref().unwrap_err().contains("1 gradient"), "{:?}", first.reports);
        }
        if chosen(2) {
            let far = Lbfgs { lr: 100.0, ..rule.clone() };
            let here = both("barrier", &queue, dtype, &far, (barrier, &[5.0, 0.5, 2.0]), 1);
            assert!(here.tried.iter().flatten().any(|&x| f64::from_bits(x) <= 0.0), "some are left of 0");
            let high = Lbfgs { lr: 1e38, max_eval: Some(60), ..rule.clone() };
            both("ledge", &queue, dtype, &high, (ledge, &[0.0, 1.0]), 1);
        }
        if chosen(0) {
            let here = both("cliffs", &queue, dtype, &rule, (cliffs, &start(40)), 1);
            assert!(dtype == DType::F64 || here.pairs < here.iterates.len() - 1, "{:?}", here.reports);
        }
    }
}

/// Two shards that hold the whole vector and count parts of it.
struct Seat<'a> {
    part: usize,
    barrier: &'a Barrier,
    words: &'a Mutex<[Vec<u64>; 2]>,
}

impl Reduce for Seat<'_> {
    fn fold(&self, sums: &mut [u64], maxima: &mut [u64]) -> Result<(), ReduceError> {
        let ways: [fn(u64, u64) -> u64; 2] = [u64::wrapping_add, u64::max];
        let mine = [sums, maxima];
        for (all, (mine, with)) in self.words.lock().unwrap().iter_mut().zip(mine.iter().zip(ways)) {
            all.resize(mine.len(), 0);
            all.iter_mut().zip(&**mine).for_each(|(all, &mine)| *all = with(*all, mine));
        }
        self.barrier.wait();
        for (all, mine) in self.words.lock().unwrap().iter().zip(mine) {
            mine.copy_from_slice(all);
        }
        if self.barrier.wait().is_leader() {
            self.words.lock().unwrap().iter_mut().for_each(Vec::clear);
        }
        self.barrier.wait();
        Ok(())
    }

    fn part(&self) -> usize {
        self.part
    }
}

#[test]
fn shards_count_what_they_are_told_to() {
    let Some(_) = queue() else { return };
    let parts = [vec![0..3, 7..7, 7..60, 199..200], vec![3..7, 60..150, 150..199]];
    for (i, (search, dtype)) in SEARCHES.into_iter().flat_map(|s| DTYPES.map(|d| (s, d))).enumerate() {
        // Short runs try each search with one type.
        if ![1, 2].contains(&i) && !all() {
            continue;
        }
        let (rule, x0) = (rule(search, 3), start(200));
        let one = run(&Queue::cpu(), dtype, &rule, rosenbrock, &x0, 1);
        let (barrier, words) = (&Barrier::new(2), &Mutex::default());
        let shard = |part: usize| {
            let queue = queue().unwrap();
            let ground = Ground { queue: &queue, dtype };
            let state = rule.state_on(200, dtype, &queue, &Meter::new()).unwrap();
            let (mut state, mut x) = (state.counting(parts[part].clone()), ground.vector(&x0));
            let closure = |x: Slice<'_>, g: SliceMut<'_>| ground.evaluate(rosenbrock, x, g);
            let report = rule.step(x.as_mut(), closure, &Seat { part, barrier, words }, &mut state);
            (report.map_err(|error| error.to_string()), bits(&ground.read(x.as_slice())))
        };
        let shard = &shard;
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..2).map(|part| scope.spawn(move || shard(part))).collect();
            for thread in threads {
                assert_eq!(
                    thread.join().unwrap(),
                    (one.reports[0].clone(), one.x.clone()),
                    "{search:?} {dtype}"
                );
            }
        });
    }
}

#[test]
fn the_host_waits_once_for_each_exchange() {
    let Some(queue) = queue() else { return };
    for search in SEARCHES {
        let (rule, dtype) = (rule(search, 5), DType::F32);
        let ground = Ground { queue: &queue, dtype };
        let mut state = rule.state_on(500, dtype, &queue, &Meter::new()).unwrap();
        let mut x = ground.vector(&start(500));
        for round in 0..3 {
            let (before, mut apart) = (cuda::waits(), 0);
            let closure = |x: Slice<'_>, g: SliceMut<'_>| {
                let before = cuda::waits();
                let loss = ground.evaluate(rosenbrock, x, g);
                apart += cuda::waits() - before;
                loss
            };
            let report = rule.step(x.as_mut(), closure, &Alone, &mut state).unwrap();
            let waits = cuda::waits() - before - apart;
            // The first step creates the tables of ranges.
            assert!(waits == report.folds || round == 0, "{search:?}: {waits} waits, {report:?}");
        }
    }
}

#[test]
fn memory_of_another_place_is_refused() {
    let Some(queue) = queue() else { return };
    let rule = rule(LineSearch::StrongWolfe, 3);
    let never = |_: Slice<'_>, _: SliceMut<'_>| -> Result<Loss, String> { panic!("not to be called") };
    for (state_on, x_on) in [(&queue, &Queue::cpu()), (&Queue::cpu(), &queue)] {
        let mut state = rule.state_on(3, DType::F64, state_on, &Meter::new()).unwrap();
        let mut x = Ground { queue: x_on, dtype: DType::F64 }.vector(&[1.0, 2.0, 3.0]);
        let told = rule.step(x.as_mut(), never, &Alone, &mut state).unwrap_err();
        let expected = meshstep_tensor::Error::Place { given: x_on.place(), expected: state_on.place() };
        assert!(matches!(&told, LbfgsError::Invalid(Error::Tensor(error)) if *error == expected), "{told}");
        assert_eq!(state.evaluations(), 0);
    }
    let bad = rule.state_on(3, DType::BF16, &queue, &Meter::new()).map(drop);
    assert!(matches!(bad, Err(Error::DType { given: DType::BF16, .. })));
    let rounded = Lbfgs { history: History::F16, ..rule }.state_on(3, DType::F32, &queue, &Meter::new());
    assert!(matches!(rounded.map(drop), Err(Error::DType { given: DType::F16, .. })));
}

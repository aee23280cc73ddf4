//! L-BFGS on a device: every iterate, loss and report is the CPU's, bit for bit.

use crate::common::{Random, Values};
use crate::gpu::{queue, upload};
use meshstep_optim::{
    Alone, Error, Iterate, Lbfgs, LbfgsError, LbfgsReport, LbfgsState, LineSearch, Loss, Reduce, ReduceError,
    Stop,
};
use meshstep_tensor::cuda;
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Slice, SliceMut, cast};

/// Loss and gradient.
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

/// Where a run is: vectors there, and how the closure reads and writes them.
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
}

/// All that a run leaves.
#[derive(Debug, Default, PartialEq)]
struct Trace {
    /// Iteration, evaluations, and bits of loss, norm, largest gradient and every element.
    iterates: Vec<(u64, u64, [u64; 3], Vec<u64>)>,
    /// Bits of every point that was evaluated.
    tried: Vec<Vec<u64>>,
    reports: Vec<Result<LbfgsReport, String>>,
    x: Vec<u64>,
    pairs: usize,
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Several steps, each in fresh memory: only the state is kept.
fn run(queue: &Queue, dtype: DType, rule: &Lbfgs, problem: Problem, x0: &[f64], steps: usize) -> Trace {
    let (ground, meter) = (Ground { queue, dtype }, Meter::new());
    let mut state = rule.state_on(x0.len(), dtype, queue, &meter).unwrap();
    let mut trace = Trace::default();
    let mut at = x0.to_vec();
    for _ in 0..steps {
        let mut x = ground.vector(&at);
        let (tried, iterates) = (&mut trace.tried, &mut trace.iterates);
        let closure = |x: Slice<'_>, g: SliceMut<'_>| {
            let x = ground.read(x);
            let mut grad = vec![0.0; x.len()];
            let loss = problem(&x, &mut grad);
            ground.write(&grad, g);
            tried.push(bits(&x));
            Ok::<_, String>(Loss::Whole(loss))
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

#[test]
fn iterates_are_the_cpus() {
    let Some(queue) = queue() else { return };
    let mut most = 0;
    for (len, history_len) in [(0, 3), (1, 3), (127, 100), (1000, 4), (65_537, 2)] {
        for (name, problem) in [("rosenbrock", rosenbrock as Problem), ("quadratic", quadratic)] {
            for search in SEARCHES {
                for dtype in DTYPES {
                    let (rule, x0) = (rule(search, history_len), start(len));
                    let here = run(&Queue::cpu(), dtype, &rule, problem, &x0, 1);
                    let there = run(&queue, dtype, &rule, problem, &x0, 1);
                    let case = format!("{name} of {len} in {dtype}, {search:?}");
                    println!("{case}: {} iterates, {:?}", here.iterates.len(), here.reports);
                    compare(&there, &here, &case);
                    assert!(len < 2 || here.iterates.len() > 20, "{case}: {:?}", here.reports);
                    most = most.max(here.pairs);
                }
            }
        }
    }
    assert!(most > 20, "a history that grows: {most}");
}

fn compare(there: &Trace, here: &Trace, case: &str) {
    assert_eq!(there.reports, here.reports, "{case}");
    for (i, (there, here)) in there.tried.iter().zip(&here.tried).enumerate() {
        let differs = there.iter().zip(here).position(|(a, b)| a != b);
        assert_eq!(differs, None, "{case}: element of point {i}");
    }
    assert!(there == here, "{case}");
}

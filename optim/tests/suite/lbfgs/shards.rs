//! Shards as threads: each owns a range of the vector, and all meet to sum, to take maxima and to gather the whole.

use crate::lbfgs::problems::Problem;
use meshstep_optim::{Iterate, Lbfgs, LbfgsReport, Loss, Reduce, ReduceError};
use meshstep_tensor::{DType, Meter};
use std::convert::Infallible;
use std::ops::Range;
use std::sync::{Barrier, Mutex};

/// Meeting point of the shards.
pub(crate) struct Meeting {
    barrier: Barrier,
    sums: Mutex<Vec<u64>>,
    maxima: Mutex<Vec<u64>>,
    whole: Mutex<Vec<f64>>,
}

impl Meeting {
    pub(crate) fn new(parts: usize, len: usize) -> Self {
        let nothing = || Mutex::new(Vec::new());
        Meeting {
            barrier: Barrier::new(parts),
            sums: nothing(),
            maxima: nothing(),
            whole: Mutex::new(vec![0.0; len]),
        }
    }

    /// Gathers the whole vector; this shard contributes `range`.
    pub(crate) fn gather(&self, range: Range<usize>, x: &[f64]) -> Vec<f64> {
        self.whole.lock().unwrap()[range].copy_from_slice(x);
        self.barrier.wait();
        let whole = self.whole.lock().unwrap().clone();
        self.barrier.wait();
        whole
    }

    fn combine(&self, all: &Mutex<Vec<u64>>, mine: &mut [u64], with: fn(u64, u64) -> u64) {
        {
            let mut all = all.lock().unwrap();
            all.resize(mine.len(), 0);
            all.iter_mut().zip(&*mine).for_each(|(a, &m)| *a = with(*a, m));
        }
        self.barrier.wait();
        mine.copy_from_slice(&all.lock().unwrap());
        self.barrier.wait();
        all.lock().unwrap().clear();
        self.barrier.wait();
    }
}

/// One shard's side of a meeting point.
pub(crate) struct Seat<'a>(pub(crate) &'a Meeting, pub(crate) usize);

impl Reduce for Seat<'_> {
    fn fold(&self, sums: &mut [u64], maxima: &mut [u64]) -> Result<(), ReduceError> {
        self.0.combine(&self.0.sums, sums, u64::wrapping_add);
        self.0.combine(&self.0.maxima, maxima, u64::max);
        Ok(())
    }

    fn part(&self) -> usize {
        self.1
    }
}

/// Returns equal ranges, the last ones shorter or empty.
pub(crate) fn ranges(len: usize, parts: usize) -> Vec<Range<usize>> {
    let chunk = len.div_ceil(parts.max(1)).max(1);
    (0..parts).map(|i| (i * chunk).min(len)..((i + 1) * chunk).min(len)).collect()
}

/// Record of a run: bits of the iterates, of losses and norms, and the report.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Trace {
    pub(crate) iterates: Vec<Vec<f64>>,
    pub(crate) losses: Vec<f64>,
    pub(crate) x: Vec<f64>,
    pub(crate) calls: u64,
    pub(crate) report: LbfgsReport,
}

/// Runs on shards of these ranges; every shard computes the whole problem.
pub(crate) fn run(
    rule: &Lbfgs,
    problem: &Problem,
    x0: &[f64],
    ranges: &[Range<usize>],
    dtype: DType,
) -> Trace {
    let meeting = &Meeting::new(ranges.len(), x0.len());
    let shard = |i: usize| {
        let range = ranges[i].clone();
        let mut state = rule.state(range.len(), dtype, &Meter::new()).unwrap();
        let mut trace = Trace {
            iterates: Vec::new(),
            losses: Vec::new(),
            x: x0[range.clone()].to_vec(),
            calls: 0,
            report: crate::lbfgs::no_report(),
        };
        let mut calls = 0;
        let mut g = vec![0.0; x0.len()];
        let each = |at: &Iterate<'_>| {
            trace.iterates.push(crate::lbfgs::wide(at.x));
            trace.losses.push(at.loss);
        };
        let mut x = crate::common::Values::new(dtype, range.len(), {
            let mut values = x0[range.clone()].iter();
            move || *values.next().unwrap()
        });
        let closure = |x: meshstep_tensor::Slice<'_>, mut out: meshstep_tensor::SliceMut<'_>| {
            calls += 1;
            let whole = meeting.gather(range.clone(), &crate::lbfgs::wide(x));
            let loss = problem(&whole, &mut g);
            out.cast_from(g[range.clone()].into()).unwrap();
            Ok::<_, Infallible>(Loss::Whole(loss))
        };
        let seat = Seat(meeting, i);
        trace.report = rule.step_with(x.slice_mut(), closure, &seat, &mut state, each).unwrap();
        trace.x = crate::lbfgs::wide(x.slice());
        trace.calls = calls;
        trace
    };
    let traces: Vec<Trace> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranges.len()).map(|i| scope.spawn(move || shard(i))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    join(traces)
}

/// Joins the traces of shards, which must agree on everything but their elements.
fn join(traces: Vec<Trace>) -> Trace {
    let mut whole = traces[0].clone();
    for trace in &traces[1..] {
        assert_eq!((&trace.losses, trace.calls, &trace.report), (&whole.losses, whole.calls, &whole.report));
        whole.x.extend(&trace.x);
        whole.iterates.iter_mut().zip(&trace.iterates).for_each(|(w, t)| w.extend(t));
    }
    whole
}

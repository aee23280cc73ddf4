//! Rayon's global pool is full of long jobs: no work of ours waits for them.

use super::{LEN, minimize, numbers};
use crate::common::rules;
use meshstep_cases::occupied::delay_by_full_rayon;
use meshstep_optim::{
    Flat, History, Isa, Lamb, LineSearch, Merge, Norm, NormAccumulator, Rule, Scalars, Segment, TensorSums,
    accumulate,
};
use meshstep_tensor::{Queue, SliceMut};
use std::time::Duration;

const LIMIT: Duration = Duration::from_millis(10);

fn check(what: &str, work: impl FnMut()) {
    let delay = delay_by_full_rayon(9, work);
    assert!(delay < LIMIT, "{what}: {delay:?}");
}

#[test]
fn updates_wait_for_nobody() {
    let [mut p, mut g, mut m, mut v] = [1, 2, 3, 4].map(|seed| numbers(seed, LEN));
    v.iter_mut().for_each(|v| *v = v.abs());
    let segment = [Segment::new(0..LEN, 1)];
    let mut with = |work: &dyn Fn(Flat<'_, '_>)| {
        let mut state: [SliceMut<'_>; 2] = [(&mut m[..]).into(), (&mut v[..]).into()];
        let (params, grads) = ((&mut p[..]).into(), (&mut g[..]).into());
        work(Flat { params, grads, state: &mut state, copy: None, remainder: None });
    };
    let (rule, scalars) = (&rules()[0], Scalars { lr: 1e-3, ..Scalars::default() });
    check("update", || with(&|flat| rule.update(flat, &segment, &scalars, &Queue::cpu()).unwrap()));
    check("sums of tensors", || {
        with(&|flat| {
            let mut sums = [TensorSums::new()];
            let lamb = Lamb::default();
            lamb.measure_on(Isa::detect(), &flat, &segment, &scalars, &mut sums, &Queue::cpu()).unwrap();
        });
    });
}

#[test]
fn norms_accumulations_and_merges_wait_for_nobody() {
    let [mut sum, values] = [1, 2].map(|seed| numbers(seed, LEN));
    check("norm", || {
        let mut norm = NormAccumulator::new(Norm::L2);
        norm.add((&values[..]).into()).unwrap();
    });
    check("accumulation", || {
        accumulate((&mut sum[..]).into(), (&values[..]).into(), 0.3, false, &Queue::cpu()).unwrap();
    });
    check("merge", || {
        let mean = (&values[..]).into();
        let merge = Merge { mean, differences: false, anchor: None, sent: None, taken: 0.4, squares: false };
        merge.mean((&mut sum[..]).into(), &Queue::cpu()).unwrap();
    });
}

#[test]
fn runs_of_lbfgs_wait_for_nobody() {
    check("L-BFGS", || drop(minimize(250_001, (LineSearch::None, History::Bf16), &Queue::cpu())));
}

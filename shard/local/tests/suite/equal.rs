//! Sharded workers equal whole ones in a plain loop, bit for bit.

use crate::common::{self, Gradients, Run, WhichRule, draws, turns};
use crate::naive::{Naive, Worker, tokens};
use meshstep_comm::loopback;
use meshstep_local::{
    Fragment, LocalOptimizer, LocalPlan, Merge, Outer, Placement, Select, Timing, Weights, What, Workers,
};
use meshstep_optim::{AdamW, Sgd};
use meshstep_shard::{Optimizer, Options, Outcome, Stage, Step, StepArgs};
use meshstep_tensor::{DType, Slice, SliceMut};
use std::sync::Arc;

pub fn run(workers: usize, inside: usize) -> Run {
    Run {
        ranks: workers * inside,
        steps: 9,
        gradients: Gradients::Grid,
        max_norm: Some(20.0),
        ..Run::default()
    }
}

/// Returns a plan for every preset, and for settings that the presets do not use.
pub fn plans() -> Vec<(&'static str, WhichRule, LocalPlan)> {
    let adamw = WhichRule::AdamW;
    let delayed = LocalPlan::des_loc(3, 4, 4).with(|f| f.timing.delay = 2);
    let outer_adam = Outer { rule: Arc::new(AdamW::default()), lr: 0.1 };
    let elements = |range| Fragment {
        params: Select::Elements { name: common::name(3), range },
        ..Fragment::mean(What::Params, Timing::every(2))
    };
    vec![
        ("local sgd", WhichRule::Sgd, LocalPlan::local_sgd(3)),
        ("post-local sgd", WhichRule::SgdMomentum, LocalPlan::post_local_sgd(3, 2)),
        ("local adam", adamw, LocalPlan::local_adam(2)),
        ("des-loc", adamw, LocalPlan::des_loc(2, 3, 4)),
        ("des-loc before", adamw, LocalPlan::des_loc(2, 3, 4).placed(Placement::Before)),
        ("mt-dao", WhichRule::TwoMoments, LocalPlan::mt_dao(2, &[Some(3), Some(5)], Some(4))),
        ("qhadopt", WhichRule::QhAdopt, LocalPlan::mt_dao(2, &[Some(3)], Some(4))),
        ("diloco", adamw, LocalPlan::diloco(3)),
        ("diloco adam", adamw, LocalPlan::diloco_with(2, outer_adam)),
        ("streaming diloco", adamw, LocalPlan::streaming_diloco(4, 3, 2, 0.5)),
        ("delayed", adamw, delayed),
        ("small buckets", adamw, LocalPlan { bucket_len: 17, ..LocalPlan::local_adam(2) }),
        ("tokens", adamw, LocalPlan::des_loc(2, 3, 4).with(|f| f.weights = Weights::Tokens)),
        ("mixed", adamw, LocalPlan::local_adam(2).with(|f| f.taken = 0.25)),
        ("elements", adamw, LocalPlan::new(vec![elements(5..90), elements(100..130)])),
        (
            "reset",
            adamw,
            LocalPlan::des_loc(2, 3, None).with(|f| {
                if f.what != What::Params {
                    f.merge = if f.timing.period.is_some() { Merge::Reset } else { Merge::Keep };
                }
            }),
        ),
    ]
}

/// Final state of one rank: its parameters, and its part of each state vector with the part's range.
#[derive(Debug)]
pub struct End {
    pub params: Vec<Vec<f32>>,
    pub parts: Vec<(std::ops::Range<usize>, Vec<Vec<f32>>)>,
    /// Bytes sent inside the worker, across workers, and for decisions of all ranks.
    pub sent: [u64; 3],
}

/// Trains a run under a plan; returns the final states by rank.
pub fn train(run: &Run, plan: &LocalPlan, workers: usize) -> Vec<End> {
    let inside = run.ranks / workers;
    loopback::spawn(run.ranks, |world| {
        let rank = world.rank();
        let (comm, between) = Workers::split(world, (rank / inside) as u32).unwrap();
        let inner = run.build(Arc::clone(&comm)).unwrap();
        let before = comm.stats().total().bytes;
        let mut local = LocalOptimizer::new(inner, between.clone(), plan.clone()).unwrap();
        let told = between.world.stats().total().bytes;
        for step in 0..run.steps {
            let mb = local.micro_batch(tokens(rank, step)).unwrap();
            for i in (0..run.lens.len()).rev() {
                let grad = run.gradient(step + 1, 0, rank, i);
                let grad: Vec<f32> = grad.iter().map(|&g| g as f32).collect();
                mb.grad(&common::name(i), &grad[..]).unwrap();
            }
            mb.finish().unwrap();
            let done = local.step(run.at(step + 1)).unwrap();
            assert!(matches!(done.outcome, Outcome::Applied { .. }), "{done:?}");
            assert_eq!((done.step, &done.exchanged.failed), (step, &vec![]));
        }
        // Operations in flight count once they have arrived.
        between.across.barrier().unwrap();
        let sent = [
            comm.stats().total().bytes - before,
            between.across.stats().total().bytes,
            between.world.stats().total().bytes - told,
        ];
        End { sent, ..end(run, &local) }
    })
    .unwrap()
}

/// Returns the final state of this rank.
pub fn end(run: &Run, local: &LocalOptimizer) -> End {
    let names: Vec<String> = (0..run.lens.len()).map(common::name).collect();
    let part = |name: &String| {
        let state = local.state(name).unwrap();
        let slots = state.slots.iter().map(|(_, slot)| slot.typed::<f32>().unwrap().to_vec()).collect();
        (state.range.clone(), slots)
    };
    let parts = names.iter().map(part).collect();
    let params = names.iter().map(|name| common::floats(local.optimizer(), name)).collect();
    End { params, parts, sent: [0; 3] }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Returns true if both have the same bits, which are compared as bytes.
fn same(a: &[f32], b: &[f32]) -> bool {
    Slice::from(a).bytes().unwrap() == Slice::from(b).bytes().unwrap()
}

pub fn assert_equal(end: &End, worker: &Worker, what: &str) {
    for (i, (params, expected)) in end.params.iter().zip(&worker.params).enumerate() {
        if !same(params, expected) {
            assert_eq!(bits(params), bits(expected), "{what}: parameter {i}");
        }
        let (range, slots) = &end.parts[i];
        for (slot, values) in slots.iter().enumerate() {
            let expected = &worker.state[slot][i][range.clone()];
            if !same(values, expected) {
                assert_eq!(bits(values), bits(expected), "{what}: state {slot} of parameter {i}");
            }
        }
    }
}

#[test]
fn sharded_workers_are_whole_ones_in_a_loop() {
    let stages = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];
    let mut drawn = draws(1);
    for (w, workers) in [2, 4].into_iter().enumerate() {
        for (p, (name, rule, plan)) in plans().into_iter().enumerate() {
            if !drawn() {
                continue;
            }
            let run = Run { rule, ..run(workers, 2) };
            let mut naive = Naive::new(&run, &plan, workers);
            (0..run.steps).for_each(|step| naive.step(step));
            for stage in turns(&stages, 2 * w + p, 1) {
                for (rank, end) in train(&run.stage(stage), &plan, workers).iter().enumerate() {
                    let what = format!("{name}, {stage:?}, rank {rank} of {workers} x 2");
                    assert_equal(end, &naive.workers[rank / 2], &what);
                }
            }
        }
    }
}

#[test]
fn an_outer_step_begins_at_the_mean_however_far_that_has_moved() {
    // A step of 2^60 to 0, then steps too small for f64 beside 2^60.
    let far = 2f64.powi(60);
    let grad = |worker: usize, step| if step == 0 { far } else { [-1.1, -2.7][worker] };
    let identity = Outer { rule: Arc::new(Sgd::default()), lr: 1.0 };
    let outer = descend_by(&LocalPlan::diloco_with(2, identity), far, grad, 2);
    assert_eq!(outer[1], descend_by(&LocalPlan::local_sgd(2), far, grad, 2)[1]);
    assert!((outer[1].1 - 1.9).abs() < 1e-12);
}

/// Returns a plan without exchanges.
pub fn never() -> LocalPlan {
    LocalPlan::new(vec![Fragment::mean(What::Params, Timing::never())])
}

#[test]
fn what_is_the_same_by_theory_is_the_same_in_bits() {
    let run = run(4, 2).stage(Stage::Zero2);
    let ends = |plan: &LocalPlan| -> Vec<Vec<Vec<u32>>> {
        let ends = train(&run, plan, 4);
        let all = |end: &End| {
            let state = end.parts.iter().flat_map(|(_, slots)| slots);
            end.params.iter().chain(state).map(|v| bits(v)).collect()
        };
        ends.iter().map(all).collect()
    };
    let des_loc = ends(&LocalPlan::des_loc(3, 3, 3));
    assert_eq!(ends(&LocalPlan::local_adam(3)), des_loc);
    let moments_kept = ends(&LocalPlan::des_loc(3, None, None));
    assert_ne!(moments_kept, des_loc);
    assert_eq!(ends(&LocalPlan::local_sgd(3)), moments_kept);
    let identity = Outer { rule: Arc::new(Sgd::default()), lr: 1.0 };
    assert_eq!(ends(&LocalPlan::diloco_with(3, identity)), moments_kept);
    // A period that is never reached is like none.
    assert_eq!(ends(&LocalPlan::des_loc(3, 100, 100)), moments_kept);
}

/// Returns x of one parameter of each type after each step of two workers with different gradients, at lr 1.
fn descend(plan: &LocalPlan, steps: u64) -> Vec<(f32, f64)> {
    descend_by(plan, 0.0, |worker, _| [0.5, 1.5][worker], steps)
}

/// [`descend`] with another start and other gradients.
fn descend_by(
    plan: &LocalPlan,
    start: f64,
    grad: impl Fn(usize, u64) -> f64 + Sync,
    steps: u64,
) -> Vec<(f32, f64)> {
    let ends = loopback::spawn(2, |world| {
        let worker = world.rank();
        let (comm, between) = Workers::split(world, worker as u32).unwrap();
        let layout = meshstep_tensor::Layout::builder();
        let layout = layout.param("a", &[3], DType::F32).param("b", &[3], DType::F64).build().unwrap();
        let options = Options::default();
        let first = |_: &_, mut x: SliceMut<'_>| x.cast_from(Slice::from(&[start; 3][..]));
        let inner = Optimizer::new(comm, layout, Sgd::default(), first, options).unwrap();
        let mut local = LocalOptimizer::new(inner, between, plan.clone()).unwrap();
        let mut all = Vec::new();
        for step in 0..steps {
            let grad = grad(worker, step);
            let mb = local.micro_batch(1).unwrap();
            mb.grad("a", &[grad as f32; 3][..]).unwrap();
            mb.grad("b", &[grad; 3][..]).unwrap();
            mb.finish().unwrap();
            let _ = local.step(StepArgs { lr: 1.0, ..StepArgs::default() }).unwrap();
            let (a, b) = (local.param("a").unwrap(), local.param("b").unwrap());
            all.push((a.typed::<f32>().unwrap()[1], b.typed::<f64>().unwrap()[2]));
        }
        all
    });
    let ends = ends.unwrap();
    assert_eq!(ends[0].last(), ends[1].last());
    ends.into_iter().next().unwrap()
}

#[test]
fn outer_momentum_is_averaged_before_the_step_it_is_for_and_reset_after() {
    let momentum = |merge, timing| Fragment { merge, ..Fragment::mean(What::OuterMomentum(0), timing) };
    let with = |fragment| LocalPlan::new([LocalPlan::diloco(1).fragments, vec![fragment]].concat());
    let near = |found: &[(f32, f64)], expected: &[f64]| {
        assert_eq!(found.len(), expected.len());
        for ((a, b), x) in found.iter().zip(expected) {
            assert!((f64::from(*a) - x).abs() < 1e-6 && (b - x).abs() < 1e-12, "{found:?} {expected:?}");
        }
    };
    let plain = descend(&LocalPlan::diloco(1), 4);
    near(&plain[..3], &[-1.33, -3.227, -5.6343]);
    // All workers have the same momentum, so the mean equals it to the bit.
    assert_eq!(descend(&with(momentum(Merge::Mean, Timing::every(1))), 4), plain);
    let reset = with(momentum(Merge::Reset, Timing::every(2)));
    near(&descend(&reset, 4), &[-1.33, -3.227, -3.227 - 1.33, -3.227 - 3.227]);
    // Without its moments Adam is at its first step again: a step of lr, whatever the gradient.
    let adam = Outer { rule: Arc::new(AdamW { weight_decay: 0.0, eps: 0.0, ..AdamW::default() }), lr: 0.25 };
    let adam = LocalPlan::diloco_with(1, adam).fragments;
    let reset = LocalPlan::new([adam, vec![momentum(Merge::Reset, Timing::every(2))]].concat());
    let found = descend(&reset, 3);
    near(&[(found[2].0 - found[1].0, found[2].1 - found[1].1)], &[-0.25]);
}

#[test]
fn one_fragment_may_have_both_types_and_one_wire() {
    // Parameter b is sent as differences, parameter a as values.
    for wire in [None, Some(DType::F32), Some(DType::F64), Some(DType::BF16)] {
        let plan = LocalPlan::local_sgd(1).with(|f| f.wire = wire);
        let expected: Vec<_> = (1..=3).map(|t| (-(t as f32), -f64::from(t))).collect();
        assert_eq!(descend(&plan, 3), expected, "{wire:?}");
    }
    // Rounded once to the nearest value: a tie in f32, but above the tie in f64.
    let plan = LocalPlan::local_sgd(1).with(|f| f.wire = Some(DType::BF16));
    let grad = -1.0 - 2f64.powi(-8) - 2f64.powi(-40);
    assert_eq!(descend_by(&plan, 0.0, |_, _| grad, 1), [(1.0, 1.0 + 2f64.powi(-7))]);
}

//! Steps beyond the plain case: skips, missing gradients, weights, groups, frozen and late parameters, threads.

use crate::common::{Run, STAGES, adamw, draws, name, params, state};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{AdamW, Norm, Sgd};
use meshstep_shard::{
    Combine, Error, Fault, Groups, Missing, Optimizer, Options, Outcome, Stage, StepArgs, WeightError,
};
use meshstep_tensor::{DType, Layout, Param, Slice, SliceMut};
use std::sync::Arc;

type Comm = Arc<dyn Communicator>;

fn ones(_: &Param, mut out: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    out.cast_from(Slice::from(&vec![1f64; out.len()][..]))
}

fn layout(lens: &[usize]) -> Layout {
    Run { lens: lens.to_vec(), ..Run::default() }.layout()
}

fn sgd(comm: Comm, lens: &[usize], options: Options) -> Optimizer {
    Optimizer::new(comm, layout(lens), Sgd::default(), ones, options).unwrap()
}

fn at_one() -> StepArgs {
    StepArgs { lr: 1.0, ..StepArgs::default() }
}

fn first(opt: &Optimizer, i: usize) -> f32 {
    crate::common::floats(opt, &name(i))[0]
}

#[test]
fn a_gradient_that_is_not_finite_on_one_rank_changes_nothing_anywhere() {
    let mut drawn = draws(1);
    for stage in STAGES {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().filter(|_| drawn()) {
            let run = Run::default().stage(stage);
            loopback::spawn(4, |comm| {
                let rank = comm.rank();
                let mut opt = run.build(comm).unwrap();
                run.hand_over(&mut opt, 1, 0).unwrap();
                let _ = opt.step(run.at(1)).unwrap().outcome().unwrap();
                let before = (params(&opt), state(&opt));
                for in_a_row in 1..=2 {
                    let mb = opt.micro_batch(1).unwrap();
                    for (i, &len) in run.lens.iter().enumerate() {
                        let mut grad = vec![0.25f32; len];
                        if rank == 2 && i == 3 {
                            grad[100] = bad;
                        }
                        mb.grad(&name(i), &grad[..]).unwrap();
                    }
                    mb.finish().unwrap();
                    let outcome = opt.step(run.at(2)).unwrap().outcome().unwrap();
                    let skipped = matches!(outcome, Outcome::Skipped { non_finite: 1, in_a_row: n, .. } if n == in_a_row);
                    assert!(skipped, "{stage:?}: {outcome:?}");
                    assert_eq!((params(&opt), state(&opt)), before, "{stage:?}");
                }
                run.hand_over(&mut opt, 2, 0).unwrap();
                let outcome = opt.step(run.at(2)).unwrap().outcome().unwrap();
                assert!(matches!(outcome, Outcome::Applied { .. }));
                params(&opt)
            })
            .unwrap()
            .into_iter()
            // The end is as if the skipped steps had never been.
            .for_each(|end| assert_eq!(end, Run { steps: 2, ..run.clone() }.run().params));
        }
    }
}

#[test]
fn too_many_skips_in_a_row_are_an_error_on_every_rank() {
    loopback::spawn(2, |comm| {
        let mut opt = sgd(comm, &[3], Options { max_skips: 2, ..Options::default() });
        for skips in 1..=3 {
            let mb = opt.micro_batch(1).unwrap();
            mb.grad("p0", &[f32::NAN, 0.0, 0.0][..]).unwrap();
            mb.finish().unwrap();
            let step = opt.step(at_one());
            match skips {
                3 => assert!(matches!(step, Err(Error::TooManySkips { skips: 3 })), "{step:?}"),
                _ => assert!(step.is_ok()),
            }
        }
    })
    .unwrap();
}

#[test]
fn missing_gradients_follow_the_policy() {
    for stage in STAGES {
        for missing in [Missing::Error, Missing::Zero, Missing::SkipIfMissingEverywhere] {
            loopback::spawn(2, |comm| {
                let rank = comm.rank();
                let options = Options { stage, missing, ..Options::default() };
                let mut opt = Optimizer::new(comm, layout(&[2, 2, 2]), adamw(), ones, options).unwrap();
                // p0 has a gradient on every rank, p1 on rank 0 only, p2 on none.
                let mb = opt.micro_batch(1).unwrap();
                mb.grad("p0", &[1f32, 1.0][..]).unwrap();
                if rank == 0 {
                    mb.grad("p1", &[1f32, 1.0][..]).unwrap();
                }
                mb.finish().unwrap();
                let step = opt.step(at_one());
                if missing == Missing::Error {
                    let Err(Error::Fault { rank: 0, fault: Fault::MissingGradient { name } }) = step else {
                        panic!("{step:?}")
                    };
                    assert_eq!((name.as_str(), first(&opt, 0)), ("p2", 1.0));
                    return;
                }
                assert!(matches!(step.unwrap().outcome().unwrap(), Outcome::Applied { .. }));
                let t = |i: usize| opt.state(&name(i)).unwrap().t;
                let left_alone = missing == Missing::SkipIfMissingEverywhere;
                assert_eq!([t(0), t(1), t(2)], [1, 1, u64::from(!left_alone)]);
                assert!(first(&opt, 0) < 0.1 && first(&opt, 1) < 0.1);
                // Without a gradient AdamW still decays: 1 - lr * wd.
                assert_eq!(first(&opt, 2), if left_alone { 1.0 } else { 0.9 }, "{stage:?} {missing:?}");
            })
            .unwrap();
        }
    }
}

/// Values of an earlier step in a place do not count as this step's gradient.
#[test]
fn a_missing_gradient_is_zeros_even_where_one_was_before() {
    for stage in STAGES {
        loopback::spawn(2, |comm| {
            let options =
                Options { stage, missing: Missing::Zero, bucket_len: Some(64), ..Options::default() };
            let mut opt = sgd(comm, &[3, 3, 3], options);
            for present in [3, 1] {
                let mb = opt.micro_batch(1).unwrap();
                (0..present).for_each(|i| mb.grad(&name(i), &[1f32; 3][..]).unwrap());
                mb.finish().unwrap();
                let _ = opt.step(at_one()).unwrap();
            }
            assert_eq!([0, 1, 2].map(|i| first(&opt, i)), [-1.0, 0.0, 0.0], "{stage:?}");
        })
        .unwrap();
    }
}

/// All ranks' pieces of the state, joined by their ranges, are the state of a single rank.
#[test]
fn state_pieces_cover_each_parameter_once() {
    let whole = Run { ranks: 1, gradients: crate::common::Gradients::Equal, ..Run::default() };
    let pieces = |run: &Run| {
        let ends = loopback::spawn(run.ranks, |comm| {
            let mut opt = run.build(comm).unwrap();
            for t in 1..=2 {
                run.hand_over(&mut opt, t, 0).unwrap();
                let _ = opt.step(run.at(t)).unwrap();
            }
            let of = |p: &Param| {
                let state = opt.state(p.name()).unwrap();
                let slots =
                    state.slots.iter().map(|(_, v)| v.typed::<f32>().unwrap().to_vec()).collect::<Vec<_>>();
                (state.range, slots)
            };
            opt.params().map(of).collect::<Vec<_>>()
        });
        ends.unwrap()
    };
    let expected = pieces(&whole).remove(0);
    for stage in STAGES {
        for bucket_len in [Some(70), None] {
            let options = Options { stage, bucket_len, ..Options::default() };
            let ranks = pieces(&Run { ranks: 3, options, ..whole.clone() });
            for (i, (range, slots)) in expected.iter().enumerate() {
                let mut seen = vec![0; range.len()];
                for (part, values) in ranks.iter().map(|rank| &rank[i]) {
                    part.clone().for_each(|j| seen[j] += 1);
                    for (slot, values) in slots.iter().zip(values) {
                        assert_eq!(values[..], slot[part.clone()], "{stage:?} p{i} {part:?}");
                    }
                }
                let times = if stage == Stage::Replicated { 3 } else { 1 };
                assert!(seen.iter().all(|&n| n == times), "{stage:?} p{i}: {seen:?}");
            }
        }
    }
}

#[test]
fn weights_are_over_ranks_and_micro_batches() {
    for stage in STAGES {
        loopback::spawn(4, |comm| {
            let rank = comm.rank();
            let options = Options { stage, combine: Combine::Weighted, ..Options::default() };
            let mut opt = sgd(comm, &[1], options);
            // Gradient r+1 with weight r+1, then 10 with weight 2 everywhere: (1+4+9+16+80) / (10+8).
            let g = rank as f32 + 1.0;
            let mb = opt.accumulate(rank as u64 + 1).unwrap();
            mb.grad("p0", &[g][..]).unwrap();
            mb.finish().unwrap();
            let mb = opt.micro_batch(2).unwrap();
            mb.grad("p0", &[10f32][..]).unwrap();
            mb.finish().unwrap();
            let outcome = opt.step(at_one()).unwrap().outcome().unwrap();
            let mean = 110.0 / 18.0;
            let Outcome::Applied { norm, .. } = outcome else { panic!("{outcome:?}") };
            assert!((norm - mean).abs() < 1e-12, "{norm}");
            assert!((first(&opt, 0) - (1.0 - mean as f32)).abs() < 1e-6);
            // Zero weight on all ranks is an error; zero weight on some is not.
            for all in [false, true] {
                let weight = u64::from(rank == 1 && !all);
                let mb = opt.micro_batch(weight).unwrap();
                // The mean over no samples is NaN, and does not count.
                mb.grad("p0", &[if weight == 0 { f32::NAN } else { g }][..]).unwrap();
                mb.finish().unwrap();
                let before = first(&opt, 0);
                match (opt.step(at_one()), all) {
                    (Ok(_), false) => assert_eq!(first(&opt, 0), before - 2.0),
                    (Err(Error::Weights(WeightError::AllZero)), true) => assert_eq!(first(&opt, 0), before),
                    (step, _) => panic!("{step:?}"),
                }
            }
        })
        .unwrap();
    }
}

#[test]
fn slots_are_weighted_like_copies_and_belong_to_the_first_micro_batch() {
    for stage in [Stage::Zero1, Stage::Zero2] {
        loopback::spawn(2, |comm| {
            let options = Options { stage, combine: Combine::Weighted, ..Options::default() };
            let mut opt = sgd(comm, &[2], options);
            let mb = opt.accumulate(3).unwrap();
            drop(mb.slot("p0").unwrap());
            let mut slot = mb.slot("p0").unwrap();
            slot.as_mut().unwrap().typed_mut::<f32>().unwrap().fill(2.0);
            assert!(matches!(mb.grad("p0", &[1f32; 2][..]), Err(Error::GradTwice { .. })));
            slot.fill().unwrap();
            mb.finish().unwrap();
            let mb = opt.micro_batch(1).unwrap();
            let second = mb.slot("p0");
            if stage == Stage::Zero2 {
                let mut slot = second.unwrap();
                slot.as_mut().unwrap().typed_mut::<f32>().unwrap().fill(6.0);
                slot.fill().unwrap();
            } else {
                assert!(matches!(second, Err(Error::SlotTaken { .. })));
                drop(second);
                mb.grad("p0", &[6f32; 2][..]).unwrap();
            }
            mb.finish().unwrap();
            let _ = opt.step(at_one()).unwrap();
            assert_eq!(first(&opt, 0), 1.0 - 3.0);
        })
        .unwrap();
    }
}

#[test]
fn groups_have_their_own_decay_and_rate() {
    for stage in STAGES {
        loopback::spawn(3, |comm| {
            let rule = AdamW { weight_decay: 0.5, ..AdamW::default() };
            let plain = AdamW { weight_decay: 0.0, ..AdamW::default() };
            let groups = Groups::new(rule.clone()).with(plain, ["p1"]).with_lr(rule, 0.5, ["p2"]);
            let options = Options { stage, ..Options::default() };
            let mut opt = Optimizer::new(comm, layout(&[100, 100, 100]), groups, ones, options).unwrap();
            let mb = opt.micro_batch(1).unwrap();
            (0..3).for_each(|i| mb.grad(&name(i), &[0f32; 100][..]).unwrap());
            mb.finish().unwrap();
            let _ = opt.step(StepArgs { lr: 0.1, ..StepArgs::default() }).unwrap();
            assert_eq!([0, 1, 2].map(|i| first(&opt, i)), [0.95, 1.0, 0.975], "{stage:?}");
        })
        .unwrap();
    }
}

#[test]
fn a_group_added_during_training_starts_at_t_1() {
    for stage in STAGES {
        loopback::spawn(2, |comm| {
            let mut opt = sgd(comm, &[5], Options { stage, ..Options::default() });
            let one = |opt: &mut Optimizer, names: &[(&str, usize)]| {
                let mb = opt.micro_batch(1).unwrap();
                names.iter().for_each(|(n, len)| mb.grad(n, &vec![1f32; *len][..]).unwrap());
                mb.finish().unwrap();
                opt.step(at_one()).unwrap().outcome().unwrap()
            };
            one(&mut opt, &[("p0", 5)]);
            let late = Layout::builder().param("late", &[700], DType::F32).build().unwrap();
            opt.add_param_group(late.clone(), adamw(), ones).unwrap();
            assert!(matches!(opt.add_param_group(late, adamw(), ones), Err(Error::NameTaken { .. })));
            let Outcome::Applied { norm, .. } = one(&mut opt, &[("late", 700), ("p0", 5)]) else { panic!() };
            assert_eq!(norm, 705f64.sqrt());
            assert_eq!((opt.state("p0").unwrap().t, opt.state("late").unwrap().t), (2, 1));
            assert_eq!(first(&opt, 0), -1.0);
            assert!(crate::common::floats(&opt, "late").iter().all(|&x| x < 0.0));
        })
        .unwrap();
    }
}

#[test]
fn frozen_parameters_are_kept_and_left_alone() {
    for stage in STAGES {
        loopback::spawn(2, |comm| {
            let rank = comm.rank() as f64;
            let layout =
                Layout::builder().param("w", &[4], DType::F32).frozen("f", &[4], DType::F64).build().unwrap();
            // Rank 0's values are broadcast.
            let values = |_: &Param, mut out: SliceMut<'_>| out.cast_from(Slice::from(&[rank + 5.0; 4][..]));
            let options = Options { stage, ..Options::default() };
            let mut opt = Optimizer::new(comm, layout, Sgd::default(), values, options).unwrap();
            let mb = opt.micro_batch(1).unwrap();
            assert!(matches!(mb.grad("f", &[1f64; 4][..]), Err(Error::FrozenParam { .. })));
            mb.grad("w", &[1f32; 4][..]).unwrap();
            mb.finish().unwrap();
            let _ = opt.step(at_one()).unwrap();
            assert_eq!(crate::common::floats(&opt, "w"), [4.0; 4]);
            assert_eq!(opt.param("f").unwrap().typed::<f64>().unwrap(), [5.0; 4]);
        })
        .unwrap();
    }
}

#[test]
fn gradients_come_from_any_thread() {
    let mut drawn = draws(1);
    for stage in STAGES.into_iter().filter(|_| drawn()) {
        let run = Run { lens: vec![300; 24], steps: 4, ..Run::default() }.stage(stage);
        let expected = run.run().params;
        let ends = loopback::spawn(4, |comm| {
            let rank = comm.rank();
            let mut opt = run.build(comm).unwrap();
            for t in 1..=run.steps {
                let mb = opt.micro_batch(1).unwrap();
                std::thread::scope(|s| {
                    for thread in 0..3 {
                        let (mb, run) = (&mb, &run);
                        s.spawn(move || {
                            for i in (0..24).filter(|i| i % 3 == thread) {
                                let grad: Vec<f32> =
                                    run.gradient(t, 0, rank, i).iter().map(|&g| g as f32).collect();
                                mb.grad(&name(i), &grad[..]).unwrap();
                            }
                        });
                    }
                });
                mb.finish().unwrap();
                let _ = opt.step(run.at(t)).unwrap();
            }
            params(&opt)
        });
        assert!(ends.unwrap().iter().all(|end| *end == expected), "{stage:?}");
    }
}

#[test]
fn every_norm_is_the_whole_vectors() {
    for (norm, expected) in [
        (Norm::L1, 70.0 * 4.0),
        (Norm::L2, (70.0f64 * 16.0).sqrt()),
        (Norm::Inf, 4.0),
        (Norm::P(3.0), (70.0f64 * 64.0).cbrt()),
    ] {
        for stage in STAGES {
            loopback::spawn(3, |comm| {
                let mut opt = sgd(comm, &[40, 30], Options { stage, norm, ..Options::default() });
                let mb = opt.micro_batch(1).unwrap();
                mb.grad("p0", &[-4f32; 40][..]).unwrap();
                mb.grad("p1", &[4f32; 30][..]).unwrap();
                mb.finish().unwrap();
                let at = StepArgs { lr: 1.0, max_norm: Some(1.0), grad_scale: 0.5 };
                let Outcome::Applied { norm, coef, .. } = opt.step(at).unwrap().outcome().unwrap() else {
                    panic!()
                };
                assert!((norm - expected / 2.0).abs() < 1e-9 * expected, "{norm} {expected}");
                assert_eq!(coef, (1.0 / (norm + 1e-6)).min(1.0));
                assert_eq!(first(&opt, 0), 1.0 + 4.0 * (0.5 * coef) as f32);
            })
            .unwrap();
        }
    }
}

//! Rules that see more than an element: refused at some stages, and correct at all others.

use crate::common::{Run, STAGES, WhichRule, draws, hash, long, turns};
use meshstep_comm::Communicator;
use meshstep_optim::{AdamW, Blocks, Lamb, Lars, Muon};
use meshstep_shard::{Error, Fault, Groups, Missing, Optimizer, Options, Outcome, Owners, Stage, StepArgs};
use meshstep_tensor::{DType, Layout, Meter, Param, Slice, SliceMut};
use std::sync::Arc;

const SHAPES: [[usize; 2]; 4] = [[6, 10], [10, 6], [1, 9], [8, 8]];

fn layout() -> Layout {
    let add = |b: meshstep_tensor::LayoutBuilder, (i, shape): (usize, &[usize; 2])| {
        b.param(format!("w{i}"), shape, DType::F32)
    };
    SHAPES.iter().enumerate().fold(Layout::builder(), add).build().unwrap()
}

fn values(len: usize, key: u64) -> Vec<f32> {
    (0..len).map(|j| (hash(&[key, j as u64]) % 2001) as f32 / 1000.0 - 1.0).collect()
}

fn build(comm: Arc<dyn Communicator>, rule: impl Into<Groups>, stage: Stage) -> Result<Optimizer, Error> {
    let options = Options { stage, bucket_len: Some(100), meter: Meter::new(), ..Options::default() };
    let first = |p: &Param, mut out: SliceMut<'_>| out.copy_from(Slice::from(&values(p.len(), 5)[..]));
    Optimizer::new(comm, layout(), rule, first, options)
}

/// Returns the parameters after five steps, which must agree on all ranks.
fn muon(ranks: usize, stage: Stage) -> Vec<Vec<u8>> {
    let ends = meshstep_comm::loopback::spawn(ranks, |comm| {
        let mut opt = build(comm, Muon::default(), stage).unwrap();
        for t in 1..=5 {
            let mb = opt.micro_batch(1).unwrap();
            for (i, shape) in SHAPES.iter().enumerate() {
                mb.grad(&format!("w{i}"), &values(shape[0] * shape[1], t * 10 + i as u64)[..]).unwrap();
            }
            mb.finish().unwrap();
            let outcome = opt.step(StepArgs { lr: 0.1, ..StepArgs::default() }).unwrap().outcome().unwrap();
            assert!(matches!(outcome, Outcome::Applied { .. }));
        }
        crate::common::params(&opt)
    })
    .unwrap();
    assert!(ends.iter().all(|end| *end == ends[0]));
    ends.into_iter().next().unwrap()
}

#[test]
fn muon_runs_where_matrices_are_whole() {
    let one = muon(1, Stage::Replicated);
    let start = bytes_of(&values(60, 5));
    assert_ne!(one[0], start);
    for ranks in [1, 2, 3, 4] {
        for stage in [
            Stage::Replicated,
            Stage::Zero1,
            Stage::Zero2,
            Stage::WholeParams(Owners::RoundRobin),
            Stage::WholeParams(Owners::SortedGreedy),
        ] {
            assert_eq!(muon(ranks, stage), one, "{ranks} ranks, {stage:?}");
        }
    }
}

/// The rate is in range, but not once it is adjusted to the other rank's matrix.
#[test]
fn a_rate_beyond_one_ranks_matrix_is_refused_on_all() {
    meshstep_comm::loopback::spawn(2, |comm| {
        let layout = Layout::builder().param("a", &[4, 4], DType::F32).param("b", &[100, 1], DType::F32);
        let options = Options { stage: Stage::WholeParams(Owners::RoundRobin), ..Options::default() };
        let init = |_: &Param, mut values: SliceMut<'_>| {
            values.typed_mut::<f32>()?.fill(1.0);
            Ok(())
        };
        let mut opt = Optimizer::new(comm, layout.build().unwrap(), Muon::default(), init, options).unwrap();
        for _ in 0..2 {
            let batch = opt.micro_batch(1).unwrap();
            batch.grad("a", &[1f32; 16][..]).unwrap();
            batch.grad("b", &[1f32; 100][..]).unwrap();
            batch.finish().unwrap();
            let step = opt.step(StepArgs { lr: 1e38, ..StepArgs::default() });
            assert!(matches!(step, Err(Error::Fault { rank: 0, fault: Fault::Lr })), "{step:?}");
            for name in ["a", "b"] {
                assert!(opt.param(name).unwrap().typed::<f32>().unwrap().iter().all(|p| *p == 1.0));
            }
        }
    })
    .unwrap();
}

/// A ratio that takes the rate out of range is not used on any rank.
#[test]
fn a_ratio_too_large_for_the_rate_is_one() {
    for stage in [Stage::Replicated, Stage::Zero1] {
        let rule = Lars { weight_decay: 0.0, trust_coefficient: 1.0, ..Lars::default() };
        let ends = meshstep_comm::loopback::spawn(2, |comm| {
            let layout = Layout::builder().param("a", &[200], DType::F32).build().unwrap();
            let init = |_: &Param, mut values: SliceMut<'_>| {
                values.typed_mut::<f32>()?.fill(1.0);
                Ok(())
            };
            let options = Options { stage, ..Options::default() };
            let mut opt = Optimizer::new(comm, layout, rule.clone(), init, options).unwrap();
            let batch = opt.micro_batch(1).unwrap();
            batch.grad("a", &[1e-28f32; 200][..]).unwrap();
            batch.finish().unwrap();
            let outcome = opt.step(StepArgs { lr: 1e12, ..StepArgs::default() }).unwrap().outcome().unwrap();
            assert!(matches!(outcome, Outcome::Applied { .. }), "{outcome:?}");
            opt.param("a").unwrap().typed::<f32>().unwrap().to_vec()
        });
        assert!(ends.unwrap().concat().iter().all(|p| (p - 1.0).abs() < 1e-6), "{stage:?}");
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

#[test]
fn muon_leaves_matrices_without_elements_alone() {
    meshstep_comm::loopback::spawn(2, |comm| {
        let layout = Layout::builder().param("a", &[4, 4], DType::F32).param("none", &[2, 0], DType::F32);
        let options = Options { stage: Stage::WholeParams(Owners::RoundRobin), ..Options::default() };
        let mut opt =
            Optimizer::new(comm, layout.build().unwrap(), Muon::default(), |_, _| Ok(()), options).unwrap();
        let batch = opt.micro_batch(1).unwrap();
        batch.grad("a", &values(16, 1)[..]).unwrap();
        batch.grad("none", &[0f32; 0][..]).unwrap();
        batch.finish().unwrap();
        let outcome = opt.step(StepArgs::default()).unwrap().outcome().unwrap();
        assert!(matches!(outcome, Outcome::Applied { .. }), "{outcome:?}");
        assert!(opt.param("a").unwrap().typed::<f32>().unwrap().iter().all(|p| *p != 0.0));
    })
    .unwrap();
}

#[test]
fn muon_is_refused_a_bias_which_may_join_with_another_rule() {
    let outcome = meshstep_comm::loopback::spawn(2, |comm| {
        let whole = Stage::WholeParams(Owners::SortedGreedy);
        let mut opt = build(comm, Muon::default(), whole).unwrap();
        let bias = || Layout::builder().param("b", &[7], DType::F32).build().unwrap();
        let refused = opt.add_param_group(bias(), Muon::default(), |_, _| Ok(())).unwrap_err();
        assert!(
            matches!(&refused, Error::NotAMatrix { name, shape, .. } if name == "b" && shape == &[7]),
            "{refused}"
        );
        opt.add_param_group(bias(), AdamW::default(), |_, _| Ok(())).unwrap();
        let mb = opt.micro_batch(1).unwrap();
        for (i, shape) in SHAPES.iter().enumerate() {
            mb.grad(&format!("w{i}"), &values(shape[0] * shape[1], 3)[..]).unwrap();
        }
        mb.grad("b", &[1f32; 7][..]).unwrap();
        mb.finish().unwrap();
        opt.step(StepArgs { lr: 0.25, ..StepArgs::default() }).unwrap().outcome().unwrap();
        opt.param("b").unwrap().typed::<f32>().unwrap()[3]
    });
    assert!(outcome.unwrap().iter().all(|b| (b + 0.25).abs() < 1e-6));
}

/// Queries, keys and values in one parameter, and experts in another: after three steps the bits of one parameter for each block.
#[test]
fn blocks_of_a_parameter_are_updated_as_parameters() {
    let fused = Layout::builder().param("qkv", &[6, 5], DType::F32).param("experts", &[3, 4, 2], DType::F32);
    let parts = (0..6).map(|i| (format!("part{i}"), if i < 3 { [2, 5] } else { [4, 2] }));
    let apart = parts.fold(Layout::builder(), |b, (name, shape)| b.param(name, &shape, DType::F32));
    let (fused, apart) = (fused.build().unwrap(), apart.build().unwrap());
    let (rows, batch) = (Blocks::Rows(3), Blocks::Batch);
    let groups = Groups::new(Muon { blocks: rows, ..Muon::default() })
        .with(Muon { blocks: batch, ..Muon::default() }, ["experts"]);
    let end = |ranks, layout: &Layout, groups: &Groups, stage| {
        let ends = meshstep_comm::loopback::spawn(ranks, |comm| {
            let options = Options { stage, bucket_len: Some(40), ..Options::default() };
            let mut opt =
                Optimizer::new(comm, layout.clone(), groups.clone(), |_, _| Ok(()), options).unwrap();
            for t in 1..=3 {
                let (mb, grads) = (opt.micro_batch(1).unwrap(), values(54, t));
                let mut first = 0;
                for param in layout.params() {
                    mb.grad(param.name(), &grads[first..first + param.len()]).unwrap();
                    first += param.len();
                }
                mb.finish().unwrap();
                opt.step(StepArgs { lr: 0.1, ..StepArgs::default() }).unwrap().outcome().unwrap();
            }
            crate::common::params(&opt).concat()
        });
        ends.unwrap()
    };
    let whole = Stage::WholeParams(Owners::SortedGreedy);
    let one = end(1, &apart, &Muon::default().into(), Stage::Replicated).remove(0);
    assert!(one.iter().any(|byte| *byte != 0));
    for (ranks, stage) in [(1, Stage::Replicated), (2, Stage::Replicated), (2, whole), (3, whole)] {
        assert!(end(ranks, &fused, &groups, stage).iter().all(|end| *end == one), "{ranks} ranks, {stage:?}");
    }
}

#[test]
fn a_parameter_that_blocks_do_not_divide_is_refused_by_name() {
    meshstep_comm::loopback::spawn(1, |comm| {
        for (blocks, refused) in [
            (Blocks::Whole, "experts"),
            (Blocks::Rows(4), "qkv"),
            (Blocks::Rows(3), "experts"),
            (Blocks::Batch, "qkv"),
        ] {
            let layout = Layout::builder().param("qkv", &[6, 5], DType::F32);
            let layout = layout.param("experts", &[3, 4, 2], DType::F32).build().unwrap();
            let options = Options { stage: Stage::Replicated, ..Options::default() };
            let rule = Muon { blocks, ..Muon::default() };
            let error = Optimizer::new(comm.clone(), layout, rule, |_, _| Ok(()), options).unwrap_err();
            let Error::NotAMatrix { rule: "muon", name, blocks: found, .. } = &error else {
                panic!("{error:?}")
            };
            assert_eq!((name.as_str(), *found), (refused, blocks), "{error}");
            assert!(error.to_string().contains(&blocks.to_string()), "{error}");
        }
    })
    .unwrap();
}

/// Two layouts, one of them layer-wise, and a parameter without a gradient.
#[test]
fn layer_wise_rules_stand_beside_others_and_missing_gradients() {
    let run = |ranks, stage| {
        let ends = meshstep_comm::loopback::spawn(ranks, |comm| {
            let options = Options {
                stage,
                missing: Missing::SkipIfMissingEverywhere,
                meter: Meter::new(),
                ..Options::default()
            };
            let first =
                |p: &Param, mut out: SliceMut<'_>| out.copy_from(Slice::from(&values(p.len(), 8)[..]));
            let bias = Layout::builder().param("b", &[700], DType::F32).build().unwrap();
            let mut opt = Optimizer::new(comm, bias, AdamW::default(), first, options).unwrap();
            let groups = Groups::new(Lamb::default()).with_lr(
                Lamb { weight_decay: 0.0, ..Lamb::default() },
                0.5,
                ["w1"],
            );
            opt.add_param_group(layout(), groups, first).unwrap();
            for t in 1..=4u64 {
                let mb = opt.micro_batch(1).unwrap();
                mb.grad("b", &values(700, t)[..]).unwrap();
                for (i, shape) in SHAPES.iter().enumerate().filter(|(i, _)| t % 2 == 0 || *i != 2) {
                    mb.grad(&format!("w{i}"), &values(shape[0] * shape[1], 40 + t)[..]).unwrap();
                }
                mb.finish().unwrap();
                opt.step(StepArgs { lr: 0.1, max_norm: Some(2.0), ..StepArgs::default() })
                    .unwrap()
                    .outcome()
                    .unwrap();
            }
            assert_eq!(opt.state("w2").unwrap().t, 2);
            crate::common::params(&opt)
        });
        ends.unwrap()
    };
    let one = run(1, Stage::Replicated).remove(0);
    for ranks in [2, 3, 4] {
        for stage in STAGES {
            assert!(run(ranks, stage).iter().all(|end| *end == one), "{ranks} ranks, {stage:?}");
        }
    }
}

#[test]
fn equal_gradients_end_alike_after_fifty_steps() {
    let mut drawn = draws(1);
    for (r, rule) in [WhichRule::Lamb, WhichRule::Lars].into_iter().enumerate() {
        let gradients = crate::common::Gradients::Equal;
        let run = Run { rule, gradients, steps: 50, ..Run::default() };
        let one = Run { ranks: 1, ..run.clone() }.stage(Stage::Replicated).run();
        for (i, ranks) in [8, 7, 4, 3, 2, 1].into_iter().enumerate() {
            // Short runs try each number of ranks with one of the two rules.
            if !long() && (r + i) % 2 > 0 || !drawn() {
                continue;
            }
            for stage in turns(&STAGES, 3 * r + i / 2, 1) {
                assert_eq!(
                    Run { ranks, ..run.clone() }.stage(stage).run(),
                    one,
                    "{rule:?} {ranks} {stage:?}"
                );
            }
        }
    }
}

//! Sharded training against one rank, and against burn's own optimizer on whole batches.

use crate::common::{Mlp, STAGES, applied, at, bits, named, on_ranks, options, param, rule, sharded, tensor};
use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};
use burn_optim::{AdamWConfig, GradientsParams};
use meshstep_burn::{BackwardPass, Sharded};
use meshstep_comm::loopback;
use meshstep_optim::{AdamW, LossScale};
use meshstep_shard::{Combine, Master, Options, Precision, Stage, StepArgs};
use meshstep_tensor::DType as Flat;

const STEPS: u64 = 20;

/// Trains with burn's AdamW on whole batches.
fn burns() -> (Vec<f32>, Mlp) {
    let mut model = Mlp::new(1);
    let config = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.1);
    let (mut optim, mut losses) = (config.init(), Vec::new());
    for step in 0..STEPS {
        let loss = model.loss(step);
        losses.push(loss.clone().into_scalar::<f32>());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(0.01, model, grads);
    }
    (losses, model)
}

#[test]
fn losses_and_parameters_are_those_of_burns_adamw_on_whole_batches() {
    let (losses, expected) = burns();
    let expected = named(&expected);
    let mut finals = Vec::new();
    for stage in STAGES {
        for ranks in [1, 2, 4] {
            let trained = on_ranks(ranks, |comm| {
                let (mut model, rank) = (Mlp::new(1), comm.rank());
                let rule = AdamW { eps: 1e-8, ..rule() };
                let mut opt = Sharded::new(comm, &mut model, rule, options(stage)).unwrap();
                let at = || StepArgs { lr: 0.01, ..StepArgs::default() };
                let losses = (0..STEPS).map(|step| {
                    let loss = model.loss_of(step, rank, ranks);
                    let number = loss.clone().into_scalar::<f32>();
                    applied(opt.backward_step(&mut model, loss, at()));
                    number
                });
                (losses.collect::<Vec<_>>(), named(&model))
            });
            for (step, theirs) in losses.iter().enumerate() {
                let ours = trained.iter().map(|(losses, _)| losses[step]).sum::<f32>() / ranks as f32;
                assert!((ours - theirs).abs() <= 1e-5 * theirs, "{stage:?} on {ranks}: {ours} and {theirs}");
            }
            assert!(trained.iter().all(|(_, values)| *values == trained[0].1), "{stage:?} on {ranks}");
            for ((name, ours), (path, theirs)) in trained[0].1.iter().zip(&expected) {
                assert_eq!(name, path);
                let apart = ours.iter().zip(theirs).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
                assert!(apart <= 2e-5, "{stage:?} on {ranks}: {name} differs by {apart}");
            }
            finals.push((ranks, stage, trained[0].1.clone()));
        }
    }
    for (ranks, stage, values) in &finals {
        let first = finals.iter().find(|(n, ..)| n == ranks).unwrap();
        assert!(values == &first.2, "{stage:?} on {ranks} ranks has other bits than stage 0");
    }
}

#[test]
fn ranks_with_equal_batches_end_with_the_bits_of_one_rank() {
    let train = |ranks: usize, stage: Stage| {
        on_ranks(ranks, |comm| {
            let mut model = Mlp::new(1);
            let mut opt = sharded(comm, &mut model, options(stage)).unwrap();
            for step in 0..4 {
                let loss = model.loss(step);
                applied(opt.backward_step(&mut model, loss, at()));
            }
            bits(&model)
        })
    };
    let alone = train(1, Stage::Replicated).remove(0);
    for stage in STAGES {
        for ranks in [1, 2, 4] {
            for (rank, finals) in train(ranks, stage).into_iter().enumerate() {
                assert_eq!(finals, alone, "rank {rank} of {ranks} at {stage:?}");
            }
        }
    }
}

#[test]
fn accumulated_micro_batches_are_averaged_with_those_of_the_other_ranks() {
    let run = |ranks: usize, stage| {
        let finals = on_ranks(ranks, |comm| {
            let (mut model, rank) = (Mlp::new(1), comm.rank());
            let options = Options { combine: Combine::Weighted, ..options(stage) };
            let mut opt = sharded(comm, &mut model, options).unwrap();
            // Four batches in any case: on one rank one after the other, on two ranks two each.
            let batches: Vec<usize> = (0..4).filter(|batch| batch % ranks == rank).collect();
            let (last, first) = batches.split_last().unwrap();
            let pass = |model: &Mlp, batch: &usize| {
                BackwardPass::new(model.loss(*batch as u64)).weight(1 + *batch as u64)
            };
            for batch in first {
                opt.accumulate(&model, pass(&model, batch)).unwrap();
            }
            opt.backward(&model, pass(&model, last)).unwrap();
            applied(opt.step(&mut model, at()));
            named(&model)
        });
        assert!(finals.iter().all(|rank| rank == &finals[0]));
        finals.into_iter().next().unwrap().into_iter().flat_map(|(_, values)| values)
    };
    let alone: Vec<f32> = run(1, Stage::Zero1).collect();
    for stage in STAGES {
        for (x, y) in run(2, stage).zip(&alone) {
            assert!((x - y).abs() < 1e-6, "{x} and {y} at {stage:?}");
        }
    }
}

#[derive(Module, Debug)]
struct Product {
    w: Param<Tensor<2>>,
}

/// One matrix in each type, with gradients in the types that an optimizer can take.
#[test]
fn every_type_trains_and_gradients_travel_in_the_type_asked_for() {
    let master = Precision { master: Master::F32, ..Precision::default() };
    let cases = [
        (DType::F32, None, Precision::default()),
        (DType::F32, Some(Flat::BF16), Precision::default()),
        (DType::F64, None, Precision::default()),
        (DType::BF16, None, master),
        (DType::F16, None, master),
        (DType::BF16, Some(Flat::F32), master),
    ];
    for (dtype, grads, precision) in cases {
        let losses = on_ranks(2, |comm| {
            let mut model = Product { w: param([6, 2], 5).map(|w| w.cast(dtype).detach().require_grad()) };
            let options = Options { grads, precision, ..options(Stage::Zero1) };
            let mut opt = sharded(comm, &mut model, options).unwrap();
            let x = tensor([8, 6], 6).cast(dtype);
            let loss = |model: &Product| x.clone().matmul(model.w.val()).square().mean();
            let number = |model: &Product| loss(model).cast(DType::F32).into_scalar::<f32>();
            let first = number(&model);
            for _ in 0..20 {
                opt.accumulate(&model, loss(&model)).unwrap();
                let last = loss(&model);
                applied(opt.backward_step(&mut model, last, at()));
            }
            assert_eq!(model.w.dtype(), dtype);
            (first, number(&model))
        });
        for (first, last) in losses {
            assert!(last < 0.7 * first, "{dtype:?} with gradients {grads:?}: {first} to {last}");
        }
    }
}

#[test]
fn the_loss_is_scaled_before_the_backward_pass() {
    let run = |loss_scale| {
        let mut model = Mlp::new(1);
        let comm = loopback::world(loopback::Config::new(1)).unwrap().pop().unwrap();
        let options = Options { loss_scale, ..options(Stage::Zero2) };
        let mut opt = sharded(comm, &mut model, options).unwrap();
        let loss = model.loss(0);
        applied(opt.backward_step(&mut model, loss, at()));
        bits(&model)
    };
    assert_eq!(run(Some(LossScale::Static(1024.0))), run(None));
}

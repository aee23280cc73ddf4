//! Sharded training against one rank, and against candle's own optimizer.

use crate::common::{Mlp, STAGES, applied, at, bits, numbers, on_ranks, options, rule, sharded};
use candle_core::{DType, Var};
use candle_nn::{Optimizer as _, ParamsAdamW};
use meshstep_candle::{BackwardPass, Sharded};
use meshstep_comm::loopback;
use meshstep_optim::AdamW;
use meshstep_shard::{Combine, Master, Options, Precision, Stage, StepArgs};
use meshstep_tensor::DType as Flat;

const STEPS: u64 = 4;

/// Trains on equal batches, and returns the final bits of each rank.
fn train(ranks: usize, stage: Stage) -> Vec<Vec<Vec<u32>>> {
    on_ranks(ranks, |comm| {
        let mlp = Mlp::new(1);
        let mut opt = sharded(comm, mlp.vars(), options(stage)).unwrap();
        for step in 0..STEPS {
            applied(opt.backward_step(&mlp.loss(step).unwrap(), at()));
        }
        bits(&opt)
    })
}

#[test]
fn ranks_with_equal_batches_end_with_the_bits_of_one_rank() {
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
            let (mlp, rank) = (Mlp::new(1), comm.rank() as u64);
            let options = Options { combine: Combine::Weighted, ..options(stage) };
            let mut opt = sharded(comm, mlp.vars(), options).unwrap();
            // Four batches in any case: on one rank one after the other, on two ranks two each.
            let batches: Vec<u64> = (0..4).filter(|batch| batch % ranks as u64 == rank).collect();
            let (last, first) = batches.split_last().unwrap();
            for batch in first {
                opt.accumulate(BackwardPass::new(&mlp.loss(*batch).unwrap()).weight(4)).unwrap();
            }
            opt.backward(BackwardPass::new(&mlp.loss(*last).unwrap()).weight(4)).unwrap();
            applied(opt.step(at()));
            opt.vars().flat_map(|(_, var)| numbers(var)).collect::<Vec<_>>()
        });
        assert!(finals.iter().all(|rank| rank == &finals[0]));
        finals.into_iter().next().unwrap()
    };
    let alone = run(1, Stage::Zero1);
    for stage in STAGES {
        for (x, y) in run(2, stage).into_iter().zip(&alone) {
            assert!((x - y).abs() < 1e-6, "{x} and {y} at {stage:?}");
        }
    }
}

#[test]
fn twenty_steps_are_those_of_candles_adamw() {
    let (mlp, own) = (Mlp::new(3), Mlp::new(3));
    let params = ParamsAdamW { lr: 0.01, weight_decay: 0.1, ..ParamsAdamW::default() };
    let theirs = own.vars().into_iter().map(|(_, var)| var).collect();
    let mut theirs = candle_nn::AdamW::new(theirs, params.clone()).unwrap();
    let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = params;
    let rule = AdamW { beta1, beta2, eps, weight_decay, ..rule() };
    let comm = loopback::world(loopback::Config::new(1)).unwrap().pop().unwrap();
    let mut opt = Sharded::new(comm, mlp.vars(), rule, options(Stage::Zero2)).unwrap();
    for step in 0..20 {
        theirs.backward_step(&own.loss(step).unwrap()).unwrap();
        applied(opt.backward_step(&mlp.loss(step).unwrap(), StepArgs { lr, ..StepArgs::default() }));
    }
    for ((name, ours), (_, theirs)) in mlp.vars().into_iter().zip(own.vars()) {
        for (x, y) in numbers(&ours).into_iter().zip(numbers(&theirs)) {
            assert!((x - y).abs() <= 1e-5 * y.abs().max(0.1), "{name}: {x} and {y}");
        }
    }
}

/// One linear layer in each type, with gradients in the types that an optimizer can take.
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
            let w = Var::from_tensor(&crate::common::tensor(&[6, 2], 5).to_dtype(dtype).unwrap()).unwrap();
            let options = Options { grads, precision, ..options(Stage::Zero1) };
            let mut opt = sharded(comm, [("w", w.clone())], options).unwrap();
            let x = crate::common::tensor(&[8, 6], 6).to_dtype(dtype).unwrap();
            let loss = || x.matmul(&w).unwrap().sqr().unwrap().mean_all().unwrap();
            let first = numbers(&loss());
            for _ in 0..20 {
                opt.accumulate(&loss()).unwrap();
                applied(opt.backward_step(&loss(), at()));
            }
            (first[0], numbers(&loss())[0])
        });
        for (first, last) in losses {
            assert!(last < 0.7 * first, "{dtype:?} with gradients {grads:?}: {first} to {last}");
        }
    }
}

#[test]
fn the_loss_is_scaled_before_the_backward_pass() {
    let run = |loss_scale| {
        let mlp = Mlp::new(1);
        let comm = loopback::world(loopback::Config::new(1)).unwrap().pop().unwrap();
        let mut opt = sharded(comm, mlp.vars(), Options { loss_scale, ..options(Stage::Zero2) }).unwrap();
        applied(opt.backward_step(&mlp.loss(0).unwrap(), at()));
        bits(&opt)
    };
    assert_eq!(run(Some(meshstep_optim::LossScale::Static(1024.0))), run(None));
}

#[cfg(feature = "nn")]
#[test]
fn a_var_map_trains_in_natural_order() {
    let names = on_ranks(2, |comm| {
        let map = candle_nn::VarMap::new();
        for name in ["h.10.w", "h.2.w", "wte", "h.1.w"] {
            map.get(3, name, candle_nn::Init::Const(1.0), DType::F32, &candle_core::Device::Cpu).unwrap();
        }
        let opt = sharded(comm, &map, options(Stage::Zero1)).unwrap();
        opt.vars().map(|(name, _)| name.to_owned()).collect::<Vec<_>>()
    });
    assert!(names.into_iter().all(|names| names == ["h.1.w", "h.2.w", "h.10.w", "wte"]));
}

//! Errors, the same step refused on every rank, and no rank left waiting.

use crate::common::{Mlp, STAGES, applied, at, bits, on_ranks, options, sharded, tensor};
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Var};
use meshstep_candle::{BackwardPass, Error};
use meshstep_shard::{Combine, Error as Shard, Fault, Initial, Missing, Options, Stage, WeightError};

/// Builds an optimizer on two ranks with the variables of `vars(rank)`, and returns the errors.
fn refused(
    vars: impl Fn(usize) -> Vec<(String, Var)> + Sync,
    options: impl Fn() -> Options + Sync,
) -> [Error; 2] {
    let errors = on_ranks(2, |comm| {
        let rank = comm.rank();
        sharded(comm, vars(rank), options()).map(drop).unwrap_err()
    });
    errors.try_into().unwrap()
}

fn named(names: &[&str]) -> Vec<(String, Var)> {
    names.iter().map(|name| (String::from(*name), Var::from_tensor(&tensor(&[2], 1)).unwrap())).collect()
}

/// Asserts that each rank of the others says what rank 1 could not do.
fn told(error: &Error, part: &str) {
    let Error::Shard(Shard::Disagree { rank: 1, theirs, .. }) = error else { panic!("{error:?}") };
    assert!(theirs.contains(part), "{theirs}");
}

#[test]
fn a_variable_that_cannot_be_trained_on_one_rank_is_an_error_on_every_rank() {
    let integer = |rank| match rank {
        0 => named(&["w"]),
        _ => vec![("w".to_owned(), Var::zeros(2, DType::I64, &Device::Cpu).unwrap())],
    };
    let [other, own] = refused(integer, Options::default);
    assert!(matches!(&own, Error::DType { name, dtype: DType::I64 } if name == "w"), "{own:?}");
    told(&other, "\"w\" has elements of I64");

    let double = |rank| {
        let mut vars = named(&["a", "b"]);
        if rank == 1 {
            vars[1].1 = vars[0].1.clone();
        }
        vars
    };
    let [other, own] = refused(double, Options::default);
    assert!(matches!(&own, Error::SameVariable { first, second } if (&**first, &**second) == ("a", "b")));
    told(&other, "\"a\" and \"b\" are one variable");
}

#[test]
fn names_shapes_and_types_that_differ_are_an_error_on_every_rank() {
    let renamed = |rank| named(&[["w", "v"][rank], "b"]);
    let shaped = |rank| vec![("w".to_owned(), Var::from_tensor(&tensor(&[2 + rank], 1)).unwrap())];
    let typed =
        |rank| vec![("w".to_owned(), Var::zeros(2, [DType::F32, DType::F64][rank], &Device::Cpu).unwrap())];
    let fewer = |rank| named(&["w", "b"][rank..]);
    let twice = |_| named(&["w", "w"]);
    let all: [&(dyn Fn(usize) -> Vec<(String, Var)> + Sync); 4] = [&renamed, &shaped, &typed, &fewer];
    for (case, vars) in all.into_iter().enumerate() {
        for error in refused(vars, Options::default) {
            assert!(matches!(error, Error::Shard(Shard::Disagree { .. })), "case {case}: {error:?}");
        }
    }
    for error in refused(twice, Options::default) {
        assert!(matches!(error, Error::Shard(Shard::Tensor(_))), "{error:?}");
    }
    for error in refused(|_| Vec::new(), Options::default) {
        assert!(matches!(error, Error::Shard(_)), "{error:?}");
    }
}

#[test]
fn values_that_differ_are_an_error_where_they_are_compared() {
    let vars = |rank| vec![("w".to_owned(), Var::from_tensor(&tensor(&[4], rank as u64)).unwrap())];
    let compare = || Options { initial: Initial::Compare, ..Options::default() };
    for error in refused(vars, compare) {
        assert!(matches!(error, Error::Shard(Shard::Disagree { .. })), "{error:?}");
    }
}

#[test]
fn stage_3_is_refused_with_the_reason() {
    for error in refused(|_| named(&["w"]), || options(Stage::Zero3)) {
        assert!(matches!(error, Error::WholeVariables), "{error:?}");
        assert!(error.to_string().contains("use Stage::Zero2"), "{error}");
    }
}

#[test]
fn a_variable_without_a_gradient_is_an_error_on_every_rank_that_changes_nothing() {
    for stage in [Stage::Replicated, Stage::Zero2] {
        let unchanged = on_ranks(2, |comm| {
            let (mlp, rank) = (Mlp::new(1), comm.rank());
            let mut opt = sharded(comm, mlp.vars(), options(stage)).unwrap();
            let before = bits(&opt);
            // Rank 1 does not use `down`.
            let loss =
                if rank == 0 { mlp.loss(0) } else { mlp.hidden(&tensor(&[4, 5], 1)).unwrap().sum_all() };
            let error = opt.backward_step(&loss.unwrap(), at()).unwrap_err();
            let missing = Fault::MissingGradient { name: "down".to_owned() };
            assert!(
                matches!(&error, Error::Shard(Shard::Fault { rank: 1, fault }) if *fault == missing),
                "{error}"
            );
            assert_eq!(bits(&opt), before);
            applied(opt.backward_step(&mlp.loss(0).unwrap(), at())); // the run goes on
            bits(&opt) != before
        });
        assert_eq!(unchanged, [true, true], "{stage:?}");
    }
}

#[test]
fn missing_gradients_count_as_zeros_where_that_is_asked_for() {
    let finals = on_ranks(2, |comm| {
        let (mlp, rank) = (Mlp::new(1), comm.rank());
        let options = Options { missing: Missing::Zero, ..options(Stage::Zero2) };
        let mut opt = sharded(comm, mlp.vars(), options).unwrap();
        for step in 0..3 {
            let loss =
                if rank == 0 { mlp.loss(step) } else { mlp.hidden(&tensor(&[4, 5], 1)).unwrap().sum_all() };
            applied(opt.backward_step(&loss.unwrap(), at()));
        }
        bits(&opt)
    });
    assert_eq!(finals[0], finals[1]);
}

/// The identity, of which candle knows no gradient.
struct NoGradient;

impl CustomOp1 for NoGradient {
    fn name(&self) -> &'static str {
        "no gradient"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }
}

#[test]
fn a_backward_pass_that_fails_on_one_rank_is_a_fault_on_the_others_and_the_run_goes_on() {
    for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero2] {
        let finals = on_ranks(3, |comm| {
            let (mlp, rank) = (Mlp::new(1), comm.rank());
            let mut opt = sharded(comm, mlp.vars(), options(stage)).unwrap();
            let before = bits(&opt);
            let loss = mlp.loss(0).unwrap();
            let loss = if rank == 1 { loss.apply_op1(NoGradient).unwrap() } else { loss };
            match opt.backward_step(&loss, at()).unwrap_err() {
                Error::Candle(_) if rank == 1 => {}
                Error::Shard(Shard::Fault { rank: 1, fault: Fault::Unfinished }) if rank != 1 => {}
                other => panic!("rank {rank}: {other:?}"),
            }
            assert_eq!(bits(&opt), before);
            applied(opt.backward_step(&mlp.loss(0).unwrap(), at()));
            bits(&opt)
        });
        assert!(finals.iter().all(|rank| rank == &finals[0]), "{stage:?}");
    }
}

#[test]
fn a_loss_of_several_elements_on_one_rank_is_an_error_that_changes_nothing() {
    let finals = on_ranks(2, |comm| {
        let (mlp, rank) = (Mlp::new(1), comm.rank());
        let mut opt = sharded(comm, mlp.vars(), options(Stage::Zero2)).unwrap();
        let (before, loss) = (bits(&opt), mlp.loss(0).unwrap());
        for shape in [vec![2], vec![0, 3]] {
            let several = loss.broadcast_as((2, 3)).unwrap().narrow(1, 0, 1).unwrap().squeeze(1).unwrap();
            let several = if shape == [2] {
                several
            } else {
                loss.broadcast_as((1, 3)).unwrap().narrow(0, 0, 0).unwrap()
            };
            match opt.backward_step(if rank == 1 { &several } else { &loss }, at()).unwrap_err() {
                Error::LossShape { shape: given } if rank == 1 => assert_eq!(given, shape),
                Error::Shard(Shard::Fault { rank: 1, fault: Fault::Unfinished }) if rank == 0 => {}
                other => panic!("rank {rank}: {other:?}"),
            }
            assert_eq!(bits(&opt), before);
        }
        applied(opt.backward_step(&loss, at()));
        bits(&opt)
    });
    assert_eq!(finals[0], finals[1]);
}

#[test]
fn a_rank_that_leaves_after_an_error_leaves_no_rank_waiting() {
    let results = on_ranks(2, |comm| {
        let (mlp, rank) = (Mlp::new(1), comm.rank());
        let mut opt = sharded(comm, mlp.vars(), options(Stage::Zero2))?;
        let loss = mlp.loss(0)?;
        // Without `backward_step`, rank 1 returns the error of its backward pass and takes no step.
        opt.backward(&if rank == 1 { loss.apply_op1(NoGradient)? } else { loss })?;
        opt.step(at())
    });
    assert!(matches!(results[1], Err(Error::Candle(_))), "{:?}", results[1]);
    assert!(matches!(results[0], Err(Error::Shard(Shard::Comm(_)))), "{:?}", results[0]);
}

#[test]
fn a_weight_that_is_too_large_on_one_rank_is_an_error_on_every_rank() {
    let errors = on_ranks(2, |comm| {
        let (mlp, rank) = (Mlp::new(1), comm.rank());
        let options = Options { combine: Combine::Weighted, ..options(Stage::Zero2) };
        let mut opt = sharded(comm, mlp.vars(), options).unwrap();
        let loss = mlp.loss(0).unwrap();
        opt.backward_step(BackwardPass::new(&loss).weight(if rank == 1 { 1 << 40 } else { 1 }), at())
            .unwrap_err()
    });
    assert!(matches!(errors[0], Error::Shard(Shard::Fault { rank: 1, .. })), "{:?}", errors[0]);
    assert!(
        matches!(&errors[1], Error::Shard(Shard::Weights(WeightError::TooLarge { .. }))),
        "{:?}",
        errors[1]
    );
}

#[test]
fn a_second_last_micro_batch_takes_no_step() {
    let mlp = Mlp::new(1);
    let done = on_ranks(1, |comm| {
        let mut opt = sharded(comm, mlp.vars(), options(Stage::Zero1)).unwrap();
        let before = bits(&opt);
        opt.backward(&mlp.loss(0).unwrap()).unwrap();
        let error = opt.backward_step(&mlp.loss(1).unwrap(), at()).unwrap_err();
        assert!(matches!(error, Error::Shard(Shard::StepDue)), "{error:?}");
        assert_eq!(bits(&opt), before);
        applied(opt.step(at()));
    });
    assert_eq!(done.len(), 1);
}

#[test]
fn values_written_after_construction_are_an_error_and_refresh_ends_it() {
    for stage in STAGES {
        let finals = on_ranks(2, |comm| {
            let (mlp, rank) = (Mlp::new(1), comm.rank());
            let mut opt = sharded(comm, mlp.vars(), options(stage)).unwrap();
            applied(opt.backward_step(&mlp.loss(0).unwrap(), at()));
            let before = bits(&opt);
            if rank == 1 {
                mlp.bias.set(&tensor(mlp.bias.dims(), 77)).unwrap();
            }
            match opt.backward_step(&mlp.loss(1).unwrap(), at()).unwrap_err() {
                Error::Written { name } if rank == 1 => assert_eq!(name, "up.bias"),
                Error::Shard(Shard::Fault { rank: 1, fault: Fault::Unfinished }) if rank == 0 => {}
                other => panic!("rank {rank}: {other:?}"),
            }
            opt.refresh().unwrap();
            assert_eq!(bits(&opt), before);
            applied(opt.backward_step(&mlp.loss(1).unwrap(), at()));
            bits(&opt)
        });
        assert_eq!(finals[0], finals[1], "{stage:?}");
    }
}

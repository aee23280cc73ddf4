//! Errors, the same step refused on every rank, and no rank left waiting.

use crate::common::{Mlp, applied, at, bits, device, on_ranks, options, param, sharded, tensor};
use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor, TensorData};
use burn_nn::{Linear, LinearConfig};
use meshstep_burn::{BackwardPass, Error};
use meshstep_shard::{Combine, Error as Shard, Fault, Initial, Missing, Options, Stage, WeightError};

/// Builds an optimizer on two ranks with the modules of `model(rank)`, and returns the errors.
fn refused<M: Module>(model: impl Fn(usize) -> M + Sync, options: impl Fn() -> Options + Sync) -> [Error; 2] {
    let errors = on_ranks(2, |comm| {
        let rank = comm.rank();
        sharded(comm, &mut model(rank), options()).map(drop).unwrap_err()
    });
    errors.try_into().unwrap()
}

/// Asserts that the other rank says what rank 1 could not do.
fn told(error: &Error, part: &str) {
    let Error::Shard(Shard::Disagree { rank: 1, theirs, .. }) = error else { panic!("{error:?}") };
    assert!(theirs.contains(part), "{theirs}");
}

fn linear(rows: usize, columns: usize) -> Linear {
    LinearConfig::new(rows, columns).init(&device())
}

#[test]
fn a_module_that_cannot_be_trained_on_one_rank_is_an_error_on_every_rank() {
    let plain = |rank| if rank == 1 { Mlp::new(1).valid() } else { Mlp::new(1) };
    let [other, own] = refused(plain, Options::default);
    assert!(matches!(own, Error::NothingTrains), "{own:?}");
    told(&other, "no parameter of the module requires a gradient");

    let flex32 = |rank| {
        let mut model = linear(2, 3);
        if rank == 1 {
            let data = TensorData::from_bytes_vec(vec![0; 24], [2, 3], DType::Flex32);
            model.weight = Param::from_tensor(Tensor::from_data(data, (&device(), DType::Flex32)));
        }
        model
    };
    let [other, own] = refused(flex32, Options::default);
    assert!(matches!(&own, Error::DType { name, dtype: DType::Flex32 } if name == "weight"), "{own:?}");
    told(&other, "\"weight\" has elements of Flex32");
}

#[test]
fn structures_shapes_and_types_that_differ_are_an_error_on_every_rank() {
    let shaped = |rank| linear(2 + rank, 3);
    let typed = |rank| {
        let mut model = linear(2, 3);
        if rank == 1 {
            model.weight = model.weight.map(|w| w.cast(DType::F64).detach().require_grad());
        }
        model
    };
    let fewer = |rank| LinearConfig::new(2, 3).with_bias(rank == 0).init(&device());
    let frozen = |rank| {
        let mut model = linear(2, 3);
        if rank == 1 {
            model.weight = model.weight.set_require_grad(false);
        }
        model
    };
    let all: [&(dyn Fn(usize) -> Linear + Sync); 4] = [&shaped, &typed, &fewer, &frozen];
    for (case, model) in all.into_iter().enumerate() {
        for error in refused(model, Options::default) {
            assert!(matches!(error, Error::Shard(Shard::Disagree { .. })), "case {case}: {error:?}");
        }
    }
}

#[test]
fn values_that_differ_are_an_error_where_they_are_compared() {
    let compare = || Options { initial: Initial::Compare, ..Options::default() };
    for error in refused(|rank| Mlp::new(rank as u64), compare) {
        assert!(matches!(error, Error::Shard(Shard::Disagree { .. })), "{error:?}");
    }
}

#[test]
fn stage_3_is_refused_with_the_reason() {
    for error in refused(|_| linear(2, 3), || options(Stage::Zero3)) {
        assert!(matches!(error, Error::WholeParameters), "{error:?}");
        assert!(error.to_string().contains("use Stage::Zero2"), "{error}");
    }
}

#[test]
fn a_parameter_without_a_gradient_is_an_error_on_every_rank_that_changes_nothing() {
    for stage in [Stage::Replicated, Stage::Zero2] {
        let changed = on_ranks(2, |comm| {
            let (mut model, rank) = (Mlp::new(1), comm.rank());
            let mut opt = sharded(comm, &mut model, options(stage)).unwrap();
            let before = bits(&model);
            // Rank 1 uses neither `down` nor `shift`.
            let loss = if rank == 0 { model.loss(0) } else { model.hidden(tensor([4, 5], 1)).sum() };
            let error = opt.backward_step(&mut model, loss, at()).unwrap_err();
            let Error::Shard(Shard::Fault { rank: 1, fault: Fault::MissingGradient { name } }) = &error
            else {
                panic!("{error:?}")
            };
            assert!(["down.weight", "down.bias", "shift"].contains(&&**name), "{name}");
            assert_eq!(bits(&model), before);
            let loss = model.loss(0);
            applied(opt.backward_step(&mut model, loss, at())); // the run goes on
            bits(&model) != before
        });
        assert_eq!(changed, [true, true], "{stage:?}");
    }
}

#[test]
fn missing_gradients_count_as_zeros_where_that_is_asked_for() {
    let finals = on_ranks(2, |comm| {
        let (mut model, rank) = (Mlp::new(1), comm.rank());
        let options = Options { missing: Missing::Zero, ..options(Stage::Zero2) };
        let mut opt = sharded(comm, &mut model, options).unwrap();
        for step in 0..3 {
            let loss = if rank == 0 { model.loss(step) } else { model.hidden(tensor([4, 5], 1)).sum() };
            applied(opt.backward_step(&mut model, loss, at()));
        }
        bits(&model)
    });
    assert_eq!(finals[0], finals[1]);
}

/// Returns a loss, and whether `Error` is the one that it must give.
type Wrong = (fn(&Mlp) -> Tensor<2>, fn(&Error) -> bool);

#[test]
fn a_loss_that_cannot_be_differentiated_on_one_rank_is_an_error_that_changes_nothing() {
    let wrong: [Wrong; 3] = [
        (
            |model| model.loss(0).expand([2, 3]),
            |error| matches!(error, Error::LossShape { shape } if *shape == [2, 3]),
        ),
        (
            |model| model.loss(0).expand([2, 3]).slice([0..0, 0..3]),
            |error| matches!(error, Error::LossShape { shape } if *shape == [0, 3]),
        ),
        (|model| model.valid().loss(0).unsqueeze(), |error| matches!(error, Error::NoGraph)),
    ];
    for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero2] {
        let finals = on_ranks(3, |comm| {
            let (mut model, rank) = (Mlp::new(1), comm.rank());
            let mut opt = sharded(comm, &mut model, options(stage)).unwrap();
            let before = bits(&model);
            for (loss, expected) in wrong {
                let loss = if rank == 1 { loss(&model) } else { model.loss(0).unsqueeze() };
                match opt.backward_step(&mut model, loss, at()).unwrap_err() {
                    Error::Shard(Shard::Fault { rank: 1, fault: Fault::Unfinished }) if rank != 1 => {}
                    own => assert!(rank == 1 && expected(&own), "rank {rank}: {own:?}"),
                }
                assert_eq!(bits(&model), before);
            }
            let loss = model.loss(0);
            applied(opt.backward_step(&mut model, loss, at()));
            bits(&model)
        });
        assert!(finals.iter().all(|rank| rank == &finals[0]), "{stage:?}");
    }
}

#[derive(Module, Debug)]
struct Other {
    up: Linear,
    shift: Param<Tensor<1>>,
}

#[test]
fn a_module_of_another_structure_is_an_error_on_every_rank_that_changes_nothing() {
    let finals = on_ranks(2, |comm| {
        let (mut model, rank) = (Mlp::new(1), comm.rank());
        let mut opt = sharded(comm, &mut model, options(Stage::Zero2)).unwrap();
        let before = bits(&model);
        let mut fewer = Other { up: linear(5, 9), shift: param([3], 2) };
        let mut wider = Mlp { shift: param([4], 2), ..model.clone() };
        for case in 0..2 {
            let loss = model.loss(0);
            let error = match (rank, case) {
                (0, _) => opt.backward_step(&mut model, loss, at()).unwrap_err(),
                (_, 0) => opt.backward_step(&mut fewer, loss, at()).unwrap_err(),
                _ => opt.backward_step(&mut wider, loss, at()).unwrap_err(),
            };
            match (rank, error) {
                (0, Error::Shard(Shard::Fault { rank: 1, fault: Fault::Unfinished })) => {}
                (1, Error::NoParameter { name }) if case == 0 => assert_eq!(name, "layers.0.weight"),
                (1, Error::Differs { name, shape, expected_shape, .. }) if case == 1 => {
                    assert_eq!((&*name, shape, expected_shape), ("shift", vec![4], vec![3]));
                }
                (_, other) => panic!("rank {rank}, case {case}: {other:?}"),
            }
        }
        // A step refuses it before any rank steps, and goes on with the right one.
        opt.backward(&model, model.loss(0)).unwrap();
        if rank == 1 {
            let error = opt.step(&mut fewer, at()).unwrap_err();
            assert!(matches!(error, Error::NoParameter { .. }), "{error:?}");
        }
        assert_eq!(bits(&model), before);
        applied(opt.step(&mut model, at()));
        assert_ne!(bits(&model), before);
        bits(&model)
    });
    assert_eq!(finals[0], finals[1]);
}

#[test]
fn a_rank_that_leaves_after_an_error_leaves_no_rank_waiting() {
    let results = on_ranks(2, |comm| {
        let (mut model, rank) = (Mlp::new(1), comm.rank());
        let mut opt = sharded(comm, &mut model, options(Stage::Zero2))?;
        // Without `backward_step`, rank 1 returns the error of its backward pass and takes no step.
        let loss = model.loss(0);
        opt.backward(&model, if rank == 1 { loss.detach() } else { loss })?;
        opt.step(&mut model, at())
    });
    assert!(matches!(results[1], Err(Error::NoGraph)), "{:?}", results[1]);
    assert!(matches!(results[0], Err(Error::Shard(Shard::Comm(_)))), "{:?}", results[0]);
}

#[test]
fn a_weight_that_is_too_large_on_one_rank_is_an_error_on_every_rank() {
    let errors = on_ranks(2, |comm| {
        let (mut model, rank) = (Mlp::new(1), comm.rank());
        let options = Options { combine: Combine::Weighted, ..options(Stage::Zero2) };
        let mut opt = sharded(comm, &mut model, options).unwrap();
        let pass = BackwardPass::new(model.loss(0)).weight(if rank == 1 { 1 << 40 } else { 1 });
        opt.backward_step(&mut model, pass, at()).unwrap_err()
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
    on_ranks(1, |comm| {
        let mut model = Mlp::new(1);
        let mut opt = sharded(comm, &mut model, options(Stage::Zero1)).unwrap();
        let before = bits(&model);
        opt.backward(&model, model.loss(0)).unwrap();
        let loss = model.loss(1);
        let error = opt.backward_step(&mut model, loss, at()).unwrap_err();
        assert!(matches!(error, Error::Shard(Shard::StepDue)), "{error:?}");
        assert_eq!(bits(&model), before);
        applied(opt.step(&mut model, at()));
    });
}

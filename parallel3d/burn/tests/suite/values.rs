//! Values of parameters: those of rank 0 first, frozen ones, running means, skipped steps; and the memory that they take.

use crate::common::{
    Mlp, ROWS, STAGES, applied, at, bits, device, named, on_ranks, options, param, sharded, tensor,
};
use burn::module::{Module, Param, ParamGroup};
use burn::tensor::Tensor;
use burn_nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use meshstep_burn::{Error, Sharded};
use meshstep_optim::ScheduleFreeAdamW;
use meshstep_shard::{Error as Shard, Fault, Missing, Options, Outcome, Stage};
use meshstep_tensor::{Category, Meter};

#[test]
fn ranks_that_start_with_different_values_get_those_of_rank_0() {
    let expected = named(&Mlp::new(0));
    for stage in STAGES {
        let values = on_ranks(3, |comm| {
            let mut model = Mlp::new(comm.rank() as u64);
            sharded(comm, &mut model, options(stage)).unwrap();
            named(&model)
        });
        assert!(values.iter().all(|values| *values == expected), "{stage:?}");
    }
}

#[test]
fn bytes_of_the_parameters_count_while_they_are_sharded() {
    let bytes = 4 * named(&Mlp::new(1)).iter().map(|(_, values)| values.len() as u64).sum::<u64>();
    on_ranks(2, |comm| {
        let meter = Meter::new();
        let options = Options { meter: meter.clone(), ..options(Stage::Zero2) };
        let opt = sharded(comm, &mut Mlp::new(1), options).unwrap();
        assert_eq!(meter.live(Category::Framework), bytes);
        drop(opt);
        // Old and new parameters exist while burn's are replaced.
        assert_eq!((meter.live(Category::Framework), meter.peak(Category::Framework)), (0, 2 * bytes));
    });
}

#[test]
fn a_step_with_a_gradient_that_is_not_finite_changes_nothing() {
    on_ranks(2, |comm| {
        let (mut model, rank) = (Mlp::new(1), comm.rank());
        let mut opt = sharded(comm, &mut model, options(Stage::Zero2)).unwrap();
        let before = bits(&model);
        let loss = model.loss(0).mul_scalar(if rank == 1 { f32::INFINITY } else { 1.0 });
        let outcome = opt.backward_step(&mut model, loss, at());
        assert!(matches!(outcome, Ok(Outcome::Skipped { in_a_row: 1, .. })), "{outcome:?}");
        assert_eq!(bits(&model), before);
    });
}

#[test]
fn parameters_that_are_frozen_at_first_are_rank_0s_and_take_no_memory() {
    let frozen = ParamGroup::from_path("layers.0.weight");
    let expected = named(&Mlp::new(0));
    let finals = on_ranks(3, |comm| {
        let meter = Meter::new();
        let mut model = Mlp::new(comm.rank() as u64).freeze_group(frozen.clone());
        let options = Options { meter: meter.clone(), ..options(Stage::Zero2) };
        let mut opt = sharded(comm, &mut model, options).unwrap();
        assert_eq!(named(&model), expected);
        assert!(opt.optimizer().params().all(|param| param.name() != "layers.0.weight"));
        let loss = model.loss(0);
        applied(opt.backward_step(&mut model, loss, at()));
        assert!(!model.layers[0].weight.is_require_grad() && model.layers[1].weight.is_require_grad());
        named(&model)
    });
    for values in finals {
        for ((name, before), (_, after)) in expected.iter().zip(&values) {
            assert_eq!(before == after, name == "layers.0.weight", "{name}");
        }
    }
}

#[test]
fn parameters_that_are_frozen_later_follow_the_options_and_thaw() {
    let frozen = ParamGroup::from_path("down.bias");
    on_ranks(2, |comm| {
        let mut model = Mlp::new(1);
        let options = Options { missing: Missing::SkipIfMissingEverywhere, ..options(Stage::Zero2) };
        let mut opt = sharded(comm, &mut model, options).unwrap();
        model = model.freeze_group(frozen.clone());
        let before = named(&model);
        let loss = model.loss(0);
        applied(opt.backward_step(&mut model, loss, at()));
        for ((name, before), (_, after)) in before.iter().zip(&named(&model)) {
            assert_eq!(before == after, name == "down.bias", "{name}");
        }
        model = model.unfreeze_group(frozen.clone());
        let before = model.down.bias.as_ref().unwrap().val().into_data();
        let loss = model.loss(1);
        applied(opt.backward_step(&mut model, loss, at()));
        assert_ne!(model.down.bias.as_ref().unwrap().val().into_data(), before);
    });
}

#[test]
fn parameters_that_are_frozen_later_are_missing_until_the_optimizer_knows() {
    on_ranks(2, |comm| {
        let mut model = Mlp::new(1);
        let mut opt = sharded(comm, &mut model, options(Stage::Zero2)).unwrap();
        model = model.freeze_group(ParamGroup::from_path("down.bias"));
        let (before, loss) = (bits(&model), model.loss(0));
        let error = opt.backward_step(&mut model, loss, at()).unwrap_err();
        let missing = Fault::MissingGradient { name: "down.bias".to_owned() };
        assert!(matches!(&error, Error::Shard(Shard::Fault { fault, .. }) if *fault == missing), "{error}");
        assert_eq!(bits(&model), before);
        opt.optimizer_mut().set_frozen(["down.bias"], true).unwrap();
        let loss = model.loss(0);
        applied(opt.backward_step(&mut model, loss, at()));
        assert_ne!(bits(&model), before);
    });
}

#[test]
fn a_parameter_that_thaws_later_is_refused() {
    let frozen = ParamGroup::from_path("shift");
    on_ranks(2, |comm| {
        let mut model = Mlp::new(1).freeze_group(frozen.clone());
        let mut opt = sharded(comm, &mut model, options(Stage::Zero2)).unwrap();
        let mut thawed = model.clone().unfreeze_group(frozen.clone());
        let loss = thawed.loss(0);
        let error = opt.backward_step(&mut thawed, loss, at()).unwrap_err();
        assert!(matches!(&error, Error::NotListed { name } if name == "shift"), "{error:?}");
        let loss = model.loss(0);
        applied(opt.backward_step(&mut model, loss, at()));
    });
}

#[derive(Module, Debug)]
struct Normed {
    linear: Linear,
    norm: BatchNorm,
}

/// Running means are no parameters; each rank has those of its own batches.
#[test]
fn running_means_are_the_ranks_own() {
    let means = on_ranks(2, |comm| {
        let linear = LinearConfig::new(5, 4).init(&device());
        let mut model = Normed { linear, norm: BatchNormConfig::new(4).init(&device()) };
        let rank = comm.rank() as u64;
        let mut opt = sharded(comm, &mut model, options(Stage::Zero2)).unwrap();
        let names: Vec<_> = opt.optimizer().params().map(|param| param.name().to_owned()).collect();
        assert_eq!(names, ["linear.weight", "linear.bias", "norm.gamma", "norm.beta"]);
        for step in 0..3 {
            let x = model.linear.forward(tensor([ROWS, 5], 10 * step + rank));
            let loss = model.norm.forward(x).square().mean();
            applied(opt.backward_step(&mut model, loss, at()));
        }
        named(&model)
    });
    for ((name, x), (_, y)) in means[0].iter().zip(&means[1]) {
        assert_eq!(x == y, !name.contains("running"), "{name}: {x:?} and {y:?}");
    }
}

#[derive(Module, Debug)]
struct Long {
    long: Param<Tensor<2>>,
}

/// More than a thread copies at a time, and not a multiple of it.
#[test]
fn long_parameters_are_copied_whole() {
    on_ranks(2, |comm| {
        let mut model = Long { long: param([3, 170_001], 1 + comm.rank() as u64) };
        let opt: Sharded = sharded(comm, &mut model, options(Stage::Zero2)).unwrap();
        let held = opt.optimizer().param("long").unwrap().typed::<f32>().unwrap().to_vec();
        let values = named(&model).remove(0).1;
        assert!(values == held && held == named(&Long { long: param([3, 170_001], 1) }).remove(0).1);
    });
}

/// An evaluation of a schedule-free rule has other values on every rank alike, and its end has those of before to the bit.
#[test]
fn an_evaluation_reaches_the_module_and_its_end_too() {
    for stage in STAGES {
        let finals = on_ranks(2, |comm| {
            let mut mlp = Mlp::new(1);
            let mut opt = Sharded::new(comm, &mut mlp, ScheduleFreeAdamW::default(), options(stage)).unwrap();
            for step in 0..3 {
                let loss = mlp.loss(step);
                applied(opt.backward_step(&mut mlp, loss, at()));
            }
            let trained = bits(&mlp);
            opt.begin_evaluation(&mut mlp).unwrap();
            let evaluated = bits(&mlp);
            assert_ne!(evaluated, trained, "{stage:?}");
            let loss = mlp.loss(3);
            let error = opt.backward_step(&mut mlp, loss, at()).unwrap_err();
            assert!(matches!(error, Error::Shard(Shard::Evaluating)), "{error}");
            opt.end_evaluation(&mut mlp).unwrap();
            assert_eq!(bits(&mlp), trained, "{stage:?}");
            let loss = mlp.loss(3);
            applied(opt.backward_step(&mut mlp, loss, at()));
            (evaluated, bits(&mlp))
        });
        assert_eq!(finals[0], finals[1], "{stage:?}");
    }
}

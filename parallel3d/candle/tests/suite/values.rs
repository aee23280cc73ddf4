//! Values of variables: those of rank 0 first, frozen ones, skipped steps; and the memory that they take.

use crate::common::{Mlp, STAGES, applied, at, bits, numbers, on_ranks, options, rule, sharded, tensor};
use candle_core::Var;
use meshstep_candle::{Error, NamedVars, Sharded};
use meshstep_optim::ScheduleFreeAdamW;
use meshstep_shard::{Options, Outcome, Stage, Step as _};
use meshstep_tensor::{Category, Meter};

#[test]
fn ranks_that_start_with_different_values_get_those_of_rank_0() {
    let expected: Vec<f32> = Mlp::new(0).vars().iter().flat_map(|(_, var)| numbers(var)).collect();
    for stage in STAGES {
        let values = on_ranks(3, |comm| {
            let mlp = Mlp::new(comm.rank() as u64);
            let _opt = sharded(comm, mlp.vars(), options(stage)).unwrap();
            mlp.vars().iter().flat_map(|(_, var)| numbers(var)).collect::<Vec<_>>()
        });
        assert!(values.iter().all(|values| *values == expected), "{stage:?}");
    }
}

#[test]
fn bytes_of_the_variables_count_while_they_are_sharded() {
    let bytes = 4 * (9 * 5 + 9 + 9 * 3);
    on_ranks(2, |comm| {
        let meter = Meter::new();
        let options = Options { meter: meter.clone(), ..options(Stage::Zero2) };
        let opt = sharded(comm, Mlp::new(1).vars(), options).unwrap();
        assert_eq!(meter.live(Category::Framework), bytes);
        drop(opt);
        assert_eq!((meter.live(Category::Framework), meter.peak(Category::Framework)), (0, bytes));
    });
}

#[test]
fn a_step_with_a_gradient_that_is_not_finite_changes_no_variable() {
    on_ranks(2, |comm| {
        let (mlp, rank) = (Mlp::new(1), comm.rank());
        let mut opt = sharded(comm, mlp.vars(), options(Stage::Zero2)).unwrap();
        let before = bits(&opt);
        let loss = (mlp.loss(0).unwrap() * if rank == 1 { f64::INFINITY } else { 1.0 }).unwrap();
        let outcome = opt.backward_step(&loss, at());
        assert!(matches!(outcome, Ok(Outcome::Skipped { in_a_row: 1, .. })), "{outcome:?}");
        assert_eq!(bits(&opt), before);
    });
}

#[test]
fn frozen_variables_stay_and_the_others_train() {
    let finals = on_ranks(2, |comm| {
        let mlp = Mlp::new(1);
        let mut opt = sharded(comm, mlp.vars(), options(Stage::Zero2)).unwrap();
        opt.optimizer_mut().set_frozen(["up.bias"], true).unwrap();
        let before = bits(&opt);
        applied(opt.backward_step(&mlp.loss(0).unwrap(), at()));
        let after = bits(&opt);
        std::array::from_fn::<bool, 3, _>(|i| before[i] == after[i])
    });
    assert_eq!(finals, [[false, true, false]; 2]);
}

#[test]
fn repaired_parameters_reach_the_variables() {
    let finals = on_ranks(3, |comm| {
        let (mlp, rank) = (Mlp::new(1), comm.rank());
        let mut opt = sharded(comm, mlp.vars(), options(Stage::Replicated)).unwrap();
        let before = bits(&opt);
        if rank == 2 {
            opt.flip_bit("down", "param", 3, 20).unwrap();
            opt.refresh().unwrap();
            assert_ne!(bits(&opt), before);
        }
        assert_eq!(opt.repair().unwrap().len(), 1);
        bits(&opt) == before
    });
    assert_eq!(finals, [true; 3]);
}

#[test]
fn variables_come_as_lists_slices_and_arrays() {
    let mlp = Mlp::new(1);
    let names =
        |vars: Vec<(String, Var)>| -> Vec<String> { vars.into_iter().map(|(name, _)| name).collect() };
    let (array, list) = (mlp.vars(), Vec::from(mlp.vars()));
    let expected = ["up.weight", "up.bias", "down"];
    assert_eq!(names(list[..].named_vars()), expected);
    assert_eq!(names(list.named_vars()), expected);
    assert_eq!(names(array.named_vars()), expected);
    let opts =
        on_ranks(1, |comm| Sharded::new(comm, mlp.vars().as_slice(), rule(), options(Stage::Zero1)).is_ok());
    assert_eq!(opts, [true]);
}

/// More than a thread copies at a time, and not a multiple of it.
#[test]
fn long_variables_are_copied_whole() {
    let finals = on_ranks(2, |comm| {
        let long = Var::from_tensor(&tensor(&[3, 170_001], 1 + comm.rank() as u64)).unwrap();
        let opt = sharded(comm, [("long", long.clone())], options(Stage::Zero2)).unwrap();
        let held: Vec<f32> = opt.optimizer().param("long").unwrap().typed::<f32>().unwrap().to_vec();
        numbers(&long) == held && held == numbers(&tensor(&[3, 170_001], 1))
    });
    assert_eq!(finals, [true, true]);
}

#[test]
fn variables_follow_an_evaluation_and_come_back() {
    for stage in STAGES {
        on_ranks(2, |comm| {
            let mlp = Mlp::new(1);
            let rule = ScheduleFreeAdamW { warmup_steps: 2, ..ScheduleFreeAdamW::default() };
            let mut opt = Sharded::new(comm, mlp.vars(), rule, options(stage)).unwrap();
            (0..3).for_each(|step| applied(opt.backward_step(&mlp.loss(step).unwrap(), at())));
            let trained = bits(&opt);
            opt.begin_evaluation().unwrap();
            let evaluated = bits(&opt);
            assert_ne!(evaluated, trained);
            let refused = opt.backward_step(&mlp.loss(3).unwrap(), at()).unwrap_err();
            assert!(matches!(refused, Error::Shard(meshstep_shard::Error::Evaluating)), "{refused}");
            assert_eq!(bits(&opt), evaluated);
            opt.end_evaluation().unwrap();
            assert_eq!(bits(&opt), trained);
            applied(opt.backward_step(&mlp.loss(3).unwrap(), at()));
        });
    }
}

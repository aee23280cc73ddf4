//! Public reports about other systems, each with the case that it describes. `cargo xtask complaints` lists them.

use crate::common::{Gradients, Run, STAGES, WhichRule, floats, params, state};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{LossScale, Sgd};
use meshstep_shard::{Error, Fault, Missing, Optimizer, Options, Outcome, Stage, StepArgs};
use meshstep_tensor::{DType, Layout};
use std::sync::Arc;

const ARGS: StepArgs = StepArgs { lr: 1.0, max_norm: None, grad_scale: 1.0 };

/// Two parameters of 64 zeros, stepped by plain SGD.
fn sgd(comm: Arc<dyn Communicator>, options: Options) -> Optimizer {
    let layout = Layout::builder().param("a", &[64], DType::F32).param("b", &[64], DType::F32);
    Optimizer::new(comm, layout.build().unwrap(), Sgd::default(), |_, _| Ok(()), options).unwrap()
}

fn on_ranks<T: Send>(ranks: usize, body: impl Fn(Arc<dyn Communicator>) -> T + Sync) -> Vec<T> {
    loopback::spawn(ranks, body).unwrap()
}

/// Hands over 1 for each element of the named parameters, and takes the step.
fn step(opt: &mut Optimizer, names: &[&str], at: StepArgs) -> Result<Outcome, Error> {
    let mb = opt.micro_batch(1)?;
    names.iter().try_for_each(|name| mb.grad(name, &[1f32; 64][..]))?;
    mb.finish()?;
    opt.step(at)?.outcome()
}

/// "Only a subset of ranks is submitting tensors, which will cause deadlock": a rank has no gradient for a parameter.
#[test]
fn horovod_2640_a_gradient_of_some_ranks_is_an_error_that_names_rank_and_parameter() {
    for stage in STAGES {
        let ends = on_ranks(3, |comm| {
            let names: &[&str] = if comm.rank() == 1 { &["a"] } else { &["a", "b"] };
            let mut opt = sgd(comm, Options { stage, ..Options::default() });
            let error = step(&mut opt, names, ARGS).unwrap_err();
            let Error::Fault { rank: 1, fault: Fault::MissingGradient { name } } = &error else {
                panic!("{error}")
            };
            assert_eq!(name, "b");
            step(&mut opt, &["a", "b"], ARGS).unwrap();
            params(&opt)
        });
        assert!(ends.iter().all(|end| *end == ends[0]), "{stage:?}");
    }
}

/// A rank runs out of memory in its backward pass, and the others wait in the reduction for ever.
#[test]
fn composer_1319_a_backward_pass_that_fails_on_one_rank_ends_the_step_of_all() {
    for stage in STAGES {
        on_ranks(3, |comm| {
            let rank = comm.rank();
            let mut opt = sgd(comm, Options { stage, ..Options::default() });
            let mb = opt.micro_batch(1).unwrap();
            mb.grad("b", &[1f32; 64][..]).unwrap();
            if rank == 2 {
                drop(mb); // its backward pass has failed
            } else {
                mb.grad("a", &[1f32; 64][..]).unwrap();
                mb.finish().unwrap();
            }
            let error = opt.step(ARGS).and_then(|pending| pending.outcome()).unwrap_err();
            assert!(
                matches!(error, Error::Fault { rank: 2, fault: Fault::Unfinished }),
                "{stage:?}: {error}"
            );
            step(&mut opt, &["a", "b"], ARGS).unwrap();
        });
    }
}

/// Ranks without gradients have other step counts than the rest.
#[test]
fn facebookresearch_optimizers_149_step_counts_are_equal_whatever_gradients_are_missing() {
    for stage in STAGES {
        let counts = on_ranks(3, |comm| {
            let rank = comm.rank();
            let missing = Missing::SkipIfMissingEverywhere;
            let mut opt = sgd(comm, Options { stage, missing, ..Options::default() });
            step(&mut opt, if rank == 0 { &["a", "b"] } else { &["a"] }, ARGS).unwrap();
            step(&mut opt, &["a"], ARGS).unwrap();
            state(&opt).into_iter().map(|(t, _)| t).collect::<Vec<_>>()
        });
        assert_eq!(counts, vec![[2, 1]; 3], "{stage:?}");
    }
}

/// The loss depends on the stage when gradients are accumulated.
#[test]
fn deepspeed_1488_every_stage_ends_alike_with_several_micro_batches() {
    let run = Run { micro_batches: 4, gradients: Gradients::Grid, ..Run::default() };
    let expected = run.stage(Stage::Replicated).run();
    for stage in STAGES {
        assert_eq!(run.stage(stage).run(), expected, "{stage:?}");
    }
}

/// Clipping does nothing, or its norm contains the loss scale.
#[test]
fn deepspeed_6767_and_2686_the_update_has_the_norm_that_was_asked_for_at_any_loss_scale() {
    for (stage, scale) in STAGES.into_iter().flat_map(|stage| [1.0, 1024.0].map(|scale| (stage, scale))) {
        on_ranks(4, |comm| {
            let options = Options { stage, loss_scale: Some(LossScale::Static(scale)), ..Options::default() };
            let mut opt = sgd(comm, options);
            let mb = opt.micro_batch(1).unwrap();
            let scaled = vec![scale as f32; 64];
            ["a", "b"].iter().for_each(|name| mb.grad(name, &scaled[..]).unwrap());
            mb.finish().unwrap();
            let outcome = opt.step(StepArgs { max_norm: Some(0.5), ..ARGS }).unwrap().outcome().unwrap();
            let Outcome::Applied { norm, .. } = outcome else { panic!("{outcome:?}") };
            assert_eq!(norm, 128f64.sqrt());
            if !stage.cuts_params() {
                let moved =
                    ["a", "b"].iter().flat_map(|name| floats(&opt, name)).map(|x| f64::from(x).powi(2));
                assert!((moved.sum::<f64>().sqrt() - 0.5).abs() < 1e-6, "{stage:?} {scale}");
            }
        });
    }
}

/// A third of the bits changes with the bucket size of the reduction.
#[test]
fn rocm_systems_11661_the_bucket_size_changes_no_bit() {
    for rule in [WhichRule::AdamW, WhichRule::Lamb] {
        let run = Run { rule, gradients: Gradients::Rough, ..Run::default() };
        let of = |bucket_len| {
            Run { options: Options { bucket_len, ..run.options.clone() }, ..run.clone() }
                .stage(Stage::Zero2)
                .run()
        };
        let expected = of(None);
        assert!([1, 2, 7, 64, 150, 100_000].into_iter().all(|len| of(Some(len)) == expected), "{rule:?}");
    }
}

//! Replicas in groups, on loopback: combining, clipping and missing gradients, drift of groups, and refusals.

pub(crate) mod cases;
mod whole_interface;

use cases::Loopback;
use meshstep_comm::{Error as CommError, loopback};
use meshstep_optim::{Lbfgs, LossScale, Rounding, Sgd};
use meshstep_shard::{
    Clip, CrossShard, Error, Missing, Options, Precision, ShardedLbfgs, Stage, Step, StepArgs,
};
use meshstep_tensor::{DType, Layout};
use std::sync::Barrier;
use std::time::Duration;

macro_rules! tests {
    ($($name:ident)*) => {
        $(#[test] fn $name() { cases::$name(&Loopback) })*
    };
}

tests! {
    gradients_combine_within_groups
    one_group_of_everyone_is_a_replicated_optimizer
    clipping_before_and_after_the_reduction
    a_rank_clips_what_its_micro_batches_have_together
    a_held_gradient_that_is_not_finite_skips_the_step
    only_a_ranks_own_gradients_of_this_step_are_clipped
    what_no_rank_of_a_group_has_is_left_alone
    what_some_ranks_of_a_group_lack_is_decided_by_the_policy
    all_or_none_holds_at_every_stage
    slots_of_empty_parameters_count_as_present
    drift_is_measured_and_averaged_away
    a_skip_of_one_group_is_a_drift_of_t
    masters_are_averaged_and_parameters_follow
    drift_is_found_at_the_end_of_a_long_parameter
    what_is_not_finite_is_not_averaged
    replicas_have_the_same_bits_once_synchronized
    assignments_that_do_not_cover_are_refused_on_every_rank
    ranks_with_different_assignments_are_told
    first_values_are_the_worlds
    sparse_gradients_are_refused_and_dense_ones_still_taken
    synchronizing_in_the_middle_of_a_step_is_refused_everywhere
    groups_step_with_closures_and_restore_their_scales
    clipping_before_the_reduction_needs_gradients_that_stay
}

/// Steps and synchronizations end with the same values for any bucket length.
#[test]
fn buckets_do_not_show() {
    let of = |bucket_len| {
        let options = Options { stage: Stage::Replicated, bucket_len, ..Options::default() };
        cases::story(&Loopback, &options)
    };
    assert_eq!(of(None), of(Some(1)));
}

/// Default options need no stage, on all ranks or on some.
#[test]
fn the_stage_need_not_be_said() {
    let told = loopback::spawn(4, |comm| -> Result<(Stage, Vec<f32>), Error> {
        let options = if comm.rank() == 1 {
            Options { stage: Stage::Replicated, ..Options::default() }
        } else {
            Options::default()
        };
        let grad = 1.0 + comm.rank() as f32;
        let layout = Layout::builder().param("w", &[1], DType::F32).build()?;
        let groups = [vec![0, 2], vec![1, 3]];
        let mut opt = CrossShard::new(comm, Some(&groups), layout, Sgd::default(), |_, _| Ok(()), options)?;
        let mb = opt.micro_batch(1)?;
        mb.grad("w", &[grad])?;
        mb.finish()?;
        opt.step(StepArgs { lr: 1.0, ..StepArgs::default() })?.outcome()?;
        Ok((opt.optimizer().options().stage, opt.param("w")?.typed::<f32>()?.to_vec()))
    });
    for (rank, told) in told.unwrap().into_iter().enumerate() {
        assert_eq!(told.unwrap(), (Stage::Replicated, vec![[-2.0, -3.0][rank % 2]]));
    }
}

/// L-BFGS reads reduced gradients, so options that only a step applies to them are refused, not ignored.
#[test]
fn lbfgs_refuses_what_only_a_step_does() {
    let loss_scale = Some(LossScale::Static(2.0));
    let precision = Precision { rounding: Rounding::Stochastic, ..Precision::default() };
    for (options, says) in [
        (Options { clip: Clip::BeforeReduce, ..Options::default() }, "no clip: Clip::BeforeReduce:"),
        (Options { loss_scale, ..Options::default() }, "no loss_scale:"),
        (Options { missing: Missing::AllOrNone, ..Options::default() }, "no missing: Missing::AllOrNone:"),
        (Options { precision, ..Options::default() }, "no rounding: Rounding::Stochastic:"),
    ] {
        let told = loopback::spawn(2, |comm| {
            let dtype = if options.precision == precision { DType::BF16 } else { DType::F32 };
            let layout = Layout::builder().param("w", &[2], dtype).build().unwrap();
            let made = ShardedLbfgs::new(comm, layout, Lbfgs::default(), |_, _| Ok(()), options.clone());
            made.map(drop).unwrap_err().to_string()
        });
        assert!(told.unwrap().iter().all(|t| t.contains(says)), "{says}");
    }
}

/// One rank steps in its group while the others compare all replicas: an error on every rank, before any deadline.
#[test]
fn a_rank_that_steps_while_others_compare_is_told() {
    for groups in [vec![vec![0, 1, 2, 3]], vec![vec![0, 2], vec![1, 3]]] {
        for odd in 0..4 {
            let config = loopback::Config { timeout: Duration::from_secs(5), ..loopback::Config::new(4) };
            let all = Barrier::new(4);
            let told = loopback::spawn_with(config, |comm| {
                let layout = Layout::builder().param("w", &[9], DType::F32).build().unwrap();
                let options = Options { stage: Stage::Replicated, ..Options::default() };
                let rank = comm.rank();
                let made =
                    CrossShard::new(comm, Some(&groups), layout, Sgd::default(), |_, _| Ok(()), options);
                let mut opt = made.unwrap();
                let told = if rank == odd {
                    let mb = opt.micro_batch(1).unwrap();
                    let given = mb.grad("w", &[1f32; 9][..]).and_then(|()| mb.finish());
                    given.and_then(|()| opt.step(StepArgs::default())?.outcome().map(drop))
                } else {
                    opt.compare_state().map(drop)
                };
                all.wait();
                matches!(told, Err(Error::Comm(failure)) if !matches!(failure.cause(), CommError::Timeout { .. }))
            });
            assert_eq!(told.unwrap(), [true; 4], "{groups:?}, rank {odd}");
        }
    }
}

/// Replicas cannot be compared without a group that has failed, and the other groups train on.
#[test]
fn a_group_that_has_failed_ends_no_other() {
    let groups = vec![vec![0, 2], vec![1, 3]];
    let all = Barrier::new(4);
    let told = loopback::spawn(4, |comm| {
        let layout = Layout::builder().param("w", &[9], DType::F32).build().unwrap();
        let rank = comm.rank();
        let options = Options { stage: Stage::Replicated, ..Options::default() };
        let made = CrossShard::new(comm, Some(&groups), layout, Sgd::default(), |_, _| Ok(()), options);
        let mut opt = made.unwrap();
        if rank == 0 {
            opt.optimizer().comm().abort();
        }
        all.wait();
        assert!(opt.compare_state().is_err());
        let mut step = || -> Result<(), Error> {
            let mb = opt.micro_batch(1)?;
            mb.grad("w", &[1f32; 9][..])?;
            mb.finish()?;
            opt.step(StepArgs::default())?.outcome().map(drop)
        };
        step().is_ok()
    });
    assert_eq!(told.unwrap(), [false, true, false, true]);
}

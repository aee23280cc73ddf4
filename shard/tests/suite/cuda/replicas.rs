//! Replicas in groups on GPUs: the cases of loopback, and faults that only a GPU can have.

use crate::common::adamw;
use crate::common::gpus::{DEADLINE, fail};
use crate::cross_shard::cases::{self, Comm, Loopback, Ranks};
use crate::cuda::{alone, devices, room_for, seed, stand_in};
use meshstep_comm::nccl;
use meshstep_shard::{Clip, Combine, CrossShard, Error, MicroBatch, Missing, Options, Stage, Step, StepArgs};
use meshstep_tensor::Queue;
use meshstep_tensor::cuda::{self, Stream};
use std::sync::Barrier;
use std::time::Instant;

/// Ranks as threads on GPUs.
struct Gpus;

impl Ranks for Gpus {
    fn run<T: Send>(&self, ranks: usize, body: impl Fn(Comm, Queue) -> T + Sync) -> Vec<T> {
        let devices: Vec<usize> = (0..ranks).map(|rank| rank % devices()).collect();
        let options = nccl::Options { deadline: DEADLINE, ..nccl::Options::default() };
        let ends = nccl::spawn(&devices, options, |comm| {
            let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
            body(comm, queue)
        });
        ends.unwrap()
    }
}

macro_rules! tests {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                let _alone = alone();
                if room_for(4) {
                    cases::$name(&Gpus);
                }
            }
        )*
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

#[test]
fn steps_and_synchronizations_are_those_of_loopback() {
    let _alone = alone();
    if !room_for(4) {
        return;
    }
    for combine in [Combine::Mean, Combine::Sum, Combine::Weighted] {
        for clip in [Clip::AfterReduce, Clip::BeforeReduce] {
            let options = Options { stage: Stage::Replicated, combine, clip, ..Options::default() };
            let (there, here) = (cases::story(&Gpus, &options), cases::story(&Loopback, &options));
            assert_eq!(there, here, "{combine:?} {clip:?}");
        }
    }
}

#[test]
fn no_order_of_streams_shows_in_replicas() {
    let _alone = alone();
    if !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    let options = Options { stage: Stage::Replicated, missing: Missing::Zero, ..Options::default() };
    let here = cases::story(&Loopback, &options);
    for order in 0..20 {
        seed(order);
        assert_eq!(cases::story(&Gpus, &options), here, "order {order}");
    }
}

/// One rank has read a step's error: all ranks get the error before they compare.
#[test]
fn an_untold_error_of_one_rank_is_told_to_those_who_compare() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    Gpus.run(2, |comm, queue| {
        let rank = comm.rank();
        let mut opt = replicas(comm, queue);
        let at = StepArgs { lr: -1.0, ..StepArgs::default() };
        let pending = cases::pend(&mut opt, 1, Some([1.0; 2]), Some(1.0), at).unwrap();
        if rank == 0 {
            pending.outcome().unwrap_err();
        } else {
            drop(pending);
        }
        let told = opt.synchronize_state().unwrap_err().to_string();
        assert!(told.contains("lr"), "rank {rank}: {told}");
        assert!(opt.synchronize_state().unwrap().is_none());
    });
}

/// A rank runs out of memory before, or fails after, the first words that ranks exchange.
#[test]
fn who_cannot_compare_ends_it_for_all() {
    let _alone = alone();
    if !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    for call in [c"cuMemAlloc_v2", c"cuMemcpyDtoHAsync_v2"] {
        let (both, began) = (Barrier::new(2), Instant::now());
        Gpus.run(2, |comm, queue| {
            let rank = comm.rank();
            let mut opt = replicas(comm, queue);
            both.wait();
            if rank == 1 {
                fail(call, 2);
            }
            both.wait();
            // The failing call may be on either rank.
            let told = opt.compare_state();
            assert!(told.is_err(), "{call:?} on rank {rank}");
            let next = opt.micro_batch(1).and_then(MicroBatch::finish);
            assert!(matches!(next, Err(Error::Comm(_))), "{call:?} on rank {rank}: {next:?}");
        });
        assert!(began.elapsed() < DEADLINE, "somebody waited for a rank that did not come");
    }
}

fn replicas(comm: Comm, queue: Queue) -> CrossShard {
    let options = Options { stage: Stage::Replicated, queue, ..Options::default() };
    CrossShard::new(comm, None, cases::layout(), adamw(), |_, _| Ok(()), options).unwrap()
}

#[test]
fn the_host_waits_for_no_step_of_replicas() {
    let _alone = alone();
    if !room_for(1) {
        return;
    }
    let waits = Gpus.run(1, |comm, queue| {
        let mut opt = replicas(comm, queue);
        let mut waits = Vec::new();
        for n in 1..=6 {
            let batch = opt.micro_batch(1).unwrap();
            // The caller's own kernels would fill the slots; b has a gradient in some steps.
            ["b", "w"].iter().skip(n % 2).for_each(|name| batch.slot(name).unwrap().fill().unwrap());
            let before = cuda::waits();
            batch.finish().unwrap();
            let _ = opt.step(StepArgs::default()).unwrap();
            waits.push(cuda::waits() - before);
        }
        waits
    });
    // The first step builds its tables.
    assert_eq!(waits[0][1..], [0; 5]);
}

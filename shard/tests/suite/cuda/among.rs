//! Parameters that several groups of GPUs share in different ways: loopback's steps, bit for bit, because sums are exact.

use crate::among::sharing::{on_rank, troubled, weighed};
use crate::common::gpus::DEADLINE;
use crate::cuda::{alone, devices, room_for, seed, stand_in};
use meshstep_comm::{Communicator, loopback, nccl};
use meshstep_optim::AdamW;
use meshstep_shard::{Combine, Initial, NonFinite, Options, Owners, Stage};
use meshstep_tensor::Queue;
use meshstep_tensor::cuda::Stream;
use std::sync::Arc;

/// Runs eight ranks with their communicators and options on GPUs and on loopback: the results are equal.
fn both<R: Send + PartialEq + std::fmt::Debug>(
    options: &Options,
    rank: impl Fn(Arc<dyn Communicator>, Options) -> R + Sync,
) {
    let here = loopback::spawn(8, |world| rank(world, options.clone())).unwrap();
    let devices: Vec<usize> = (0..8).map(|rank| rank % devices()).collect();
    let patience = nccl::Options { deadline: DEADLINE, ..nccl::Options::default() };
    let there = nccl::spawn(&devices, patience, |world| {
        let queue = Queue::cuda(Stream::new(world.device()).unwrap());
        rank(world, Options { queue, ..options.clone() })
    });
    for (rank, (there, here)) in there.unwrap().iter().zip(&here).enumerate() {
        assert_eq!(there, here, "rank {rank}, {options:?}");
    }
}

fn options(stage: Stage, combine: Combine) -> Options {
    Options { stage, combine, bucket_len: Some(64), ..Options::default() }
}

const STAGES: [Stage; 4] =
    [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::WholeParams(Owners::SortedGreedy)];

#[test]
fn ways_of_sharing_step_together_as_on_loopback() {
    let _alone = alone();
    if !room_for(8) {
        return;
    }
    for (i, stage) in STAGES.into_iter().enumerate() {
        for (j, combine) in [Combine::Mean, Combine::Sum, Combine::Weighted].into_iter().enumerate() {
            let initial = [Initial::Broadcast, Initial::Compare][(i + j) % 2];
            let non_finite = [NonFinite::Skip, NonFinite::Propagate][j % 2];
            let options = Options { initial, non_finite, ..options(stage, combine) };
            both(&options, |world, options| on_rank(world, AdamW::default(), options));
        }
    }
}

#[test]
fn ranks_that_share_nothing_decide_together() {
    let _alone = alone();
    if !room_for(8) {
        return;
    }
    for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero2] {
        both(&options(stage, Combine::Mean), troubled);
    }
}

/// A GPU reports that weights differ, but not on which ranks.
#[test]
fn ranks_that_weigh_the_same_apart_are_told() {
    let _alone = alone();
    if !room_for(8) {
        return;
    }
    for stage in [Stage::Replicated, Stage::Zero1] {
        both(&options(stage, Combine::Weighted), |world, options| {
            weighed(world, options).map(|told| told.is_some())
        });
    }
}

#[test]
fn no_order_of_streams_shows_in_groups() {
    let _alone = alone();
    if !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    for order in 0..8 {
        seed(order);
        both(&options(STAGES[order as usize % 3], Combine::Mean), |world, options| {
            on_rank(world, AdamW::default(), options)
        });
    }
}

//! Steps and verification by two processes, with the bits of loopback.

use crate::common::{Gradients, PRECISIONS, Run, WhichRule};
use crate::cuda::alone;
use crate::cuda::pair::{Rank, finish};
use crate::cuda::some;
use crate::cuda::verify::{flipped, wide};
use meshstep_shard::{Options, Stage};

pub(super) const ZERO: [Stage; 4] = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];

/// SGD without clipping and AdamW with clipping, at every stage, on gradients with exact sums.
pub(super) fn steps(rank: &Rank) {
    for (i, stage) in ZERO.into_iter().enumerate() {
        for (rule, max_norm) in [(WhichRule::Sgd, None), (WhichRule::AdamW, Some(1.0))] {
            let (in_place, shuffle) = (i % 2 == 0, i % 3 == 1);
            let gradients = Gradients::Grid;
            let run = Run { ranks: 2, rule, max_norm, gradients, in_place, shuffle, ..Run::default() };
            let run = run.stage(stage);
            let end = rank.same(&run, &(stage, rule), |comm, run| run.on_rank(comm).unwrap());
            assert_eq!(end, run.naive(), "{stage:?} {rule:?}");
        }
    }
}

/// Parameter types and precisions, on gradients that are equal on both ranks.
pub(super) fn precisions(rank: &Rank) {
    let all: Vec<_> = PRECISIONS.into_iter().enumerate().collect();
    for (i, rule) in [WhichRule::AdamW, WhichRule::SgdMomentum].into_iter().enumerate() {
        for (j, (dtype, precision)) in some(&all, 5 * i, 5) {
            let options = Options { precision, ..Run::default().options };
            let gradients = Gradients::Equal;
            let run = Run { ranks: 2, rule, dtype, grads: dtype, gradients, options, ..Run::default() };
            let run = run.stage(ZERO[(i + j) % ZERO.len()]);
            rank.same(&run, &(rule, dtype, precision), |comm, run| run.on_rank(comm).unwrap());
        }
    }
}

/// Verification finds a bit flipped on rank 1, and training continues once it is repaired.
pub(super) fn flips(rank: &Rank) {
    for (stage, slot) in [(Stage::Replicated, "param"), (Stage::Replicated, "v"), (Stage::Zero1, "param")] {
        let run = Run { ranks: 2, ..wide(stage) };
        let (difference, params) = rank.same(&run, &(stage, slot), |comm, run| {
            let mut opt = run.build(comm).unwrap();
            let difference = flipped(run, &mut opt, slot);
            (difference, crate::common::params(&opt))
        });
        assert_eq!((&difference.param[..], difference.slot), ("p3", slot));
        assert_eq!(params, run.run().params, "{stage:?} {slot}");
    }
}

#[test]
fn two_processes_end_with_the_bits_of_loopback() {
    let _alone = alone();
    finish("steps", &[]);
}

#[test]
fn every_precision_of_two_processes_ends_with_the_bits_of_loopback() {
    let _alone = alone();
    finish("precisions", &[]);
}

#[test]
fn a_bit_that_flips_in_one_process_is_named_in_both() {
    let _alone = alone();
    finish("flips", &[]);
}

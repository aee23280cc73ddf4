//! Trainings on GPUs end with the bits of loopback.

use super::{alone, on_gpus, room_for, seed, some, stand_in};
use crate::common::{Gradients, PRECISIONS, Run, STAGES, WITH_STATE, WhichRule, cases};
use meshstep_optim::Norm;
use meshstep_shard::{Combine, Moments, Options, SlotRuns, Stage};

/// Rules that have kernels.
fn rules() -> impl Iterator<Item = WhichRule> {
    let more = [WhichRule::Sgd].into_iter().chain(WITH_STATE);
    more.filter(|&rule| Run { rule, ..Run::default() }.boxed_rule().on_device().is_some())
}

#[test]
fn exact_sums_end_with_the_bits_of_loopback() {
    let _alone = alone();
    for ranks in [1, 2, 4] {
        if !room_for(ranks) {
            continue;
        }
        for (i, stage) in STAGES.into_iter().enumerate() {
            for rule in [WhichRule::Sgd, WhichRule::AdamW] {
                let (in_place, shuffle) = (i % 2 == 0, i % 3 == 1);
                let gradients = Gradients::Grid;
                let run = Run { ranks, rule, gradients, in_place, shuffle, ..Run::default() }.stage(stage);
                let end = on_gpus(&run);
                assert_eq!(end, run.run(), "{stage:?} on {ranks} ranks: {rule:?}");
                assert_eq!(end, run.naive(), "{stage:?} on {ranks} ranks: {rule:?}");
            }
        }
    }
}

#[test]
fn every_rule_and_precision_ends_with_the_bits_of_loopback() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let stages = [Stage::Zero1, Stage::Zero2];
    let precisions: Vec<_> = PRECISIONS.into_iter().enumerate().collect();
    for (i, rule) in rules().enumerate() {
        for (j, (dtype, precision)) in some(&precisions, 3 * i, 3) {
            if rule == WhichRule::Sgd && precision.moments == Moments::BF16 {
                continue; // without state there are no moments
            }
            let options = Options { precision, ..Run::default().options };
            let (gradients, steps) = (Gradients::Equal, 4);
            let run =
                Run { ranks: 2, rule, dtype, grads: dtype, gradients, steps, options, ..Run::default() };
            let run = run.stage(stages[(i + j) % 2]);
            assert_eq!(on_gpus(&run), run.run(), "{rule:?} {dtype} {precision:?}");
        }
    }
}

#[test]
fn stages_agree_to_the_bit_and_with_loopback_nearly() {
    let _alone = alone();
    for ranks in [2, 4] {
        if !room_for(ranks) {
            continue;
        }
        let run = Run { ranks, steps: 5, ..Run::default() };
        let first = on_gpus(&run.stage(STAGES[0]));
        for stage in STAGES {
            assert_eq!(on_gpus(&run.stage(stage)), first, "{stage:?}");
        }
        let loopback = run.run();
        for (there, here) in first.params.iter().zip(&loopback.params) {
            let floats = |bytes: &[u8]| -> Vec<f32> {
                bytes.chunks(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect()
            };
            for (a, b) in floats(there).into_iter().zip(floats(here)) {
                assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{a} and {b}");
            }
        }
    }
}

#[test]
fn micro_batches_weights_and_norms_are_those_of_loopback() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    for (i, stage) in STAGES.into_iter().enumerate() {
        for combine in [Combine::Mean, Combine::Sum, Combine::Weighted] {
            let norm = [Norm::L1, Norm::L2, Norm::Inf][i % 3];
            let options = Options { combine, norm, ..Run::default().options };
            let gradients = Gradients::Grid;
            let run = Run { ranks: 2, micro_batches: 2, gradients, options, ..Run::default() }.stage(stage);
            assert_eq!(on_gpus(&run), run.run(), "{stage:?} {combine:?} {norm:?}");
        }
    }
}

/// NCCL moves the sums over slots, and kernels add them: rough gradients have loopback's bits, which those on other numbers of ranks have.
#[test]
fn sums_over_slots_have_the_bits_of_loopback() {
    let _alone = alone();
    let base = Run::default();
    let with = |ranks: usize, stage| {
        let slots = Some(SlotRuns::even(8, ranks).unwrap());
        Run { ranks, options: Options { slots, ..base.options.clone() }, ..base.clone() }.stage(stage)
    };
    let expected = with(1, Stage::Replicated).run();
    for ranks in [1, 2, 3, 4] {
        if !room_for(ranks) {
            continue;
        }
        for stage in &STAGES[..4] {
            assert_eq!(on_gpus(&with(ranks, *stage)), expected, "{stage:?} on {ranks} ranks");
        }
    }
}

#[test]
fn no_order_of_streams_shows() {
    let _alone = alone();
    if !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    let run = Run { ranks: 2, gradients: Gradients::Grid, in_place: true, ..Run::default() };
    let expected = run.run();
    for order in 0..u64::from(cases(60, 100)) {
        seed(order);
        let stage = STAGES[order as usize % 4];
        assert_eq!(on_gpus(&run.stage(stage)), expected, "order {order}, {stage:?}");
    }
}

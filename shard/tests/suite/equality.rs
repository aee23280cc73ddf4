//! All shardings, bucketings and orders of gradients end with the same bits.

use crate::common::{F32_MASTER, Gradients, Run, STAGES, WhichRule, cases, draws, long};
use meshstep_shard::{Combine, Options, Stage};
use meshstep_tensor::DType;
use proptest::prelude::*;

const RANKS: [usize; 7] = [1, 2, 3, 4, 5, 7, 8];
pub(crate) const RULES: [(WhichRule, Option<f64>); 5] = [
    (WhichRule::Sgd, None),
    (WhichRule::SgdMomentum, Some(3.0)),
    (WhichRule::AdamW, Some(1.0)),
    (WhichRule::Lamb, Some(1.0)),
    (WhichRule::Lars, None),
];

fn lens() -> impl Strategy<Value = Vec<usize>> {
    let len = prop_oneof![2 => Just(0usize), 3 => Just(1), 5 => 2usize..70, 5 => 60usize..400];
    prop::collection::vec(len, 1..12).prop_filter("something to train", |l| l.iter().any(|&n| n > 0))
}

prop_compose! {
    fn runs()(
        lens in lens(),
        ranks in prop::sample::select(&RANKS[..]),
        rule in prop::sample::select(&RULES[..]),
        bucket_len in prop_oneof![Just(None), (1usize..600).prop_map(Some)],
        seed in any::<u64>(),
    ) -> Run {
        let options = Options { bucket_len, ..Options::default() };
        Run { lens, ranks, steps: 2, rule: rule.0, max_norm: rule.1, options, seed, ..Run::default() }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(100, 4000), ..ProptestConfig::default() })]

    #[test]
    fn stages_buckets_overlap_and_order_do_not_show(
        run in runs(),
        other_bucket in prop_oneof![Just(None), (1usize..600).prop_map(Some)],
        stage in prop::sample::select(&STAGES[..]),
        overlap in any::<bool>(),
        shuffle in any::<bool>(),
        in_place in any::<bool>(),
        in_step in any::<bool>(),
    ) {
        let reduce_in_step = in_step && !matches!(stage, Stage::Zero2 | Stage::Zero3);
        let options = Options { bucket_len: other_bucket, overlap, reduce_in_step, ..run.options.clone() };
        let other = Run { options, shuffle, in_place, ..run.clone() }.stage(stage);
        prop_assert_eq!(other.run(), run.stage(Stage::Replicated).run());
    }

    #[test]
    fn equal_gradients_on_n_ranks_are_one_ranks(
        run in runs(),
        stage in prop::sample::select(&STAGES[..]),
        grads in prop::sample::select(&[DType::F32, DType::BF16, DType::F16][..]),
    ) {
        let run = Run { gradients: Gradients::Equal, grads, ..run };
        let one = Run { ranks: 1, ..run.stage(Stage::Replicated) };
        prop_assert_eq!(run.stage(stage).run(), one.run());
    }

    #[test]
    fn exact_sums_equal_a_naive_loop(
        run in runs(),
        stage in prop::sample::select(&STAGES[..]),
        micro_batches in 1usize..4,
        sum in any::<bool>(),
        ranks in prop::sample::select(&[1usize, 2, 3, 4, 5, 7, 8][..]),
    ) {
        let combine = if sum { Combine::Sum } else { Combine::Mean };
        let options = Options { combine, ..run.options.clone() };
        let run = Run { gradients: Gradients::Grid, micro_batches, ranks, options, ..run };
        prop_assert_eq!(run.stage(stage).run(), run.naive());
    }
}

#[test]
fn sixteen_bit_parameters_with_a_master_agree_over_stages() {
    let mut drawn = draws(1);
    for dtype in [DType::BF16, DType::F16] {
        for grads in [DType::F32, dtype].into_iter().filter(|_| drawn()) {
            let options = Options { precision: F32_MASTER, bucket_len: Some(100), ..Options::default() };
            let steps = if long() { 20 } else { 12 };
            let run = Run { dtype, grads, options, steps, ..Run::default() };
            let first = run.stage(Stage::Replicated).run();
            for stage in STAGES {
                assert_eq!(run.stage(stage).run(), first, "{dtype} {grads} {stage:?}");
            }
        }
    }
}

/// Updates accumulate in the master, not in the rounded parameter.
#[test]
fn sixteen_bit_parameters_are_their_masters_rounded() {
    let mut drawn = draws(1);
    for dtype in [DType::BF16, DType::F16] {
        let options = Options { precision: F32_MASTER, bucket_len: Some(100), ..Options::default() };
        let run = Run { dtype, gradients: Gradients::Grid, options, steps: 20, ..Run::default() };
        for stage in STAGES.into_iter().filter(|_| drawn()) {
            assert_eq!(run.stage(stage).run(), run.naive(), "{dtype} {stage:?}");
        }
    }
}

#[test]
fn f64_parameters_agree_over_stages() {
    let run = Run { dtype: DType::F64, grads: DType::F64, ..Run::default() };
    let first = run.stage(Stage::Replicated).run();
    for stage in STAGES {
        assert_eq!(run.stage(stage).run(), first, "{stage:?}");
    }
}

/// Stage 2 with several micro-batches rounds where the others do not; each stage is stable in bucket size and overlap.
#[test]
fn each_stage_is_stable_with_several_micro_batches() {
    let mut drawn = draws(1);
    for stage in STAGES.into_iter().filter(|_| drawn()) {
        let base = Run { micro_batches: 3, ..Run::default() }.stage(stage);
        let first = base.run();
        for bucket_len in [None, Some(1), Some(65), Some(333)] {
            for overlap in [false, true] {
                let options = Options { bucket_len, overlap, stage, ..Options::default() };
                assert_eq!(
                    Run { options, ..base.clone() }.run(),
                    first,
                    "{stage:?} {bucket_len:?} {overlap}"
                );
            }
        }
    }
}

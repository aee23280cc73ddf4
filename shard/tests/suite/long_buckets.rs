//! Buckets whose update and gather are one pass: they end with the bits of a rank that updates everything and gathers nothing.

use crate::common::{Gradients, PRECISIONS, Run, WhichRule, long};
use meshstep_comm::loopback;
use meshstep_optim::AdamW;
use meshstep_shard::{Groups, Missing, Optimizer, Options, Outcome, Stage, StepArgs};
use meshstep_tensor::{DType, Layout, Param, SliceMut};

/// Lengths that put borders of tensors within parts, and many tensors in one part; a chunk of 4 ranks is longer than 256 Ki elements.
fn lens() -> Vec<usize> {
    let small = [700, 5, 33_000, 64].repeat(8);
    [vec![300_001], small, vec![400_000, 3, 150_000]].concat()
}

fn check(row: usize, rule: WhichRule, ranks: usize) {
    let (dtype, precision) = PRECISIONS[row];
    let grads = if dtype == DType::F64 { DType::F64 } else { [dtype, DType::F32][row % 2] };
    let options = Options { precision, ..Options::default() };
    let (gradients, steps, max_norm) = (Gradients::Equal, 2, Some(0.5));
    let run = Run { lens: lens(), rule, dtype, grads, options, steps, gradients, max_norm, ..Run::default() };
    let one = Run { ranks: 1, ..run.stage(Stage::Replicated) }.run();
    for stage in [Stage::Zero1, Stage::Zero2] {
        let bucket_lens = [None, Some(600_000)];
        for bucket_len in &bucket_lens[..if long() { 2 } else { 1 }] {
            let options = Options { stage, bucket_len: *bucket_len, ..run.options.clone() };
            let ended = Run { ranks, options, ..run.clone() }.run();
            assert!(
                ended == one,
                "{dtype} {precision:?} {rule:?} on {ranks} ranks, {stage:?} {bucket_len:?}"
            );
        }
    }
}

#[test]
fn every_precision_ends_with_the_bits_of_one_rank() {
    for row in 0..PRECISIONS.len() {
        check(row, WhichRule::AdamW, [2, 4][row % 2]);
    }
}

#[test]
fn rules_with_sums_and_several_states_end_with_the_bits_of_one_rank() {
    use WhichRule::{AmsGrad, Lamb, Lars, Sgd, TwoMoments};
    for (i, rule) in [Lamb, AmsGrad, Sgd, Lars, TwoMoments].into_iter().enumerate() {
        check([0, 4][i % 2], rule, 4);
    }
}

/// Parameters of several groups, some without a gradient, some frozen.
#[test]
fn groups_and_missing_gradients_end_with_the_bits_of_one_rank() {
    let ended = |ranks, stage| {
        let ends = loopback::spawn(ranks, |comm| {
            let mut layout = Layout::builder();
            for (i, len) in lens().into_iter().enumerate() {
                layout = layout.param(format!("p{i}"), &[len], DType::F32);
            }
            let layout = layout.build().unwrap();
            let decayed = AdamW { weight_decay: 0.3, ..AdamW::default() };
            let groups =
                Groups::new(AdamW::default()).with(decayed, |param: &Param| param.name().ends_with('2'));
            let options = Options { stage, missing: Missing::AllOrNone, ..Options::default() };
            let first = |_: &_, mut values: SliceMut<'_>| {
                let values = values.typed_mut::<f32>()?;
                values.iter_mut().enumerate().for_each(|(i, x)| *x = (i % 97) as f32 / 50.0 - 1.0);
                Ok(())
            };
            let mut opt = Optimizer::new(comm, layout, groups, first, options).unwrap();
            for step in 0..3 {
                let mb = opt.micro_batch(1).unwrap();
                for (i, len) in lens().into_iter().enumerate() {
                    let grad: Vec<f32> = (0..len).map(|j| ((j + i + step) % 13) as f32 - 6.0).collect();
                    if (i + step) % 5 == 0 {
                        mb.none(&format!("p{i}")).unwrap()
                    } else {
                        mb.grad(&format!("p{i}"), &grad[..]).unwrap()
                    }
                }
                mb.finish().unwrap();
                let outcome = opt.step(StepArgs { max_norm: Some(1.0), ..StepArgs::default() }).unwrap();
                assert!(matches!(outcome.outcome().unwrap(), Outcome::Applied { .. }));
            }
            (0..lens().len())
                .flat_map(|i| opt.param(&format!("p{i}")).unwrap().typed::<f32>().unwrap().to_vec())
                .map(f32::to_bits)
                .collect::<Vec<_>>()
        });
        ends.unwrap()
    };
    let one = ended(1, Stage::Replicated).swap_remove(0);
    for (ranks, stage) in [(2, Stage::Zero1), (4, Stage::Zero1), (4, Stage::Zero2)] {
        for end in ended(ranks, stage) {
            assert!(end == one, "{ranks} {stage:?}");
        }
    }
}

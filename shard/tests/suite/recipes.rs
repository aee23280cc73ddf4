//! Precisions: every combination works or is refused with a reason; working ones end with the same bits on any number of ranks.

use crate::common::{Gradients, PRECISIONS, Run, STAGES, WITH_STATE, draws, long, turns};
use meshstep_comm::loopback;
use meshstep_optim::{AdamW, Rounding, Rule, Sgd};
use meshstep_shard::{Groups, Master, Moments, Optimizer, Options, Precision, Stage, StepArgs};
use meshstep_tensor::{DType, Layout, Param, Slice, SliceMut, bf16};

/// With equal gradients all ranks end alike, stochastic rounding included, at every stage.
#[test]
fn any_number_of_ranks_ends_with_the_bits_of_one() {
    let (steps, mut drawn, mut met) = (if long() { 50 } else { 8 }, draws(1), 0);
    for (row, &(dtype, precision)) in PRECISIONS.iter().enumerate() {
        let grads = [dtype, DType::F32][row % 2];
        let grads = if dtype == DType::F64 { DType::F64 } else { grads };
        for (column, rule) in WITH_STATE.into_iter().enumerate() {
            // Short runs try a third of the combinations: five rules for each precision.
            if !long() && (row + 2 * column) % 3 > 0 || !drawn() {
                continue;
            }
            let options = Options { precision, bucket_len: Some(150), ..Options::default() };
            let run =
                Run { rule, dtype, grads, options, steps, gradients: Gradients::Equal, ..Run::default() };
            let one = Run { ranks: 1, ..run.stage(Stage::Replicated) }.run();
            // Together they cover every number of ranks with every stage. A single rank is compared with itself, so it comes last.
            for ranks in turns(&[8, 2, 3, 4, 7, 1], met, 1) {
                for stage in turns(&STAGES, met + met / 6, 1) {
                    let ended = Run { ranks, ..run.stage(stage) }.run();
                    assert_eq!(ended, one, "{dtype} {precision:?} {rule:?} on {ranks} ranks, {stage:?}");
                }
            }
            met += 1;
        }
    }
}

/// Random bits do not depend on how buckets are cut, nor on their other contents; they depend on seed and name.
#[test]
fn random_bits_depend_on_seed_and_name_alone() {
    let (dtype, precision) = PRECISIONS[7];
    let run = |bucket_len, seed| {
        let precision = Precision { seed, ..precision };
        let options = Options { precision, bucket_len, ..Options::default() };
        let lens = vec![700, 5, 700];
        Run { lens, dtype, grads: DType::F32, options, gradients: Gradients::Equal, ..Run::default() }.run()
    };
    let first = run(None, 1);
    assert_eq!(run(Some(1), 1), first);
    assert_eq!(run(Some(800), 1), first);
    assert_ne!(run(None, 2).params, first.params);
}

/// Builds an optimizer of one parameter with a recipe, and takes two steps; returns its error.
fn tried(dtype: DType, precision: Precision, rule: impl Rule + Clone + 'static) -> Result<(), String> {
    let layout = Layout::builder().param("p", &[70], dtype).build().unwrap();
    let options =
        Options { precision, grads: (dtype == DType::F16).then_some(DType::F32), ..Options::default() };
    let mut results = loopback::spawn(2, |comm| {
        let first = |_: &Param, mut out: SliceMut<'_>| out.cast_from(Slice::from(&[1f32; 70][..]));
        let mut opt = Optimizer::new(comm, layout.clone(), Groups::new(rule.clone()), first, options.clone())
            .map_err(|e| e.to_string())?;
        for _ in 0..2 {
            let mb = opt.micro_batch(1).unwrap();
            match dtype {
                DType::F64 => mb.grad("p", &[0.5f64; 70][..]).unwrap(),
                DType::BF16 => mb.grad("p", &[bf16::from_f32(0.5); 70][..]).unwrap(),
                _ => mb.grad("p", &[0.5f32; 70][..]).unwrap(),
            }
            mb.finish().unwrap();
            let _ = opt.step(StepArgs { lr: 0.01, ..StepArgs::default() }).unwrap();
        }
        let mut moved = [0f32; 70];
        SliceMut::from(&mut moved[..]).cast_from(opt.param("p").unwrap()).unwrap();
        assert!(moved.iter().all(|&p| p <= 1.0 && p > 0.97) && moved.iter().any(|&p| p < 1.0), "{moved:?}");
        Ok(())
    })
    .unwrap();
    results.swap_remove(0)
}

/// A word of the expected refusal; `None` if the combination works.
fn reason(dtype: DType, precision: Precision, (retention, states): (f64, usize)) -> Option<&'static str> {
    let Precision { master, moments, rounding, .. } = precision;
    let stochastic = rounding == Rounding::Stochastic;
    match (dtype, master, moments) {
        (_, _, Moments::BF16) if states == 0 => Some("rule with state"),
        (_, _, Moments::BF16) if !stochastic && retention > 0.996_093_75 => Some("cannot decay"),
        (DType::F16, Master::Remainder, _) => Some("only bf16 has f32 remainders"),
        (DType::F16, Master::None, _) => Some("`Master::F32` in"),
        (DType::BF16, Master::None, _) if !stochastic => Some("small steps vanish"),
        (DType::F64, _, Moments::BF16) => Some("waste"),
        (DType::F32 | DType::F64, Master::F32, _) => Some("f32 master"),
        (DType::F32 | DType::F64, Master::Remainder, _) => Some("remainders"),
        (DType::BF16, Master::None, Moments::Full) => None,
        (_, _, Moments::Full) if stochastic => Some("asks for stochastic rounding"),
        _ => None,
    }
}

#[test]
fn every_combination_works_or_is_refused_with_a_reason() {
    let (mut works, mut refused) = (0, 0);
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        for master in [Master::None, Master::F32, Master::Remainder] {
            for moments in [Moments::Full, Moments::BF16] {
                for rounding in [Rounding::Nearest, Rounding::Stochastic] {
                    let precision = Precision { master, moments, rounding, seed: 0 };
                    let quick = AdamW { beta2: 0.99, ..AdamW::default() };
                    let tries = [
                        (tried(dtype, precision, AdamW::default()), (0.999, 2)),
                        (tried(dtype, precision, quick), (0.99, 2)),
                        (tried(dtype, precision, Sgd::default()), (0.0, 0)),
                    ];
                    for (said, rule) in tries {
                        let expected = reason(dtype, precision, rule);
                        match (said, expected) {
                            (Ok(()), None) => works += 1,
                            (Err(said), Some(reason)) if said.contains(reason) => refused += 1,
                            (said, _) => panic!("{dtype} {precision:?} {rule:?}: {said:?}, not {expected:?}"),
                        }
                    }
                }
            }
        }
    }
    println!("{works} combinations work, {refused} are refused");
    assert_eq!((works, refused), (32, 112));
}

/// Each type of a mixed layout takes the settings that apply to it, and a later group need not use those of an earlier one.
#[test]
fn types_mix() {
    let layout =
        Layout::builder().param("w", &[70], DType::BF16).param("norm", &[7], DType::F32).build().unwrap();
    let more = Layout::builder().param("late", &[9], DType::F32).build().unwrap();
    let precision = Precision { master: Master::Remainder, ..Precision::default() };
    let options = Options { precision, ..Options::default() };
    loopback::spawn(2, |comm| {
        let ones = |p: &Param, mut out: SliceMut<'_>| out.cast_from(Slice::from(&vec![1f32; p.len()][..]));
        let mut opt = Optimizer::new(comm, layout.clone(), AdamW::default(), ones, options.clone()).unwrap();
        opt.add_param_group(more.clone(), AdamW::default(), ones).unwrap();
        let mb = opt.micro_batch(1).unwrap();
        mb.grad("w", &[bf16::ONE; 70][..]).unwrap();
        mb.grad("norm", &[1f32; 7][..]).unwrap();
        mb.grad("late", &[1f32; 9][..]).unwrap();
        mb.finish().unwrap();
        let _ = opt.step(StepArgs::default()).unwrap();
        let master = opt.state("w").unwrap().master.map(|m| m.dtype());
        assert!(opt.state("w").unwrap().range.is_empty() || master == Some(DType::U16));
        assert!(opt.state("norm").unwrap().master.is_none());
        assert!(opt.param("late").unwrap().typed::<f32>().unwrap().iter().all(|&p| p < 1.0));
    })
    .unwrap();
}

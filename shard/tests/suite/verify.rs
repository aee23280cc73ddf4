//! Ranks that should hold the same are compared bit by bit, and a vector that one rank alone holds with its last update.

use crate::common::elsewhere::Elsewhere;
use crate::common::{
    F32_MASTER, Run, STAGES, WhichRule, adamw, cases, draws, fetch, name, params, state, turns,
};
use meshstep_comm::{Communicator, loopback};
use meshstep_shard::{Clip, Difference, Error, NonFinite, Optimizer, Options, Stage, Verified, VerifyError};
use meshstep_tensor::{DType, Layout, Param, SliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

/// Every rank owns a part of every kind of parameter, at every stage.
fn wide() -> Run {
    let options = Options { bucket_len: Some(400), ..Options::default() };
    Run { lens: vec![300, 70, 130, 500, 64, 90], options, ..Run::default() }
}

fn take(run: &Run, opt: &mut Optimizer, t: u64) -> Result<(), Error> {
    run.hand_over(opt, t, 0)?;
    opt.step(run.at(t))?.outcome().map(drop)
}

/// Finds an element of a vector that this rank holds: its parameter, index and bits.
fn target(opt: &Optimizer, slot: &str) -> (String, usize, u64) {
    let bits = |bytes: &[u8], size: usize, i: usize| {
        let mut word = [0; 8];
        word[..size].copy_from_slice(&bytes[i * size..][..size]);
        u64::from_le_bytes(word)
    };
    let queue = &opt.options().queue;
    for param in opt.params() {
        let state = opt.state(param.name()).unwrap();
        let (first, values) = match (slot, &state.master) {
            ("param", _) => match opt.param(param.name()) {
                Ok(whole) => (0, whole),
                Err(_) => (state.range.start, state.values),
            },
            ("master", Some(master)) => (state.range.start, *master),
            _ => match state.slots.iter().find(|(name, _)| *name == slot) {
                Some((_, values)) => (state.range.start, *values),
                None => continue,
            },
        };
        if values.len() > 20 {
            let i = values.len() * 2 / 3;
            return (
                param.name().to_owned(),
                first + i,
                bits(&fetch(values, queue), values.dtype().size(), i),
            );
        }
    }
    panic!("no rank has so little");
}

fn difference(error: &Error) -> Difference {
    match error {
        Error::Differs(difference) => (**difference).clone(),
        other => panic!("{other}"),
    }
}

/// Flips a bit on one rank between two steps: `verify` and the next step report the same difference on every rank; after flipping
/// it back training continues unchanged.
fn flipped(run: &Run, slot: &'static str, odd: usize, bit: u32) -> (Difference, (String, usize, u64)) {
    let ranks = loopback::spawn(run.ranks, |comm| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        opt.verify_every(1).unwrap();
        take(run, &mut opt, 1).unwrap();
        let at = (rank == odd).then(|| target(&opt, slot));
        let flip = |opt: &mut Optimizer| {
            at.iter().for_each(|(name, element, _)| opt.flip_bit(name, slot, *element, bit).unwrap());
        };
        let clean = (params(&opt), state(&opt));
        flip(&mut opt);
        let told = opt.verify().unwrap_err();
        assert_eq!(take(run, &mut opt, 2).unwrap_err().to_string(), told.to_string());
        flip(&mut opt);
        assert_eq!((params(&opt), state(&opt)), clean);
        opt.verify().unwrap();
        take(run, &mut opt, 2).unwrap();
        (difference(&told), at, params(&opt))
    });
    let ranks = ranks.unwrap();
    let expected = Run { steps: 2, ..run.clone() }.run().params;
    assert!(ranks.iter().all(|(told, _, end)| *told == ranks[0].0 && *end == expected));
    let at = ranks.iter().find_map(|(_, at, _)| at.clone()).unwrap();
    (ranks[0].0.clone(), at)
}

#[test]
fn one_flipped_bit_is_named() {
    let bf16 = |stage| {
        let run = Run { dtype: DType::BF16, grads: DType::BF16, ..wide() };
        Run { options: Options { precision: F32_MASTER, ..run.options.clone() }, ..run }.stage(stage)
    };
    let mut drawn = draws(1);
    for (s, stage) in STAGES.into_iter().enumerate() {
        let cut = stage != Stage::Replicated;
        let all = [
            (wide().stage(stage), "param", DType::F32),
            (wide().stage(stage), "m", DType::F32),
            (wide().stage(stage), "v", DType::F32),
            (bf16(stage), "param", DType::BF16),
            (bf16(stage), "master", DType::F32),
            (bf16(stage), "m", DType::F32),
        ];
        for (i, (run, slot, dtype)) in all.into_iter().enumerate() {
            if !drawn() {
                continue;
            }
            for (odd, bit) in turns(&[(1, 0), (3, 8 * dtype.size() as u32 - 1)], s + i, 1) {
                let (told, (name, element, bits)) = flipped(&run, slot, odd, bit);
                let alone = cut && (slot != "param" || stage == Stage::Zero3);
                assert_eq!((&told.param, told.slot, told.element), (&name, slot, Some(element)), "{stage:?}");
                assert_eq!((told.odd(), told.dtype, told.more), (vec![odd], dtype, 0), "{told}");
                assert_eq!(told.values(), Some([bits, bits ^ 1 << bit]), "{told}");
                assert_eq!(told.held.len(), if alone { 1 } else { run.ranks }, "{stage:?} {slot}");
                assert_eq!(told.wrote, alone.then_some(bits));
                if bit == 0 {
                    assert_eq!(told.apart().unwrap().ulps, 1);
                }
            }
        }
    }
}

#[test]
fn a_step_that_goes_ahead_of_its_gradients_verifies_too() {
    let options = Options { non_finite: NonFinite::Propagate, ..wide().options };
    let run = Run { max_norm: None, options, ..wide() };
    for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero2] {
        let (told, (name, element, _)) = flipped(&run.stage(stage), "v", 2, 3);
        assert_eq!((told.param, told.element, told.slot), (name, Some(element), "v"));
    }
}

/// Two changes of a vector that one rank alone holds are found, and not attributed to one element.
#[test]
fn more_than_one_change_is_told_as_such() {
    let run = wide().stage(Stage::Zero2);
    let told = loopback::spawn(run.ranks, |comm| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        opt.verify_every(1).unwrap();
        take(&run, &mut opt, 1).unwrap();
        if rank == 2 {
            let (name, element, _) = target(&opt, "v");
            opt.flip_bit(&name, "v", element, 0).unwrap();
            opt.flip_bit(&name, "v", element + 1, 30).unwrap();
        }
        difference(&opt.verify().unwrap_err())
    });
    let told = told.unwrap();
    assert!(told.iter().all(|difference| *difference == told[0]));
    assert_eq!((told[0].slot, told[0].element, told[0].odd()), ("v", None, vec![2]));
    assert_eq!(told[0].values(), None);
}

/// With several differences the first is reported, and the number of the others.
#[test]
fn the_first_of_several_differences_is_told() {
    let run = wide().stage(Stage::Zero1);
    let told = loopback::spawn(run.ranks, |comm| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        opt.verify_every(1).unwrap();
        take(&run, &mut opt, 1).unwrap();
        if rank == 1 {
            opt.flip_bit("p3", "param", 101, 4).unwrap();
        }
        if rank >= 2 {
            opt.flip_bit("p0", "param", 65 + rank, 4).unwrap();
            let (name, element, _) = target(&opt, "m");
            opt.flip_bit(&name, "m", element, 0).unwrap();
        }
        difference(&opt.verify().unwrap_err())
    });
    for told in told.unwrap() {
        // Two of four ranks differ, each in another way: the other two are no majority.
        assert_eq!((&told.param[..], told.slot, told.element, told.more), ("p0", "param", Some(67), 3));
        assert_eq!((told.majority(), told.odd()), (None, vec![]));
        let hashes: Vec<u64> = told.held.iter().map(|held| held.hash).collect();
        assert!(hashes[0] == hashes[1] && hashes[2] != hashes[3] && hashes[2] != hashes[0]);
    }
}

#[test]
fn numbers_are_compared_by_their_bits() {
    let values = [f32::from_bits(0x7fc0_0001), 0.0, f32::from_bits(0xffff_ffff)];
    let layout = || Layout::builder().param("w", &[3], DType::F32).frozen("still", &[3], DType::F32).build();
    let told = loopback::spawn(3, |comm| {
        let rank = comm.rank();
        let fill = |_: &Param, mut out: SliceMut<'_>| out.copy_from((&values[..]).into());
        let mut opt = Optimizer::new(comm, layout().unwrap(), adamw(), fill, Options::default()).unwrap();
        opt.verify().unwrap();
        let mut flip = |name, element, bit| {
            (0..2)
                .map(|_| {
                    if rank == 1 {
                        opt.flip_bit(name, "param", element, bit).unwrap();
                    }
                    opt.verify().map(drop)
                })
                .collect::<Vec<_>>()
        };
        let all = [flip("w", 0, 1), flip("w", 1, 31), flip("still", 2, 0)];
        assert!(all.iter().all(|told| told[1].is_ok()));
        all.map(|told| difference(told[0].as_ref().unwrap_err()))
    });
    for [nan, zero, frozen] in told.unwrap() {
        assert_eq!((nan.element, nan.values()), (Some(0), Some([0x7fc0_0001, 0x7fc0_0003])));
        assert_eq!((zero.element, zero.values()), (Some(1), Some([0, 0x8000_0000])));
        assert_eq!((zero.apart().unwrap().ulps, zero.apart().unwrap().abs), (1, 0.0));
        assert_eq!((&frozen.param[..], frozen.element, frozen.odd()), ("still", Some(2), vec![1]));
    }
}

/// No false alarm in many steps of changing values, and a report on every vector.
#[test]
fn clean_steps_raise_no_alarm() {
    let steps = u64::from(cases(400, 5000));
    for (stage, rule) in [
        (Stage::Replicated, WhichRule::AdamW),
        (Stage::Zero1, WhichRule::Lamb),
        (Stage::Zero2, WhichRule::TwoMoments),
    ] {
        let run = Run { lens: vec![70, 1, 0, 130], ranks: 3, rule, ..wide() }.stage(stage);
        let costs = loopback::spawn(run.ranks, |comm| {
            let mut opt = run.build(comm).unwrap();
            opt.verify_every(1).unwrap();
            let mut cost = (0, 0, Duration::ZERO);
            for t in 1..=steps {
                take(&run, &mut opt, t).unwrap();
                let Verified { bytes, sent, elapsed, .. } = opt.verified().unwrap();
                cost = (cost.0 + bytes, cost.1 + sent, cost.2 + *elapsed);
            }
            let states = run.boxed_rule().state().len();
            let verified = opt.verified().unwrap();
            let (all, alone) = (4 * (1 + states), if stage == Stage::Replicated { 0 } else { 4 * states });
            assert_eq!((verified.compared, verified.kept, verified.unchecked), (all - alone, alone, 0));
            assert_eq!(opt.verify().unwrap().hashes.len(), 4);
            cost
        });
        let (bytes, sent, took) = costs.unwrap()[0];
        println!(
            "verify: {stage:?}, {steps} steps: {bytes} bytes read, {sent} bytes sent, {:.1} ms",
            took.as_secs_f64() * 1e3
        );
    }
}

/// Bytes that a verification reads and sends, exactly; a step's traffic does not include them.
#[test]
fn a_verification_costs_what_it_says() {
    let run = Run { lens: vec![640, 256], ranks: 4, rule: WhichRule::AdamW, ..wide() };
    for stage in [Stage::Replicated, Stage::Zero1] {
        let run = run.stage(stage);
        loopback::spawn(run.ranks, |comm| {
            let mut opt = run.build(comm).unwrap();
            let plain = {
                run.hand_over(&mut opt, 1, 0).unwrap();
                opt.step(run.at(1)).unwrap().outcome().unwrap()
            };
            opt.verify_every(1).unwrap();
            run.hand_over(&mut opt, 2, 0).unwrap();
            let watched = opt.step(run.at(2)).unwrap().outcome().unwrap();
            let sent = |outcome| match outcome {
                meshstep_shard::Outcome::Applied { traffic, .. } => traffic.sent,
                other => panic!("{other:?}"),
            };
            assert_eq!(sent(plain), sent(watched));
            let verified = opt.verified().unwrap();
            let own: usize = opt.params().map(|p| opt.state(p.name()).unwrap().range.len()).sum();
            assert!(own == 896 || stage != Stage::Replicated);
            assert_eq!(verified.bytes, 4 * (896 + 2 * own as u64));
            // A ring sends all chunks but its own, twice: two words a vector, then three.
            let rank = opt.comm().rank();
            let ring = |words: usize| 16 * (words - words / 4 - usize::from(rank < words % 4)) as u64;
            assert_eq!(verified.compared, if stage == Stage::Replicated { 6 } else { 2 });
            assert_eq!(verified.sent, ring(2 * verified.compared) + ring(3));
        })
        .unwrap();
    }
}

/// Between verifications no hashes are kept; a change between the last update and the verification is found.
#[test]
fn every_second_step_keeps_what_it_needs() {
    let run = wide().stage(Stage::Zero2);
    loopback::spawn(run.ranks, |comm| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        opt.verify_every(2).unwrap();
        let unchecked = |opt: &mut Optimizer| opt.verify().unwrap().unchecked;
        let flip = |opt: &mut Optimizer| {
            let (name, element, _) = target(opt, "m");
            opt.flip_bit(&name, "m", element, 7).unwrap();
        };
        assert_eq!(unchecked(&mut opt), 12);
        take(&run, &mut opt, 1).unwrap();
        assert_eq!((unchecked(&mut opt), opt.verified().unwrap().kept), (0, 12));
        for t in 2..=6 {
            if rank == 0 {
                flip(&mut opt);
            }
            // Even steps verify; an odd step uses the flipped bit as its own value, and writes it.
            let told = take(&run, &mut opt, t);
            assert_eq!(told.is_err(), t % 2 == 0, "{t}: {told:?}");
            if t % 2 == 0 {
                if rank == 0 {
                    flip(&mut opt);
                }
                take(&run, &mut opt, t).unwrap();
            }
        }
        opt.verify_every(0).unwrap();
        take(&run, &mut opt, 7).unwrap();
        assert_eq!(unchecked(&mut opt), 12);
    })
    .unwrap();
}

#[test]
fn the_middle_of_a_step_is_refused() {
    for stage in STAGES {
        let run = wide().stage(stage);
        loopback::spawn(run.ranks, |comm| {
            let mut opt = run.build(comm).unwrap();
            let midway = |opt: &mut Optimizer| {
                let told = [opt.verify().map(drop), opt.verify_every(1), opt.repair().map(drop)];
                let midway = |told: &Result<(), Error>| {
                    matches!(told, Err(Error::Verify(VerifyError::Midway { batches: 1 })))
                };
                assert!(told.iter().all(midway), "{stage:?}: {told:?}");
                opt.discard_gradients().unwrap();
                opt.verify().unwrap();
            };
            drop(opt.micro_batch(1).unwrap());
            midway(&mut opt);
            drop(opt.accumulate(1).unwrap());
            midway(&mut opt);
            run.hand_over(&mut opt, 1, 0).unwrap();
            midway(&mut opt);
            take(&run, &mut opt, 1).unwrap();
        })
        .unwrap();
    }
}

/// One rank has begun a step: it gets that error, and the others learn which rank it is.
#[test]
fn a_rank_in_the_middle_of_a_step_is_told_of() {
    let run = Run { micro_batches: 2, ..wide() }.stage(Stage::Zero1);
    loopback::spawn(run.ranks, |comm| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        if rank == 2 {
            run.hand_over(&mut opt, 1, 0).unwrap();
        }
        match opt.verify().unwrap_err() {
            Error::Verify(VerifyError::Midway { batches: 1 }) => assert_eq!(rank, 2),
            Error::Disagree { what, rank: 2, .. } => assert!(rank != 2 && what == "this call"),
            other => panic!("{other}"),
        }
        if rank != 2 {
            run.hand_over(&mut opt, 1, 0).unwrap();
        }
        run.hand_over(&mut opt, 1, 1).unwrap();
        let _ = opt.step(run.at(1)).unwrap().outcome().unwrap();
        opt.verify().unwrap();
    })
    .unwrap();
}

/// Different calls are an error on every rank, and no rank waits.
#[test]
fn ranks_that_part_are_told() {
    let run = wide();
    type Call = fn(&Run, &mut Optimizer) -> Result<(), Error>;
    let verify: Call = |_, opt| opt.verify().map(drop);
    let calls: [(Call, Call, bool); 5] = [
        (verify, |run, opt| take(run, opt, 1), false),
        (verify, |_, opt| opt.repair().map(drop), true),
        (verify, |_, opt| opt.verify_every(1), true),
        (|_, opt| opt.verify_every(2), |_, opt| opt.verify_every(3), true),
        (
            verify,
            |_, opt| {
                let late = Layout::builder().param("late", &[2], DType::F32).build().unwrap();
                opt.add_param_group(late, adamw(), |_, _| Ok(()))
            },
            true,
        ),
    ];
    for stage in STAGES {
        for (one, others, goes_on) in calls {
            let run = run.stage(stage);
            let told = loopback::spawn(run.ranks, |comm| {
                let rank = comm.rank();
                let mut opt = run.build(comm).unwrap();
                let told = if rank == 2 { one(&run, &mut opt) } else { others(&run, &mut opt) };
                let poisoned = take(&run, &mut opt, 1).is_err();
                (told.unwrap_err(), poisoned)
            });
            for (told, poisoned) in told.unwrap() {
                let disagree = matches!(&told, Error::Disagree { what, .. } if what == "this call");
                assert!(if goes_on { disagree } else { matches!(told, Error::Comm(_)) }, "{told}");
                assert_eq!(poisoned, !goes_on, "{told}");
            }
        }
    }
}

/// After a repair all ranks hold the values of a majority of at least three ranks.
#[test]
fn a_majority_repairs() {
    for (stage, slots) in [
        (Stage::Replicated, &["param", "m", "v"][..]),
        (Stage::Zero1, &["param"][..]),
        (Stage::WholeParams(meshstep_shard::Owners::RoundRobin), &["param"][..]),
    ] {
        let run = wide().stage(stage);
        let ends = loopback::spawn(run.ranks, |comm| {
            let rank = comm.rank();
            let mut opt = run.build(comm).unwrap();
            take(&run, &mut opt, 1).unwrap();
            let clean = (params(&opt), state(&opt));
            for (i, slot) in slots.iter().enumerate().filter(|(i, _)| rank == i + 1) {
                opt.flip_bit("p3", slot, 127 + i, 5).unwrap();
                opt.flip_bit("p3", slot, 3, 6).unwrap();
            }
            opt.verify().unwrap_err();
            let repaired = opt.repair().unwrap();
            assert_eq!((params(&opt), state(&opt)), clean);
            assert!(opt.repair().unwrap().is_empty());
            take(&run, &mut opt, 2).unwrap();
            repaired
        });
        for repaired in ends.unwrap() {
            let told: Vec<_> =
                repaired.iter().map(|r| (&r.param[..], r.slot, r.ranks.clone(), r.from)).collect();
            let expected: Vec<_> =
                slots.iter().enumerate().map(|(i, slot)| ("p3", *slot, vec![i + 1], 0)).collect();
            assert_eq!(told, expected, "{stage:?}");
        }
    }
}

#[test]
fn nobody_is_outvoted_by_as_many() {
    for (ranks, odd, stage, slot) in [
        (2, &[1][..], Stage::Replicated, "m"),
        (4, &[0, 3][..], Stage::Zero1, "param"),
        (3, &[1][..], Stage::Zero2, "m"),
    ] {
        let run = Run { ranks, ..wide() }.stage(stage);
        let told = loopback::spawn(ranks, |comm| {
            let rank = comm.rank();
            let mut opt = run.build(comm).unwrap();
            opt.verify_every(1).unwrap();
            take(&run, &mut opt, 1).unwrap();
            if odd.contains(&rank) {
                let (name, element, _) = target(&opt, slot);
                opt.flip_bit(&name, slot, element, 0).unwrap();
            }
            // A repairable difference is not repaired while another one is not repairable.
            if rank == ranks - 1 {
                opt.flip_bit("p4", "param", 1, 1).unwrap();
            }
            let before = (params(&opt), state(&opt));
            let told = opt.repair().unwrap_err();
            assert_eq!((params(&opt), state(&opt)), before);
            told.to_string()
        });
        let told = told.unwrap();
        assert!(
            told.iter().all(|text| *text == told[0] && text.contains("nothing was changed")),
            "{told:#?}"
        );
    }
}

#[test]
fn reduced_gradients_are_compared_on_demand() {
    for stage in STAGES {
        let run = wide().stage(stage);
        let whole = !matches!(stage, Stage::Zero1 | Stage::Zero2 | Stage::Zero3);
        loopback::spawn(run.ranks, |comm| {
            let rank = comm.rank();
            let mut opt = run.build(comm).unwrap();
            let refused = |opt: &mut Optimizer| {
                let told = opt.verify_gradients().unwrap_err();
                assert!(matches!(told, Error::Verify(VerifyError::NoGradients)), "{told}");
            };
            refused(&mut opt);
            run.hand_over(&mut opt, 1, 0).unwrap();
            let verified = opt.verify_gradients().unwrap();
            let some = run.lens.len();
            let expected = if whole { (some, 0) } else { (0, some) };
            assert_eq!((verified.compared, verified.unchecked), expected, "{stage:?}");
            if rank == 3 && whole {
                opt.flip_bit("p0", "grad", 69, 31).unwrap();
            }
            let told = opt.verify_gradients();
            if whole {
                let told = difference(&told.unwrap_err());
                assert_eq!((&told.param[..], told.slot, told.element), ("p0", "grad", Some(69)));
                assert_eq!(told.odd(), [3]);
            }
            opt.discard_gradients().unwrap();
            refused(&mut opt);
            take(&run, &mut opt, 1).unwrap();
            opt.verify().unwrap();
        })
        .unwrap();
    }
    let options = Options { clip: Clip::BeforeReduce, stage: Stage::Replicated, ..wide().options };
    let run = Run { options, ..wide() };
    loopback::spawn(run.ranks, |comm| {
        let mut opt = run.build(comm).unwrap();
        run.hand_over(&mut opt, 1, 0).unwrap();
        let told = opt.verify_gradients().unwrap_err();
        assert!(matches!(told, Error::Verify(VerifyError::HeldBack)), "{told}");
        let _ = opt.step(run.at(1)).unwrap().outcome().unwrap();
    })
    .unwrap();
}

/// A single rank: every vector is compared with its last update, including parameters added later, from their first update on.
#[test]
fn a_rank_alone_and_parameters_that_come_later() {
    let run = Run { ranks: 1, ..wide() };
    let alone = |comm: Arc<dyn Communicator>| {
        let mut opt = run.build(comm).unwrap();
        opt.verify_every(1).unwrap();
        take(&run, &mut opt, 1).unwrap();
        let late = Layout::builder().param("late", &[2], DType::F32).build().unwrap();
        opt.add_param_group(late, adamw(), |_, _| Ok(())).unwrap();
        let verified = opt.verify().unwrap();
        assert_eq!((verified.compared, verified.kept, verified.unchecked), (0, 18, 3));
        let (name, element, bits) = target(&opt, "param");
        opt.flip_bit(&name, "param", element, 12).unwrap();
        let told = difference(&opt.verify().unwrap_err());
        assert_eq!((told.element, told.wrote, told.odd()), (Some(element), Some(bits), vec![0]));
        assert!(matches!(opt.repair(), Err(Error::Verify(VerifyError::NoMajority(_)))));
    };
    loopback::spawn(1, alone).unwrap();
}

/// A hyperparameter that changes on one rank after construction is found before a step uses it, for rules with and without
/// kernels.
#[test]
fn hyperparameters_are_compared_by_their_bits() {
    for (kernels, verifying) in [(true, false), (false, false), (false, true), (true, true)] {
        hyperparameters_are_compared(kernels, verifying);
    }
}

fn hyperparameters_are_compared(kernels: bool, verifying: bool) {
    let run = wide().stage(Stage::Zero1);
    loopback::spawn(run.ranks, |comm| {
        let rank = comm.rank();
        let beta1 = Arc::new(AtomicU64::new(0.9f64.to_bits()));
        let rule = Elsewhere { beta1: Arc::clone(&beta1), kernels };
        let mut opt = Optimizer::new(comm, run.layout(), rule, |_, _| Ok(()), run.options.clone()).unwrap();
        opt.verify_every(verifying.into()).unwrap();
        take(&run, &mut opt, 1).unwrap();
        if rank == 3 {
            beta1.fetch_xor(1, SeqCst);
        }
        let clean = (params(&opt), state(&opt));
        for told in [opt.verify().map(drop), take(&run, &mut opt, 2)] {
            let told = told.unwrap_err();
            assert!(
                matches!(&told, Error::Disagree { what, rank: 3, .. } if what == "beta1 of group 0"),
                "{told}"
            );
        }
        assert_eq!((params(&opt), state(&opt)), clean);
        beta1.store(0.9f64.to_bits(), SeqCst);
        take(&run, &mut opt, 2).unwrap();
    })
    .unwrap();
}

#[test]
fn bits_that_are_not_there_are_refused() {
    let run = wide().stage(Stage::Replicated);
    loopback::spawn(1, |comm| {
        let mut opt = run.build(comm).unwrap();
        for (slot, element, bit) in
            [("m", 300, 0), ("m", 0, 32), ("master", 0, 0), ("n", 0, 0), ("param", usize::MAX, 0)]
        {
            let told = opt.flip_bit(&name(0), slot, element, bit).unwrap_err();
            assert!(matches!(told, Error::Verify(VerifyError::NoSuchBit { .. })), "{told}");
        }
        assert!(matches!(opt.flip_bit("w", "param", 0, 0), Err(Error::UnknownParam { .. })));
        opt.flip_bit(&name(0), "m", 299, 31).unwrap();
    })
    .unwrap();
}

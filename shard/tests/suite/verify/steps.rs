//! Verification in steps and between them: its cost, refusals, and ranks that do not verify together.

use super::{difference, flipped, take, target, wide};
use crate::common::{Run, STAGES, WhichRule, adamw, cases};
use meshstep_comm::{Communicator, loopback};
use meshstep_shard::{Error, NonFinite, Optimizer, Options, Stage, Verified, VerifyError};
use meshstep_tensor::{DType, Layout};
use std::sync::Arc;
use std::time::Duration;

#[test]
fn a_step_that_goes_ahead_of_its_gradients_verifies_too() {
    let options = Options { non_finite: NonFinite::Propagate, ..wide().options };
    let run = Run { max_norm: None, options, ..wide() };
    for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero2] {
        let (told, (name, element, _)) = flipped(&run.stage(stage), "v", 2, 3);
        assert_eq!((told.param, told.element, told.slot), (name, Some(element), "v"));
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

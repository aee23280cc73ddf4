//! Gradients that a rank lacks, and the order of their buckets.

use super::{FAMILIES, Of, RANKS, backward, hand_over, optimizer, options, planned, traffic, values};
use meshstep_comm::loopback;
use meshstep_optim::AdamW;
use meshstep_shard::{Error, Fault, Missing, Options, Plan, Stage, StepArgs};
use meshstep_tensor::{Category, Meter};

/// How a rank hands over the gradient of the first matrix, `5w`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Handed {
    There,
    Zeros,
    /// It calls `none`.
    Says,
    /// It finishes its micro-batch without the gradient.
    Lacks,
}

/// Growth of the pool in each of `steps` steps, the peak bytes of buckets, and the parameters.
type Grown = (Vec<u64>, u64, Vec<Vec<u8>>);

/// Takes steps in which each rank hands over `5w` as `handed` says for rank and step, and all other gradients.
fn run_with(
    parts: &[Of],
    options: &Options,
    steps: u64,
    handed: impl Fn(usize, u64) -> Handed + Sync,
) -> Vec<Grown> {
    let ends = loopback::spawn(RANKS, |comm| {
        let (rank, options) = (comm.rank(), Options { meter: Meter::new(), ..options.clone() });
        let meter = options.meter.clone();
        let mut opt = optimizer(&comm, parts, options);
        let (mut grown, mut before) = (Vec::new(), 0);
        for t in 1..=steps {
            let mb = opt.micro_batch(1).unwrap();
            for param in &backward(parts) {
                match handed(rank, t) {
                    Handed::Lacks if param.0 == "5w" => {}
                    Handed::Says if param.0 == "5w" => {
                        mb.none(&param.0).unwrap();
                        assert!(matches!(mb.none(&param.0), Err(Error::GradTwice { .. })));
                    }
                    Handed::Zeros if param.0 == "5w" => hand_over(&mb, param, &vec![0.0; param.1]),
                    _ => hand_over(&mb, param, &values(param, rank, t)),
                }
            }
            mb.finish().unwrap();
            let now = traffic(opt.step(StepArgs::default()).unwrap().outcome().unwrap()).pool_grown;
            grown.push(now - before);
            before = now;
        }
        (grown, meter.peak(Category::Buckets), crate::common::params(&opt))
    });
    ends.unwrap()
}

/// A gradient declared missing costs no memory.
#[test]
fn a_bucket_need_not_wait_for_a_gradient_that_is_said_to_be_missing() {
    for missing in [Missing::Zero, Missing::SkipIfMissingEverywhere, Missing::AllOrNone] {
        for stage in [Stage::Zero1, Stage::Zero2, Stage::Zero3] {
            let parts = FAMILIES[4];
            let options = Options { missing, ..options(parts, stage) };
            let plan = Plan::of(RANKS, planned(parts, &options), &options).unwrap();
            let everywhere = missing == Missing::AllOrNone;
            let seldom = |way: Handed| {
                move |rank: usize, t: u64| {
                    if t == 3 || rank == 0 && !(everywhere || t == 2) { Handed::There } else { way }
                }
            };
            let said = run_with(parts, &options, 3, seldom(Handed::Says));
            let lacking = run_with(parts, &options, 3, seldom(Handed::Lacks));
            for (rank, ((grown, peak, params), (_, _, expected))) in said.iter().zip(&lacking).enumerate() {
                let what = format!("{missing:?} {stage:?} on rank {rank}");
                assert_eq!(grown[..], [0, 0, 0], "{what}");
                assert_eq!(*peak, plan.memory(rank, &AdamW::default()).buckets, "{what}");
                assert_eq!(params, expected, "{what}");
            }
        }
    }
}

/// A missing gradient that no rank declares delays all buckets once. From then on only its own bucket waits, until the gradient
/// is back.
#[test]
fn a_bucket_that_lacked_a_gradient_travels_last() {
    for stage in [Stage::Zero2, Stage::Zero3] {
        let parts = FAMILIES[0];
        let options = Options { missing: Missing::Zero, ..options(parts, stage) };
        let lacks =
            |way: Handed| move |rank: usize, t: u64| if rank == 1 && t < 4 { way } else { Handed::There };
        let lacking = run_with(parts, &options, 6, lacks(Handed::Lacks));
        let zeros = run_with(parts, &options, 6, lacks(Handed::Zeros));
        // The rank that lacks it opens its bucket after the others, in memory that is free again.
        let apart = [[1, 1, 1, 0, 0], [0, 0, 1, 0, 0]];
        for (((grown, _, params), (_, _, expected)), apart) in lacking.iter().zip(&zeros).zip(apart) {
            assert_eq!(grown[1..], apart, "{stage:?}: {grown:?}");
            assert_eq!(params, expected, "{stage:?}");
        }
        assert!(lacking[1].0[0] > 1, "{:?}", lacking[1].0);
    }
}

/// If every bucket lacks a gradient, the order is unchanged: buckets use the plan's memory, and waiting ones grow the pool.
#[test]
fn buckets_that_all_lack_gradients_wait_for_each_other() {
    let parts = FAMILIES[0];
    let options = Options { missing: Missing::Zero, ..options(parts, Stage::Zero2) };
    loopback::spawn(RANKS, |comm| {
        let (rank, options) = (comm.rank(), Options { meter: Meter::new(), ..options.clone() });
        let mut opt = optimizer(&comm, parts, options);
        let mut grown = 0;
        for t in 1..=4 {
            let mb = opt.micro_batch(1).unwrap();
            // One rank hands over no gradients, the other all.
            if rank == 0 {
                backward(parts).iter().for_each(|param| hand_over(&mb, param, &values(param, rank, t)));
            }
            mb.finish().unwrap();
            let now = traffic(opt.step(StepArgs::default()).unwrap().outcome().unwrap()).pool_grown;
            if rank == 1 {
                assert_eq!(now, 0, "a rank without gradients fills one bucket after another");
            }
            grown = now;
        }
        grown
    })
    .unwrap();
}

/// Under [`Missing::Error`] `none` has the same error as finishing without the gradient.
#[test]
fn a_gradient_that_is_said_to_be_missing_is_missing() {
    let parts = FAMILIES[0];
    loopback::spawn(RANKS, |comm| {
        let mut opt = optimizer(&comm, parts, options(parts, Stage::Zero2));
        let mb = opt.micro_batch(1).unwrap();
        for param in &backward(parts) {
            match (comm.rank(), &*param.0) {
                (1, "3w") => mb.none("3w").unwrap(),
                _ => hand_over(&mb, param, &values(param, comm.rank(), 1)),
            }
        }
        assert!(matches!(mb.none("2w"), Err(Error::GradTwice { name }) if name == "2w"));
        assert!(matches!(mb.none("9w"), Err(Error::UnknownParam { name, .. }) if name == "9w"));
        mb.finish().unwrap();
        let missing = opt.step(StepArgs::default()).and_then(|step| step.outcome());
        let Err(Error::Fault { rank: 1, fault: Fault::MissingGradient { name } }) = missing else {
            panic!("{missing:?}");
        };
        assert_eq!(name, "3w");
    })
    .unwrap();
}

/// With several micro-batches that accumulate in place, one may lack a gradient.
#[test]
fn a_micro_batch_may_say_that_it_has_no_gradient() {
    for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3] {
        let run = |says: bool| {
            let parts = FAMILIES[0];
            let options = Options { missing: Missing::Zero, ..options(parts, stage) };
            let ends = loopback::spawn(RANKS, |comm| {
                let mut opt = optimizer(&comm, parts, options.clone());
                for t in 1..=4 {
                    let mb =
                        if t % 2 == 1 { opt.accumulate(1).unwrap() } else { opt.micro_batch(1).unwrap() };
                    for param in &backward(parts) {
                        // The gradient is missing in the first micro-batch, the second, or both.
                        let without =
                            param.0 == "5w" && t == 1 || param.0 == "4w" && t == 2 || param.0 == "3w";
                        match (without, says) {
                            (true, true) => mb.none(&param.0).unwrap(),
                            (true, false) => {}
                            (false, _) => hand_over(&mb, param, &values(param, comm.rank(), t)),
                        }
                    }
                    mb.finish().unwrap();
                    if t % 2 == 0 {
                        traffic(opt.step(StepArgs::default()).unwrap().outcome().unwrap());
                    }
                }
                crate::common::params(&opt)
            });
            ends.unwrap()
        };
        assert_eq!(run(true), run(false), "{stage:?}");
    }
}

//! Verification of GPU memory: the same findings as on the CPU.

use crate::common::gpus::on_ranks;
use crate::common::{Gradients, Run, STAGES};
use crate::cuda::{alone, room_for, seed, stand_in};
use meshstep_shard::{Difference, Error, Optimizer, Options, Stage};

pub(super) fn wide(stage: Stage) -> Run {
    let options = Options { bucket_len: Some(400), ..Options::default() };
    let gradients = Gradients::Grid;
    Run { lens: vec![300, 70, 130, 500, 64, 90], steps: 3, gradients, options, ..Run::default() }.stage(stage)
}

pub(super) fn take(run: &Run, opt: &mut Optimizer, t: u64) -> Result<(), Error> {
    run.hand_over(opt, t, 0)?;
    opt.step(run.at(t))?.outcome().map(drop)
}

fn difference(error: Error) -> Difference {
    match error {
        Error::Differs(difference) => *difference,
        other => panic!("{other}"),
    }
}

/// Flips a bit of p3 on rank 1 after the first step, verifies, steps, flips it back, and continues.
pub(super) fn flipped(run: &Run, opt: &mut Optimizer, slot: &str) -> Difference {
    opt.verify_every(1).unwrap();
    take(run, opt, 1).unwrap();
    let element = opt.state("p3").unwrap().range.start + 20;
    let flip = |opt: &mut Optimizer| {
        if opt.comm().rank() == 1 {
            opt.flip_bit("p3", slot, element, 4).unwrap();
        }
    };
    flip(opt);
    let told = opt.verify().unwrap_err();
    assert_eq!(take(run, opt, 2).unwrap_err().to_string(), told.to_string());
    flip(opt);
    (2..=run.steps).for_each(|t| take(run, opt, t).unwrap());
    assert_eq!(opt.verify().unwrap().unchecked, 0);
    difference(told)
}

#[test]
fn what_flips_on_a_gpu_is_named_as_on_a_cpu() {
    let _alone = alone();
    for (ranks, stage) in [(2, STAGES[0]), (2, STAGES[1]), (4, STAGES[2])] {
        if !room_for(ranks) {
            continue;
        }
        for slot in ["param", "v"] {
            for order in 0..if stand_in() { 3 } else { 1 } {
                if stand_in() {
                    seed(order);
                }
                let run = Run { ranks, ..wide(stage) };
                let ends = on_ranks(&run, |comm, run| {
                    let mut opt = run.build(comm).unwrap();
                    let told = flipped(run, &mut opt, slot);
                    (told, crate::common::params(&opt))
                });
                let expected = run.run().params;
                let here = meshstep_comm::loopback::spawn(ranks, |comm| {
                    flipped(&run, &mut run.build(comm).unwrap(), slot)
                });
                let here = here.unwrap();
                assert!(
                    ends.iter().all(|(told, end)| *told == here[0] && *end == expected),
                    "{stage:?} {slot}"
                );
            }
        }
    }
}

#[test]
fn gradients_on_gpus_are_compared_and_parameters_repaired() {
    let _alone = alone();
    if !room_for(4) {
        return;
    }
    let run = wide(Stage::Replicated);
    on_ranks(&run, |comm, run| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        take(run, &mut opt, 1).unwrap();
        run.hand_over(&mut opt, 2, 0).unwrap();
        opt.verify_gradients().unwrap();
        if rank == 2 {
            opt.flip_bit("p1", "grad", 69, 31).unwrap();
        }
        let told = difference(opt.verify_gradients().unwrap_err());
        assert_eq!((&told.param[..], told.slot, told.element, told.odd()), ("p1", "grad", Some(69), vec![2]));
        opt.discard_gradients().unwrap();
        if rank == 3 {
            opt.flip_bit("p1", "m", 69, 1).unwrap();
        }
        let repaired = opt.repair().unwrap();
        assert_eq!((&repaired[0].param[..], repaired[0].slot, &repaired[0].ranks[..]), ("p1", "m", &[3][..]));
        take(run, &mut opt, 2).unwrap();
        assert!(opt.repair().unwrap().is_empty());
    });
}

//! Ranks that gather different units, or leave.

use super::{build, step};
use crate::common::params;
use meshstep_comm::loopback;
use meshstep_shard::{Error, Optimizer, Options, StepArgs};
use std::sync::Barrier;

/// Units of one length cannot be distinguished on the wire: the step returns an error, and nothing has changed.
#[test]
fn ranks_that_gather_different_units_are_told_by_the_step() {
    loopback::spawn(3, |comm| {
        let rank = comm.rank();
        let mut opt = build(comm, Options::default()).unwrap();
        let before = params(&opt);
        let order = if rank == 2 { ["b", "a"] } else { ["a", "b"] };
        order.iter().for_each(|unit| drop(opt.gather(unit).unwrap()));
        let told = step(&mut opt).unwrap_err().to_string();
        assert!(told.starts_with("ranks disagree on buckets and gathers sent"), "{told}");
        assert_eq!(params(&opt), before);
        // The ranks' orders of gathers still differ.
        assert!(matches!(step(&mut opt), Err(Error::Disagree { .. })));
    })
    .unwrap();
}

/// Units of different lengths, or one rank that steps or ends its evaluation while others gather: an error on every rank, at
/// once.
#[test]
fn ranks_that_part_in_a_gather_are_told_at_once() {
    type Odd = fn(&mut Optimizer) -> Result<(), Error>;
    let odd: [Odd; 3] = [
        |opt| opt.gather("d").map(drop),
        |opt| opt.step(StepArgs::default()).map(drop),
        |opt| {
            let failed = opt.step_with(StepArgs::default(), 1, |_| Err::<f64, _>("no data")).map(drop);
            assert!(matches!(failed, Err(Error::Comm(_))), "{failed:?}");
            failed
        },
    ];
    for odd in odd {
        // No rank leaves before every rank has its error.
        let told = Barrier::new(3);
        loopback::spawn(3, |comm| {
            let rank = comm.rank();
            let mut opt = build(comm, Options::default()).unwrap();
            let gathered = if rank == 1 { odd(&mut opt) } else { opt.gather("a").map(drop) };
            assert!(matches!(gathered, Err(Error::Comm(_))), "{gathered:?}");
            assert!(matches!(opt.gather("a"), Err(Error::Comm(_))));
            assert!(matches!(opt.step(StepArgs::default()), Err(Error::Comm(_))));
            told.wait();
        })
        .unwrap();
    }
}

#[test]
fn a_rank_that_leaves_during_a_gather_is_an_error_on_the_others() {
    for early in [false, true] {
        loopback::spawn(3, |comm| {
            let rank = comm.rank();
            let mut opt = build(comm, Options::default()).unwrap();
            if rank == 1 {
                return;
            }
            let pending = opt.start_gather("d");
            if early {
                // Dropped in flight: the next call returns the error.
                drop(pending);
            } else {
                let gathered = pending.and_then(|pending| pending.wait()).map(drop);
                assert!(matches!(gathered, Err(Error::Comm(_))), "{gathered:?}");
            }
            assert!(matches!(opt.gather("d"), Err(Error::Comm(_))));
            assert!(matches!(step(&mut opt), Err(Error::Comm(_))));
        })
        .unwrap();
    }
}

//! Ranks that share only the world: some take a step while the others make another call.

use crate::among::sharing::layout;
use crate::common::draws;
use meshstep_comm::{Communicator, Error as CommError, loopback};
use meshstep_optim::AdamW;
use meshstep_shard::{
    DataRank, DataRankError, Error, NonFinite, Optimizer, Options, RankRoles, Stage, StepArgs, Until,
};
use std::sync::Arc;
use std::time::Duration;

/// A rank that waited this long would report the deadline instead of a mismatch.
const DEADLINE: Duration = Duration::from_secs(20);

const NAMES: [&str; 2] = ["w", "v"];

fn zeros(_: &meshstep_tensor::Param, _: meshstep_tensor::SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    Ok(())
}

/// Builds pairs of ranks with parameters of their own; returns the optimizer and the pair's communicator.
fn pairs(
    world: Arc<dyn Communicator>,
    options: Options,
) -> Result<(Optimizer, Arc<dyn Communicator>), Error> {
    let rank = world.rank();
    let pair = world.split(Some(rank as u32 / 2), 0)?.unwrap();
    let place = DataRank { index: rank as u64, ranks: 1, first: true };
    let mut opt = Optimizer::empty(world, place, options)?;
    for name in NAMES {
        opt.add_shared(layout(&[(name, 100)]), AdamW::default(), RankRoles::all(Arc::clone(&pair)), zeros)?;
    }
    Ok((opt, pair))
}

fn step(opt: &mut Optimizer, max_norm: Option<f64>) -> Result<(), Error> {
    let mb = opt.micro_batch(1)?;
    NAMES.iter().try_for_each(|name| mb.grad(name, &[1f32; 100][..]))?;
    mb.finish()?;
    opt.step(StepArgs { max_norm, ..StepArgs::default() })?.outcome().map(drop)
}

fn minimize(opt: &mut Optimizer, _: &Arc<dyn Communicator>) -> Result<(), Error> {
    opt.minimize(Until::default(), |_| StepArgs::default(), 1, |_| Ok::<_, Error>(0.0)).map(drop)
}

fn add(opt: &mut Optimizer, pair: &Arc<dyn Communicator>) -> Result<(), Error> {
    opt.add_shared(layout(&[("late", 9)]), AdamW::default(), RankRoles::all(Arc::clone(pair)), zeros)
}

/// A step's words meet the other call on any communicator: no rank waits for the deadline.
#[test]
fn a_call_that_meets_a_step_of_other_groups_is_told() {
    type Call = fn(&mut Optimizer, &Arc<dyn Communicator>) -> Result<(), Error>;
    let calls: [(&str, Call); 5] = [
        ("verify", |opt, _| opt.verify().map(drop)),
        ("verify_every", |opt, _| opt.verify_every(2)),
        ("repair", |opt, _| opt.repair().map(drop)),
        ("minimize", minimize),
        ("add", add),
    ];
    let mut drawn = draws(1);
    for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3] {
        for non_finite in [NonFinite::Skip, NonFinite::Propagate] {
            for max_norm in [None, Some(1.0)] {
                for (name, call) in calls {
                    if !drawn() {
                        continue;
                    }
                    let options = Options { stage, non_finite, bucket_len: Some(64), ..Options::default() };
                    let what = format!("{name} {stage:?} {non_finite:?} {max_norm:?}");
                    let config = loopback::Config { timeout: DEADLINE, ..loopback::Config::new(4) };
                    let told = loopback::spawn_with(config, |world| {
                        let rank = world.rank();
                        let (mut opt, pair) = pairs(world, options.clone()).unwrap();
                        step(&mut opt, max_norm).unwrap();
                        let told = if rank < 2 { call(&mut opt, &pair) } else { step(&mut opt, max_norm) };
                        told.unwrap_err()
                    });
                    for (rank, error) in told.unwrap().into_iter().enumerate() {
                        let Error::Comm(failure) = &error else { panic!("{what}, rank {rank}: {error}") };
                        let told = match failure.cause() {
                            CommError::Mismatch { .. } => true,
                            // Aborted by a rank that saw the mismatch before this one arrived.
                            CommError::Aborted { .. } => rank >= 2,
                            _ => false,
                        };
                        assert!(told, "{what}, rank {rank}: {error}");
                    }
                }
            }
        }
    }
}

/// Data places that are impossible, or that ranks give differently: an error on every rank, after which they can try again.
#[test]
fn data_places_that_contradict_each_other_are_refused() {
    let place = |index, ranks, first| DataRank { index, ranks, first };
    let right = |rank: usize| place(rank as u64 / 2, 2, rank.is_multiple_of(2));
    let told = |odd: usize, wrong: DataRank| {
        let told = loopback::spawn(4, |world| {
            let place = |rank| if rank == odd { wrong } else { right(rank) };
            let made = Optimizer::empty(Arc::clone(&world), place(world.rank()), Options::default());
            let again = Optimizer::empty(Arc::clone(&world), right(world.rank()), Options::default());
            assert!(again.is_ok());
            made.map(drop).unwrap_err()
        });
        told.unwrap()
    };
    for (odd, wrong, expected) in [
        (3, place(1, 3, false), DataRankError::Apart { index: 1, ranks: [2, 3], says: [2, 3] }),
        (2, place(0, 2, false), DataRankError::Count { index: 0, says: 2, there: 3 }),
        (1, place(7, 2, false), DataRankError::Count { index: 0, says: 2, there: 1 }),
        (1, place(0, 2, true), DataRankError::Firsts { index: 0, ranks: 2, firsts: 2 }),
        (2, place(1, 2, false), DataRankError::Firsts { index: 1, ranks: 2, firsts: 0 }),
        (0, DataRank::OWN, DataRankError::Apart { index: 0, ranks: [0, 1], says: [1, 2] }),
    ] {
        for error in told(odd, wrong) {
            assert!(matches!(&error, Error::Place(found) if *found == expected), "{wrong:?}: {error}");
        }
    }
    for (wrong, expected) in [
        (place(5, 0, true), DataRankError::NoRanks { index: 5 }),
        (place(5, 1, false), DataRankError::Firsts { index: 5, ranks: 1, firsts: 0 }),
    ] {
        for (rank, error) in told(1, wrong).into_iter().enumerate() {
            let own = matches!(&error, Error::Place(found) if *found == expected);
            let others = matches!(&error, Error::Disagree { what, rank: 1, .. } if what == "this call");
            assert!(if rank == 1 { own } else { others }, "{error}");
        }
    }
}

//! Parameters that several groups of ranks share in different ways, stepped together: the result of one rank, bit for bit.

mod parting;
pub(crate) mod sharing;
mod tensors;

use crate::common::draws;
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{AdamW, Lamb, Rule, Strided};
use meshstep_shard::{
    Combine, DataRank, Error, Initial, Optimizer, Options, Owners, Parts, RankRoles, Stage, StepArgs,
    WeightError,
};
use meshstep_tensor::{Param, SliceMut};
use sharing::{CUT, alone, layout, on_rank, shared, troubled, weighed};
use std::sync::Arc;

fn check(rule: impl Rule + Clone + 'static, stages: &[Stage]) {
    let mut drawn = draws(1);
    for combine in [Combine::Mean, Combine::Sum, Combine::Weighted] {
        let (params, norms) = alone(rule.clone(), combine);
        for &stage in stages {
            for initial in [Initial::Broadcast, Initial::Compare] {
                if !drawn() {
                    continue;
                }
                let options = Options { stage, combine, initial, bucket_len: Some(64), ..Options::default() };
                let ends = loopback::spawn(8, |world| on_rank(world, rule.clone(), options.clone()));
                for (rank, (own, seen)) in ends.unwrap().into_iter().enumerate() {
                    let what = format!("{stage:?} {combine:?} {initial:?} rank {rank}");
                    assert_eq!(seen, norms, "{what}");
                    assert_eq!(own[0], params[0][rank % 2 * CUT..][..CUT], "{what}");
                    assert_eq!(own[1..], params[1..], "{what}");
                }
            }
        }
    }
}

#[test]
fn ways_of_sharing_step_together_as_one_rank_does() {
    let stages = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];
    let stages = [&stages[..], &[Stage::WholeParams(Owners::SortedGreedy)]].concat();
    check(AdamW::default(), &stages);
}

/// Norms of a tensor that is cut between ranks, or held by several, are the whole tensor's.
#[test]
fn sums_over_tensors_are_of_whole_tensors() {
    check(Lamb::default(), &[Stage::Zero1, Stage::Zero2, Stage::Zero3]);
}

#[test]
fn sums_that_would_count_twice_are_refused() {
    let refused = loopback::spawn(8, |world: Arc<dyn Communicator>| {
        let options = Options { stage: Stage::Replicated, ..Options::default() };
        shared(world, Lamb::default(), options).unwrap_err()
    });
    for error in refused.unwrap() {
        assert!(matches!(&error, Error::Shared { what, .. } if what.contains("lamb")), "{error}");
    }
}

/// A missing or non-finite gradient of one rank affects every rank, also those that share no parameter with it.
#[test]
fn ranks_that_share_nothing_decide_together() {
    for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3] {
        let options = Options { stage, ..Options::default() };
        let all = loopback::spawn(8, |world| troubled(world, options.clone())).unwrap();
        for (said, t) in &all {
            assert!(said[0].contains("rank 6") && said[0].contains("whole"), "{said:?}");
            assert_eq!((&said[1..], *t), (&["skipped".to_owned(), "applied".to_owned()][..], 1), "{stage:?}");
        }
    }
}

/// An optimizer without parameters is an error on every rank.
#[test]
fn an_optimizer_without_parameters_says_so() {
    loopback::spawn(2, |world: Arc<dyn Communicator>| {
        let mut opt = Optimizer::empty(world, DataRank::OWN, Options::default()).unwrap();
        assert!(matches!(opt.micro_batch(1).map(drop), Err(Error::NothingTrains)));
        assert!(matches!(opt.step(StepArgs::default()).map(drop), Err(Error::NothingTrains)));
    })
    .unwrap();
}

/// Parts on one rank that omit elements, or repeat them, are an error on every rank, and the next call succeeds.
#[test]
fn parts_that_are_not_the_parameter_are_refused() {
    let by = |run| Strided { first: 9, run, stride: 100 };
    let wrong: [Parts; 5] = [
        vec![],
        vec![(0..5, by(5))],
        vec![(0..5, by(5)), (4..10, by(5))],
        vec![(0..5, by(5)), (5..11, by(5))],
        vec![(0..10, by(0))],
    ];
    loopback::spawn(2, |world: Arc<dyn Communicator>| {
        let rank = world.rank();
        let mut opt = Optimizer::empty(
            Arc::clone(&world),
            DataRank { index: 0, ranks: 2, first: rank == 0 },
            Options::default(),
        )
        .unwrap();
        let shards = world.split(Some(rank as u32), 0).unwrap().unwrap();
        let mut add = |parts: Parts| {
            let parts = [("w".to_owned(), parts)].into();
            let among =
                RankRoles { replicas: Arc::clone(&shards), parts, ..RankRoles::all(Arc::clone(&shards)) };
            opt.add_shared(layout(&[("w", 10)]), AdamW::default(), among, |_, _| Ok(()))
        };
        let right: Parts = vec![(0..4, by(2)), (4..10, by(6))];
        for wrong in &wrong {
            let error = add(if rank == 1 { wrong.clone() } else { right.clone() }).unwrap_err();
            assert_eq!(rank == 1, matches!(&error, Error::Parts { len: 10, .. }), "{error}");
            assert!(error.to_string().contains("\"w\" are not its 10 elements"), "{error}");
        }
        add(right).unwrap();
    })
    .unwrap();
}

/// Two ranks compute the same micro-batches and one gives them other weights: an error on all ranks, and the next step succeeds.
#[test]
fn ranks_that_weigh_the_same_apart_are_told() {
    let options = |combine| Options { combine, bucket_len: Some(64), ..Options::default() };
    let apart = |ranks, weights| Some(WeightError::Apart { ranks, weights });
    let told = loopback::spawn(8, |world| weighed(world, options(Combine::Weighted)));
    let expected = [
        None,
        apart([4, 5], [3, 2]),
        None,
        // The differences cancel in the sum.
        apart([2, 3], [3, 4]),
        // The weights come in another order.
        apart([6, 7], [3, 3]),
        None,
    ];
    assert_eq!(told.unwrap(), vec![expected; 8]);
    // Unused weights are not compared.
    for combine in [Combine::Mean, Combine::Sum] {
        let told = loopback::spawn(8, |world| weighed(world, options(combine)));
        assert_eq!(told.unwrap(), vec![[const { None::<WeightError> }; 6]; 8]);
    }
}

/// Another name of a parameter, and parameters that join later.
#[test]
fn another_name_stays_that_of_its_parameter() {
    loopback::spawn(2, |world: Arc<dyn Communicator>| {
        let first = |p: &Param, mut values: SliceMut<'_>| {
            let of = p.len() as f32;
            values.copy_from((&vec![of; p.len()][..]).into())
        };
        let both = layout(&[("a", 5), ("b", 6)]);
        let mut opt = Optimizer::new(world, both, AdamW::default(), first, Options::default()).unwrap();
        opt.also_called("c", "a").unwrap();
        opt.also_called("c", "a").unwrap();
        assert!(matches!(opt.also_called("c", "b"), Err(Error::NameTaken { .. })));
        assert!(matches!(opt.also_called("d", "e"), Err(Error::UnknownParam { .. })));
        let taken = opt.add_param_group(layout(&[("c", 7)]), AdamW::default(), first);
        assert!(matches!(taken, Err(Error::NameTaken { .. })), "{taken:?}");
        opt.add_param_group(layout(&[("d", 8), ("e", 9)]), AdamW::default(), first).unwrap();
        let lens = ["a", "b", "c", "d", "e"].map(|name| opt.param(name).unwrap().len());
        assert_eq!(lens, [5, 6, 5, 8, 9]);
    })
    .unwrap();
}

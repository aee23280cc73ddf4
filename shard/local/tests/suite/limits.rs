//! Plans at the edge of the valid range: the right result, or an error on every rank.

use crate::common::{self, Gradients, Run, WhichRule, draws, turns};
use crate::equal::{assert_equal, run, train};
use crate::naive::Naive;
use crate::traffic::planned;
use meshstep_comm::loopback;
use meshstep_local::{
    Fragment, LocalError, LocalOptimizer, LocalPlan, LocalWarning, Merge, Placement, Select, Slots, Timing,
    Veto, Weights, What, Workers,
};
use meshstep_optim::AdamW;
use meshstep_shard::{Stage, Step};

const STAGES: [Stage; 4] = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];

fn of(params: Select, what: What, period: u64) -> Fragment {
    Fragment { params, ..Fragment::mean(what, Timing::every(period)) }
}

fn named(names: &[usize]) -> Select {
    Select::Names(names.iter().map(|&i| common::name(i)).collect())
}

fn elements(param: usize, range: std::ops::Range<usize>) -> Select {
    Select::Elements { name: common::name(param), range }
}

/// Checks that two workers of two ranks end as in a loop, and send the planned bytes.
fn is_right(run: &Run, plan: &LocalPlan, what: &str) {
    let mut naive = Naive::new(run, plan, 2);
    (0..run.steps).for_each(|step| naive.step(step));
    for (rank, end) in train(run, plan, 2).iter().enumerate() {
        assert_equal(end, &naive.workers[rank / 2], &format!("{what}, rank {rank}"));
        let expected = planned(run, plan, 2, rank);
        assert_eq!(end.sent[1..], [expected.payload, expected.words], "{what}, rank {rank}");
    }
}

#[test]
fn fragments_may_be_sparse() {
    let moment = || What::State(Slots::First);
    let plans = [
        // Parameters with others, and an empty one, between them.
        vec![of(named(&[4, 0, 2]), What::Params, 2), of(named(&[5, 1]), moment(), 3)],
        // Fragments without elements on one rank: a parameter of one element, the first and the last element of a long one.
        vec![of(named(&[1]), What::Params, 2)],
        vec![of(elements(3, 0..1), What::Params, 2), of(elements(3, 129..130), What::Params, 3)],
        // Every second element of the beginning.
        (0..20).map(|j| of(elements(0, 2 * j..2 * j + 1), What::Params, 2)).collect(),
    ];
    for (i, fragments) in plans.into_iter().enumerate() {
        for stage in turns(&STAGES, i, 2) {
            is_right(
                &run(2, 2).stage(stage),
                &LocalPlan::new(fragments.clone()),
                &format!("plan {i}, {stage:?}"),
            );
        }
    }
}

#[test]
fn tensors_may_be_longer_than_buckets() {
    let mut drawn = draws(1);
    for (b, bucket_len) in [1, 17, usize::MAX].into_iter().enumerate() {
        // Buckets of the optimizer as long as the longest tensor, nearly as long, or far shorter.
        for (o, optimizers) in [1, 129, 130].into_iter().enumerate() {
            if !drawn() {
                continue;
            }
            for stage in turns(&STAGES, 2 * b + o, 1) {
                let mut run = run(2, 2).stage(stage);
                run.options.bucket_len = Some(optimizers);
                for plan in [LocalPlan::des_loc(2, 3, 4), LocalPlan::diloco(2)] {
                    let plan = LocalPlan { bucket_len, ..plan };
                    is_right(&run, &plan, &format!("buckets of {bucket_len}, {optimizers}, {stage:?}"));
                }
            }
        }
    }
}

/// Returns the result of a plan's check, equal on every rank of two workers.
fn told(rule: WhichRule, plan: &LocalPlan) -> Result<Vec<LocalWarning>, LocalError> {
    let run = Run { rule, ..run(2, 2) };
    let told = loopback::spawn(4, |world| {
        let worker = world.rank() as u32 / 2;
        let (comm, between) = Workers::split(world, worker).unwrap();
        LocalOptimizer::new(run.build(comm).unwrap(), between, plan.clone())
            .map(|local| local.warnings().to_vec())
    });
    let mut told = told.unwrap();
    assert!(told.iter().all(|one| format!("{one:?}") == format!("{:?}", told[0])), "{told:?}");
    told.remove(0)
}

fn refused(plan: &LocalPlan) -> LocalError {
    told(WhichRule::AdamW, plan).unwrap_err()
}

#[test]
fn a_period_of_zero_is_refused_in_every_preset() {
    let plans = [
        LocalPlan::local_sgd(0),
        LocalPlan::post_local_sgd(3, 0),
        LocalPlan::local_adam(0),
        LocalPlan::des_loc(2, 0, 4),
        LocalPlan::des_loc(2, 4, 0),
        LocalPlan::des_loc_default(0),
        LocalPlan::des_loc_half_lives(0, 0.9, 0.999),
        LocalPlan::mt_dao(2, &[Some(0)], None),
        LocalPlan::diloco(0),
        LocalPlan::streaming_diloco(0, 2, 0, 0.0),
        LocalPlan::local_sgd(0).placed(Placement::Before),
    ];
    for plan in plans {
        let error = refused(&plan);
        assert!(matches!(error, LocalError::Period { .. }), "{plan:?}: {error}");
    }
}

#[test]
fn a_result_arrives_before_the_next_is_sent() {
    let late = |plan: LocalPlan, delay| plan.with(|f| f.timing.delay = delay);
    for plan in
        [LocalPlan::local_sgd(4), LocalPlan::local_sgd(4).placed(Placement::Before), LocalPlan::diloco(4)]
    {
        for delay in [4, 5, u64::MAX] {
            let error = refused(&late(plan.clone(), delay));
            let is = matches!(error, LocalError::Delay { fragment: 0, delay: d, period: 4 } if d == delay);
            assert!(is, "{error}");
        }
        is_right(&run(2, 2).stage(Stage::Zero1), &late(plan, 3), "a delay of 3 in 4");
    }
    // The first fragment is due every step.
    let error = refused(&late(LocalPlan::post_local_sgd(3, 4), 1));
    assert!(matches!(error, LocalError::Delay { fragment: 0, delay: 1, period: 1 }), "{error}");
    let error = refused(&LocalPlan::streaming_diloco(4, 2, 4, 0.5));
    assert!(matches!(error, LocalError::Delay { fragment: 0, .. }), "{error}");
    // The flight that the first fragment sends last, at 8, has arrived when the second one begins.
    let then = |from| {
        let first = Timing { delay: 2, during: 0..9, ..Timing::every(4) };
        let second = Timing { during: from..u64::MAX, ..Timing::every(1) };
        LocalPlan::new([first, second].map(|timing| Fragment::mean(What::Params, timing)).into())
    };
    assert!(matches!(refused(&then(10)), LocalError::Overlap { first: 0, second: 1, .. }));
    is_right(&Run { steps: 13, ..run(2, 2) }.stage(Stage::Zero2), &then(11), "one after the other");
}

#[test]
fn a_fragment_of_nothing_is_refused() {
    let params = |select| {
        LocalPlan::new(vec![of(elements(0, 0..9), What::Params, 2), of(select, What::State(Slots::First), 2)])
    };
    // Parameter 2 has no elements; no parameter has its middle in part 3 of 9.
    let empty =
        [named(&[]), named(&[2]), elements(3, 7..7), elements(2, 0..0), Select::Part { index: 3, of: 9 }];
    for select in empty {
        let error = refused(&params(select.clone()));
        assert!(matches!(error, LocalError::Empty { fragment: 1 }), "{select:?}: {error}");
    }
    assert!(matches!(refused(&LocalPlan::streaming_diloco(4, 0, 0, 0.0)), LocalError::NoFragments));
    assert!(matches!(refused(&LocalPlan::streaming_diloco(40, 9, 0, 0.0)), LocalError::Empty { .. }));
    assert!(matches!(refused(&params(elements(3, 129..131))), LocalError::Elements { len: 130, .. }));
    assert!(matches!(refused(&params(named(&[9]))), LocalError::UnknownParam { count: 6, .. }));
    assert!(matches!(refused(&params(named(&[3, 0, 3]))), LocalError::NamedTwice { .. }));
    assert!(matches!(refused(&params(Select::Part { index: 0, of: 0 })), LocalError::NoSuchPart { .. }));
    let error = refused(&LocalPlan { bucket_len: 0, ..LocalPlan::local_sgd(2) });
    assert!(matches!(error, LocalError::EmptyBuckets), "{error}");
}

#[test]
fn second_moments_that_stay_apart_are_a_warning_and_train_on() {
    let apart = |fragment, rule| vec![LocalWarning::SecondMomentsApart { fragment, rule, beta2: 0.999 }];
    let des_loc = LocalPlan::des_loc(2, 3, None);
    let kept = LocalPlan::des_loc(2, 3, 4).with(|f| {
        if f.what == What::State(Slots::Second) {
            f.merge = Merge::Keep;
        }
    });
    for plan in [des_loc.clone(), des_loc.placed(Placement::Before), kept] {
        assert_eq!(told(WhichRule::AdamW, &plan).unwrap(), apart(2, "adamw"));
        is_right(&run(2, 2).stage(Stage::Zero2), &plan, "second moments apart");
    }
    let dao = LocalPlan::mt_dao(2, &[Some(3), None], None);
    let beta2 = AdamW::default().beta2;
    let warnings = told(WhichRule::TwoMoments, &dao).unwrap();
    assert!(
        matches!(warnings[..], [LocalWarning::SecondMomentsApart { fragment: 3, beta2: b, .. }] if b == beta2),
        "{warnings:?}"
    );
    // No warning if second moments are averaged, or first moments are not.
    for plan in [LocalPlan::des_loc(2, 3, 4), LocalPlan::des_loc(2, None, None), LocalPlan::local_sgd(2)] {
        assert_eq!(told(WhichRule::AdamW, &plan).unwrap(), []);
    }
}

#[test]
fn where_nobody_counts_in_one_fragment_nothing_is_applied() {
    // Both are due in steps 1 and 3; no worker has tokens in the first two steps.
    let plan = |delay| {
        let timing = |delay| Timing { delay, ..Timing::every(2) };
        let first = Fragment::mean(What::Params, timing(0));
        let second =
            Fragment { weights: Weights::Tokens, ..Fragment::mean(What::State(Slots::First), timing(delay)) };
        LocalPlan::new(vec![first, second])
    };
    for (stage, delay) in [(Stage::Replicated, 0), (Stage::Zero2, 0), (Stage::Zero2, 1)] {
        let run = Run { gradients: Gradients::Grid, ..run(2, 2) }.stage(stage);
        let ends = loopback::spawn(4, |world| {
            let rank = world.rank();
            let (comm, between) = Workers::split(world, rank as u32 / 2).unwrap();
            let mut local = LocalOptimizer::new(run.build(comm).unwrap(), between, plan(delay)).unwrap();
            let mut step = |step: u64| {
                let mb = local.micro_batch(u64::from(step > 1)).unwrap();
                for i in (0..run.lens.len()).rev() {
                    let grad: Vec<f32> =
                        run.gradient(step + 1, 0, rank, i).iter().map(|&g| g as f32).collect();
                    mb.grad(&common::name(i), &grad[..]).unwrap();
                }
                mb.finish().unwrap();
                let done = local.step(run.at(step + 1)).unwrap();
                (done.exchanged, crate::equal::end(&run, &local).params)
            };
            (0..4).map(&mut step).collect::<Vec<_>>()
        });
        let ends = ends.unwrap();
        let veto = Veto::NoWeight { fragment: 1 };
        for end in &ends {
            assert_eq!(end[1].0.failed, [(0, veto), (1, veto)]);
            assert_eq!(
                (&end[3].0.failed, &end[3].0.merged),
                (&vec![], &vec![0, 1][..2 - delay as usize].to_vec())
            );
            assert_eq!(end[3].1, ends[0][3].1);
        }
        assert_ne!(ends[0][1].1, ends[2][1].1);
    }
}

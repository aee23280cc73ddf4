//! Plans as data: due steps, refusals, traffic.

use meshstep_local::{
    Fragment, LocalError, LocalPlan, LocalWarning, Merge, OnFailure, Outer, ParamSpec, Placement, Ring,
    Select, Slots, Timing, Weights, What, Worker, half_life,
};
use meshstep_optim::{AdamW, Lamb, Moments, QhAdamW, RmsProp, Sgd};
use meshstep_shard::{Groups, Options, Part, Sizes, Stage};
use meshstep_tensor::{DType, Layout};
use std::sync::Arc;

fn layout(lens: &[usize]) -> Layout {
    let add = |b: meshstep_tensor::LayoutBuilder, (i, &len): (usize, &usize)| {
        b.param(format!("p{i}"), &[len], DType::F32)
    };
    lens.iter().enumerate().fold(Layout::builder(), add).build().unwrap()
}

fn part(lens: &[usize], shards: usize, stage: Stage) -> Part {
    let options = Options { stage, bucket_len: Some(300), ..Options::default() };
    Part::new(layout(lens), Sizes::all(shards), [], &options).unwrap()
}

fn trained(lens: &[usize], rules: impl Into<Groups>) -> Vec<ParamSpec> {
    ParamSpec::of(&part(lens, 1, Stage::Replicated), &rules.into()).unwrap()
}

/// Returns the steps below `horizon` at which each fragment is due.
fn due(plan: &LocalPlan, horizon: u64) -> Vec<Vec<u64>> {
    let mut due = vec![Vec::new(); plan.fragments.len()];
    for step in 0..horizon {
        for placement in [Placement::Before, Placement::After] {
            plan.due(step, placement).for_each(|f| due[f].push(step));
        }
    }
    due
}

#[test]
fn every_method_is_due_when_its_paper_says() {
    let none = Vec::<u64>::new();
    assert_eq!(due(&LocalPlan::local_sgd(5), 12), [vec![4, 9]]);
    assert_eq!(due(&LocalPlan::post_local_sgd(3, 4), 13), [vec![0, 1, 2], vec![3, 7, 11]]);
    assert_eq!(due(&LocalPlan::local_adam(4), 9), [vec![3, 7], vec![3, 7], vec![3, 7]]);
    assert_eq!(due(&LocalPlan::des_loc(2, 3, 6), 7), [vec![1, 3, 5], vec![2, 5], vec![5]]);
    let before = LocalPlan::des_loc(2, 3, 6).placed(Placement::Before);
    assert_eq!(due(&before, 7), [vec![0, 2, 4, 6], vec![0, 3, 6], vec![0, 6]]);
    assert_eq!(due(&LocalPlan::des_loc(2, None, None), 4), [vec![1, 3], none.clone(), none.clone()]);
    assert_eq!(due(&LocalPlan::des_loc_default(1), 6)[1..], [vec![2, 5], vec![5]]);
    let dao = LocalPlan::mt_dao(2, &[Some(3), None], Some(4));
    assert_eq!(due(&dao, 6), [vec![1, 3, 5], vec![2, 5], none, vec![3]]);
    assert_eq!(due(&LocalPlan::diloco(3), 6), [vec![2, 5]]);
    let streaming = LocalPlan::streaming_diloco(6, 3, 2, 0.5);
    assert_eq!(due(&streaming, 12), [vec![5, 11], vec![1, 7], vec![3, 9]]);
    let arrives: Vec<u64> =
        (0..12).filter(|&t| streaming.arriving(t, Placement::After).any(|f| f == 1)).collect();
    assert_eq!(arrives, [3, 9]);
}

#[test]
fn half_lives_make_periods() {
    assert!((half_life(0.5) - 1.0).abs() < 1e-15 && (half_life(0.999) - 692.8).abs() < 0.01);
    let never = LocalPlan::des_loc_half_lives(16, 0.9, 1.0).fragments[2].timing.period;
    assert!(half_life(1.0) == f64::INFINITY && never.is_none());
    let plan = LocalPlan::des_loc_half_lives(16, 0.9, 0.999);
    assert_eq!(plan.fragments.iter().map(|f| f.timing.period).collect::<Vec<_>>(), [16, 16, 693].map(Some));
}

#[test]
fn plans_that_cannot_work_are_refused() {
    let params = trained(&[10, 20, 30], AdamW::default());
    let plan = || LocalPlan::des_loc(4, 8, 12);
    let change = |f: usize, change: &dyn Fn(&mut Fragment)| {
        let mut plan = plan();
        change(&mut plan.fragments[f]);
        plan
    };
    let outer = |rule| Merge::Outer(Outer { rule, lr: 0.7 });
    let named = |name: &str| What::State(Slots::Named(name.into()));
    let add = |fragment| {
        let mut plan = plan();
        plan.fragments.push(fragment);
        plan
    };
    let elements = |range| Fragment {
        params: Select::Elements { name: "p1".into(), range },
        ..plan().fragments[0].clone()
    };
    let table: Vec<(LocalPlan, &str)> = vec![
        (LocalPlan::new(vec![]), "the plan has no fragments; give it one, such as LocalPlan::local_sgd's"),
        (LocalPlan { bucket_len: 0, ..plan() }, "bucket_len is 0; use at least 1 element"),
        (
            change(1, &|f| f.timing.period = Some(0)),
            "fragment 1 has the period 0; use 1 or more, or None for never",
        ),
        (
            change(1, &|f| f.timing.offset = 8),
            "fragment 1 has the offset 8 in a period of 8; use one below the period",
        ),
        (
            change(0, &|f| f.timing.delay = 4),
            "fragment 0 has the delay 4 and is sent every 4 steps; use a delay below that",
        ),
        (
            change(0, &|f| f.taken = 0.0),
            "fragment 0 takes the share 0 of a result; use a number above 0, at most 1",
        ),
        (
            change(0, &|f| f.taken = f64::NAN),
            "fragment 0 takes the share NaN of a result; use a number above 0, at most 1",
        ),
        (
            change(2, &|f| f.wire = Some(DType::F16)),
            "fragment 2 travels as f16; use bf16, f32 or f64, or None for its own type",
        ),
        (
            change(1, &|f| f.merge = outer(Arc::new(Sgd::default()))),
            "fragment 1: an outer optimizer cannot be used with state; use Merge::Mean, or What::Params",
        ),
        (
            change(0, &|f| f.merge = Merge::Reset),
            "fragment 0: Merge::Reset cannot be used with parameters; use What::State",
        ),
        (
            change(1, &|f| (f.merge, f.timing.delay) = (Merge::Reset, 1)),
            "fragment 1: Merge::Reset cannot be used with a delay, as nothing travels; use a delay of 0",
        ),
        (
            change(0, &|f| f.merge = outer(Arc::new(Sgd { momentum: -1.0, ..Sgd::default() }))),
            "fragment 0 cannot be stepped by the outer rule sgd at lr 0.7: sgd: momentum = -1 is out of range; use a number >= 0 that f32 can hold",
        ),
        (
            change(0, &|f| f.merge = outer(Arc::new(Lamb::default()))),
            "fragment 0 cannot be stepped by the outer rule lamb at lr 0.7: it sees more than an element; \
             use a rule that sees elements",
        ),
        (
            change(1, &|f| f.what = named("momentum")),
            "fragment 1 selects the state \"momentum\", but rule adamw has only [\"m\", \"v\"]; \
             choose a preset for this rule, or select its state by these names",
        ),
        (
            change(1, &|f| f.what = What::OuterMomentum(0)),
            "fragment 1 selects the outer momentum of fragment 0, which has none",
        ),
        (
            change(1, &|f| f.what = What::OuterMomentum(9)),
            "fragment 1 selects the outer momentum of fragment 9, which has none",
        ),
        (
            change(0, &|f| f.params = Select::Names(vec![])),
            "fragment 0 has no elements; choose parameters that have some, or fewer parts",
        ),
        (
            change(0, &|f| f.params = Select::Part { index: 1, of: 9 }),
            "fragment 0 has no elements; choose parameters that have some, or fewer parts",
        ),
        (
            add(elements(3..5)),
            "fragments 0 and 3 both have elements of \"p1\"; give each element to one of them",
        ),
        (
            add(Fragment::mean(named("v"), Timing::every(5))),
            "fragments 2 and 3 both have elements of \"p0\"; give each element to one of them",
        ),
    ];
    for (plan, expected) in table {
        assert_eq!(plan.check(&params).unwrap_err().to_string(), expected);
    }
    let sgd = trained(&[4], Sgd::default());
    let error = LocalPlan::des_loc(1, 2, None).check(&sgd).unwrap_err();
    assert!(matches!(error, LocalError::NoState { fragment: 1, rule: "sgd", has: [], .. }), "{error}");
}

#[test]
fn plans_that_fit_are_taken() {
    let params = trained(&[10, 20, 30], AdamW::default());
    let outer_momentum = |plan: LocalPlan| {
        let reset =
            Fragment { merge: Merge::Reset, ..Fragment::mean(What::OuterMomentum(0), Timing::every(8)) };
        LocalPlan::new(plan.fragments.into_iter().chain([reset]).collect())
    };
    // Neighbouring ranges, and an element in two fragments at different times, do not overlap.
    let piece = |range, during| Fragment {
        params: Select::Elements { name: "p1".into(), range },
        ..Fragment::mean(What::Params, Timing { during, ..Timing::every(2) })
    };
    let pieces = vec![piece(0..5, 0..9), piece(5..20, 0..9), piece(4..6, 9..20)];
    for plan in [
        LocalPlan::local_sgd(1),
        LocalPlan::post_local_sgd(10, 4),
        LocalPlan::local_adam(32),
        LocalPlan::diloco(1),
        LocalPlan::streaming_diloco(10, 3, 9, 0.5),
        outer_momentum(LocalPlan::diloco(4)),
        LocalPlan::new(pieces),
    ] {
        assert_eq!(plan.check(&params).unwrap(), []);
    }
    let two = QhAdamW { moments: Moments::new(&[(0.9, 0.3), (0.99, 0.5)]).unwrap(), ..QhAdamW::default() };
    assert_eq!(LocalPlan::mt_dao(2, &[Some(4), Some(8)], Some(16)).check(&trained(&[3], two)).unwrap(), []);
    let one = trained(&[3], QhAdamW::default());
    assert_eq!(LocalPlan::mt_dao(2, &[Some(4)], Some(16)).check(&one).unwrap(), []);
    let rms = trained(&[3], RmsProp { momentum: 0.9, ..RmsProp::default() });
    assert_eq!(LocalPlan::des_loc(1, 2, 3).check(&rms).unwrap(), []);
    // Never exchanging state that does not exist is valid.
    assert_eq!(LocalPlan::des_loc(1, None, None).check(&trained(&[3], Sgd::default())).unwrap(), []);
}

#[test]
fn what_a_paper_advises_against_is_a_warning() {
    let params = trained(&[10], AdamW::default());
    let apart = LocalWarning::SecondMomentsApart { fragment: 2, rule: "adamw", beta2: 0.999 };
    assert_eq!(LocalPlan::des_loc(4, 8, None).check(&params).unwrap(), [apart]);
    // If first moments stay apart too, no worker divides a common average by its own root.
    assert_eq!(LocalPlan::des_loc(4, None, None).check(&params).unwrap(), []);
    let never = LocalPlan::local_sgd(10).with(|f| f.timing.during = 11..20);
    let warning = LocalWarning::NeverDue { fragment: 0, from: 11, until: 20 };
    assert_eq!(never.check(&params).unwrap(), [warning]);
    let once = LocalPlan::local_sgd(10).with(|f| f.timing.during = 11..21);
    assert_eq!(once.check(&params).unwrap(), []);
}

#[test]
fn equal_plans_have_equal_hashes_and_others_other_ones() {
    let plan = || LocalPlan::streaming_diloco(8, 2, 1, 0.5);
    assert_eq!(plan().hash(), plan().hash());
    assert_eq!(LocalPlan::local_adam(7).describe(), LocalPlan::des_loc(7, 7, 7).describe());
    let changes: [&dyn Fn(&mut Fragment); 13] = [
        &|f| f.params = Select::All,
        &|f| f.what = What::State(Slots::First),
        &|f| f.timing.period = Some(9),
        &|f| f.timing.offset = 3,
        &|f| f.timing.delay = 2,
        &|f| f.timing.placement = Placement::Before,
        &|f| f.timing.during = 0..100,
        &|f| f.merge = Merge::Mean,
        &|f| f.merge = Merge::Outer(Outer::nesterov(0.7, 0.95)),
        &|f| f.merge = Merge::Outer(Outer::nesterov(0.8, 0.9)),
        &|f| f.taken = 1.0,
        &|f| f.weights = Weights::Tokens,
        &|f| f.on_failure = OnFailure::Retry,
    ];
    let mut hashes = vec![plan().hash(), LocalPlan { bucket_len: 5, ..plan() }.hash()];
    hashes.extend(changes.map(|change| plan().with(change).hash()));
    hashes.push(plan().with(|f| f.wire = Some(DType::BF16)).hash());
    hashes.sort_unstable();
    assert!(hashes.windows(2).all(|pair| pair[0] != pair[1]));
    // Lines in the record of a run.
    let line = LocalPlan::diloco(8).describe();
    assert!(line.contains("merge of fragment 0 = sgd at 0.7, momentum 0.9, form 0,"), "{line}");
    assert!(line.contains("period of fragment 0 = 8\n"), "{line}");
}

/// Returns the traffic of one-rank workers, with all elements on each rank.
fn sent(plan: &LocalPlan, lens: &[usize], workers: usize, steps: u64) -> meshstep_local::LocalTraffic {
    let worker = |rank| {
        let ring = Ring { ranks: workers, rank };
        Worker { shard: 0, across: ring, world: ring }
    };
    let part = part(lens, 1, Stage::Replicated);
    plan.traffic(&part, &AdamW::default().into(), worker(0), 0..steps).unwrap()
}

#[test]
fn des_loc_sends_a_hundred_and_seventy_times_less() {
    let (lens, p) = ([1000, 24], 1024u64);
    let des_loc = sent(&LocalPlan::des_loc(256, 768, 1536), &lens, 4, 1536);
    // 9 / 1536 payloads a step.
    assert_eq!(des_loc.elements, 9 * p);
    let every_step = 1536 * 2 * 3 * p / 4 * 4;
    assert_eq!(every_step as f64 / des_loc.payload as f64, 1536.0 / 9.0);
    assert_eq!(sent(&LocalPlan::local_adam(256), &lens, 4, 1536).payload, 2 * des_loc.payload);
    // Six exchanges, each with an agreement of 4 words to 3 others and a vote of one word, of which the first rank sends nothing.
    assert_eq!((des_loc.exchanges, des_loc.words), (6, 6 * 3 * 4 * 8));
}

#[test]
fn bytes_are_those_of_owned_elements_in_their_wire_type() {
    let lens = [70, 1, 130, 64];
    let rules: Groups = AdamW::default().into();
    let bytes = |plan: &LocalPlan, stage, shard, rank| {
        let part = part(&lens, 2, stage);
        let worker =
            Worker { shard, across: Ring { ranks: 3, rank }, world: Ring { ranks: 6, rank: 2 * rank } };
        plan.traffic(&part, &rules, worker, 0..1).unwrap()
    };
    let plan = LocalPlan::des_loc(1, 1, None).with(|f| {
        if f.what != What::Params {
            f.wire = Some(DType::BF16)
        }
    });
    for stage in [Stage::Zero1, Stage::Zero2, Stage::Zero3] {
        let ranks: Vec<_> = (0..6).map(|i| bytes(&plan, stage, i / 3, i % 3)).collect();
        // Parameters in f32 and first moments in bf16, for each of two shards among three workers.
        let total: u64 = ranks.iter().map(|t| t.payload).sum();
        assert_eq!(total, 2 * 2 * 265 * (4 + 2), "{stage:?}");
        assert_eq!(ranks.iter().map(|t| t.elements).sum::<u64>(), 3 * 265 * 2);
    }
    let whole = bytes(&LocalPlan::local_sgd(1), Stage::Replicated, 1, 2);
    assert_eq!(whole.elements, 265);
    let once = Fragment {
        params: Select::Elements { name: "p2".into(), range: 100..130 },
        ..Fragment::mean(What::Params, Timing::every(1))
    };
    let some: u64 =
        (0..2).map(|s| bytes(&LocalPlan::new(vec![once.clone()]), Stage::Zero2, s, 0).elements).sum();
    assert_eq!(some, 30);
    // The rest of a bucket goes round the ring too, however small; the total is the same.
    let cut = LocalPlan { bucket_len: 7, ..LocalPlan::local_sgd(1) };
    let all: u64 = (0..3).map(|r| bytes(&cut, Stage::Replicated, 0, r).payload).sum();
    assert_eq!(all, 2 * 2 * 265 * 4);
}

#[test]
fn the_same_plan_sends_the_same_share_whatever_is_reset_or_kept() {
    let quiet = LocalPlan::des_loc(2, 4, 8).with(|f| {
        if f.what != What::Params {
            f.merge = if f.timing.period == Some(4) { Merge::Reset } else { Merge::Keep };
        }
    });
    assert_eq!(sent(&quiet, &[64], 2, 16), sent(&LocalPlan::local_sgd(2), &[64], 2, 16));
    // A reset alone: no exchange.
    let reset = LocalPlan::new(vec![Fragment { merge: Merge::Reset, ..quiet.fragments[1].clone() }]);
    assert_eq!(sent(&reset, &[64], 2, 16).total(), 0);
}

//! A checkpoint saved on some ranks loads onto others, and training continues without a difference.

use crate::common::{Gradients, PRECISIONS, Run, STAGES, WITH_STATE, cases};
use crate::whole::{Whole, join, part};
use meshstep_checkpoint::{self as checkpoint, Load, Save, Store};
use meshstep_checkpoint_cases::Sim;
use meshstep_shard::{Optimizer, Options, SlotRuns, Stage};
use meshstep_tensor::DType;
use proptest::prelude::*;
use std::sync::Arc;

pub(crate) const DIR: &str = "/run";

/// Takes the steps of a range, and returns the state of the ranks after them.
pub(crate) fn train(run: &Run, opt: &mut Optimizer, steps: std::ops::Range<u64>) {
    for t in steps {
        let batches = run.batches(opt.comm().rank());
        (0..batches).for_each(|batch| run.read_and_hand_over(opt, t, batch).unwrap());
        opt.step(run.at(t)).unwrap().outcome().unwrap();
    }
}

/// Saves after `before` steps and takes three more; returns the state at the save and at the end.
pub(crate) fn save(run: &Run, store: &Store, before: u64) -> (Whole, Whole) {
    let ends = meshstep_comm::loopback::spawn(run.ranks, |comm| {
        let mut opt = run.build(comm).unwrap();
        train(run, &mut opt, 1..before + 1);
        assert_eq!(checkpoint::save(&mut opt, store, Save::default()).unwrap(), before);
        let then = part(&opt);
        train(run, &mut opt, before + 1..before + 4);
        (then, part(&opt))
    });
    let (thens, ends): (Vec<_>, Vec<_>) = ends.unwrap().into_iter().unzip();
    (join(thens), join(ends))
}

/// Loads the checkpoint after `strayed` other steps, and returns the same two states.
pub(crate) fn load(run: &Run, store: &Store, (before, strayed): (u64, u64)) -> (Whole, Whole) {
    let ends = meshstep_comm::loopback::spawn(run.ranks, |comm| {
        let mut opt = run.build(comm).unwrap();
        train(run, &mut opt, 1..strayed + 1);
        let loaded = checkpoint::load(&mut opt, store, Load::default()).unwrap();
        assert_eq!(loaded.saved.manifest().step, before);
        assert!(loaded.missing.is_empty() && loaded.unexpected.is_empty() && loaded.cast.is_empty());
        let then = part(&opt);
        train(run, &mut opt, before + 1..before + 4);
        (then, part(&opt))
    });
    let (thens, ends): (Vec<_>, Vec<_>) = ends.unwrap().into_iter().unzip();
    (join(thens), join(ends))
}

pub(crate) fn seat() -> impl Strategy<Value = (usize, usize, usize)> {
    (1..7usize, 0..STAGES.len(), 1..300usize)
}

pub(crate) fn on((ranks, stage, bucket): (usize, usize, usize), run: &Run) -> Run {
    let options = Options { bucket_len: Some(bucket), ..run.options.clone() };
    Run { ranks, options, ..run.clone() }.stage(STAGES[stage])
}

/// Runs with any parameters, precision and rule that give the same steps on any number of ranks.
pub(crate) fn runs() -> impl Strategy<Value = Run> {
    let lens = prop::collection::vec(prop_oneof![Just(0), Just(1), 0..160usize], 1..8);
    let lens = lens.prop_filter("some element", |lens| lens.iter().any(|&len| len > 0));
    let run = |(lens, precision, rule, seed): (Vec<usize>, usize, usize, u64)| {
        let (dtype, precision) = PRECISIONS[precision];
        let grads = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let options = Options { precision, ..Options::default() };
        let gradients = Gradients::Equal;
        Run { lens, dtype, grads, options, gradients, rule: WITH_STATE[rule], seed, ..Run::default() }
    };
    (lens, 0..PRECISIONS.len(), 0..WITH_STATE.len(), any::<u64>()).prop_map(run)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(40, 3000), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_layout_loads_onto_any_other(
        (from, to) in (seat(), seat()),
        run in runs(),
        (before, strayed) in (0..4u64, 0..3u64),
    ) {
        let store = Store::on(Arc::new(Sim::new(DIR)), DIR);
        let (then, end) = save(&on(from, &run), &store, before);
        let (loaded, went_on) = load(&on(to, &run), &store, (before, strayed));
        prop_assert!(loaded == then, "what was loaded is not what was saved");
        prop_assert!(went_on == end, "three steps later they are apart");
        store.latest().unwrap().verify().unwrap();
    }
}

/// A run over slots that goes from four ranks to three to eight, at other stages, is on the curve of one rank.
#[test]
fn slots_stay_on_one_curve_on_other_ranks() {
    let of = |ranks: usize, stage: Stage| {
        let slots = Some(SlotRuns::even(8, ranks).unwrap());
        let options = Options { slots, ..Run::default().options };
        Run { ranks, options, ..Run::default() }.stage(stage)
    };
    let store = Store::on(Arc::new(Sim::new(DIR)), DIR);
    let steps = |run: &Run, steps: std::ops::Range<u64>| {
        let ends = meshstep_comm::loopback::spawn(run.ranks, |comm| {
            let mut opt = run.build(comm).unwrap();
            if steps.start > 1 {
                checkpoint::load(&mut opt, &store, Load::default()).unwrap();
            }
            train(run, &mut opt, steps.clone());
            checkpoint::save(&mut opt, &store, Save::default()).unwrap();
            part(&opt)
        });
        join(ends.unwrap())
    };
    let alone = of(1, Stage::Replicated);
    let expected = meshstep_comm::loopback::spawn(1, |comm| {
        let mut opt = alone.build(comm).unwrap();
        train(&alone, &mut opt, 1..10);
        part(&opt)
    });
    let expected = join(expected.unwrap());
    steps(&of(4, Stage::Zero1), 1..4);
    steps(&of(3, Stage::Zero3), 4..7);
    assert!(steps(&of(8, Stage::Zero2), 7..10) == expected);
}

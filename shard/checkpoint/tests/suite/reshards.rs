//! A reshard moves the state that a checkpoint would bring, and no more bytes than must travel.

use crate::common::{F32_MASTER, Run, STAGES, WhichRule, cases, draws};
use crate::layouts::{DIR, load, on, runs, save, seat, train};
use crate::whole::{Whole, join, part};
use meshstep_checkpoint::{
    self as checkpoint, CheckpointError, Error, Mismatch, Moved, Save, Saver, Store, reshard,
};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::loopback::{Config, spawn, world};
use meshstep_comm::{Communicator, Faults, Kind};
use meshstep_shard::{Optimizer, Options, Outcome, Stage};
use meshstep_tensor::{Category, DType};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Returns the ranges of bytes of each vector of each parameter that a rank holds.
fn held(opt: &Optimizer, whole: &Whole) -> BTreeMap<(String, String), Vec<Range<usize>>> {
    let mut held = BTreeMap::new();
    for (name, (_, vectors)) in &whole.tensors {
        for (slot, bytes) in vectors {
            // A parameter is held whole, or on the rank that updates it.
            let cut = opt.options().stage == Stage::Zero3;
            let slot = match &**slot {
                "whole" if cut => continue,
                "param" if !cut => continue,
                "whole" | "param" => "param",
                slot => slot,
            };
            held.insert((name.clone(), slot.to_owned()), bytes.known().to_vec());
        }
    }
    held
}

/// Counts the bytes of `new` outside of `old`, and within `old`.
fn count(old: Option<&(Optimizer, Whole)>, new: &(Optimizer, Whole)) -> [u64; 2] {
    let had = old.map_or_else(BTreeMap::new, |(opt, whole)| held(opt, whole));
    let mut counts = [0; 2];
    for (key, has) in held(&new.0, &new.1) {
        let had = had.get(&key).map_or(&[][..], Vec::as_slice);
        let both = |range: &Range<usize>| {
            had.iter().map(|had| range.end.min(had.end).saturating_sub(range.start.max(had.start))).sum()
        };
        for range in &has {
            let both: usize = both(range);
            counts[0] += (range.len() - both) as u64;
            counts[1] += both as u64;
        }
    }
    counts
}

/// Returns this rank's optimizer among `ranks` of `via` after some steps; the order of ranks is reversed if `turned`.
fn among(
    via: &Arc<dyn Communicator>,
    ranks: Range<usize>,
    turned: bool,
    run: &Run,
    steps: u64,
) -> Option<(Optimizer, Whole)> {
    let rank = via.rank() as i64;
    let color = ranks.contains(&via.rank()).then_some(0);
    let comm = via.split(color, if turned { -rank } else { rank }).unwrap()?;
    let mut opt = run.build(comm).unwrap();
    train(run, &mut opt, 1..steps + 1);
    let whole = part(&opt);
    Some((opt, whole))
}

/// Moves from the first ranks to those from `first` on, and takes three steps there; returns the moved state and the final one.
fn moved(
    (from, to): (&Run, &Run),
    (first, turned): (usize, bool),
    (before, strayed): (u64, u64),
) -> (Whole, Whole) {
    let ranks = from.ranks.max(first + to.ranks);
    let ends = spawn(ranks, |via| {
        let mut old = among(&via, 0..from.ranks, false, from, before);
        let mut new = among(&via, first..first + to.ranks, turned, to, strayed);
        let sent = || via.stats().of(Kind::Send).bytes;
        let already = sent();
        let moved = reshard(&via, old.as_mut().map(|(opt, _)| opt), new.as_mut().map(|(opt, _)| opt));
        let moved = moved.unwrap();
        assert_eq!(sent() - already, moved.sent);
        if let Some((opt, whole)) = &old {
            assert!(part(opt) == *whole, "what is moved stays as it is");
        }
        let end = new.map(|(mut opt, _)| {
            let here = part(&opt);
            let here = (opt, here);
            assert_eq!(count(old.as_ref(), &here), [moved.received, moved.kept]);
            opt = here.0;
            train(to, &mut opt, before + 1..before + 4);
            (here.1, part(&opt))
        });
        (moved, end)
    });
    let (moved, ends): (Vec<Moved>, Vec<_>) = ends.unwrap().into_iter().unzip();
    let sum = |of: fn(&Moved) -> u64| moved.iter().map(of).sum::<u64>();
    assert_eq!(sum(|moved| moved.sent), sum(|moved| moved.received));
    let (here, end): (Vec<_>, Vec<_>) = ends.into_iter().flatten().unzip();
    (join(here), join(end))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(30, 3000), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_layout_moves_to_any_other(
        (from, to) in (seat(), seat()),
        (first, turned) in (0..7usize, any::<bool>()),
        run in runs(),
        (before, strayed) in (0..4u64, 0..3u64),
    ) {
        let (from, to) = (on(from, &run), on(to, &run));
        let store = Store::on(Arc::new(Sim::new(DIR)), DIR);
        let (then, end) = save(&from, &store, before);
        let (here, went_on) = moved((&from, &to), (first.min(from.ranks), turned), (before, strayed));
        prop_assert!(here == then, "what has come is not what was there");
        prop_assert!(went_on == end, "three steps later they are apart");
        prop_assert!((here, went_on) == load(&to, &store, (before, strayed)), "a checkpoint brings something else");
    }
}

/// Messages have several windows, and elements of different sizes cross the edges of windows.
#[test]
fn long_messages_travel_in_windows() {
    let options = Options { precision: F32_MASTER, ..Options::default() };
    let (dtype, lens) = (DType::BF16, vec![1_500_001, 3]);
    let run = Run { ranks: 1, lens, dtype, grads: DType::F32, options, ..Run::default() };
    let ends = spawn(2, |via| {
        let mut old = among(&via, 0..1, false, &run, u64::from(cases(2, 2)));
        let mut new = among(&via, 1..2, false, &run, 0);
        let meter = new.as_ref().or(old.as_ref()).unwrap().0.options().meter.clone();
        let live = meter.live(Category::Staging);
        meter.reset_peaks();
        let moved =
            reshard(&via, old.as_mut().map(|(opt, _)| opt), new.as_mut().map(|(opt, _)| opt)).unwrap();
        let bytes = (1_500_001 + 3) * (2 + 4 + 4 + 4);
        assert_eq!(moved.sent + moved.received, bytes);
        assert_eq!(meter.live(Category::Staging), live);
        // The window, a few words, and on the joining rank the memory for its future state.
        let most = (16 << 20) + if via.rank() == 1 { bytes } else { 0 };
        assert!((16 << 20..most + 4096).contains(&(meter.peak(Category::Staging) - live)));
        part(&new.or(old).unwrap().0)
    });
    let ends = ends.unwrap();
    assert!(ends[0] == ends[1]);
}

fn small(stage: Stage) -> Run {
    let options = Options { bucket_len: Some(150), ..Options::default() };
    Run { lens: vec![70, 1, 0, 130], ranks: 2, options, ..Run::default() }.stage(stage)
}

/// Rank 1 of three never starts operation `dropped`. Returns true if the ranks have moved nevertheless.
fn interrupted(stage: Stage, dropped: u64) -> bool {
    let faults = Faults::none().drop_op(1, dropped);
    let config = Config { timeout: Duration::from_millis(60), faults, ..Config::new(3) };
    let vias: Vec<_> = world(config).unwrap().into_iter().map(|via| Mutex::new(Some(via))).collect();
    let run = small(stage);
    let moved = spawn(3, |comm| {
        let via = vias[comm.rank()].lock().unwrap().take().unwrap();
        let mut old = among(&comm, 0..2, false, &run, 2);
        let mut new = among(&comm, 1..3, false, &run, 1);
        comm.barrier().unwrap();
        let moved = reshard(&via, old.as_mut().map(|(opt, _)| opt), new.as_mut().map(|(opt, _)| opt));
        for (opt, whole) in old.iter_mut().chain(if moved.is_err() { new.as_mut() } else { None }) {
            assert!(part(opt) == *whole, "a failure has changed something");
            let next = opt.steps() + 1;
            train(&run, opt, next..next + 1);
        }
        match moved {
            Ok(_) => true,
            Err(Error::Shard(meshstep_shard::Error::Comm(_))) => false,
            Err(error) => panic!("{error}"),
        }
    });
    let moved = moved.unwrap();
    assert!(moved.iter().all(|all| *all == moved[0]), "{moved:?}");
    moved[0]
}

#[test]
fn wherever_ranks_lose_each_other_nothing_has_changed() {
    let mut drawn = draws(1);
    for stage in [Stage::Zero1, Stage::Zero3].into_iter().filter(|_| drawn()) {
        let first = (0..100).find(|&dropped| interrupted(stage, dropped)).unwrap();
        assert!(first > 7, "{first} operations are not all of a move");
    }
}

/// Returns the error of all ranks for an old and a new optimizer that do not match.
fn refused(from: &Run, to: &Run) -> CheckpointError {
    let told = spawn(3, |via| {
        let mut old = among(&via, 0..2, false, from, 1);
        let mut new = among(&via, 1..3, false, to, 2);
        let error = reshard(&via, old.as_mut().map(|(opt, _)| opt), new.as_mut().map(|(opt, _)| opt));
        let unchanged = old.iter().chain(&new).all(|(opt, whole)| part(opt) == *whole);
        assert!(unchanged, "a refusal has changed something");
        via.barrier().unwrap();
        match error.unwrap_err() {
            Error::Failed(failed) => (failed.rank, failed.error),
            other => panic!("{other}"),
        }
    });
    let told = told.unwrap();
    assert!(told.iter().all(|all| *all == told[0]), "{told:?}");
    assert_eq!(told[0].0, 1, "the first rank that joins or stays");
    told[0].1.clone()
}

#[test]
fn what_does_not_fit_is_refused_on_all_ranks() {
    let run = small(Stage::Zero2);
    let mismatch = |to: Run| match refused(&run, &to) {
        CheckpointError::Mismatch(mismatch) => mismatch,
        other => panic!("{other}"),
    };
    let shape = mismatch(Run { lens: vec![70, 1, 0, 131], ..run.clone() });
    assert!(matches!(shape, Mismatch::Shape { ref tensor, .. } if tensor == "p3"), "{shape}");
    let more = mismatch(Run { lens: vec![70, 1, 0, 130, 5], ..run.clone() });
    assert_eq!(more, Mismatch::Missing { vectors: vec!["p4".to_owned()] });
    let fewer = mismatch(Run { lens: vec![70, 1, 0], ..run.clone() });
    assert_eq!(fewer, Mismatch::Unexpected { vectors: vec!["p3".to_owned()] });
    let options = Options { precision: F32_MASTER, ..run.options.clone() };
    let dtype = mismatch(Run { dtype: DType::BF16, options, ..run.clone() });
    assert!(matches!(dtype, Mismatch::Missing { ref vectors } if vectors[0] == "p0:master"), "{dtype}");
    let rule = mismatch(Run { rule: WhichRule::Adam, ..run.clone() });
    assert!(matches!(rule, Mismatch::Setting { .. }), "{rule}");
}

#[test]
fn ranks_that_are_not_ready_or_have_nothing_are_told() {
    let run = small(Stage::Zero1);
    spawn(3, |via| {
        let mut old = among(&via, 0..2, false, &run, 1);
        let mut new = among(&via, 1..3, false, &run, 0);
        let checkpoint = |moved: Result<Moved, Error>| match moved.unwrap_err() {
            Error::Failed(failed) => failed.error,
            other => panic!("{other}"),
        };
        let none = checkpoint(reshard(&via, None, new.as_mut().map(|(opt, _)| opt)));
        assert_eq!(none, CheckpointError::NoSide { direction: "from".to_owned() });
        let none = checkpoint(reshard(&via, old.as_mut().map(|(opt, _)| opt), None));
        assert_eq!(none, CheckpointError::NoSide { direction: "to".to_owned() });
        // Some ranks pass the old optimizer and others the new one, as if both were the same.
        let mut either = if via.rank() == 0 { old.as_mut() } else { new.as_mut() };
        let apart = checkpoint(reshard(&via, either.as_mut().map(|(opt, _)| opt), None));
        assert!(matches!(apart, CheckpointError::Apart { ranks: [0, 1], .. }), "{apart}");
        // In the middle of a step.
        if let Some((opt, _)) = &mut old {
            run.hand_over(opt, 2, 0).unwrap();
        }
        let moved = reshard(&via, old.as_mut().map(|(opt, _)| opt), new.as_mut().map(|(opt, _)| opt));
        match via.rank() {
            0 | 1 => assert!(matches!(moved, Err(Error::Shard(meshstep_shard::Error::StepDue))), "{moved:?}"),
            _ => assert!(
                matches!(moved, Err(Error::Shard(meshstep_shard::Error::Disagree { .. }))),
                "{moved:?}"
            ),
        }
        if let Some((opt, _)) = &mut old {
            opt.step(run.at(2)).unwrap().outcome().unwrap();
        }
        reshard(&via, old.as_mut().map(|(opt, _)| opt), new.as_mut().map(|(opt, _)| opt)).unwrap();
        assert!(new.is_none_or(|(opt, _)| opt.steps() == 2));
    })
    .unwrap();
}

/// The communicator of training carries a move and a background save; their bytes are not counted as a step's.
#[test]
fn what_has_moved_is_no_step_s() {
    let (run, store) = (small(Stage::Zero1), Store::on(Arc::new(Sim::new(DIR)), DIR));
    spawn(2, |via| {
        let sent = |opt: &mut Optimizer, t: u64| {
            run.hand_over(opt, t, 0).unwrap();
            match opt.step(run.at(t)).unwrap().outcome().unwrap() {
                Outcome::Applied { traffic, .. } => traffic.sent,
                skipped => panic!("{skipped:?}"),
            }
        };
        let mut opt = run.build(Arc::clone(&via)).unwrap();
        let first = sent(&mut opt, 1);
        let comm = via.split(Some(0), -(via.rank() as i64)).unwrap().unwrap();
        let mut turned = run.build(comm).unwrap();
        reshard(&via, Some(&mut opt), Some(&mut turned)).unwrap();
        checkpoint::save_async(&mut opt, &mut Saver::default(), &store, Save::default())
            .unwrap()
            .join()
            .unwrap();
        assert_eq!(sent(&mut opt, 2), first);
    })
    .unwrap();
}

/// Replicas share the sending to a joining rank.
#[test]
fn those_that_have_the_same_share_the_sending() {
    let run = Run { lens: vec![3_000_000], ranks: 2, ..Run::default() }.stage(STAGES[0]);
    let sent = spawn(3, |via| {
        let mut old = among(&via, 0..2, false, &run, 0);
        let mut new = among(&via, 2..3, false, &Run { ranks: 1, ..run.clone() }, 0);
        reshard(&via, old.as_mut().map(|(opt, _)| opt), new.as_mut().map(|(opt, _)| opt)).unwrap().sent
    });
    let sent = sent.unwrap();
    assert_eq!((sent[0], sent[1], sent[2]), (18_000_000, 18_000_000, 0));
}

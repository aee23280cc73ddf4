//! L-BFGS resumes from its history on any ranks, bit for bit.

use crate::common::{STAGES, draws, turns};
use crate::failures::failed;
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Load, Mismatch, Moved, Save, Saver, Store};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{History, Lbfgs, LineSearch};
use meshstep_shard::{Error, MicroBatch, Options, ShardedLbfgs, Stage};
use meshstep_tensor::{DType, Layout, Meter, Param, Slice, SliceMut};
use std::ops::Range;
use std::sync::Arc;

const SIZES: [(&str, usize); 3] = [("a", 37), ("b", 1), ("c", 90)];

fn make(comm: Arc<dyn Communicator>, rule: &Lbfgs, stage: Stage, frozen: usize) -> ShardedLbfgs {
    // A history of 16 bits takes f32.
    let dtype = if rule.history == History::Exact { DType::F64 } else { DType::F32 };
    let add = |layout: meshstep_tensor::LayoutBuilder, (name, len): (&str, usize)| {
        layout.param(name, &[len], dtype)
    };
    let layout = SIZES.into_iter().fold(Layout::builder().unit("u"), add).frozen("still", &[frozen], dtype);
    let options = Options { stage, bucket_len: Some(40), meter: Meter::new(), ..Options::default() };
    let first = |p: &Param, mut values: SliceMut<'_>| {
        let own: Vec<f64> = (0..p.len()).map(|i| (i as f64 * 0.7).sin()).collect();
        values.cast_from(Slice::from(&own[..]))
    };
    ShardedLbfgs::new(comm, layout.build().unwrap(), rule.clone(), first, options).unwrap()
}

/// Sums a loss of each parameter alone, badly scaled and not convex everywhere.
fn loss(mb: &MicroBatch<'_>, units: &[Vec<String>]) -> Result<f64, Error> {
    let mut loss = 0.0;
    for unit in units {
        let here = mb.gather(&unit[0])?;
        for name in &unit[1..] {
            let values = here.param(name)?;
            let mut x = vec![0f64; values.len()];
            meshstep_tensor::cast(values, (&mut x[..]).into())?;
            let scale = |i: usize| 1.0 + (i % 7) as f64 * 3.0;
            loss += x
                .iter()
                .enumerate()
                .map(|(i, x)| scale(i) * (x - 0.3).powi(2) + x.powi(4) - x.cos())
                .sum::<f64>();
            let grad =
                x.iter().enumerate().map(|(i, x)| 2.0 * scale(i) * (x - 0.3) + 4.0 * x.powi(3) + x.sin());
            let grad: Vec<f64> = grad.collect();
            match values.dtype() {
                DType::F32 => mb.grad(name, &grad.iter().map(|&g| g as f32).collect::<Vec<_>>()[..])?,
                _ => mb.grad(name, &grad[..])?,
            }
        }
    }
    Ok(loss)
}

fn steps(opt: &mut ShardedLbfgs, count: usize) -> Vec<u64> {
    // Name of the unit, and its parameters.
    let names = ["u", "a", "b", "c"];
    let units = vec![names.map(str::to_owned).to_vec()];
    let step = |_| {
        let report = opt.step(|mb| loss(mb, &units)).unwrap().report;
        [report.loss.to_bits(), report.iterations, report.evaluations]
    };
    (0..count).flat_map(step).collect()
}

/// Line searches, each with an exact history and one with a rounded one.
const KINDS: [(LineSearch, History); 4] = [
    (LineSearch::None, History::Exact),
    (LineSearch::StrongWolfe, History::Exact),
    (LineSearch::None, History::F16),
    (LineSearch::StrongWolfe, History::Bf16),
];

/// Final state: parameters, and the reports of iterations.
type End = (Vec<Vec<u8>>, Vec<u64>, [u64; 3]);

fn end(opt: &ShardedLbfgs, told: Vec<u64>) -> End {
    let whole = opt.optimizer().gather("u").unwrap();
    let bytes = |(name, _): (&str, usize)| whole.param(name).unwrap().bytes().unwrap().to_vec();
    let state = opt.state();
    let counts = [state.iterations(), state.evaluations(), state.pairs() as u64];
    (SIZES.map(bytes).to_vec(), told, counts)
}

#[test]
fn a_history_is_saved_and_gone_on_with_on_any_ranks() {
    let mut drawn = draws(1);
    for (line_search, history) in KINDS {
        let rule = Lbfgs { lr: 0.05, max_iter: 3, history_len: 4, line_search, history, ..Lbfgs::default() };
        for (s, &stage) in STAGES.iter().enumerate().filter(|_| drawn()) {
            let store = Store::on(Arc::new(Sim::new("/run")), "/run");
            let (ranks, others) = ([3, 1, 4, 2, 5, 4][s], [2, 5, 3, 4, 1, 3][s]);
            let ends = loopback::spawn(ranks, |comm| {
                let mut opt = make(comm, &rule, stage, 3);
                steps(&mut opt, 2);
                let save = Save { step: Some(2), ..Save::default() };
                let mut saver = Saver::default();
                let saving = match s % 2 {
                    0 => Some(checkpoint::save_async(&mut opt, &mut saver, &store, save).unwrap()),
                    _ => checkpoint::save(&mut opt, &store, save).map(|_| None).unwrap(),
                };
                let told = steps(&mut opt, 3);
                saving.map(|saving| saving.join().unwrap());
                end(&opt, told)
            });
            let went_on = loopback::spawn(others, |comm| {
                let mut opt = make(comm, &rule, STAGES[(s + 1) % STAGES.len()], 3);
                steps(&mut opt, 1);
                checkpoint::load(&mut opt, &store, Load::default()).unwrap();
                let told = steps(&mut opt, 3);
                end(&opt, told)
            });
            let (ends, went_on) = (ends.unwrap(), went_on.unwrap());
            assert!(ends.iter().chain(&went_on).all(|end| *end == ends[0]), "{stage:?} {line_search:?}");
            store.latest().unwrap().verify().unwrap();
        }
    }
}

#[test]
fn another_history_or_none_is_refused() {
    let rule = Lbfgs { max_iter: 3, history_len: 4, ..Lbfgs::default() };
    let store = Store::on(Arc::new(Sim::new("/run")), "/run");
    let saved = loopback::spawn(2, |comm| {
        let mut opt = make(comm, &rule, Stage::Zero1, 3);
        steps(&mut opt, 2);
        checkpoint::save(&mut opt, &store, Save { step: Some(2), ..Save::default() }).unwrap();
    });
    saved.unwrap();
    let others = [Lbfgs { history_len: 5, ..rule.clone() }, Lbfgs { lr: 0.5, ..rule.clone() }];
    for (i, other) in others.into_iter().enumerate() {
        let told = loopback::spawn(2, |comm| {
            let mut opt = make(comm, &other, Stage::Zero1, 3);
            let told = failed(checkpoint::load(&mut opt, &store, Load::default()).map(drop).unwrap_err());
            steps(&mut opt, 1);
            told.error
        });
        match (i, told.unwrap().remove(0)) {
            (0, CheckpointError::Mismatch(Mismatch::Missing { .. })) => {}
            (1, CheckpointError::Mismatch(Mismatch::Setting { what, .. })) => assert_eq!(what, "L-BFGS"),
            (_, other) => panic!("{other}"),
        }
    }
}

/// A history of another type, from which only the parameters would be of use.
#[test]
fn a_history_of_another_type_is_refused() {
    let rule = |history| Lbfgs { max_iter: 3, history_len: 4, history, ..Lbfgs::default() };
    for (saved, here) in [(History::Bf16, History::F16), (History::F16, History::Bf16)] {
        let store = Store::on(Arc::new(Sim::new("/run")), "/run");
        let told = loopback::spawn(2, |via| {
            let mut old = make(via.clone(), &rule(saved), Stage::Zero1, 3);
            steps(&mut old, 2);
            checkpoint::save(&mut old, &store, Save { step: Some(2), ..Save::default() }).unwrap();
            let mut new = make(via.clone(), &rule(here), Stage::Zero1, 3);
            let all = Load { partial: true, other_settings: true, ..Load::default() };
            let told = [Load::default(), all]
                .map(|load| failed(checkpoint::load(&mut new, &store, load).map(drop).unwrap_err()).error);
            let bytes = checkpoint::serialize(&mut old).unwrap();
            assert!(checkpoint::deserialize(&mut new, &bytes).is_err());
            assert!(checkpoint::reshard(&via, Some(&mut old), Some(&mut new)).is_err());
            // The refusals have changed nothing.
            let untouched = make(via.clone(), &rule(here), Stage::Zero1, 3);
            assert!(on_from(new) == on_from(untouched));
            told
        });
        for error in told.unwrap().remove(0) {
            let expected = Mismatch::History { saved: format!("{saved:?}"), here: format!("{here:?}") };
            assert!(matches!(&error, CheckpointError::Mismatch(found) if *found == expected), "{error}");
        }
    }
}

/// The rows of a checkpoint take the bytes of 16 bits.
#[test]
fn a_rounded_history_is_saved_in_16_bits() {
    let rule = Lbfgs { max_iter: 3, history_len: 4, history: History::Bf16, ..Lbfgs::default() };
    let store = Store::on(Arc::new(Sim::new("/run")), "/run");
    let saved = loopback::spawn(2, |comm| {
        let mut opt = make(comm, &rule, Stage::Zero1, 3);
        steps(&mut opt, 2);
        checkpoint::save(&mut opt, &store, Save { step: Some(2), ..Save::default() }).unwrap();
    });
    saved.unwrap();
    let saved = store.latest().unwrap();
    let slots = &saved.manifest().tensors["a"].slots;
    let types = |name: &str| slots[name].dtype.dtype().unwrap();
    assert_eq!(["d0", "d4", "y0", "y4"].map(types), [DType::BF16; 4]);
    assert_eq!(["x", "d", "g0", "g1"].map(types), [DType::F32; 4]);
}

#[test]
fn a_history_goes_into_bytes_and_back_and_to_one_rank() {
    let rule = Lbfgs { lr: 0.05, max_iter: 3, history_len: 4, ..Lbfgs::default() };
    for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero3] {
        let same = loopback::spawn(3, |comm| {
            let mut opt = make(comm, &rule, stage, 3);
            steps(&mut opt, 2);
            let bytes = checkpoint::serialize(&mut opt).unwrap();
            let mut whole = std::collections::BTreeMap::new();
            checkpoint::consolidate(&mut opt, 2, &mut |window| {
                let values: &[f64] = window.values.typed().unwrap();
                assert!(whole.insert(format!("{}:{}", window.param, window.slot), values.to_vec()).is_none());
                Ok(())
            })
            .unwrap();
            if opt.optimizer().comm().rank() == 2 {
                let names = |param: &str| whole.keys().filter(|key| key.starts_with(param)).count();
                // The parameter, the point, and the vectors of the history.
                assert!(
                    names("a:") > 6 && names("a:") == names("c:") && names("still:") == 1,
                    "{:?}",
                    whole.keys()
                );
                assert_eq!(whole["a:x"], whole["a:param"]);
                assert!(whole["c:d0"].len() == 90 && whole["c:d0"].iter().any(|&d| d != 0.0));
            }
            let told = steps(&mut opt, 3);
            let went_on = end(&opt, told);
            checkpoint::deserialize(&mut opt, &bytes).unwrap();
            let told = steps(&mut opt, 3);
            end(&opt, told) == went_on
        });
        assert_eq!(same.unwrap(), [true; 3], "{stage:?}");
    }
}

/// Makes L-BFGS on these ranks of `via`, and takes some steps.
fn among(
    via: &Arc<dyn Communicator>,
    ranks: Range<usize>,
    (rule, stage): (&Lbfgs, Stage),
    count: usize,
) -> Option<ShardedLbfgs> {
    let comm = via.split(ranks.contains(&via.rank()).then_some(0), 0).unwrap()?;
    let mut opt = make(comm, rule, stage, 3);
    steps(&mut opt, count);
    Some(opt)
}

/// Takes three further steps.
fn on_from(mut opt: ShardedLbfgs) -> End {
    let told = steps(&mut opt, 3);
    end(&opt, told)
}

/// Ranks join, leave, stay, or take no part.
#[test]
fn a_history_moves_to_any_ranks() {
    let (worlds, mut drawn) = ([(3, 1, 2), (1, 0, 5), (4, 2, 3), (2, 3, 1)], draws(1));
    for (l, (line_search, history)) in KINDS.into_iter().enumerate() {
        let rule = Lbfgs { lr: 0.05, max_iter: 3, history_len: 4, line_search, history, ..Lbfgs::default() };
        for (s, &stage) in STAGES.iter().enumerate().filter(|_| drawn()) {
            for (ranks, first, others) in turns(&worlds, s + 2 * l, 1) {
                let to = STAGES[(s + 1) % STAGES.len()];
                let ends = loopback::spawn(ranks.max(first + others), |via| {
                    let mut old = among(&via, 0..ranks, (&rule, stage), 2);
                    let mut new = among(&via, first..first + others, (&rule, to), 1);
                    let moved = checkpoint::reshard(&via, old.as_mut(), new.as_mut()).unwrap();
                    (moved, old.map(on_from), new.map(on_from))
                });
                let ends = ends.unwrap();
                let expected = ends[0].1.as_ref().unwrap();
                let all: Vec<_> = ends.iter().flat_map(|(_, old, new)| old.iter().chain(new)).collect();
                assert_eq!(all.len(), ranks + others);
                assert!(all.iter().all(|end| *end == expected), "{stage:?} {ranks} {others} {line_search:?}");
                let sum = |of: fn(&Moved) -> u64| ends.iter().map(|(moved, ..)| of(moved)).sum::<u64>();
                assert_eq!(sum(|moved| moved.sent), sum(|moved| moved.received));
                // At least the whole state comes to the new ranks.
                let state = match history {
                    History::Exact => 128 * (1 + 1 + 2 * 4 + 2 + 1) * 8,
                    _ => 128 * ((1 + 1 + 2 + 1) * 4 + 2 * 4 * 2),
                };
                assert!(sum(|moved| moved.received + moved.kept) >= state, "{stage:?}");
            }
        }
    }
}

#[test]
fn a_history_of_another_rule_does_not_move() {
    let rule = Lbfgs { max_iter: 3, history_len: 4, ..Lbfgs::default() };
    let others = [Lbfgs { history_len: 5, ..rule.clone() }, Lbfgs { lr: 0.5, ..rule.clone() }];
    for (i, other) in others.into_iter().enumerate() {
        let told = loopback::spawn(3, |via| {
            let mut old = among(&via, 0..2, (&rule, Stage::Zero1), 2);
            let mut new = among(&via, 1..3, (&other, Stage::Zero1), 1);
            let told = failed(checkpoint::reshard(&via, old.as_mut(), new.as_mut()).unwrap_err());
            // Compare with an optimizer that was never the target of a move.
            let untouched = among(&via, 1..3, (&other, Stage::Zero1), 1).map(on_from);
            assert!(new.map(on_from) == untouched, "a refusal has changed something");
            drop(old);
            told.error
        });
        match (i, told.unwrap().remove(0)) {
            (0, CheckpointError::Mismatch(Mismatch::Missing { .. })) => {}
            (1, CheckpointError::Mismatch(Mismatch::Setting { what, .. })) => assert_eq!(what, "L-BFGS"),
            (_, other) => panic!("{other}"),
        }
    }
}

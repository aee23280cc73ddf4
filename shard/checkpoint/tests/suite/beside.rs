//! State saved beside trained vectors: frozen parameters, blobs, counters; and the memory and the progress of a save.

use crate::common::{Gradients, Run, draws, fetch};
use crate::layouts::train;
use crate::whole::{join, part};
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Load, Save, Store};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::schedule::{Cosine, Schedule};
use meshstep_optim::{AdamW, DynamicLossScale, LossScale};
use meshstep_shard::{Optimizer, Options, Outcome, Stage, StepArgs};
use meshstep_tensor::{Category, DType, Layout, Meter, Slice};
use std::sync::Arc;

const DIR: &str = "/run";

fn in_memory() -> Store {
    Store::on(Arc::new(Sim::new(DIR)), DIR)
}

#[test]
fn frozen_parameters_and_scalars_are_saved_once() {
    let make = |comm: Arc<dyn Communicator>, stage, first: f32| {
        let layout = Layout::builder().param("scale", &[], DType::F32).frozen("table", &[5, 7], DType::BF16);
        let layout =
            layout.param("w", &[3, 11], DType::F32).frozen("mask", &[9], DType::F32).build().unwrap();
        let options = Options { stage, meter: Meter::new(), ..Options::default() };
        let fill = |p: &meshstep_tensor::Param, mut values: meshstep_tensor::SliceMut<'_>| {
            let own: Vec<f32> = (0..p.len()).map(|i| first + i as f32).collect();
            values.cast_from(Slice::from(&own[..]))
        };
        Optimizer::new(comm, layout, AdamW::default(), fill, options).unwrap()
    };
    let store = in_memory();
    let stages = [Stage::Replicated, Stage::Zero1, Stage::Zero3];
    for (number, stage) in (0..).zip(stages) {
        let step = Some(number);
        let saved = loopback::spawn(4, |comm| {
            let mut opt = make(comm, stage, 1.0);
            checkpoint::save(&mut opt, &store, Save { step, ..Save::default() }).unwrap();
            part(&opt)
        });
        let saved = join(saved.unwrap());
        let manifest = store.open(number).unwrap();
        let stored = |name: &str| -> u64 {
            let slots = &manifest.manifest().tensors[name].slots;
            slots["param"].pieces.iter().map(|piece| piece.stored.bytes).sum()
        };
        assert_eq!(["scale", "table", "w", "mask"].map(stored), [4, 70, 132, 36]);
        for other in stages {
            let loaded = loopback::spawn(3, |comm| {
                let mut opt = make(comm, other, 500.0);
                checkpoint::load(&mut opt, &store, Load { step, ..Load::default() }).unwrap();
                part(&opt)
            });
            assert!(join(loaded.unwrap()) == saved, "{stage:?} to {other:?}");
        }
    }
}

#[test]
fn the_callers_bytes_come_back_by_name_and_rank() {
    let (store, run) = (in_memory(), Run { ranks: 3, ..Run::default() });
    let long: Vec<u8> = (0..3_000_000u32).map(|i| (i * 7) as u8).collect();
    let saved = loopback::spawn(3, |comm| {
        let rank = comm.rank() as u8;
        let mut opt = run.build(comm).unwrap();
        let own = [rank; 5];
        let own_blobs = vec![("rng", &own[..usize::from(rank) + 1]), ("nothing", &[])];
        // Shared blobs come from rank 0 alone.
        let blobs = vec![("loader", if rank == 0 { &long[..] } else { &own }), ("param", &[9])];
        checkpoint::save(&mut opt, &store, Save { blobs, own_blobs, ..Save::default() }).unwrap();
        let mut named = |name| opt_error(&mut opt, &store, name);
        [named("a@b"), named("twice")]
    });
    for errors in saved.unwrap() {
        assert!(errors.iter().all(|error| matches!(error, CheckpointError::Blob { .. })), "{errors:?}");
    }
    let loaded = loopback::spawn(1, |comm| {
        let run = Run { ranks: 1, ..run.clone() };
        let loaded = checkpoint::load(&mut run.build(comm).unwrap(), &store, Load::default()).unwrap();
        assert_eq!(loaded.blobs.keys().collect::<Vec<_>>(), ["loader", "param"]);
        assert_eq!(loaded.own_blobs, [("rng".to_owned(), vec![0]), ("nothing".to_owned(), vec![])].into());
        loaded.saved
    });
    let saved = loaded.unwrap().remove(0);
    assert!(saved.blob("loader").unwrap().unwrap() == long);
    assert_eq!(saved.blob("param"), Ok(Some(vec![9])));
    assert_eq!((saved.blob("other"), saved.blob_of("rng", 3)), (Ok(None), Ok(None)));
    for rank in 0..3 {
        assert_eq!(saved.blob_of("rng", rank), Ok(Some(vec![rank as u8; rank + 1])));
        assert_eq!(saved.blob_of("nothing", rank), Ok(Some(vec![])));
    }
}

#[test]
fn skips_in_a_row_are_counted_on() {
    let (store, run) = (in_memory(), Run { ranks: 2, gradients: Gradients::Broken, ..Run::default() });
    let skips = |opt: &mut Optimizer| {
        run.hand_over(opt, 2, 0).unwrap();
        match opt.step(run.at(2)).unwrap().outcome().unwrap() {
            Outcome::Skipped { in_a_row, .. } => in_a_row,
            applied => panic!("{applied:?}"),
        }
    };
    let ranks = loopback::spawn(2, |comm| {
        let mut opt = run.build(Arc::clone(&comm)).unwrap();
        assert_eq!([skips(&mut opt), skips(&mut opt)], [1, 2]);
        checkpoint::save(&mut opt, &store, Save::default()).unwrap();
        let mut again = run.build(comm).unwrap();
        checkpoint::load(&mut again, &store, Load::default()).unwrap();
        skips(&mut again)
    });
    assert_eq!(ranks.unwrap(), [3, 3]);
}

#[test]
fn the_newest_are_kept() {
    let (store, run) = (in_memory(), Run { ranks: 2, ..Run::default() });
    let ranks = loopback::spawn(2, |comm| {
        let mut opt = run.build(comm).unwrap();
        for (step, keep) in [(1, None), (2, None), (3, None), (4, Some(2)), (5, Some(2))] {
            checkpoint::save(&mut opt, &store, Save { step: Some(step), keep, ..Save::default() }).unwrap();
        }
    });
    ranks.unwrap();
    assert_eq!(store.steps().unwrap(), [4, 5]);
}

/// Returns the error of saving bytes under this name.
fn opt_error(opt: &mut Optimizer, store: &Store, name: &str) -> CheckpointError {
    let blobs = vec![("twice", &[1][..]), (name, &[2])];
    match checkpoint::save(opt, store, Save { step: Some(77), blobs, ..Save::default() }) {
        Err(checkpoint::Error::Failed(failed)) => failed.error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn skips_loss_scale_and_schedule_go_on_where_they_were() {
    let scale = DynamicLossScale {
        init_scale: 1024.0,
        growth_interval: 3,
        hysteresis: 2,
        ..DynamicLossScale::default()
    };
    let schedule = Schedule::new(0.01, Cosine::new(2, 12)).unwrap();
    let options = Options {
        loss_scale: Some(LossScale::Dynamic(scale)),
        schedule: Some(schedule),
        ..Options::default()
    };
    let run = Run { ranks: 2, gradients: Gradients::Broken, options, ..Run::default() };
    let steps = |opt: &mut Optimizer, steps: std::ops::Range<u64>| {
        for t in steps {
            run.hand_over(opt, t, 0).unwrap();
            let at = StepArgs { max_norm: Some(1.0), ..opt.scheduled().unwrap() };
            let outcome = opt.step(at).unwrap().outcome().unwrap();
            assert_eq!(matches!(outcome, Outcome::Skipped { .. }), t == 2);
        }
    };
    let store = in_memory();
    // Right after the skip, and later.
    for before in [2, 4] {
        let ends = loopback::spawn(2, |comm| {
            let mut opt = run.build(Arc::clone(&comm)).unwrap();
            steps(&mut opt, 1..before + 1);
            checkpoint::save(&mut opt, &store, Save { step: Some(before), ..Save::default() }).unwrap();
            let then = opt.loss_scale_state();
            steps(&mut opt, before + 1..before + 6);
            let mut again = run.build(comm).unwrap();
            checkpoint::load(&mut again, &store, Load { step: Some(before), ..Load::default() }).unwrap();
            assert_eq!((again.loss_scale_state(), again.steps()), (then, before));
            steps(&mut again, before + 1..before + 6);
            (part(&opt), part(&again))
        });
        let (ends, agains): (Vec<_>, Vec<_>) = ends.unwrap().into_iter().unzip();
        assert!(join(ends) == join(agains));
    }
}

#[test]
fn hashes_that_were_kept_are_those_of_what_was_loaded() {
    let (store, run) = (in_memory(), Run { ranks: 3, ..Run::default() }.stage(Stage::Zero2));
    let ranks = loopback::spawn(3, |comm| {
        let mut opt = run.build(comm).unwrap();
        opt.verify_every(1).unwrap();
        train(&run, &mut opt, 1..3);
        checkpoint::save(&mut opt, &store, Save::default()).unwrap();
        train(&run, &mut opt, 3..5);
        checkpoint::load(&mut opt, &store, Load::default()).unwrap();
        assert_eq!(opt.verify().unwrap().unchecked, 0);
        train(&run, &mut opt, 3..5);
        opt.verify().unwrap().kept
    });
    assert!(ranks.unwrap().iter().all(|&kept| kept > 0));
}

#[test]
fn saving_takes_little_memory_and_tells_how_far_it_is() {
    const LEN: usize = 7_000_001;
    let all: Vec<f32> = (0..LEN).map(|i| i as f32).collect();
    let indices = |p: &meshstep_tensor::Param, mut values: meshstep_tensor::SliceMut<'_>| {
        values.copy_from(Slice::from(&all[..p.len()]))
    };
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    let (stages, mut drawn) = ([Stage::Zero1, Stage::Replicated, Stage::Zero3], draws(1));
    for (step, stage) in stages.into_iter().enumerate().filter(|_| drawn()) {
        let ranks = loopback::spawn(2, |comm| {
            let layout = Layout::builder().param("w", &[LEN], DType::F32).param("b", &[3], DType::F32);
            let meter = Meter::new();
            let options = Options { stage, meter: meter.clone(), ..Options::default() };
            let layout = layout.build().unwrap();
            let mut opt = Optimizer::new(comm, layout, AdamW::default(), indices, options).unwrap();
            meter.reset_peaks();
            let before = meter.live(Category::Staging);
            let mut told = Vec::new();
            let mut progress = |done, all| told.push((done, all));
            let save = Save { step: Some(step as u64), progress: Some(&mut progress), ..Save::default() };
            checkpoint::save(&mut opt, &store, save).unwrap();
            let staged = meter.peak(Category::Staging) - before;
            assert!(staged < 17 << 20, "{staged} bytes");
            assert_eq!(fetch(opt.state("b").unwrap().values, &opt.options().queue).len() % 4, 0);
            told
        });
        let ranks = ranks.unwrap();
        let mut written = 0;
        for told in &ranks {
            let (done, all) = *told.last().unwrap();
            assert!(told.is_sorted() && told.len() > 2 && done == all, "{told:?}");
            written += all;
        }
        // Parameters and two moments, each once; each rank writes about half.
        assert_eq!(written, 3 * 4 * (LEN as u64 + 3));
        let [a, b] = [0, 1].map(|rank: usize| ranks[rank].last().unwrap().1);
        assert!(a.abs_diff(b) < written / 50, "{stage:?}: {a} and {b}");
    } // Each element is at its place, whichever rank has written its window.
    let loaded = loopback::spawn(3, |comm| {
        let layout = Layout::builder().param("w", &[LEN], DType::F32).param("b", &[3], DType::F32);
        let options = Options { meter: Meter::new(), ..Options::default() };
        let mut opt =
            Optimizer::new(comm, layout.build().unwrap(), AdamW::default(), |_, _| Ok(()), options).unwrap();
        checkpoint::load(&mut opt, &store, Load { step: Some(0), ..Load::default() }).unwrap();
        opt.param("w").unwrap().bytes().unwrap() == Slice::from(&all[..]).bytes().unwrap()
    });
    assert_eq!(loaded.unwrap(), [true; 3]);
}

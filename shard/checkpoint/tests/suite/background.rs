//! Background saves: they save the moment of the call, whatever happens meanwhile.

use crate::common::{Run, STAGES, adamw, cases, params, tried, turns};
use crate::failures::failed;
use crate::gate::{Gate, gated};
use crate::layouts::{DIR, load, on, runs, seat, train};
use crate::whole::{Whole, join, part};
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Error, Failed, Save, Saver, Saving, Store};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::loopback::{Config, spawn, spawn_with};
use meshstep_comm::{self as comm, Clock};
use meshstep_shard::Optimizer;
use meshstep_tensor::{Category, DType, Layout};
use proptest::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// Starts this rank's background save of step `step`.
fn save_as(opt: &mut Optimizer, saver: &mut Saver, store: &Store, step: u64) -> Result<Saving, Error> {
    checkpoint::save_async(opt, saver, store, Save { step: Some(step), ..Save::default() })
}

fn cause(error: Error) -> (usize, CheckpointError) {
    let Failed { rank, error } = failed(error);
    (rank, error)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(25, 1000), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_saved_is_of_one_moment(
        (from, to) in (seat(), seat()),
        run in runs(),
        before in 0..3u64,
    ) {
        let (sim, gate, store) = gated();
        let (then, end) = save_beside(&on(from, &run), (&store, &gate), before);
        let (loaded, went_on) = load(&on(to, &run), &Store::on(Arc::new(sim), DIR), (before, 0));
        prop_assert!(loaded == then, "what was saved is of another moment");
        prop_assert!(went_on == end, "three steps later they are apart");
    }
}

/// Saves after `before` steps; nothing is written before three more steps are taken.
fn save_beside(run: &Run, (store, gate): (&Store, &Gate), before: u64) -> (Whole, Whole) {
    let ends = spawn(run.ranks, |comm| {
        let mut opt = run.build(Arc::clone(&comm)).unwrap();
        let mut saver = Saver::default();
        train(run, &mut opt, 1..before + 1);
        let saving = checkpoint::save_async(&mut opt, &mut saver, store, Save::default()).unwrap();
        let then = part(&opt);
        train(run, &mut opt, before + 1..before + 4);
        let end = part(&opt);
        comm.barrier().unwrap();
        assert!(!saving.is_done() && store.latest().is_err());
        comm.barrier().unwrap();
        gate.open();
        assert_eq!((saving.step(), saving.join().unwrap()), (before, before));
        (then, end)
    });
    let (thens, ends): (Vec<_>, Vec<_>) = ends.unwrap().into_iter().unzip();
    (join(thens), join(ends))
}

const SMALL: usize = 3;

fn small() -> Run {
    Run { lens: vec![70, 1, 0, 130], ranks: SMALL, ..Run::default() }
}

/// Returns the numbers of disk events after one checkpoint, and after a background save that follows. If the disk fails at event `fails_at`
/// of the background save, also returns the error of the ranks that `joins`, and of the next save.
fn failing(fails_at: Option<usize>, joins: [bool; SMALL]) -> ([usize; 2], Option<(usize, CheckpointError)>) {
    let (run, sim) = (small(), Sim::new(DIR));
    let (store, expected) = (Store::on(Arc::new(sim.clone()), DIR), run.run().params);
    let events = [const { AtomicUsize::new(0) }; 2];
    let told = spawn(run.ranks, |comm| {
        let mut opt = run.build(Arc::clone(&comm)).unwrap();
        let mut saver = Saver::default();
        let together = |then: &dyn Fn()| {
            comm.barrier().unwrap();
            then();
            comm.barrier().unwrap();
        };
        checkpoint::save(&mut opt, &store, Save { step: Some(1), ..Save::default() }).unwrap();
        together(&|| events[0].store(sim.events(), SeqCst));
        together(&|| sim.fail_at(fails_at.unwrap_or(usize::MAX)));
        let saving = save_as(&mut opt, &mut saver, &store, 2).unwrap();
        train(&run, &mut opt, 1..3);
        let joined = joins[comm.rank()].then(|| saving.join());
        let mut told = None;
        if fails_at.is_some() {
            told = joined.map(|joined| cause(joined.unwrap_err()));
            if joins != [true; SMALL] {
                let next = match fails_at.is_some_and(|event| event % 2 == 0) {
                    true => save_as(&mut opt, &mut saver, &store, 3).map(drop),
                    false => {
                        let save = Save { step: Some(3), after: Some(&mut saver), ..Save::default() };
                        checkpoint::save(&mut opt, &store, save).map(drop)
                    }
                };
                let next = cause(next.unwrap_err());
                assert!(told.is_none_or(|told| told == next), "what is joined is what the next save tells");
                told = Some(next);
            }
        }
        together(&|| events[1].store(sim.events(), SeqCst));
        assert!([1, 2].contains(&store.latest().unwrap().manifest().step));
        together(&|| sim.fail_at(usize::MAX));
        save_as(&mut opt, &mut saver, &store, 4).unwrap().join().unwrap();
        train(&run, &mut opt, 3..4);
        assert_eq!(params(&opt), expected, "training has noticed");
        told
    });
    let told = told.unwrap();
    assert!(told.iter().all(|error| *error == told[0]), "{told:?}");
    store.latest().unwrap().verify().unwrap();
    assert_eq!(store.latest().unwrap().manifest().step, 4);
    (events.map(|count| count.load(SeqCst)), told[0].clone())
}

#[test]
fn what_fails_beside_training_is_told_once_to_all() {
    let ([first, last], none) = failing(None, [true; SMALL]);
    assert!(none.is_none() && last > first + 20);
    let all = [[true, true, true], [false, true, false], [false, false, false]];
    for (i, fails_at) in (first..last).enumerate().filter(|(i, _)| tried(*i, 2)) {
        for joins in turns(&all, i, 1) {
            let (_, told) = failing(Some(fails_at), joins);
            assert!(matches!(told, Some((_, CheckpointError::Io { .. }))), "{told:?}");
        }
    }
}

/// Rank 1's disk does not answer; the other ranks wait no longer than the deadline.
fn stuck(joins: bool) {
    let (sim, gate, slow) = gated();
    let (run, fast) = (small(), Store::on(Arc::new(sim.clone()), DIR));
    let config =
        Config { clock: Clock::manual(), timeout: Duration::from_secs(60), ..Config::new(run.ranks) };
    let (clock, passed) = (config.clock.clone(), Barrier::new(SMALL));
    let told = spawn_with(config, |comm| {
        let mut opt = run.build(Arc::clone(&comm)).unwrap();
        let mut saver = Saver::default();
        let saving = save_as(&mut opt, &mut saver, if comm.rank() == 1 { &slow } else { &fast }, 1).unwrap();
        train(&run, &mut opt, 1..3);
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            while !saving.is_done() {
                clock.advance(Duration::from_secs(61));
                std::thread::yield_now();
            }
            gate.open();
        }
        // No rank must wait for another while that time passes.
        passed.wait();
        let told = if joins {
            let error = saving.join().unwrap_err();
            assert!(matches!(error, Error::Shard(meshstep_shard::Error::Comm(_))), "{error}");
            error.to_string()
        } else {
            drop(saving);
            save_as(&mut opt, &mut saver, &fast, 2).unwrap_err().to_string()
        };
        comm.barrier().unwrap();
        checkpoint::save(&mut opt, &fast, Save { step: Some(3), ..Save::default() }).unwrap();
        assert_eq!(save_as(&mut opt, &mut saver, &fast, 4).unwrap().join().unwrap(), 4);
        train(&run, &mut opt, 3..4);
        assert_eq!(params(&opt), run.run().params);
        told
    });
    let told = told.unwrap();
    assert!(told[0].contains("had not arrived after 60s"), "{told:?}");
    assert!(
        joins || told == [&*told[0]; SMALL] && told[0].contains("the save of step 1 did not complete"),
        "{told:?}"
    );
    assert_eq!(fast.steps().unwrap(), [3, 4]);
}

#[test]
fn a_rank_that_does_not_come_is_waited_for_until_the_deadline() {
    stuck(true);
    stuck(false);
}

#[test]
fn giving_training_up_ends_the_save() {
    let (run, (_, gate, store)) = (small(), gated());
    let ended = AtomicUsize::new(0);
    spawn(run.ranks, |comm| {
        let mut opt = run.build(Arc::clone(&comm)).unwrap();
        let mut saver = Saver::default();
        let saving = save_as(&mut opt, &mut saver, &store, 1).unwrap();
        comm.barrier().unwrap();
        comm.abort();
        if comm.rank() == 0 {
            // Its thread waits for the disk, while the threads of the other ranks have ended.
            while ended.load(SeqCst) < SMALL - 1 {
                std::thread::yield_now();
            }
            gate.open();
        }
        assert!(matches!(saving.join(), Err(Error::Shard(meshstep_shard::Error::Comm(_)))));
        ended.fetch_add(1, SeqCst);
        assert!(matches!(
            save_as(&mut opt, &mut saver, &store, 2),
            Err(Error::Shard(meshstep_shard::Error::Comm(_)))
        ));
    })
    .unwrap();
    assert!(matches!(store.latest(), Err(CheckpointError::Nothing { .. })));
}

#[test]
fn a_thread_that_panics_keeps_nobody_waiting() {
    let (run, (sim, gate, shattered)) = (small(), gated());
    gate.shatter();
    let whole = Store::on(Arc::new(sim), DIR);
    let told = spawn(run.ranks, |comm| {
        let mut opt = run.build(Arc::clone(&comm)).unwrap();
        let mut saver = Saver::default();
        let store = if comm.rank() == 1 { &shattered } else { &whole };
        let told = save_as(&mut opt, &mut saver, store, 1).unwrap().join().unwrap_err();
        train(&run, &mut opt, 1..4);
        assert_eq!(params(&opt), run.run().params);
        save_as(&mut opt, &mut saver, &whole, 2).unwrap().join().unwrap();
        told
    });
    for (rank, told) in told.unwrap().into_iter().enumerate() {
        match told {
            Error::Shard(meshstep_shard::Error::Comm(comm::Error::Panicked { rank: 1, .. })) if rank == 1 => {
            }
            Error::Shard(meshstep_shard::Error::Comm(comm::Error::Aborted { rank: 1 })) if rank != 1 => {}
            told => panic!("{rank}: {told}"),
        }
    }
}

#[test]
fn what_is_copied_is_what_is_written_and_its_memory_is_counted() {
    for stage in STAGES {
        let (_, gate, store) = gated();
        gate.open();
        let run = Run { lens: vec![700, 1, 0, 1300], ..Run::default() }.stage(stage);
        let copied = spawn(run.ranks, |comm| {
            let mut opt = run.build(comm).unwrap();
            let mut saver = Saver::default();
            let meter = opt.options().meter.clone();
            let live = || meter.live(Category::Staging);
            let before = live();
            let mut bytes = 0;
            for step in 1..4 {
                if step == 3 {
                    let more = Layout::builder().param("more", &[90], DType::F32).build().unwrap();
                    opt.add_param_group(more, adamw(), |_, _| Ok(())).unwrap();
                }
                let before = if step == 3 { live() - bytes } else { before };
                let saving = save_as(&mut opt, &mut saver, &store, step).unwrap();
                bytes = saving.stall().bytes;
                assert!(saving.stall().whole >= saving.stall().copying);
                while !saving.is_done() {
                    std::thread::yield_now();
                }
                assert_eq!(saving.progress(), (bytes, bytes));
                saving.join().unwrap();
                assert_eq!(live(), before + bytes, "once, however often one saves");
            }
            let before = live() - bytes;
            let saving = save_as(&mut opt, &mut saver, &store, 4).unwrap();
            meter.reset_peaks();
            saving.join().unwrap();
            drop(saver);
            assert_eq!(live(), before);
            (bytes, meter.peak(Category::Staging) - before)
        });
        let (copied, peaks): (Vec<u64>, Vec<u64>) = copied.unwrap().into_iter().unzip();
        let saved = store.latest().unwrap();
        let slots = saved.manifest().tensors.values().flat_map(|tensor| tensor.slots.values());
        let written: u64 = slots.flat_map(|slot| &slot.pieces).map(|piece| piece.stored.bytes).sum();
        assert_eq!(copied.iter().sum::<u64>(), written);
        // The window of a file is at most as long as the file's data; the remaining bytes are words that ranks exchange.
        assert!(
            peaks.iter().zip(&copied).all(|(peak, copied)| peak <= &(2 * copied + 8192)),
            "{peaks:?} {copied:?}"
        );
    }
}

#[test]
fn the_next_save_waits_for_the_one_before() {
    for beside in [false, true] {
        let (run, (_, gate, store)) = (small(), gated());
        let waiting = std::thread::scope(|threads| {
            threads.spawn(|| gate.open_for_one());
            spawn(run.ranks, |comm| {
                let mut opt = run.build(comm).unwrap();
                let mut saver = Saver::default();
                let first = save_as(&mut opt, &mut saver, &store, 1).unwrap();
                if beside {
                    save_as(&mut opt, &mut saver, &store, 2).unwrap().join().unwrap();
                } else {
                    let save = Save { step: Some(2), after: Some(&mut saver), ..Save::default() };
                    checkpoint::save(&mut opt, &store, save).unwrap();
                }
                assert!(first.is_done());
                first.join().unwrap()
            })
        });
        assert_eq!(waiting.unwrap(), [1; SMALL]);
        assert_eq!(store.steps().unwrap(), [1, 2]);
    }
}

#[test]
fn two_saves_to_one_folder_at_once_are_refused() {
    let (run, (_, gate, store)) = (small(), gated());
    let (other, gate) = (&store.clone(), &gate);
    spawn(run.ranks, |comm| {
        let mut opt = run.build(Arc::clone(&comm)).unwrap();
        let mut saver = Saver::default();
        let first = save_as(&mut opt, &mut saver, &store, 1).unwrap();
        gate.wait_for_one();
        let next = Save { step: Some(2), ..Save::default() };
        let refused = cause(checkpoint::save(&mut opt, other, next).unwrap_err());
        assert!(matches!(refused, (0, CheckpointError::Locked { .. })), "{refused:?}");
        comm.barrier().unwrap();
        gate.open();
        assert_eq!(first.join().unwrap(), 1);
    })
    .unwrap();
    assert_eq!(store.steps().unwrap(), [1]);
}

/// After the ranks have formed another group, or a rank has lost its saver, the ranks split a new communicator off.
#[test]
fn a_saver_follows_the_ranks() {
    let (run, (_, gate, store)) = (small(), gated());
    gate.open();
    spawn(run.ranks, |comm| {
        let mut saver = Saver::default();
        for step in 1..4 {
            let turned = comm.split(Some(0), -(comm.rank() as i64)).unwrap().unwrap();
            let mut opt = run.build(turned).unwrap();
            save_as(&mut opt, &mut saver, &store, 2 * step).unwrap().join().unwrap();
            if comm.rank() as u64 == step - 1 {
                saver = Saver::default();
            }
            save_as(&mut opt, &mut saver, &store, 2 * step + 1).unwrap().join().unwrap();
        }
    })
    .unwrap();
    assert_eq!(store.steps().unwrap(), [2, 3, 4, 5, 6, 7]);
}

#[test]
fn dropping_the_saver_waits_for_its_save() {
    let (run, (_, gate, store)) = (small(), gated());
    std::thread::scope(|threads| {
        threads.spawn(|| gate.open_for_one());
        let dropped = spawn(run.ranks, |comm| {
            let mut opt = run.build(comm).unwrap();
            let mut saver = Saver::default();
            drop(save_as(&mut opt, &mut saver, &store, 1).unwrap());
            drop(opt);
        });
        dropped.unwrap();
    });
    store.latest().unwrap().verify().unwrap();
}

#[test]
fn a_hook_and_another_call_are_refused_on_every_rank() {
    let (run, (_, gate, store)) = (small(), gated());
    gate.open();
    spawn(run.ranks, |comm| {
        let mut opt = run.build(Arc::clone(&comm)).unwrap();
        let mut saver = Saver::default();
        let mut hook = |_, _| {};
        let progress: Option<&mut dyn FnMut(u64, u64)> =
            if comm.rank() == 1 { Some(&mut hook) } else { None };
        let error =
            checkpoint::save_async(&mut opt, &mut saver, &store, Save { progress, ..Save::default() })
                .unwrap_err();
        assert_eq!(cause(error), (1, CheckpointError::Progress));
        let error = match comm.rank() {
            0 => checkpoint::save(&mut opt, &store, Save::default()).unwrap_err(),
            _ => checkpoint::save_async(&mut opt, &mut saver, &store, Save::default()).unwrap_err(),
        };
        assert!(matches!(error, Error::Shard(meshstep_shard::Error::Disagree { .. })), "{error}");
        checkpoint::save_async(&mut opt, &mut saver, &store, Save::default()).unwrap().join().unwrap();
    })
    .unwrap();
}

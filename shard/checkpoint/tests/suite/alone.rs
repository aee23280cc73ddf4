//! Independence of saves: a save needs no thread that steps compute with, and no rank waits long for rank 0.

use crate::common::{Run, draws, params};
use crate::hooked::{Call, Hooked};
use crate::layouts::{self, DIR, train};
use meshstep_cases::occupied::while_rayon_is_full;
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Save, Saver, Store};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::loopback::{Config, spawn, spawn_with};
use meshstep_comm::{Clock, Communicator, Error as CommError, InFlight, Op, Stats};
use meshstep_tensor::{Buffer, Queue};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Limit of the waits in tests; no failure of the code takes as long.
const FOREVER: Duration = Duration::from_secs(30);

/// A save that needed rayon's threads would wait here, as a step would wait for a save that occupies them.
#[test]
fn a_background_save_ends_while_all_threads_of_rayon_are_busy() {
    // Writes are long enough to be hashed on a thread of their own.
    let run = Run { lens: vec![600_000, 700_000], ranks: 2, ..Run::default() };
    let (sim, held) = (Sim::new(DIR), Arc::new((Mutex::new(false), Condvar::new())));
    let store = Store::on(Arc::new(sim), DIR);
    let (built, ready) = channel();
    let (ended, saved) = channel();
    let busy = OnceLock::new();
    std::thread::scope(|threads| {
        let (run, store, busy) = (&run, &store, &busy);
        threads.spawn(move || {
            spawn(run.ranks, |comm| {
                let mut opt = run.build(comm).unwrap();
                train(run, &mut opt, 1..2);
                built.send(()).unwrap();
                while busy.get().is_none() {
                    std::thread::yield_now();
                }
                checkpoint::save_async(&mut opt, &mut Saver::default(), store, Save::default())
                    .unwrap()
                    .join()
                    .unwrap();
                ended.send(()).unwrap();
            })
            .unwrap();
        });
        (0..run.ranks).for_each(|_| ready.recv().unwrap());
        let (at_work, working) = channel();
        let hold = Arc::clone(&held);
        rayon::spawn_broadcast(move |_| {
            at_work.send(()).unwrap();
            let released = hold.0.lock().unwrap();
            drop(hold.1.wait_while(released, |released| !*released).unwrap());
        });
        (0..rayon::current_num_threads()).for_each(|_| working.recv().unwrap());
        busy.set(()).unwrap();
        let both = (0..run.ranks).all(|_| saved.recv_timeout(FOREVER).is_ok());
        *held.0.lock().unwrap() = true;
        held.1.notify_all();
        assert!(both, "the save waits for a thread of the pool");
    });
    store.latest().unwrap().verify().unwrap();
}

/// A load copies on threads that steps use, not on rayon's.
#[test]
fn a_load_ends_while_all_threads_of_rayon_are_busy() {
    let run = Run { lens: vec![600_000, 700_000], ranks: 2, ..Run::default() };
    let store = Store::on(Arc::new(Sim::new(DIR)), DIR);
    let (_, end) = layouts::save(&run, &store, 1);
    let started = Instant::now();
    let loaded = while_rayon_is_full(|| layouts::load(&run, &store, (1, 0)).1);
    assert!(loaded == end && started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
}

/// Removing on this disk does not end before `go_on` is set.
#[derive(Debug, Default)]
struct Slow {
    removing: AtomicBool,
    go_on: AtomicBool,
}

impl Slow {
    fn disk(self: &Arc<Self>, sim: Sim, refuses: bool) -> Hooked<Sim> {
        let slow = Arc::clone(self);
        let draft = |path: &Path| path.file_name().unwrap().to_str().unwrap().starts_with("tmp-");
        Hooked::new(sim, move |call| match call {
            Call::Remove(path) if draft(path) => {
                slow.removing.store(true, SeqCst);
                while !slow.go_on.load(SeqCst) {
                    std::thread::yield_now();
                }
                if refuses { Err(ErrorKind::PermissionDenied.into()) } else { Ok(()) }
            }
            _ => Ok(()),
        })
    }
}

/// Communicator that counts its operations together with those of the communicators split from it.
#[derive(Debug)]
struct Counting {
    inner: Arc<dyn Communicator>,
    begun: Arc<AtomicU64>,
}

impl Communicator for Counting {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn start(&self, op: Op, buffer: Buffer, after: &Queue) -> Result<InFlight, (Buffer, CommError)> {
        self.begun.fetch_add(1, SeqCst);
        self.inner.start(op, buffer, after)
    }

    fn complete(&self, op: Op, buffer: Buffer) -> (Buffer, Result<(), CommError>) {
        self.begun.fetch_add(1, SeqCst);
        self.inner.complete(op, buffer)
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        let Some(inner) = self.inner.split(color, key)? else { return Ok(None) };
        Ok(Some(Arc::new(Counting { inner, begun: Arc::clone(&self.begun) })))
    }

    fn abort(&self) {
        self.inner.abort();
    }

    fn sound(&self) -> Result<(), CommError> {
        self.inner.sound()
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }
}

/// Time at which there is a draft or a step to remove.
#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    /// Before a step is saved: the remains of an interrupted save.
    Left,
    /// After the save, during a blocking or a background one: the previous step.
    Old { beside: bool },
}

/// While rank 0 removes, more time than one deadline passes, but in parts: between them the ranks exchange signals.
#[test]
fn removing_may_take_longer_than_any_deadline() {
    let old = |beside| When::Old { beside };
    // A normal run takes the first, the third and the fourth, which contain each `when` and both values of `refuses`.
    let all = [
        (old(false), false),
        (old(false), true),
        (old(true), false),
        (When::Left, true),
        (When::Left, false),
    ];
    let mut drawn = draws(2);
    for (when, refuses) in all.into_iter().filter(|_| drawn()) {
        let run = Run { lens: vec![70, 1, 130], ranks: 3, ..Run::default() };
        let (sim, slow) = (Sim::new(DIR), Arc::<Slow>::default());
        let store = Store::on(Arc::new(slow.disk(sim.clone(), refuses)), DIR);
        if when == When::Left {
            drop(store.begin(7).unwrap());
        }
        let config =
            Config { clock: Clock::manual(), timeout: Duration::from_secs(60), ..Config::new(run.ranks) };
        let (clock, begun) = (config.clock.clone(), Arc::<AtomicU64>::default());
        let told = std::thread::scope(|threads| {
            threads.spawn(|| {
                let started = Instant::now();
                while !slow.removing.load(SeqCst) && started.elapsed() < FOREVER {
                    std::thread::yield_now();
                }
                for _ in 0..5 {
                    let (before, started) = (begun.load(SeqCst), Instant::now());
                    // Time passes even if no rank sends a signal.
                    while begun.load(SeqCst) < before + 2 && started.elapsed() < Duration::from_secs(5) {
                        std::thread::yield_now();
                    }
                    clock.advance(Duration::from_secs(20));
                }
                slow.go_on.store(true, SeqCst);
            });
            spawn_with(config, |comm| {
                let comm: Arc<dyn Communicator> = match comm.rank() {
                    1 => Arc::new(Counting { inner: comm, begun: Arc::clone(&begun) }),
                    _ => comm,
                };
                let mut opt = run.build(comm).unwrap();
                if when != When::Left {
                    checkpoint::save(&mut opt, &store, Save { step: Some(1), ..Save::default() }).unwrap();
                }
                train(&run, &mut opt, 1..3);
                let save = Save { step: Some(2), keep: Some(1), ..Save::default() };
                let saved = match when == old(true) {
                    true => {
                        checkpoint::save_async(&mut opt, &mut Saver::default(), &store, save).unwrap().join()
                    }
                    false => checkpoint::save(&mut opt, &store, save),
                };
                train(&run, &mut opt, 3..4);
                assert_eq!(params(&opt), run.run().params);
                saved
            })
        });
        for told in told.unwrap() {
            match told {
                Ok(step) => assert!(step == 2 && !refuses),
                Err(checkpoint::Error::Failed(failed)) => {
                    let removing = matches!(failed.error, CheckpointError::Io { doing: "removing", .. });
                    assert!(refuses && failed.rank == 0 && removing, "{failed}");
                }
                Err(error) => panic!("{error}"),
            }
        }
        let left = Store::on(Arc::new(sim), DIR);
        if when == When::Left && refuses {
            assert_eq!(left.latest().map(drop), Err(CheckpointError::Nothing { dir: DIR.into() }));
            continue;
        }
        assert_eq!((left.steps().unwrap(), left.latest().unwrap().manifest().step), (vec![2], 2));
    }
}

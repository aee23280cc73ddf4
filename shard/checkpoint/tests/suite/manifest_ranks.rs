//! One rank reads the manifest for all: the others read its end alone, and are told if theirs is another step.

use crate::common::Run;
use crate::failures::failed;
use crate::hooked::{Call, Hooked};
use crate::layouts::{DIR, train};
use crate::whole::part;
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Load, Save, Store};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::loopback::spawn;
use meshstep_shard::Stage;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

const MANIFEST: &str = "/run/step-000000000003/manifest.json";

fn run() -> Run {
    Run { ranks: 4, ..Run::default() }.stage(Stage::Zero1)
}

/// Saves step 3 of a run with this seed.
fn saved(seed: u64) -> Sim {
    let (sim, run) = (Sim::new(DIR), Run { seed, ..run() });
    let store = Store::on(Arc::new(sim.clone()), DIR);
    let saved = spawn(4, |comm| {
        let mut opt = run.build(comm).unwrap();
        train(&run, &mut opt, 1..4);
        checkpoint::save(&mut opt, &store, Save::default()).unwrap();
    });
    saved.unwrap();
    sim
}

#[test]
fn only_rank_0_reads_the_whole_manifest() {
    let sim = saved(1);
    let len = sim.bytes(MANIFEST.as_ref()).len();
    for step in [None, Some(3)] {
        let read = spawn(4, |comm| {
            let bytes = Arc::new(AtomicUsize::new(0));
            let counted = Arc::clone(&bytes);
            let disk = Hooked::new(sim.clone(), move |call| {
                if let Call::Read(path, len) = call
                    && path.ends_with("manifest.json")
                {
                    counted.fetch_add(len, SeqCst);
                }
                Ok(())
            });
            let store = Store::on(Arc::new(disk), DIR);
            let mut opt = run().build(comm).unwrap();
            let loaded = checkpoint::load(&mut opt, &store, Load { step, ..Load::default() }).unwrap();
            // Every rank has all of it.
            assert_eq!(*loaded.saved.manifest(), *store.open(3).unwrap().manifest());
            assert_eq!(loaded.saved.hash(), store.open(3).unwrap().hash());
            bytes.load(SeqCst) - 2 * len
        });
        let read = read.unwrap();
        assert!(read[0] >= len && read[1..].iter().all(|&bytes| bytes < 100), "{step:?}: {read:?} of {len}");
    }
}

#[test]
fn a_rank_with_another_step_is_told() {
    let [sim, other] = [1, 2].map(saved);
    let gone = saved(1);
    gone.forget(MANIFEST.as_ref());
    for step in [None, Some(3)] {
        for (there, is_gone) in [(&other, false), (&gone, true)] {
            let told = spawn(4, |comm| {
                let at = if comm.rank() == 2 { there } else { &sim };
                let store = Store::on(Arc::new(at.clone()), DIR);
                let mut opt = run().build(comm).unwrap();
                let before = part(&opt);
                let load = Load { step, ..Load::default() };
                let error = checkpoint::load(&mut opt, &store, load).map(drop).unwrap_err();
                assert!(part(&opt) == before, "nothing has changed");
                error
            });
            for error in told.unwrap() {
                let text = error.to_string();
                match is_gone {
                    true => {
                        let failed = failed(error);
                        let gone = matches!(failed.error, CheckpointError::Gone { .. });
                        assert!(gone && failed.rank == 2, "{text}");
                    }
                    false => {
                        assert!(text.starts_with("ranks disagree on checkpoint to load: "), "{text}");
                        assert!(text.contains("of step 3"), "{text}");
                    }
                }
            }
        }
    }
}

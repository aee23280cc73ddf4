//! What fails on one rank is one error on all of them, changes nothing, and leaves what was saved before.

use crate::common::Run;
use crate::faulty::Faulty;
use crate::layouts::train;
use crate::sim::Sim;
use crate::whole::part;
use meshstep_comm::Communicator;
use meshstep_shard::checkpoint::{CheckpointError, Failed, Load, Save, Store};
use meshstep_shard::{Error, Stage};
use std::io::ErrorKind;
use std::sync::Arc;

const DIR: &str = "/run";

pub(crate) fn failed(error: Error) -> Failed {
    match error {
        Error::Checkpoint(failed) => *failed,
        other => panic!("{other}"),
    }
}

/// On every rank: saves, then saves or loads with each call of `faulty` rank's disk refused in turn; the errors.
fn on_rank(
    comm: Arc<dyn Communicator>,
    run: &Run,
    sim: &Sim,
    (at, gone): (usize, bool),
    loads: bool,
) -> Vec<Failed> {
    let rank = comm.rank();
    let disk = Faulty::new(sim.clone(), gone, ErrorKind::PermissionDenied);
    let (store, sound) = (Store::on(Arc::new(disk.clone()), DIR), Store::on(Arc::new(sim.clone()), DIR));
    let mut opt = run.build(comm).unwrap();
    train(run, &mut opt, 1..3);
    opt.save(&store, Save { step: Some(0), ..Save::default() }).unwrap();
    let before = part(&opt);
    let mut errors = Vec::new();
    for calls in 0.. {
        disk.after(if rank == at { calls } else { usize::MAX });
        let step = Some(1 + calls as u64);
        let done = match loads {
            true => opt.load(&store, Load::default()).map(drop),
            false => opt
                .save(
                    &store,
                    Save { step, keep: Some(1), blobs: vec![("loader", &[1, 2])], ..Save::default() },
                )
                .map(drop),
        };
        disk.after(usize::MAX);
        assert!(part(&opt) == before, "call {calls}: nothing has changed");
        let left = sim.files().iter().any(|path| path.to_str().unwrap().contains("tmp-"));
        assert!(rank > 0 || at == 0 || !left, "call {calls}: nothing is left of what failed");
        // What is there is complete, whoever looks at it.
        let latest = opt.load(&sound, Load::default()).unwrap();
        latest.saved.verify().unwrap();
        assert!(part(&opt) == before, "call {calls}: the newest is what was saved");
        match done {
            Ok(()) => break,
            Err(error) => errors.push(failed(error)),
        }
    }
    train(run, &mut opt, 3..4);
    errors
}

#[test]
fn every_refusal_of_a_disk_is_one_error_on_all_ranks() {
    for loads in [false, true] {
        for (at, gone) in [(0, false), (1, false), (2, false), (0, true), (2, true)] {
            let run = Run { ranks: 3, ..Run::default() }.stage(Stage::Zero2);
            let sim = Sim::new(DIR);
            let ranks =
                meshstep_comm::loopback::spawn(3, |comm| on_rank(comm, &run, &sim, (at, gone), loads));
            let ranks = ranks.unwrap();
            assert!(ranks.iter().all(|errors| *errors == ranks[0]), "{:?}", ranks);
            assert!(ranks[0].len() > 5, "rank {at} makes some calls, {}", ranks[0].len());
            let mut named = 0;
            for Failed { rank, error } in &ranks[0] {
                assert_eq!(*rank, at);
                let error = match error {
                    CheckpointError::Unreadable { what, source } => {
                        assert!(what.contains("of tensor \"p"), "{what}");
                        named += 1;
                        source
                    }
                    error => error,
                };
                let refused = matches!(error, CheckpointError::Io { kind: ErrorKind::PermissionDenied, .. });
                assert!(refused, "{error}");
            }
            assert_eq!(named > 3, loads, "what cannot be read of tensors is named");
        }
    }
}

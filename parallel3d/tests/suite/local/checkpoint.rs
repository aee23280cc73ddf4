//! Checkpoints of workers on one mesh continue on any other, with the same or another number of workers.

use crate::local::worker::{Has, Job, assert_same, cases, has, plans};
use meshstep_cases::{long, tried};
use meshstep_checkpoint::{self as checkpoint, Load, Save, Saver, Store};
use meshstep_comm::loopback;
use meshstep_parallel3d::{Mesh, Model, ModelBuilder};
use meshstep_shard::{Owners, Stage};
use std::path::Path;

/// Step of the save: in the middle of every plan's intervals, with a delayed exchange in flight.
const SAVED: u64 = 4;
const ON: u64 = 4;

fn save(job: &Job, mesh: &str, dir: &Path, background: bool) {
    let (mesh, store): (Mesh, _) = (mesh.parse().unwrap(), Store::new(dir));
    let saved = loopback::spawn(mesh.world_size(), |world| {
        let (mut local, worker) = job.build(world, &mesh);
        job.steps(&mut local, worker, SAVED);
        match background {
            true => {
                let mut saver = Saver::default();
                let saving = checkpoint::save_async(&mut local, &mut saver, &store, Save::default());
                saving.unwrap().join().unwrap();
            }
            false => drop(checkpoint::save(&mut local, &store, Save::default()).unwrap()),
        }
    });
    drop(saved.unwrap());
}

/// Loads the checkpoint, continues, and returns the final state.
fn go_on(job: &Job, mesh: &str, dir: &Path) -> Vec<(usize, Has)> {
    let (mesh, store): (Mesh, _) = (mesh.parse().unwrap(), Store::new(dir));
    let ends = loopback::spawn(mesh.world_size(), |world| {
        let (mut local, worker) = job.build(world, &mesh);
        let _ = checkpoint::load(&mut local, &store, Load::default()).unwrap();
        assert_eq!(local.local().steps(), SAVED);
        job.steps(&mut local, worker, ON);
        (worker, has(&local))
    });
    ends.unwrap()
}

#[test]
fn workers_go_on_on_another_mesh_as_if_nothing_had_been() {
    let whole = Stage::WholeParams(Owners::SortedGreedy);
    for (case, (name, job)) in cases().into_iter().enumerate() {
        let expected = crate::local::worker::run(&job(Stage::Replicated), "dp_replicate=2", SAVED + ON);
        let from = [
            ("dp_replicate=2,tp=2", Stage::Zero1),
            ("dp_replicate=2,dp_shard=2,tp=2", Stage::Zero3),
            ("dp_replicate=2", Stage::Replicated),
        ];
        let to = [
            ("dp_replicate=2,tp=4", Stage::Zero2),
            ("dp_replicate=2,dp_shard=2,cp=2", whole),
            ("dp_replicate=2,dp_shard=4", Stage::Zero3),
        ];
        // Short runs try one of the three pairs, a different one for each case; long runs try all.
        let pairs = from.into_iter().zip(to).enumerate().filter(|(i, _)| long() || *i == case % 3);
        for (_, ((from, saved), (to, loaded))) in pairs {
            let dir = tempfile::tempdir().unwrap();
            save(&job(saved), from, dir.path(), saved == Stage::Zero1);
            let ends = go_on(&job(loaded), to, dir.path());
            assert_same(&ends, &expected, &format!("{name} from {from}, {saved:?} to {to}, {loaded:?}"));
        }
    }
}

#[test]
fn another_number_of_workers_goes_on_from_the_mean_on_every_mesh_alike() {
    for (case, (name, job)) in cases().into_iter().enumerate() {
        let (whole, cut) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        save(&job(Stage::Replicated), "dp_replicate=2", whole.path(), false);
        // Short runs try one number of workers on one mesh, different ones for each case; long runs try all on all.
        let own = |i: usize, one: usize| long() || i == one;
        // Input of all meshes below except the second.
        if long() || case % 3 != 1 {
            save(&job(Stage::Zero2), "dp_replicate=2,dp_shard=2,tp=2", cut.path(), false);
        }
        for (_, workers) in [3, 1].into_iter().enumerate().filter(|(i, _)| own(*i, case / 3 % 2)) {
            let on = |rest: &str| format!("dp_replicate={workers}{rest}");
            let expected = go_on(&job(Stage::Replicated), &on(""), whole.path());
            let meshes =
                [(&cut, ",cp=2", Stage::Zero3), (&whole, ",tp=2", Stage::Zero1), (&cut, "", Stage::Zero1)];
            for (_, (dir, rest, stage)) in meshes.into_iter().enumerate().filter(|(i, _)| own(*i, case % 3)) {
                let ends = go_on(&job(stage), &on(rest), dir.path());
                assert_same(&ends, &expected, &format!("{name}, {}, {stage:?}", on(rest)));
            }
        }
    }
}

/// Returns the model with tied parameters under their other names.
fn otherwise_called(model: &Model) -> Model {
    let other =
        |name: &str| model.tied().into_iter().find(|(_, first)| *first == name).map(|(alias, _)| alias);
    let own = model.parameters().iter().fold(Model::builder(), |all, p| {
        all.param(other(&p.name).unwrap_or(&p.name), &p.shape, p.dtype, p.placement.clone())
    });
    let tie = |all: ModelBuilder, (alias, first): (&str, &str)| {
        all.tied(first, alias, &model.get(first).unwrap().shape)
    };
    model.tied().into_iter().fold(own, tie).build().unwrap()
}

#[test]
fn tied_parameters_are_found_under_either_name() {
    for (_, (name, plan, rules)) in plans().into_iter().enumerate().filter(|(i, _)| tried(*i, 1)) {
        let job = Job::new(Stage::Zero1, &plan, &rules);
        let dir = tempfile::tempdir().unwrap();
        save(&job, "dp_replicate=2,tp=2", dir.path(), false);
        let expected = crate::local::worker::run(&job, "dp_replicate=2", SAVED);
        let other = Job { model: otherwise_called(&job.model), ..job };
        let mesh: Mesh = "dp_replicate=2,dp_shard=2".parse().unwrap();
        let ends = loopback::spawn(4, |world| {
            let (mut local, worker) = other.build(world, &mesh);
            let _ = checkpoint::load(&mut local, &Store::new(dir.path()), Load::default()).unwrap();
            (worker, has(&local))
        });
        assert_same(&ends.unwrap(), &expected, name);
    }
}

//! A crash during saves of all ranks, blocking or in the background, may undo anything unsynced: the newest step is complete, so is every
//! other step on the disk, and a job resumes from the newest without a difference.

use crate::common::{Gradients, Run, cases, tried};
use crate::crash::all;
use crate::layouts::{DIR, train};
use crate::whole::{Whole, join, part};
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Disk as _, Load, Save, Saver, Store};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::{Communicator, loopback};
use meshstep_shard::Stage;
use rand::prelude::*;
use std::path::Path;
use std::sync::Arc;

/// Saves of the job: true for one in the background, and the number of steps to keep.
const SAVES: [(bool, Option<usize>); 6] =
    [(false, None), (true, None), (false, Some(2)), (true, Some(1)), (true, Some(2)), (false, Some(1))];

/// Disk of a job, and its state after each step.
struct Job {
    sim: Sim,
    /// Number of disk events at which all ranks knew that a step was saved.
    ends: Vec<usize>,
    wholes: Vec<Whole>,
}

fn run(ranks: usize, stage: Stage) -> Run {
    Run { lens: vec![70, 0, 33], ranks, gradients: Gradients::Equal, ..Run::default() }.stage(stage)
}

fn job() -> Job {
    let (sim, run) = (Sim::new(DIR), run(3, Stage::Zero2));
    let store = Store::on(Arc::new(sim.clone()), DIR);
    let ranks = loopback::spawn(run.ranks, |comm| {
        let mut opt = run.build(Arc::clone(&comm)).unwrap();
        let (mut saver, mut ends, mut parts) = (Saver::default(), Vec::new(), Vec::new());
        for (t, (beside, keep)) in (1..).zip(SAVES) {
            train(&run, &mut opt, t..t + 1);
            parts.push(part(&opt));
            let save = Save { keep, ..Save::default() };
            let saved = match beside {
                true => checkpoint::save_async(&mut opt, &mut saver, &store, save).unwrap().join(),
                false => checkpoint::save(&mut opt, &store, save),
            };
            assert_eq!(saved.unwrap(), t);
            comm.barrier().unwrap();
            ends.push(sim.events());
            comm.barrier().unwrap();
        }
        // One more step, which is not saved.
        train(&run, &mut opt, ends.len() as u64 + 1..ends.len() as u64 + 2);
        parts.push(part(&opt));
        (ends, parts)
    });
    let (mut ends, parts): (Vec<_>, Vec<_>) = ranks.unwrap().into_iter().unzip();
    let wholes = (0..=SAVES.len()).map(|t| join(parts.iter().map(|parts| parts[t].clone()).collect()));
    Job { wholes: wholes.collect(), ends: ends.remove(0), sim }
}

/// Loads the newest step on other ranks; `None` if no step was saved.
fn newest(store: &Store, comm: Arc<dyn Communicator>, run: &Run) -> Option<(u64, Whole)> {
    let mut opt = run.build(comm).unwrap();
    match checkpoint::load(&mut opt, store, Load::default()) {
        Ok(loaded) => Some((loaded.saved.manifest().step, part(&opt))),
        Err(error) => {
            let nothing = matches!(crate::failures::failed(error).error, CheckpointError::Nothing { .. });
            assert!(nothing, "something was saved, and is not there");
            None
        }
    }
}

impl Job {
    /// Checks the disk after a crash before event `count`, and that a job resumes from it; returns the step it resumed from.
    fn recover(&self, after: &Sim, count: usize, run: &Run) -> u64 {
        let store = Store::on(Arc::new(after.clone()), DIR);
        let begun = self.ends.iter().filter(|&&end| end <= count).count() as u64;
        all(&store).unwrap();
        let ranks = loopback::spawn(run.ranks, |comm| {
            let found = newest(&store, Arc::clone(&comm), run);
            let step = found.as_ref().map_or(0, |(step, _)| *step);
            let mut opt = run.build(comm).unwrap();
            if step > 0 {
                checkpoint::load(&mut opt, &store, Load::default()).unwrap();
            }
            train(run, &mut opt, step + 1..step + 2);
            checkpoint::save(&mut opt, &store, Save { keep: Some(1), ..Save::default() }).unwrap();
            (step, found.map(|(_, part)| part), part(&opt))
        });
        let ranks = ranks.unwrap();
        let step = ranks[0].0;
        assert!(step == begun || step == begun + 1, "step {step} of {begun} or the next, event {count}");
        let (found, next): (Vec<_>, Vec<_>) = ranks.into_iter().map(|(_, found, next)| (found, next)).unzip();
        if let Some(found) = found.into_iter().collect::<Option<Vec<_>>>() {
            assert!(join(found) == self.wholes[step as usize - 1], "step {step} is not what was saved");
        }
        assert!(join(next) == self.wholes[step as usize], "the step after {step} is another one");
        let mut names = after.list(Path::new(DIR)).unwrap();
        names.sort();
        let saved = format!("step-{:012}", step + 1);
        assert_eq!(names, [("LATEST".to_owned(), false), (saved, true)], "all else is swept");
        assert_eq!(all(&store), Ok(vec![step + 1]));
        step
    }
}

#[test]
fn after_a_crash_anywhere_the_newest_step_loads_on_all_ranks() {
    let job = job();
    let other = [run(2, Stage::Zero1), run(1, Stage::Replicated), run(4, Stage::Zero3)];
    let mut found = [0; SAVES.len() + 1];
    // Always include the events after each save, so that every step occurs.
    for count in (0..=job.sim.events()).filter(|count| job.ends.contains(count) || tried(*count, 5)) {
        for seed in 0..u64::from(cases(1, 20)) {
            let random = &mut StdRng::seed_from_u64(seed << 32 | count as u64);
            let after = job.sim.crashed(count, random);
            let step = job.recover(&after, count, &other[count % other.len()]);
            found[step as usize] += 1;
            // The job that resumes crashes too.
            let second = after.crashed(random.random_range(0..=after.events()), random);
            let store = Store::on(Arc::new(second), DIR);
            all(&store).unwrap();
            let there = match store.latest() {
                Err(CheckpointError::Nothing { .. }) => 0,
                saved => saved.unwrap().verify().map(|_| store.latest().unwrap().manifest().step).unwrap(),
            };
            assert!(there == step || there == step + 1, "step {there} after {step}");
        }
    }
    println!("{} events, steps found: {found:?}", job.sim.events());
    assert!(found.iter().all(|&times| times > 0), "{found:?}");
}

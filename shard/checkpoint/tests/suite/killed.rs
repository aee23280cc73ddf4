//! A job that saves is killed at any moment, again and again: the newest step is complete, and the next job resumes from it.

use crate::common::{adamw, cases};
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Error, Load, Save, Store};
use meshstep_comm::{Communicator, loopback};
use meshstep_shard::{Optimizer, Options, Stage, StepArgs};
use meshstep_tensor::{DType, Layout, Meter};
use rand::prelude::*;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Folder to save to, set if this binary runs as the job.
const DIR: &str = "MESHSTEP_TEST_SAVES_TO";
/// Length of the job's parameter, so that a save takes many writes.
const LEN: usize = 150_000;
/// Maximum time of a kill after the job has loaded, in microseconds.
const MOST: u64 = 120_000;

fn make(comm: Arc<dyn Communicator>, len: usize, stage: Stage) -> Optimizer {
    let layout = Layout::builder().param("w", &[len], DType::F32).build().unwrap();
    let options = Options { stage, meter: Meter::new(), ..Options::default() };
    Optimizer::new(comm, layout, adamw(), |_, _| Ok(()), options).unwrap()
}

/// Takes a step with the same gradient for all elements.
fn step(opt: &mut Optimizer, len: usize) {
    let grad = 1.0 + (opt.steps() % 5) as f32;
    let mb = opt.micro_batch(1).unwrap();
    mb.grad("w", &vec![grad; len][..]).unwrap();
    mb.finish().unwrap();
    opt.step(StepArgs { lr: 0.01, ..StepArgs::default() }).unwrap().outcome().unwrap();
}

/// Returns the bits of the elements and of their moments, each of them once if all elements are equal.
fn alike(opt: &Optimizer) -> Vec<u32> {
    let state = opt.state("w").unwrap();
    let vectors = [state.values].into_iter().chain(state.slots.into_iter().map(|(_, values)| values));
    let one = |values: meshstep_tensor::Slice<'_>| {
        let mut bits: Vec<u32> = values.typed::<f32>().unwrap().iter().map(|x| x.to_bits()).collect();
        bits.dedup();
        bits
    };
    vectors.flat_map(one).collect()
}

/// Resumes from the checkpoint, and saves after every step. In a run of tests it does nothing.
#[test]
fn child() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let store = Store::new(dir);
    loopback::spawn(2, |comm| {
        let first = comm.rank() == 0;
        let mut opt = make(comm, LEN, Stage::Zero1);
        if !nothing(checkpoint::load(&mut opt, &store, Load::default()).map(drop)) {
            step(&mut opt, LEN);
        }
        if first {
            println!("\nloaded");
        }
        loop {
            checkpoint::save(&mut opt, &store, Save { keep: Some(2), ..Save::default() }).unwrap();
            step(&mut opt, LEN);
        }
    })
    .unwrap();
}

/// Returns true if there is no checkpoint yet; any other failure is a finding.
fn nothing(loaded: Result<(), Error>) -> bool {
    match loaded {
        Err(Error::Failed(failed)) if matches!(failed.error, CheckpointError::Nothing { .. }) => true,
        loaded => {
            loaded.unwrap();
            false
        }
    }
}

fn start(dir: &Path) -> Child {
    let mut job = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "killed::child", "--nocapture", "--test-threads=1"])
        .env(DIR, dir)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(job.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line == "loaded"), "the job ended");
    job
}

/// Returns the state after each step of a job with one element that is never killed.
fn never_killed(steps: usize) -> Vec<Vec<u32>> {
    let run = |comm| {
        let mut opt = make(comm, 1, Stage::Replicated);
        let mut after = vec![alike(&opt)];
        for _ in 0..steps {
            step(&mut opt, 1);
            after.push(alike(&opt));
        }
        after
    };
    loopback::spawn(1, run).unwrap().swap_remove(0)
}

/// Returns the newest step after checks that it is complete, and that other ranks load the state of the job that was never killed
/// (`expected`).
fn newest(dir: &Path, expected: &[Vec<u32>]) -> Option<u64> {
    let store = Store::new(dir);
    let loaded = loopback::spawn(3, |comm| {
        let mut opt = make(comm, LEN, Stage::Zero2);
        (!nothing(checkpoint::load(&mut opt, &store, Load::default()).map(drop)))
            .then(|| (opt.steps(), alike(&opt)))
    });
    let ranks: Vec<_> = loaded.unwrap().into_iter().collect::<Option<_>>()?;
    let steps = ranks[0].0;
    let expected = &expected[steps as usize];
    assert!(ranks.iter().all(|rank| rank.0 == steps && rank.1 == *expected), "step {steps}");
    store.latest().unwrap().verify().unwrap();
    Some(steps)
}

#[test]
fn what_is_newest_is_complete_whenever_a_job_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut times = StdRng::seed_from_u64(7);
    let kills = cases(12, 200);
    // A few kills may all come before or between saves. More follow until one was within a save and a checkpoint exists.
    let most = kills.max(24);
    // A save is several writes to a disk, so no job gets further.
    let mut expected = never_killed(kills as usize * 100);
    let (mut last, mut stale, mut killed) = (None, 0, 0);
    while killed < kills || (stale == 0 || last.is_none()) && killed < most {
        killed += 1;
        let mut job = start(dir.path());
        // The time is random, and longer where no save has ended in many jobs.
        let longest = if last.is_none() && killed > kills { 10 * MOST } else { MOST };
        std::thread::sleep(Duration::from_micros(times.random_range(0..longest)));
        job.kill().unwrap();
        job.wait().unwrap();
        stale += usize::from(drafts(dir.path()) > 0);
        if expected.len() <= killed as usize * 100 {
            expected = never_killed(most as usize * 100);
        }
        let newest = newest(dir.path(), &expected);
        assert!(newest >= last, "{newest:?} after {last:?}");
        last = newest;
    }
    let loaded = loopback::spawn(1, |comm| {
        let (mut opt, store) = (make(comm, LEN, Stage::Zero1), Store::new(dir.path()));
        checkpoint::load(&mut opt, &store, Load::default()).unwrap();
        step(&mut opt, LEN);
        checkpoint::save(&mut opt, &store, Save { keep: Some(1), ..Save::default() }).unwrap()
    });
    println!("{stale} of {killed} kills amid a save, {last:?} the last step, {loaded:?} saved behind it");
    assert!(stale > 0, "no job was killed while it saved");
    let mut names: Vec<String> = names(dir.path()).collect();
    names.sort();
    assert_eq!(names, ["LATEST", "LOCK", &format!("step-{:012}", loaded.unwrap()[0])]);
}

fn names(dir: &Path) -> impl Iterator<Item = String> {
    dir.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap())
}

/// Counts the folders of incomplete saves.
fn drafts(dir: &Path) -> usize {
    names(dir).filter(|name| name.starts_with("tmp-")).count()
}

//! Two jobs start on one folder again and again, and the holder is killed: the other one takes over, and no step is lost.

use crate::common::{adamw, cases};
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Load, Save, Store};
use meshstep_comm::{Communicator, loopback};
use meshstep_shard::{Optimizer, Options, Stage, StepArgs};
use meshstep_tensor::{DType, Layout, Meter};
use rand::prelude::*;
use std::io::{BufRead, BufReader, Lines};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Folder to save to, set if this binary runs as a job.
const DIR: &str = "MESHSTEP_TEST_RIVAL_IN";
const LEN: usize = 2000;
/// Maximum time from the start of the rivals to the death of the holder, in microseconds.
const MOST: u64 = 60_000;

/// Job, and the lines that it prints.
struct Job {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

fn make(comm: Arc<dyn Communicator>) -> Optimizer {
    let layout = Layout::builder().param("w", &[LEN], DType::F32).build().unwrap();
    let options = Options { stage: Stage::Zero1, meter: Meter::new(), ..Options::default() };
    Optimizer::new(comm, layout, adamw(), |_, _| Ok(()), options).unwrap()
}

/// Claims the folder, resumes, and saves after every step. In a run of tests it does nothing.
#[test]
fn child() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let store = Store::new(dir);
    if let Err(error) = store.claim() {
        let CheckpointError::Held { holder: Some(holder), .. } = error else { panic!("{error}") };
        println!("\nheld by {}", holder.pid);
        return;
    }
    println!("\nclaimed");
    loopback::spawn(2, |comm| {
        let first = comm.rank() == 0;
        let mut opt = make(comm);
        match checkpoint::load(&mut opt, &store, Load::default()) {
            Ok(_) => {}
            Err(checkpoint::Error::Failed(failed))
                if matches!(failed.error, CheckpointError::Nothing { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        loop {
            let mb = opt.micro_batch(1).unwrap();
            mb.grad("w", &vec![1.0f32; LEN][..]).unwrap();
            mb.finish().unwrap();
            opt.step(StepArgs { lr: 0.01, ..StepArgs::default() }).unwrap().outcome().unwrap();
            let step = checkpoint::save(&mut opt, &store, Save { keep: Some(2), ..Save::default() }).unwrap();
            if first {
                println!("saved {step}");
            }
        }
    })
    .unwrap();
}

impl Job {
    fn start(dir: &Path) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rivals::child", "--nocapture", "--test-threads=1"])
            .env(DIR, dir)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Job { process, lines }
    }

    /// Returns the next line that is the job's own.
    fn says(&mut self) -> String {
        let own = |line: &String| ["held by ", "claimed", "saved "].iter().any(|word| line.starts_with(word));
        self.lines.by_ref().map(Result::unwrap).find(own).unwrap()
    }

    /// Kills the job, and returns the last step that it has reported.
    fn kill(mut self) -> Option<u64> {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        self.lines.filter_map(|line| saved_step(&line.ok()?)).last()
    }
}

fn saved_step(line: &str) -> Option<u64> {
    line.strip_prefix("saved ")?.parse().ok()
}

#[test]
fn no_step_is_lost_however_two_jobs_start_and_die() {
    let dir = tempfile::tempdir().unwrap();
    let mut random = StdRng::seed_from_u64(11);
    let (mut last, mut refused, mut saved) = (0, 0, 0);
    for pair in 0..cases(8, 200) {
        let mut jobs = [Job::start(dir.path()), Job::start(dir.path())];
        let said = [0, 1].map(|i: usize| jobs[i].says());
        let holder = said.iter().position(|line| line == "claimed");
        let holder = holder.unwrap_or_else(|| panic!("pair {pair}: nobody holds the folder: {said:?}"));
        let [one, two] = jobs;
        let (mut rightful, mut other) = if holder == 0 { (one, two) } else { (two, one) };
        assert_eq!(said[1 - holder], format!("held by {}", rightful.process.id()), "pair {pair}");
        assert!(other.process.wait().unwrap().success());
        refused += 1;
        std::thread::sleep(Duration::from_micros(random.random_range(0..MOST)));
        // The first one saves, however slow the disk is.
        let first = if pair == 0 { saved_step(&rightful.says()) } else { None };
        let reported = rightful.kill().or(first);
        let store = Store::new(dir.path());
        let begun = Instant::now();
        store.claim().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(20));
        let newest = match store.latest() {
            Ok(latest) => latest.verify().map(|_| latest.manifest().step).unwrap(),
            Err(CheckpointError::Nothing { .. }) => 0,
            Err(error) => panic!("pair {pair}: {error}"),
        };
        let reported = reported.unwrap_or(last).max(last);
        // A job may be killed between the save and the report.
        assert!((reported..=reported + 1).contains(&newest), "pair {pair}: {newest} after {reported}");
        let kept = store.steps().unwrap();
        // The folder may also have the step before them, and a step that never became the newest.
        let both = newest < 2 || [newest - 1, newest].iter().all(|step| kept.contains(step));
        assert!(both, "pair {pair}: {newest} of {kept:?}");
        saved += newest - last;
        last = newest;
    }
    println!("{refused} jobs refused, {saved} steps saved, none lost");
    assert!(saved > 0, "no job lived long enough to save");
}

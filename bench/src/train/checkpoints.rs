//! Saves a training run at intervals and on request, and continues from a checkpoint: its state, and its losses so far.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Load, Save, Saveable, Saved, Store};

use crate::args::train::Train;
use crate::train::signals::Stopped;

/// Blobs of a checkpoint besides the optimizer: the run's settings, the losses that the ranks of the saving program
/// computed, the losses of earlier programs, and norms.
const JOB: &str = "job";
const LOSSES: &str = "losses";
const BEFORE: &str = "losses-before";
const NORMS: &str = "norms";

/// Location and times of a run's checkpoints.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    store: Store,
    dir: PathBuf,
    every: Option<usize>,
    resume: bool,
    /// True if the run may go on after checkpoints of another one.
    adopt: bool,
    last: usize,
    job: String,
}

/// Record of a run on one rank: its own results, and those of earlier programs.
#[derive(Debug)]
pub(crate) struct Journal<'a> {
    checkpoints: Option<&'a Checkpoints>,
    /// Losses of the run from earlier programs.
    pub(crate) before: Vec<f64>,
    /// Losses of this rank in this program.
    pub(crate) losses: Vec<f64>,
    /// Norms of the run from the first step on.
    pub(crate) norms: Vec<f64>,
}

impl Checkpoints {
    /// Returns the checkpoint settings, if checkpoints were requested. `job` must be equal when a run continues; `folder`
    /// is the parent of the default location.
    pub(crate) fn of(asked: &Train, folder: &Path, job: String) -> Result<Option<Self>> {
        if asked.save_every.is_none() && !asked.resume {
            return Ok(None);
        }
        ensure!(
            asked.stage.is_some() && asked.meshes().len() <= 1,
            "checkpoints need a single run: add --stage, such as --stage 2, and at most one --mesh"
        );
        let dir = asked.checkpoints.clone().unwrap_or_else(|| folder.join("checkpoints"));
        if asked.save_every.is_some() {
            std::fs::create_dir_all(&dir)
                .with_context(|| format!("cannot create the folder {}", dir.display()))?;
        }
        let (every, resume, last) = (asked.save_every, asked.resume, asked.last_step());
        let store = Store::new(&dir);
        let store = if asked.take_over { store.taking_over() } else { store };
        let store = if asked.adopt { store.adopting() } else { store };
        Ok(Some(Self { store, dir, every, resume, adopt: asked.adopt, last, job }))
    }

    /// Refuses a run that could not save here, before it trains: a folder of another run. All ranks see the same folder.
    fn check_run(&self, loaded: Option<&Saved>) -> Result<()> {
        let Self { store, dir, adopt: false, every: Some(_), .. } = self else { return Ok(()) };
        match loaded {
            Some(saved) => ensure!(
                saved.manifest().run.is_some(),
                "{}: the checkpoint is of an earlier version, which did not number runs; add --adopt to save after it",
                dir.display()
            ),
            None => match store.latest() {
                Err(CheckpointError::Nothing { .. }) => {}
                found => bail!(
                    "{}: another run has saved step {} there; continue it with --resume, choose another folder with --checkpoints, \
                     or add --adopt to save after it",
                    dir.display(),
                    found?.manifest().step
                ),
            },
        }
        Ok(())
    }

    fn is_due(&self, steps: usize) -> bool {
        self.every.is_some_and(|every| steps.is_multiple_of(every) || steps == self.last)
    }
}

impl<'a> Journal<'a> {
    /// Creates an empty journal.
    pub(crate) fn new(checkpoints: Option<&'a Checkpoints>) -> Self {
        Self { checkpoints, before: Vec::new(), losses: Vec::new(), norms: Vec::new() }
    }

    /// Claims the folder if the run saves; loads the newest checkpoint if --resume was given, and returns the number of steps taken
    /// before. `whole` combines the losses of the ranks into those of the run.
    pub(crate) fn resume(
        &mut self,
        optimizer: &mut impl Saveable,
        whole: impl FnOnce(&str, &[Vec<f64>]) -> Result<Vec<f64>>,
    ) -> Result<usize> {
        if let Some(Checkpoints { store, .. }) = self.checkpoints.filter(|c| c.every.is_some()) {
            checkpoint::claim(optimizer, store).context("--save-every")?;
        }
        let Some(checkpoints) = self.checkpoints else { return Ok(0) };
        let Checkpoints { store, dir, last, job, .. } = checkpoints;
        if !checkpoints.resume {
            checkpoints.check_run(None)?;
            return Ok(0);
        }
        let saved = checkpoint::load(optimizer, store, Load::default()).context("--resume")?.saved;
        checkpoints.check_run(Some(&saved))?;
        let found = String::from_utf8_lossy(&blob(&saved, JOB)?).into_owned();
        ensure!(
            found == *job,
            "{}: the checkpoint is of another run: {found} instead of {job}",
            dir.display()
        );
        self.before = numbers(&blob(&saved, BEFORE)?);
        self.norms = numbers(&blob(&saved, NORMS)?);
        let mut ranks = Vec::new();
        while let Some(losses) = saved.blob_of(LOSSES, ranks.len())? {
            ranks.push(numbers(&losses));
        }
        self.before.extend(whole(&saved.manifest().mesh, &ranks)?);
        let steps = saved.manifest().step as usize;
        ensure!(
            self.before.len() == steps,
            "the checkpoint has {} losses of {steps} steps",
            self.before.len()
        );
        // A run that was asked to end after its last step has not reported yet.
        ensure!(
            steps <= *last,
            "{}: the checkpoint is of step {steps}, after the last one, {last}; use more --steps",
            dir.display()
        );
        Ok(steps)
    }

    /// Saves after `steps` steps if a checkpoint is due, or if the run ends here on request and saves at all. Collective.
    pub(crate) fn save(&self, steps: usize, preempted: bool, optimizer: &mut impl Saveable) -> Result<()> {
        let due = |c: &&Checkpoints| c.is_due(steps) || (preempted && c.every.is_some());
        let Some(Checkpoints { store, job, .. }) = self.checkpoints.filter(due) else {
            return Ok(());
        };
        let [losses, before, norms] = [&self.losses, &self.before, &self.norms].map(|values| bytes(values));
        let blobs = vec![(JOB, job.as_bytes()), (BEFORE, &before[..]), (NORMS, &norms)];
        let own_blobs = vec![(LOSSES, &losses[..])];
        let save = Save { step: Some(steps as u64), keep: Some(2), blobs, own_blobs, ..Save::default() };
        checkpoint::save(optimizer, store, save)?;
        Ok(())
    }
}

/// Returns the end of a run that was asked to end after `steps` steps.
pub(crate) fn stopped(steps: usize, checkpoints: Option<&Checkpoints>) -> Stopped {
    let saves = checkpoints.filter(|checkpoints| checkpoints.every.is_some());
    Stopped { steps, saved: saves.map(|checkpoints| checkpoints.dir.clone()) }
}

fn blob(saved: &Saved, name: &str) -> Result<Vec<u8>> {
    match saved.blob(name)? {
        Some(bytes) => Ok(bytes),
        None => {
            bail!("{}: no {name:?} besides the optimizer; not a checkpoint of train", saved.dir().display())
        }
    }
}

fn bytes(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn numbers(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|&value| f64::from_le_bytes(value)).collect()
}

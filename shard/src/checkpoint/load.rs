//! Loading: every rank reads what it has, and all of them take it in, or none.

use super::contents::Named;
use super::error::CheckpointError;
use super::fits::{Cast, Fitting};
use super::placing::{Alike, Placing};
use super::ranks::Ranks;
use super::read::Reading;
use super::saved::Saved;
use super::settings::Settings;
use super::store::Store;
use crate::verify::Slot;
use crate::{Error, Optimizer};
use meshstep_optim::LossScaleState;
use meshstep_tensor::{Buffer, Category};

/// What is loaded, and what may differ. The same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Load {
    /// Which checkpoint; `None`: the newest complete one.
    pub step: Option<u64>,
    /// Whether to load what fits, and to tell what was missing, unexpected, or of another type; otherwise these are errors. What is
    /// missing stays as it is; shapes must be the same.
    pub partial: bool,
    /// Whether to go on with other hyperparameters, another schedule or loss scale, other random bits; otherwise that is an error.
    pub other_settings: bool,
}

/// What was loaded.
#[derive(Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// The checkpoint, for its manifest, and for bytes that other ranks have saved.
    pub saved: Saved,
    /// Vectors that are as they were, nothing like them having been saved: parameters, or their states as `parameter:state`.
    pub missing: Vec<String>,
    /// Vectors that were saved and that there are none of here.
    pub unexpected: Vec<String>,
    /// Vectors that were made from others.
    pub cast: Vec<Cast>,
}

/// All that is taken in.
#[derive(Debug, Default)]
pub(super) struct Staged {
    pub(super) vectors: Vec<(usize, Slot, Buffer)>,
    pub(super) t: Vec<Option<u64>>,
    pub(super) settings: Settings,
    pub(super) scale: Option<LossScaleState>,
    pub(super) missing: Vec<String>,
    pub(super) unexpected: Vec<String>,
    pub(super) cast: Vec<Cast>,
}

impl Optimizer {
    /// Loads parameters, state, and how far they were, onto whatever ranks, stage and buckets there are here. Collective, between
    /// two steps.
    ///
    /// Each rank reads the bytes it needs, and checks every window of 1 MiB that they are in. All of it lies in memory of the host
    /// beside what there is, once more what this rank holds of parameters and state, until every rank has its own; then it is
    /// copied, which does not fail. An error is the same on every rank ([`Error::Checkpoint`] names the first rank that has one),
    /// and has changed nothing on any.
    pub fn load(&mut self, store: &Store, load: Load) -> Result<Loaded, Error> {
        let ranks = self.comm().world_size();
        self.load_placed(store, load, &Alike { ranks })
    }

    /// The same where parameters are parts of others.
    pub fn load_placed(&mut self, store: &Store, load: Load, placing: &dyn Placing) -> Result<Loaded, Error> {
        self.handover.healthy()?;
        let ready = self.between_two_steps();
        self.call_together(&format!("load\nwhat to load = {load:?}"), ready)?;
        let ranks = Ranks::new(self.comm(), self.options());
        let loaded = self.apart_from_steps(|all| {
            let opened = load.step.map_or_else(|| store.latest(), |step| store.open(step));
            let saved = ranks.agree(opened)?;
            let text = format!("checkpoint to load = {} of step {}\n", saved.hash(), saved.manifest().step);
            crate::same_everywhere(&**all.comm(), &all.options, &text)?;
            let mut staged = ranks.agree(all.stage(&saved, &load, placing))?;
            let [missing, unexpected] = [&mut staged.missing, &mut staged.unexpected].map(std::mem::take);
            let cast = std::mem::take(&mut staged.cast);
            all.take_in_staged(staged)?;
            Ok(Loaded { saved, missing, unexpected, cast })
        });
        loaded.map(|(loaded, _)| loaded)
    }

    /// Reads all that this rank needs.
    fn stage(
        &mut self,
        saved: &Saved,
        load: &Load,
        placing: &dyn Placing,
    ) -> Result<Staged, CheckpointError> {
        let contents = self.contents(placing)?;
        let settings = Settings::from_json(&saved.manifest().settings)?;
        let mut tied = settings.tied.clone();
        tied.extend(placing.tied());
        let fitting = Fitting::new(&contents, saved.manifest(), &tied, load)?;
        if !load.other_settings {
            settings.check(&Settings::of(self, placing.tied()))?;
        }
        let scale = self.scale_to_load(&settings, load)?;
        let mut reading = Reading::of(saved);
        let mut vectors = Vec::new();
        for (param, (content, sources)) in contents.iter().zip(&fitting.sources).enumerate() {
            for (vector, source) in content.vectors.iter().zip(sources) {
                let Some(source) = source else { continue };
                let range = self.has(param, vector.slot).map_err(CheckpointError::memory)?;
                let what = format!("slot {:?} of tensor {:?}", vector.name, content.name);
                let mut buffer = self.room_for(vector, range.len())?;
                let meter = &self.options.meter;
                reading.vector(content, source, range, &what, meter, buffer.as_mut())?;
                vectors.push((param, vector.slot, buffer));
            }
        }
        let Fitting { t, missing, unexpected, cast, .. } = fitting;
        Ok(Staged { vectors, t, settings, scale, missing, unexpected, cast })
    }

    pub(super) fn room_for(&self, vector: &Named, len: usize) -> Result<Buffer, CheckpointError> {
        let dtype = vector.dtype.dtype().ok_or_else(|| CheckpointError::memory("bytes are no numbers"))?;
        Buffer::zeroed(len, dtype, &self.options.meter, Category::Staging).map_err(CheckpointError::memory)
    }

    /// The loss scale to go on with; `None`: the one there is.
    pub(super) fn scale_to_load(
        &self,
        settings: &Settings,
        load: &Load,
    ) -> Result<Option<LossScaleState>, CheckpointError> {
        let (Some(state), Some(rule)) = (settings.scale()?, self.options.loss_scale) else { return Ok(None) };
        match rule.check_state(&state) {
            Ok(()) => Ok(Some(state)),
            // Of another rule.
            Err(_) if load.other_settings => Ok(None),
            Err(error) => {
                let (what, reason) = ("the loss scale".to_owned(), error.to_string());
                Err(CheckpointError::Contradiction { what, reason })
            }
        }
    }

    /// Takes everything in. What fails here is the device, and ends the run.
    pub(super) fn take_in_staged(&mut self, staged: Staged) -> Result<(), Error> {
        let Staged { vectors, t, settings, scale, .. } = staged;
        let queue = self.options.queue.clone();
        for (param, slot, values) in vectors {
            queue.upload(values.as_slice(), self.vector_mut(param, slot)?)?;
        }
        for (entry, t) in self.entries.iter_mut().zip(t) {
            entry.t = t.unwrap_or(entry.t);
        }
        (self.progress.steps, self.progress.skips) = (settings.steps, settings.skips);
        self.progress.hopeless = settings.hopeless;
        self.progress.loss_scale = scale.or(self.progress.loss_scale);
        #[cfg(feature = "cuda")]
        {
            self.buckets.iter_mut().for_each(crate::owned::Owned::recount);
            self.tell_there()?;
        }
        self.verifying.last = None;
        self.keep_if_due()
    }
}

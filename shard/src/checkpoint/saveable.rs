//! State that checkpoints save and load, by the type that it belongs to.

use super::collective::compatibility::Fitting;
use super::collective::load::read_own;
use super::error::CheckpointError;
use super::failure::{self, Failed};
use super::format::manifest::Type;
use super::format::placement::{ModelPlacement, Unsharded, shape};
use super::format::progress::SavedProgress;
use super::format::rules::SavedRules;
use super::format::settings::Settings;
use super::parts::{CheckpointCall, SavedParts};
use super::store::reader::Saved;
use super::tensors::Read;
use super::tensors::{MASTER, Named, PARAM, REMAINDER, SavedTensor};
use crate::config::schedule;
use crate::update::params::ParamPlace;
use crate::update::values::VectorKind as Slot;
use crate::{Error, Optimizer, Stage};
use meshstep_optim::{Rounding, Rule};
use meshstep_tensor::{DType, Queue, Slice, SliceMut};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::{self, Write};

/// Type with state that the functions of [`checkpoint`](super) save and load: an optimizer, or a wrapper of one.
///
/// A wrapper passes on the contents of the type inside, and adds its placement if it cuts the model's parameters:
///
/// ```
/// # use meshstep_shard::{Optimizer, checkpoint::{Contents, LocalPieces, ModelPlacement, Saveable}};
/// # use meshstep_tensor::Param;
/// /// Trains the rows of a model from `first` on.
/// struct Rows {
///     inner: Optimizer,
///     first: u64,
/// }
///
/// struct From(u64);
/// # impl From { fn piece(&self, _: &Param) -> LocalPieces { LocalPieces::whole(&[1]) } }
///
/// impl ModelPlacement for From {
///     fn mesh(&self) -> String {
///         format!("rows from {}", self.0)
///     }
///
///     fn holding(&self, param: &Param) -> LocalPieces {
///         self.piece(param)
///     }
/// }
///
/// impl Saveable for Rows {
///     fn contents(&mut self) -> Contents<'_> {
///         self.inner.contents().placed(From(self.first))
///     }
/// }
/// ```
pub trait Saveable {
    /// Returns this rank's state for one call, with the placement of its parameters.
    fn contents(&mut self) -> Contents<'_>;
}

/// State of a [`Saveable`] on this rank, and the placement of its parameters in the whole model.
pub struct Contents<'a> {
    parts: ContentsParts<'a>,
    placement: Option<Box<dyn ModelPlacement + 'a>>,
}

enum ContentsParts<'a> {
    Borrowed(&'a mut dyn SavedParts),
    Made(Box<dyn SavedParts + 'a>),
}

impl<'a> Contents<'a> {
    /// Returns the contents of a type that is its own state.
    pub fn of(parts: &'a mut dyn SavedParts) -> Self {
        Contents { parts: ContentsParts::Borrowed(parts), placement: None }
    }

    /// Returns the contents of state that is made for one call.
    pub fn made(parts: impl SavedParts + 'a) -> Self {
        Contents { parts: ContentsParts::Made(Box::new(parts)), placement: None }
    }

    /// Sets the placement of the parameters. Without one, every rank has whole parameters.
    #[must_use]
    pub fn placed(self, placement: impl ModelPlacement + 'a) -> Self {
        Contents { placement: Some(Box::new(placement)), ..self }
    }

    /// Returns the state, and the placement of all ranks that save together.
    pub(crate) fn all(&mut self) -> (&mut dyn SavedParts, Box<dyn ModelPlacement + '_>) {
        let (parts, inside) = self.open();
        let placement = parts.placement(inside);
        (parts, placement)
    }

    /// Returns the state of this rank's group alone, and the placement in it.
    pub(crate) fn of_group(&mut self) -> (&mut dyn SavedParts, Box<dyn ModelPlacement + '_>) {
        let (parts, inside) = self.open();
        (parts.inside(), inside)
    }

    /// Same as [`of_group`](Self::of_group) for a call that some types do not support; the error is the same on every rank.
    pub(crate) fn for_group(
        &mut self,
        call: CheckpointCall,
    ) -> Result<(&mut dyn SavedParts, Box<dyn ModelPlacement + '_>), failure::Error> {
        let (parts, inside) = self.open();
        parts.supports(call).map_err(|error| Failed { rank: 0, error })?;
        Ok((parts.inside(), inside))
    }

    fn open(&mut self) -> (&mut dyn SavedParts, Box<dyn ModelPlacement + '_>) {
        let parts: &mut dyn SavedParts = match &mut self.parts {
            ContentsParts::Borrowed(parts) => &mut **parts,
            ContentsParts::Made(parts) => &mut **parts,
        };
        let placement: Box<dyn ModelPlacement + '_> = match &self.placement {
            Some(placement) => Box::new(&**placement),
            None => Box::new(Unsharded { ranks: parts.optimizer().comm().world_size() }),
        };
        (parts, placement)
    }
}

impl fmt::Debug for Contents<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mesh = self.placement.as_ref().map(|placement| placement.mesh());
        f.debug_struct("Contents").field("mesh", &mesh).finish_non_exhaustive()
    }
}

impl Saveable for Optimizer {
    fn contents(&mut self) -> Contents<'_> {
        Contents::of(self)
    }
}

/// Section of L-BFGS in the settings of other optimizers.
#[derive(Serialize)]
struct WithoutLbfgs {
    lbfgs: Option<()>,
}

impl SavedParts for Optimizer {
    fn optimizer(&mut self) -> &mut Optimizer {
        self
    }

    fn inside(&mut self) -> &mut dyn SavedParts {
        self
    }

    fn tensors(&self, placing: &dyn ModelPlacement) -> Result<Vec<SavedTensor>, CheckpointError> {
        (0..self.params.entries.len()).map(|param| self.tensor(param, placing)).collect()
    }

    fn queue(&self) -> Queue {
        self.params.options.queue.clone()
    }

    fn vector(&mut self, param: usize, slot: Slot) -> Result<(usize, Slice<'_>), Error> {
        self.params.vector(param, slot)
    }

    fn vector_mut(&mut self, param: usize, slot: Slot) -> Result<SliceMut<'_>, Error> {
        self.params.vector_mut(param, slot)
    }

    fn read(
        &mut self,
        saved: &Saved,
        tensors: &[SavedTensor],
        fitting: &Fitting<'_>,
    ) -> Result<Vec<Read>, CheckpointError> {
        read_own(self, saved, tensors, fitting)
    }

    fn settings(&self) -> Settings {
        let settings = Settings::default().with(&self.saved_progress()).with(&self.saved_rules());
        settings.with(&WithoutLbfgs { lbfgs: None })
    }

    fn check(&self, settings: &Settings) -> Result<(), CheckpointError> {
        let progress = SavedProgress::read(settings)?;
        let saved: SavedRules = settings.section()?;
        let (Some(rule), Some(state)) = (&self.params.options.loss_scale, progress.scale()) else {
            return Ok(());
        };
        match rule.check_state(&state) {
            Err(error) if saved.loss_scale_rule == self.saved_rules().loss_scale_rule => {
                let (what, reason) = ("the loss scale".to_owned(), error.to_string());
                Err(CheckpointError::Contradiction { what, reason })
            }
            _ => Ok(()),
        }
    }

    fn resume(&mut self, settings: &Settings) -> Result<(), failure::Error> {
        let rank = self.comm().rank();
        let progress = SavedProgress::read(settings).map_err(|error| Failed { rank, error })?;
        Ok(self.resume_at(&progress)?)
    }
}

/// Access of checkpoints to an optimizer.
impl Optimizer {
    /// Checks that communication has not failed.
    pub(crate) fn healthy(&self) -> Result<(), Error> {
        self.reducer.healthy()
    }

    /// Checks that no step is in progress on this rank and that the outcome of every step is known.
    pub(crate) fn between_two_steps(&mut self) -> Result<(), Error> {
        self.reducer.finish_dropped()?;
        self.check_outcomes()?;
        self.params.check_some()?;
        self.reducer.check_idle()
    }

    /// Checks that all ranks have the same counts and hyperparameters. Collective.
    pub(crate) fn compare_counters(&mut self) -> Result<(), Error> {
        let counters = self.describe_counters()?;
        crate::same_everywhere(&**self.comm(), self.options(), &counters)
    }

    /// Returns the bytes sent so far by the optimizer's communicators.
    pub(crate) fn bytes_sent(&self) -> u64 {
        self.reducer.sent()
    }

    /// Excludes the bytes sent since `before` from the next step's count.
    pub(crate) fn exclude_sent_since(&mut self, before: u64) {
        self.reducer.exclude_from_step(before);
    }

    /// Sets the number of updates of each parameter; `None` leaves it as it is.
    pub(crate) fn set_updates(&mut self, t: &[Option<u64>]) {
        for (entry, t) in self.params.entries.iter_mut().zip(t) {
            entry.t = t.unwrap_or(entry.t);
        }
    }

    /// Returns the rule that updates a parameter; `None` for a frozen one.
    pub(crate) fn rule(&self, param: usize) -> Option<&dyn Rule> {
        let entry = &self.params.entries[param];
        (!entry.param.frozen()).then(|| &*self.params.groups[entry.group].rule)
    }

    pub(crate) fn saved_progress(&self) -> SavedProgress {
        SavedProgress {
            steps: Some(self.steps()),
            skips: self.decider.progress.skips,
            skips_at_min_scale: self.decider.progress.skips_at_min_scale,
            loss_scale: self.loss_scale_state().map(Into::into),
        }
    }

    fn saved_rules(&self) -> SavedRules {
        let options = self.options();
        let mut rules: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for entry in self.params.entries.iter().filter(|entry| !entry.param.frozen()) {
            let group = &self.params.groups[entry.group];
            let mut rule = format!("{} lr_scale={}", group.rule.name(), group.lr_scale);
            for (name, value) in group.rule.hyperparameters() {
                let _ = write!(rule, " {name}={value}");
            }
            rules.entry(rule).or_default().push(entry.param.name().to_owned());
        }
        let recipe = [
            ("stage", format!("{:?}", options.stage)),
            ("combine", format!("{:?}", options.combine)),
            ("missing", format!("{:?}", options.missing)),
            ("non_finite", format!("{:?}", options.non_finite)),
            ("norm", format!("{:?}", options.norm)),
            ("clip", format!("{:?}", options.clip)),
            ("precision", format!("{:?}", options.precision)),
        ];
        SavedRules {
            rules,
            loss_scale_rule: Some(options.loss_scale.map_or("none".to_owned(), |rule| format!("{rule:?}"))),
            schedule: Some(schedule::describe(options.schedule.as_ref()).trim_end().replace('\n', ", ")),
            rounding: Some(match options.precision.rounding {
                Rounding::Stochastic => format!("Stochastic with seed {}", options.precision.seed),
                other => format!("{other:?}"),
            }),
            recipe: recipe.map(|(name, value)| (name.to_owned(), value)).into(),
        }
    }

    /// Resumes from saved counts, after the vectors have been written.
    pub(crate) fn resume_at(&mut self, saved: &SavedProgress) -> Result<(), Error> {
        let progress = &mut self.decider.progress;
        progress.steps = saved.steps.unwrap_or(progress.steps);
        (progress.skips, progress.skips_at_min_scale) = (saved.skips, saved.skips_at_min_scale);
        if let (Some(rule), Some(state)) = (&self.params.options.loss_scale, saved.scale()) {
            // The state may be of another rule; then the loss scale stays as it is.
            progress.loss_scale = rule.check_state(&state).map(|()| state).ok().or(progress.loss_scale);
        }
        self.publish_counters()?;
        self.verifier.last = None;
        self.keep_if_due()
    }

    /// Describes a parameter and its state.
    fn tensor(&self, param: usize, placing: &dyn ModelPlacement) -> Result<SavedTensor, CheckpointError> {
        let entry = &self.params.entries[param];
        let (name, t) = (entry.param.name().to_owned(), entry.t);
        let holding = placing.holding(&entry.param);
        if holding.local != shape(&entry.param) {
            let reason = format!("its local shape is {:?}, not {:?}", holding.local, entry.param.shape());
            return Err(CheckpointError::Contradiction { what: format!("parameter {name:?}"), reason });
        }
        let named = |slot, name: &str, dtype: DType| match Type::of(dtype) {
            Some(dtype) => Ok(Named { slot, name: name.to_owned(), dtype }),
            None => Err(CheckpointError::memory(format!("{dtype} is not saved"))),
        };
        let mut vectors = vec![named(Slot::Params, PARAM, entry.param.dtype())?];
        let ParamPlace::Bucket { bucket, range, .. } = &entry.place else {
            return Ok(SavedTensor { name, t, holding, owned: 0..entry.param.len(), shared: true, vectors });
        };
        let owned = &self.params.buckets[*bucket];
        if let Some(master) = owned.master() {
            let name = if master.dtype() == DType::U16 { REMAINDER } else { MASTER };
            vectors.push(named(Slot::Master, name, master.dtype())?);
        }
        for (i, (state, of)) in
            self.params.groups[entry.group].rule.state().iter().zip(owned.state()).enumerate()
        {
            vectors.push(named(Slot::State(i), state, of.dtype())?);
        }
        let owned = owned.part_of(range).map_or(0..0, |(within, ..)| within);
        let shared = self.params.options.stage == Stage::Replicated;
        Ok(SavedTensor { name, t, holding, owned, shared, vectors })
    }
}

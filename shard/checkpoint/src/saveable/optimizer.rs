//! Saved state of an optimizer: parameters, state vectors, progress and rules.

use crate::contents::{Contents, Saveable};
use crate::error::CheckpointError;
use crate::failure::{self, Failed};
use crate::format::manifest::Type;
use crate::format::placement::{ModelPlacement, shape};
use crate::format::progress::SavedProgress;
use crate::format::rules::SavedRules;
use crate::format::settings::Settings;
use crate::parts::SavedParts;
use crate::tensors::{MASTER, Named, PARAM, REMAINDER, SavedTensor};
use meshstep_optim::Rounding;
use meshstep_shard::extend::{OptimizerShard, ParamShard, VectorKind as Slot, describe_schedule};
use meshstep_shard::{Error, Optimizer, Options, Stage};
use meshstep_tensor::{DType, Queue, Slice, SliceMut};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

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
        let shared = self.options().stage == Stage::Replicated;
        shards(self).map(|shard| tensor(&shard, shared, placing)).collect()
    }

    fn queue(&self) -> Queue {
        self.options().queue.clone()
    }

    fn vector(&mut self, param: usize, slot: Slot) -> Result<(usize, Slice<'_>), Error> {
        self.shard_vector(param, slot)
    }

    fn vector_mut(&mut self, param: usize, slot: Slot) -> Result<SliceMut<'_>, Error> {
        self.shard_vector_mut(param, slot)
    }

    fn settings(&self) -> Settings {
        let settings = Settings::default().with(&SavedProgress::of(self)).with(&saved_rules(self));
        settings.with(&WithoutLbfgs { lbfgs: None })
    }

    fn check(&self, settings: &Settings) -> Result<(), CheckpointError> {
        let progress = SavedProgress::read(settings)?;
        let saved: SavedRules = settings.section()?;
        let (Some(rule), Some(state)) = (&self.options().loss_scale, progress.scale()) else {
            return Ok(());
        };
        match rule.check_state(&state) {
            Err(error) if saved.loss_scale_rule == saved_rules(self).loss_scale_rule => {
                let (what, reason) = ("the loss scale".to_owned(), error.to_string());
                Err(CheckpointError::Contradiction { what, reason })
            }
            _ => Ok(()),
        }
    }

    fn resume(&mut self, settings: &Settings) -> Result<(), failure::Error> {
        let rank = self.comm().rank();
        let progress = SavedProgress::read(settings).map_err(|error| Failed { rank, error })?;
        Ok(progress.resume(self)?)
    }
}

impl SavedProgress {
    /// Returns the progress of an optimizer.
    pub fn of(opt: &Optimizer) -> Self {
        opt.progress().into()
    }

    /// Lets an optimizer continue from here, after its vectors have been written.
    pub(crate) fn resume(&self, opt: &mut Optimizer) -> Result<(), Error> {
        let steps = self.steps.unwrap_or(opt.steps());
        opt.resume_from(self.run_progress(steps))
    }
}

/// Returns all parameters on this rank, in registration order.
fn shards(opt: &Optimizer) -> impl Iterator<Item = ParamShard<'_>> {
    (0..opt.params().count()).map(|param| opt.param_shard(param))
}

fn saved_rules(opt: &Optimizer) -> SavedRules {
    let options = opt.options();
    SavedRules {
        rules: rules_of_params(opt),
        loss_scale_rule: Some(options.loss_scale.map_or("none".to_owned(), |rule| format!("{rule:?}"))),
        schedule: Some(describe_schedule(options.schedule.as_ref()).trim_end().replace('\n', ", ")),
        rounding: Some(match options.precision.rounding {
            Rounding::Stochastic => format!("Stochastic with seed {}", options.precision.seed),
            other => format!("{other:?}"),
        }),
        recipe: recipe(options),
    }
}

/// Returns the names of the parameters that each rule updates, by the rule's text.
fn rules_of_params(opt: &Optimizer) -> BTreeMap<String, Vec<String>> {
    let mut rules: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for shard in shards(opt) {
        let Some(rule) = shard.rule else { continue };
        let mut text = format!("{} lr_scale={}", rule.name(), shard.lr_scale);
        for (name, value) in rule.hyperparameters() {
            let _ = write!(text, " {name}={value}");
        }
        rules.entry(text).or_default().push(shard.param.name().to_owned());
    }
    rules
}

/// Returns options that are saved for people.
fn recipe(options: &Options) -> BTreeMap<String, String> {
    let recipe = [
        ("stage", format!("{:?}", options.stage)),
        ("combine", format!("{:?}", options.combine)),
        ("missing", format!("{:?}", options.missing)),
        ("non_finite", format!("{:?}", options.non_finite)),
        ("norm", format!("{:?}", options.norm)),
        ("clip", format!("{:?}", options.clip)),
        ("precision", format!("{:?}", options.precision)),
    ];
    recipe.map(|(name, value)| (name.to_owned(), value)).into()
}

/// Describes a parameter and its state; `shared` is true if other ranks have the same state.
fn tensor(
    shard: &ParamShard<'_>,
    shared: bool,
    placing: &dyn ModelPlacement,
) -> Result<SavedTensor, CheckpointError> {
    let (name, t) = (shard.param.name().to_owned(), shard.t);
    let holding = placing.holding(shard.param);
    if holding.local != shape(shard.param) {
        let reason = format!("its local shape is {:?}, not {:?}", holding.local, shard.param.shape());
        return Err(CheckpointError::Contradiction { what: format!("parameter {name:?}"), reason });
    }
    let mut vectors = vec![named(Slot::Params, PARAM, shard.param.dtype())?];
    if let Some(dtype) = shard.master {
        vectors.push(named(Slot::Master, if dtype == DType::U16 { REMAINDER } else { MASTER }, dtype)?);
    }
    for (i, (name, dtype)) in shard.state.iter().enumerate() {
        vectors.push(named(Slot::State(i), name, *dtype)?);
    }
    // Every rank has all of a frozen parameter.
    let shared = shared || shard.rule.is_none();
    Ok(SavedTensor { name, t, holding, owned: shard.owned.clone(), shared, vectors })
}

fn named(slot: Slot, name: &str, dtype: DType) -> Result<Named, CheckpointError> {
    match Type::of(dtype) {
        Some(dtype) => Ok(Named { slot, name: name.to_owned(), dtype }),
        None => Err(CheckpointError::memory(format!("{dtype} is not saved"))),
    }
}

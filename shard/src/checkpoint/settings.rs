//! What of an optimizer belongs to no parameter: how far it is, and what it was made with.

use super::error::CheckpointError;
use super::mismatch::Mismatch;
use crate::{Optimizer, schedule};
use meshstep_optim::LossScaleState;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The manifest's `settings`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Settings {
    /// Steps taken or skipped.
    pub(super) steps: u64,
    /// Skipped in a row.
    pub(super) skips: u32,
    /// Of these, since the loss scale could last fall.
    pub(super) hopeless: u32,
    pub(super) loss_scale: Option<Scale>,
    /// The parameters of each rule that hyperparameters make.
    pub(super) rules: BTreeMap<String, Vec<String>>,
    pub(super) loss_scale_rule: String,
    pub(super) schedule: String,
    pub(super) rounding: String,
    /// For people.
    pub(super) recipe: BTreeMap<String, String>,
    /// Other names of parameters.
    #[serde(default)]
    pub(super) tied: BTreeMap<String, String>,
}

/// A loss scale's state.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Scale {
    /// As text, of which nothing is lost.
    scale: String,
    growth_tracker: u64,
    hysteresis_tracker: u64,
}

/// Counts beyond this are no counts of steps.
const MOST: u64 = 1 << 53;

impl Settings {
    pub(super) fn of(opt: &Optimizer, tied: BTreeMap<String, String>) -> Self {
        let options = opt.options();
        let loss_scale = opt.loss_scale_state().map(|state| Scale {
            scale: state.scale.to_string(),
            growth_tracker: state.growth_tracker,
            hysteresis_tracker: state.hysteresis_tracker,
        });
        let mut rules: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for entry in opt.entries.iter().filter(|entry| !entry.param.frozen()) {
            let group = &opt.groups[entry.group];
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
        Settings {
            steps: opt.steps(),
            skips: opt.progress.skips,
            hopeless: opt.progress.hopeless,
            loss_scale,
            rules,
            loss_scale_rule: options.loss_scale.map_or("none".to_owned(), |rule| format!("{rule:?}")),
            schedule: schedule::describe(options.schedule.as_ref()).trim_end().replace('\n', ", "),
            rounding: format!("{:?} with seed {}", options.precision.rounding, options.precision.seed),
            recipe: recipe.map(|(name, value)| (name.to_owned(), value)).into(),
            tied,
        }
    }

    pub(super) fn to_json(&self) -> BTreeMap<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(members)) => members.into_iter().collect(),
            _ => BTreeMap::new(),
        }
    }

    pub(super) fn from_json(members: &BTreeMap<String, Value>) -> Result<Self, CheckpointError> {
        let wrong = |reason: String| CheckpointError::Contradiction { what: "settings".to_owned(), reason };
        let members: serde_json::Map<String, Value> = members.clone().into_iter().collect();
        let settings: Settings =
            serde_json::from_value(Value::Object(members)).map_err(|error| wrong(error.to_string()))?;
        match settings.steps < MOST {
            true => Ok(settings),
            false => Err(wrong(format!("{} is no count of steps", settings.steps))),
        }
    }

    /// The loss scale that was saved.
    pub(super) fn scale(&self) -> Result<Option<LossScaleState>, CheckpointError> {
        let Some(Scale { scale, growth_tracker, hysteresis_tracker }) = &self.loss_scale else {
            return Ok(None);
        };
        let (growth_tracker, hysteresis_tracker) = (*growth_tracker, *hysteresis_tracker);
        let wrong = |_| CheckpointError::Contradiction {
            what: "the loss scale".to_owned(),
            reason: format!("{scale:?} is no number"),
        };
        let scale: f64 = scale.parse().map_err(wrong)?;
        Ok(Some(LossScaleState { scale, growth_tracker, hysteresis_tracker }))
    }

    /// The first setting that steps depend on and that is another one `here`.
    pub(super) fn check(&self, here: &Settings) -> Result<(), Mismatch> {
        let differs = |what: &str, saved: &str, here: &str| match saved == here {
            true => Ok(()),
            false => Err(Mismatch::Setting {
                what: what.to_owned(),
                saved: saved.to_owned(),
                here: here.to_owned(),
            }),
        };
        let saved = by_param(&self.rules);
        for (param, rule) in by_param(&here.rules) {
            if let Some(saved) = saved.get(param) {
                differs(&format!("the rule of {param:?}"), saved, rule)?;
            }
        }
        differs("the schedule", &self.schedule, &here.schedule)?;
        differs("the loss scale's rule", &self.loss_scale_rule, &here.loss_scale_rule)?;
        differs("the rounding", &self.rounding, &here.rounding)
    }
}

fn by_param(rules: &BTreeMap<String, Vec<String>>) -> BTreeMap<&str, &str> {
    rules.iter().flat_map(|(rule, params)| params.iter().map(move |param| (&**param, &**rule))).collect()
}

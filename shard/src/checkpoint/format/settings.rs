//! Settings and progress of an optimizer that belong to no parameter.

use super::mismatch::Mismatch;
use crate::Optimizer;
use crate::checkpoint::collective::compatibility::find;
use crate::checkpoint::error::CheckpointError;
use crate::config::schedule;
use crate::cross_shard::GroupsRecord;
use crate::local::LocalRecord;
use meshstep_optim::{LossScaleState, Rounding};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The manifest's `settings`. Settings that another program left out are not compared.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Settings {
    /// Number of steps taken or skipped; `None` means the manifest's step.
    pub(crate) steps: Option<u64>,
    /// Number of steps skipped in a row.
    pub(crate) skips: u32,
    /// Number of latest skips in a row at which the loss scale could not fall.
    #[serde(rename = "hopeless")]
    pub(crate) skips_at_min_scale: u32,
    pub(crate) loss_scale: Option<Scale>,
    /// Names of the parameters of each rule; a rule's key lists its hyperparameters.
    pub(crate) rules: BTreeMap<String, Vec<String>>,
    pub(crate) loss_scale_rule: Option<String>,
    pub(crate) schedule: Option<String>,
    pub(crate) rounding: Option<String>,
    /// Other options, for people; they are not compared.
    pub(crate) recipe: BTreeMap<String, String>,
    /// Rule and progress of L-BFGS.
    pub(crate) lbfgs: Option<(String, Vec<u64>)>,
    /// Progress of workers that train locally.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) local: Option<LocalRecord>,
    /// Progress of groups of replicas that have diverged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) groups: Option<GroupsRecord>,
    /// Other names of parameters, and the parameters they denote.
    pub(crate) tied: BTreeMap<String, String>,
}

/// State of a loss scale.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Scale {
    /// As text, which loses no bits.
    scale: String,
    growth_tracker: u64,
    hysteresis_tracker: u64,
}

/// Counts of steps from this value on are refused.
const MOST: u64 = 1 << 53;

/// Counts of skipped steps in a row from this value on are refused.
const MOST_SKIPS: u64 = 1 << 31;

impl Settings {
    pub(crate) fn of(opt: &Optimizer, tied: BTreeMap<String, String>) -> Self {
        let options = opt.options();
        let loss_scale = opt.loss_scale_state().map(|state| Scale {
            scale: state.scale.to_string(),
            growth_tracker: state.growth_tracker,
            hysteresis_tracker: state.hysteresis_tracker,
        });
        let mut rules: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for entry in opt.params.entries.iter().filter(|entry| !entry.param.frozen()) {
            let group = &opt.params.groups[entry.group];
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
            steps: Some(opt.steps()),
            skips: opt.decider.progress.skips,
            skips_at_min_scale: opt.decider.progress.skips_at_min_scale,
            loss_scale,
            rules,
            loss_scale_rule: Some(options.loss_scale.map_or("none".to_owned(), |rule| format!("{rule:?}"))),
            schedule: Some(schedule::describe(options.schedule.as_ref()).trim_end().replace('\n', ", ")),
            rounding: Some(match options.precision.rounding {
                Rounding::Stochastic => format!("Stochastic with seed {}", options.precision.seed),
                other => format!("{other:?}"),
            }),
            lbfgs: None,
            local: None,
            groups: None,
            recipe: recipe.map(|(name, value)| (name.to_owned(), value)).into(),
            tied,
        }
    }

    pub(crate) fn to_json(&self) -> BTreeMap<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(members)) => members.into_iter().collect(),
            _ => BTreeMap::new(),
        }
    }

    pub(crate) fn from_json(members: &BTreeMap<String, Value>) -> Result<Self, CheckpointError> {
        let wrong = |reason: String| CheckpointError::Contradiction { what: "settings".to_owned(), reason };
        let members: serde_json::Map<String, Value> = members.clone().into_iter().collect();
        let settings: Settings =
            serde_json::from_value(Value::Object(members)).map_err(|error| wrong(error.to_string()))?;
        let skips = u64::from(settings.skips.max(settings.skips_at_min_scale));
        let counts = [(settings.steps.unwrap_or(0), MOST), (skips, MOST_SKIPS)];
        match counts.into_iter().find(|(count, most)| count >= most) {
            Some((count, _)) => Err(wrong(format!("{count} is no count of steps"))),
            None if settings.loss_scale.is_some() != settings.scale().is_some() => {
                Err(wrong("the loss scale is no number".to_owned()))
            }
            None => Ok(settings),
        }
    }

    /// Returns the saved state of the loss scale.
    pub(crate) fn scale(&self) -> Option<LossScaleState> {
        let Scale { scale, growth_tracker, hysteresis_tracker } = self.loss_scale.as_ref()?;
        let (growth_tracker, hysteresis_tracker) = (*growth_tracker, *hysteresis_tracker);
        Some(LossScaleState { scale: scale.parse().ok()?, growth_tracker, hysteresis_tracker })
    }

    /// Returns an error for the first setting that steps depend on and that differs from `here`.
    pub(crate) fn check(&self, here: &Settings) -> Result<(), Mismatch> {
        let differs = |what: &str, saved: &str, here: &str| match saved == here {
            true => Ok(()),
            false => Err(Mismatch::Setting {
                what: what.to_owned(),
                saved: saved.to_owned(),
                here: here.to_owned(),
            }),
        };
        let (saved, mut tied) = (by_param(&self.rules), self.tied.clone());
        tied.extend(here.tied.clone());
        for (param, rule) in &by_param(&here.rules) {
            // The parameter may have been saved under another of its names.
            if let Some((_, saved)) = find(param, &saved, &tied) {
                differs(&format!("the rule of {param:?}"), saved, rule)?;
            }
        }
        let lbfgs = |of: &Settings| of.lbfgs.as_ref().map(|(rule, _)| rule.clone());
        let lbfgs = [lbfgs(self), lbfgs(here)].map(|rule| rule.or(Some("none".to_owned())));
        let said = [
            ("L-BFGS", &lbfgs[0], &lbfgs[1]),
            ("the schedule", &self.schedule, &here.schedule),
            ("the loss scale's rule", &self.loss_scale_rule, &here.loss_scale_rule),
            ("the rounding", &self.rounding, &here.rounding),
        ];
        said.into_iter().try_for_each(|(what, saved, here)| match (saved, here) {
            (Some(saved), Some(here)) => differs(what, saved, here),
            _ => Ok(()),
        })
    }
}

fn by_param(rules: &BTreeMap<String, Vec<String>>) -> BTreeMap<String, &str> {
    rules.iter().flat_map(|(rule, params)| params.iter().map(move |param| (param.clone(), &**rule))).collect()
}

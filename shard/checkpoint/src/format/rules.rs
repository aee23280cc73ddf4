//! Rules of an optimizer: the section of settings on which its later steps depend.

use super::mismatch::Mismatch;
use super::settings::{Settings, TiedNames};
use super::tied_names::find;
use crate::error::CheckpointError;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Rules and options as text. Texts that another program left out are not compared.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SavedRules {
    /// Names of the parameters of each rule; a rule's key lists its hyperparameters.
    pub(crate) rules: BTreeMap<String, Vec<String>>,
    pub(crate) loss_scale_rule: Option<String>,
    pub(crate) schedule: Option<String>,
    pub(crate) rounding: Option<String>,
    /// Other options, for people; they are not compared.
    pub(crate) recipe: BTreeMap<String, String>,
}

/// Section of L-BFGS as other optimizers see it: its rule, and progress that they do not read.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct OfLbfgs {
    lbfgs: Option<(String, IgnoredAny)>,
}

impl OfLbfgs {
    fn text(self) -> Option<String> {
        Some(self.lbfgs.map_or("none".to_owned(), |(rule, _)| rule))
    }
}

impl SavedRules {
    /// Returns an error for the first setting that steps depend on and that differs between `saved` and `here`.
    pub(crate) fn compare(saved: &Settings, here: &Settings) -> Result<(), CheckpointError> {
        let TiedNames { mut tied } = saved.section()?;
        tied.extend(here.section::<TiedNames>()?.tied);
        let lbfgs = [saved.section::<OfLbfgs>()?.text(), here.section::<OfLbfgs>()?.text()];
        let [saved, here] = [saved.section::<Self>()?, here.section::<Self>()?];
        let rules = by_param(&saved.rules);
        for (param, rule) in &by_param(&here.rules) {
            // The parameter may have been saved under another of its names.
            if let Some(saved) = find(param, |name| rules.get(name), &tied) {
                same(&format!("the rule of {param:?}"), saved, rule)?;
            }
        }
        let texts = [
            ("L-BFGS", &lbfgs[0], &lbfgs[1]),
            ("the schedule", &saved.schedule, &here.schedule),
            ("the loss scale's rule", &saved.loss_scale_rule, &here.loss_scale_rule),
            ("the rounding", &saved.rounding, &here.rounding),
        ];
        let compared = texts.into_iter().try_for_each(|(what, saved, here)| match (saved, here) {
            (Some(saved), Some(here)) => same(what, saved, here),
            _ => Ok(()),
        });
        Ok(compared?)
    }
}

fn same(what: &str, saved: &str, here: &str) -> Result<(), Mismatch> {
    match saved == here {
        true => Ok(()),
        false => {
            Err(Mismatch::Setting { what: what.to_owned(), saved: saved.to_owned(), here: here.to_owned() })
        }
    }
}

fn by_param(rules: &BTreeMap<String, Vec<String>>) -> BTreeMap<String, &str> {
    rules.iter().flat_map(|(rule, params)| params.iter().map(move |param| (param.clone(), &**rule))).collect()
}

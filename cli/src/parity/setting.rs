//! Settings of a replay, combined from the command line and the trace.

use meshstep_optim::Sees;
use meshstep_shard::{Owners, Stage};

use super::reason::Reason;
use super::rule::Recipe;
use super::spec::{Reduction, Spec};
use crate::parity::args::Partition;

/// Options of a replay; they should change results only by rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    /// ZeRO stage; the default is 1.
    pub(crate) stage: Option<u8>,
    /// Number of ranks; the default is the trace's.
    pub(crate) ranks: Option<usize>,
    /// Partition; the default is flat if the rule supports it.
    pub(crate) partition: Option<Partition>,
    /// Elements of a bucket.
    pub(crate) bucket: Option<usize>,
}

/// Settings of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) ranks: usize,
    pub(super) stage: Stage,
    pub(super) bucket: Option<usize>,
    pub(super) reduce: Reduction,
}

impl Setting {
    /// Returns the settings for one trace; contradictory options are an error.
    pub(super) fn new(asked: Asked, spec: &Spec, recipe: &Recipe) -> Result<Self, Reason> {
        let ranks = asked.ranks.unwrap_or(spec.ranks);
        check_problem(spec, recipe)?;
        // A problem can be divided among any number of ranks.
        if spec.problem.is_none() && spec.ranks > 1 && ranks != spec.ranks {
            let other = format!("a trace of {} ranks", spec.ranks);
            return Err(contradiction(format!("--ranks {ranks}"), other, "each rank has its own gradients"));
        }
        // The mean over ranks with the same gradients equals the gradient of one rank.
        let alone = spec.ranks == 1 && spec.reduce != Reduction::Weighted;
        let reduce = if alone { Reduction::Mean } else { spec.reduce };
        Ok(Setting { ranks, stage: stage(asked, recipe)?, bucket: asked.bucket, reduce })
    }
}

fn stage(asked: Asked, recipe: &Recipe) -> Result<Stage, Reason> {
    let Asked { stage, partition, .. } = asked;
    let matrices = match recipe {
        Recipe::Steps { rule, sees: Sees::Matrix, .. } => Some(*rule),
        _ => None,
    };
    let of_rule = |rule: &str| format!("the rule {rule}");
    match (stage, partition, matrices) {
        (Some(stage @ (0 | 2)), Some(Partition::Whole), _) => {
            let why = "whole parameters are a partition of stage 1 only";
            Err(contradiction(format!("--stage {stage}"), "--partition whole".to_owned(), why))
        }
        (Some(0), _, _) => Ok(Stage::Replicated),
        (_, Some(Partition::Flat), Some(rule)) => {
            let why = "it needs whole matrices: use --partition whole";
            Err(contradiction("--partition flat".to_owned(), of_rule(rule), why))
        }
        (Some(2), None, Some(rule)) => {
            let why = "it needs whole matrices: use --stage 1 or 0";
            Err(contradiction("--stage 2".to_owned(), of_rule(rule), why))
        }
        (_, Some(Partition::Whole), _) | (_, None, Some(_)) => Ok(Stage::WholeParams(Owners::SortedGreedy)),
        (Some(2), _, _) => Ok(Stage::Zero2),
        _ => Ok(Stage::Zero1),
    }
}

/// Rejects settings that a problem, or L-BFGS on a problem, does not support.
fn check_problem(spec: &Spec, recipe: &Recipe) -> Result<(), Reason> {
    let Spec { clip, lrs, groups, problem, reduce, .. } = spec;
    let lbfgs = matches!(recipe, Recipe::Lbfgs(_));
    let present = [
        (problem.is_some() && *reduce != Reduction::Mean, "a reduce that is not mean", "a problem"),
        (lbfgs && clip.is_some(), "clip", "the rule lbfgs"),
        (lbfgs && lrs.is_some(), "lrs", "the rule lbfgs"),
        (lbfgs && groups.is_some(), "groups", "the rule lbfgs"),
    ];
    present.into_iter().find(|(present, ..)| *present).map_or(Ok(()), |(_, what, other)| {
        let why =
            "its loss is the mean over its rows, and L-BFGS has one setting for all steps and parameters";
        Err(contradiction(what.to_owned(), other.to_owned(), why))
    })
}

fn contradiction(what: String, other: String, why: &str) -> Reason {
    Reason::Contradiction { what, other, why: why.to_owned() }
}

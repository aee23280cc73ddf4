//! A training method: an update rule, its learning rate, and the plan of the exchanges between workers.

use anyhow::{Context as _, Result, ensure};
use meshstep_local::{Fragment, LocalPlan, Merge, Outer, Slots, Timing, What};
use meshstep_optim::schedule::Schedule;
use meshstep_optim::{Moments, QhAdamW, Rule as _, Sgd};
use meshstep_shard::Groups;

use crate::args::local::{Asked, Moment, Task};
use crate::args::train::Optimizer;
use crate::gpt::Param;
use crate::train::rules;

/// Averages of squared gradients cover a hundred steps, because runs are short.
const BETAS: [f64; 2] = [0.9, 0.99];

/// Learning rate and Nesterov momentum of DiLoCo's outer optimizer. These values gave the lowest held-out loss, 2.603,
/// after 192 steps with seed 1, kx 16 and the other defaults. Other values: 0.5 and 0.7 2.617, 0.7 and 0.3 2.611, 1 and 0
/// (the mean) 2.625, 0.3 and 0.7 2.635, 0.7 and 0.5 2.659, 1 and 0.3 2.921, 0.9 and 0.5 2.992, 0.7 and 0.9 (the paper's,
/// for runs with many more exchanges) 3.115.
const OUTER: [f64; 2] = [0.5, 0.5];

/// The same for Streaming DiLoCo: 2.619. Other values: 0.7 and 0.7 2.631, 0.5 and 0.5 2.633, 0.7 and 0.5 2.635, 0.7 and 0.3
/// 2.636, 1 and 0 2.640, 1 and 0.3 2.643, 0.9 and 0.5 2.645, 0.5 and 0.3 2.662, 1 and 0.5 2.670.
const STREAMING_OUTER: [f64; 2] = [0.5, 0.7];

/// A method with all its parameters.
#[derive(Clone, Debug)]
pub(crate) struct Method {
    pub(crate) task: Task,
    /// Plan of the exchanges; `None` if gradients are reduced in every step.
    pub(crate) plan: Option<LocalPlan>,
    rule: Rule,
}

/// Update rule of all parameters.
#[derive(Clone, Debug)]
enum Rule {
    AdamW,
    Sgd,
    QhAdamW(Moments),
}

impl Method {
    /// Creates the method named by `task`, from the given flags and the defaults of the others, for runs of `steps` steps.
    pub(crate) fn of(task: Task, asked: &Asked, steps: u64) -> Result<Self> {
        let kx = asked.kx();
        let (rule, outer) = (rule(task, asked)?, outer(task, asked));
        let plan = match task {
            Task::EveryStep | Task::EveryStepSgd | Task::EveryStepQhadamw => None,
            Task::All | Task::Compare | Task::Doubling => None,
            Task::LocalSgd => Some(LocalPlan::local_sgd(kx)),
            Task::PostLocalSgd => Some(LocalPlan::post_local_sgd(asked.every_step.unwrap_or(steps / 6), kx)),
            Task::LocalAdam => Some(LocalPlan::local_adam(kx)),
            Task::DesLoc if asked.half_lives => Some(LocalPlan::des_loc_half_lives(kx, BETAS[0], BETAS[1])),
            Task::DesLoc => Some(LocalPlan::des_loc(kx, asked.ku(1)?[0], asked.kv())),
            Task::MtDao => {
                let count = given_moments(asked)?.pairs().len();
                Some(LocalPlan::mt_dao(kx, &asked.ku(count)?, asked.kv()))
            }
            Task::Diloco => Some(LocalPlan::diloco_with(kx, outer)),
            Task::StreamingDiloco => {
                let (delay, alpha) = (asked.delay.unwrap_or(kx / 4), asked.alpha.unwrap_or(0.5));
                ensure!(
                    delay < kx,
                    "--delay {delay} with --kx {kx}: a result must arrive before the next exchange of its fragment; use less than {kx}"
                );
                let plan = LocalPlan::streaming_diloco(kx, asked.parts.unwrap_or(4), delay, alpha);
                Some(plan.with(|fragment| fragment.merge = Merge::Outer(outer.clone())))
            }
        };
        Ok(Method { task, plan, rule })
    }

    /// Returns the method's baseline for changing workers, among which gradients cannot be reduced: the same rule, with
    /// parameters and all state averaged after every step.
    pub(crate) fn averaged_every_step(&self) -> Option<Self> {
        let mean = |what| Fragment::mean(what, Timing::every(1));
        let mut fragments = vec![mean(What::Params), mean(What::State(Slots::First))];
        if !matches!(self.rule, Rule::Sgd) {
            fragments.push(mean(What::State(Slots::Second)));
        }
        let task = self.task.baseline()?;
        Some(Method { task, plan: Some(LocalPlan::new(fragments)), rule: self.rule.clone() })
    }

    /// Returns the rules of the parameters: weight decay only for matrices.
    pub(crate) fn groups(&self, params: &[Param]) -> Groups {
        let Rule::QhAdamW(moments) = self.rule else { return rules::groups(self.optimizer(), params) };
        let rule = QhAdamW { moments, beta2: BETAS[1], weight_decay: 0.1, ..QhAdamW::default() };
        let without = QhAdamW { weight_decay: 0.0, ..rule.clone() };
        let plain = params.iter().filter(|param| !param.decays()).map(|param| param.name.as_str());
        Groups::new(rule).with(without, plain.collect::<Vec<_>>())
    }

    /// Returns the learning rates of all steps.
    pub(crate) fn schedule(&self, steps: usize) -> Result<Schedule> {
        rules::schedule(self.optimizer(), steps)
    }

    /// Returns the number of steps in which all parameters are exchanged once.
    pub(crate) fn period(&self) -> u64 {
        let fragments = self.plan.iter().flat_map(|plan| &plan.fragments);
        let periods = fragments.filter(|f| f.what == What::Params).filter_map(|f| f.timing.period);
        periods.max().unwrap_or(1)
    }

    /// Returns true if exchanges have no delay.
    pub(crate) fn is_prompt(&self) -> bool {
        self.plan.iter().flat_map(|plan| &plan.fragments).all(|f| f.timing.delay == 0)
    }

    /// Returns true if all workers have the same parameters after `steps`: all were exchanged, without a share of own
    /// parameters.
    pub(crate) fn alike_after(&self, steps: u64) -> bool {
        let fragments = self.plan.iter().flat_map(|plan| &plan.fragments);
        let mut params = fragments.filter(|f| f.what == What::Params && f.timing.during.contains(&steps));
        self.is_prompt() && params.all(|f| f.taken == 1.0 && f.timing.due(steps.wrapping_sub(1)))
    }

    /// Describes the rule and each fragment's period in words.
    pub(crate) fn describe(&self) -> String {
        let rule = match &self.rule {
            Rule::QhAdamW(moments) => {
                let pairs: Vec<String> =
                    moments.pairs().iter().map(|(beta, weight)| format!("{beta}:{weight}")).collect();
                format!("QHAdamW of moments {}", pairs.join(", "))
            }
            Rule::AdamW => "AdamW".to_owned(),
            Rule::Sgd => "SGD with Nesterov momentum 0.9".to_owned(),
        };
        let Some(plan) = &self.plan else { return format!("{rule}, gradients reduced in every step") };
        // Fragments that differ only in their parameters share a line.
        let mut lines: Vec<(Vec<String>, String)> = Vec::new();
        for fragment in &plan.fragments {
            let (params, when) = (fragment.params.to_string(), describe(fragment));
            match lines.iter_mut().find(|(_, known)| *known == when) {
                Some((all, _)) => all.push(params),
                None => lines.push((vec![params], when)),
            }
        }
        let line = |(params, when): &(Vec<String>, String)| match params.as_slice() {
            [all] if all == "all" => when.clone(),
            some => format!("{} of {when}", some.join(", ")),
        };
        format!("{rule}; {}", lines.iter().map(line).collect::<Vec<_>>().join("; "))
    }

    fn optimizer(&self) -> Optimizer {
        match self.rule {
            Rule::Sgd => Optimizer::Sgd,
            // Both rules make steps of the same size.
            Rule::AdamW | Rule::QhAdamW(_) => Optimizer::Adamw,
        }
    }
}

fn rule(task: Task, asked: &Asked) -> Result<Rule> {
    Ok(match task {
        Task::EveryStepSgd | Task::LocalSgd | Task::PostLocalSgd => Rule::Sgd,
        Task::EveryStepQhadamw | Task::MtDao => Rule::QhAdamW(given_moments(asked)?),
        _ => Rule::AdamW,
    })
}

fn outer(task: Task, asked: &Asked) -> Outer {
    let [lr, momentum] = if task == Task::StreamingDiloco { STREAMING_OUTER } else { OUTER };
    Outer::nesterov(asked.outer_lr.unwrap_or(lr), asked.outer_momentum.unwrap_or(momentum))
}

/// Describes the outer rule, its rate, and its hyperparameters other than the defaults.
fn of_outer(outer: &Outer) -> String {
    let defaults = Sgd::default().hyperparameters();
    let given = outer.rule.hyperparameters();
    let given = given.iter().filter(|setting| !defaults.contains(setting));
    let given: Vec<String> = given.map(|(name, value)| format!(", {name} {value}")).collect();
    format!("{} at {}{}", outer.rule.name(), outer.lr, given.concat())
}

fn given_moments(asked: &Asked) -> Result<Moments> {
    let pair = |moment: &Moment| (moment.beta, moment.weight);
    match asked.moments.as_slice() {
        [] => Ok(QhAdamW::default().moments),
        given => Moments::new(&given.iter().map(pair).collect::<Vec<_>>()).context("--moments"),
    }
}

/// Describes the content, the timing and the merge of a fragment.
fn describe(Fragment { what, timing, merge, taken, .. }: &Fragment) -> String {
    let what = match what {
        What::Params => "parameters".to_owned(),
        _ => what.to_string(),
    };
    let Some(period) = timing.period else { return format!("{what} never") };
    let during = match (timing.during.start, timing.during.end) {
        (0, u64::MAX) => String::new(),
        (0, end) => format!(" up to step {}", end - 1),
        (start, _) => format!(" from step {start} on"),
    };
    let delay =
        if timing.delay > 0 { format!(", arriving {} steps later", timing.delay) } else { String::new() };
    let mixed = if *taken < 1.0 { format!(", {taken} of the result taken") } else { String::new() };
    let merged =
        if let Merge::Outer(outer) = merge { format!(" by {}", of_outer(outer)) } else { String::new() };
    format!("{what} every {period}{during}{delay}{mixed}{merged}")
}

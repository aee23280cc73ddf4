//! Which rule updates which parameter.

use meshstep_optim::{AdamW, Sgd};
use meshstep_shard::Groups;

use crate::cli::Optimizer;
use crate::gpt::Param;

/// The chosen rule: with weight decay for matrices, without for biases and norms.
pub(super) fn groups(optimizer: Optimizer, params: &[Param]) -> Groups {
    let plain: Vec<&str> =
        params.iter().filter(|param| !param.decays()).map(|param| param.name.as_str()).collect();
    match optimizer {
        Optimizer::Adamw => {
            // Runs are short, so the second moment looks back a hundred steps and not a thousand.
            let rule = AdamW { beta2: 0.99, weight_decay: 0.1, ..AdamW::default() };
            let without = AdamW { weight_decay: 0.0, ..rule.clone() };
            Groups::new(rule).with(without, plain)
        }
        Optimizer::Sgd => {
            let rule = Sgd { momentum: 0.9, nesterov: true, weight_decay: 1e-4, ..Sgd::default() };
            let without = Sgd { weight_decay: 0.0, ..rule.clone() };
            Groups::new(rule).with(without, plain)
        }
    }
}

/// The highest learning rate each rule is given here.
pub(super) fn peak_lr(optimizer: Optimizer) -> f64 {
    match optimizer {
        Optimizer::Adamw => 2e-3,
        Optimizer::Sgd => 0.1,
    }
}

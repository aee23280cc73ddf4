//! Forms of weight decay.

use crate::Error;
use crate::engine::check::Check;

/// Form of a rule's `weight_decay`. Every rule that sees single elements has a field of this type; its default is the form under which
/// the rule was published.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// Added to the gradient: `g + weight_decay * p`, an L2 penalty. It passes through momentum and normalisation (`torch.optim.Adam`,
    /// `SGD`).
    Coupled,
    /// Subtracted from the parameter: it loses `lr * weight_decay * p` beside the step (Loshchilov and Hutter, *Decoupled weight decay
    /// regularization*, 2019; `torch.optim.AdamW`).
    Decoupled,
    /// Subtracted from the parameter, independent of the size of the learning rate: it loses `weight_decay * lr / lr_max * p`, so
    /// `weight_decay` is the fraction that a step at the peak of the schedule removes, and tuning the peak does not change the decay (the
    /// decoupling that the paper of `Decoupled` proposes, with `lr / lr_max` as its schedule multiplier).
    FullyDecoupled {
        /// Largest learning rate of the schedule; above 0.
        lr_max: f64,
    },
}

impl Decay {
    /// Checks that `weight_decay` and the peak are in range.
    pub(crate) fn check(self, check: &Check, weight_decay: f64) -> Result<(), Error> {
        check.at_least_zero("weight_decay", weight_decay)?;
        match self {
            Decay::FullyDecoupled { lr_max } => {
                let good = lr_max > 0.0 && lr_max.is_finite();
                check.range("lr_max", lr_max, good, "the largest learning rate, finite and > 0")
            }
            _ => Ok(()),
        }
    }

    /// Returns the kind as a number, and the peak or 0, for comparison between ranks.
    pub(crate) fn list(self) -> [(&'static str, f64); 2] {
        let (kind, lr_max) = match self {
            Decay::Coupled => (0.0, 0.0),
            Decay::Decoupled => (1.0, 0.0),
            Decay::FullyDecoupled { lr_max } => (2.0, lr_max),
        };
        [("decay", kind), ("lr_max", lr_max)]
    }

    /// Returns the fraction of a parameter that one step at `lr` removes.
    pub(crate) fn share(self, weight_decay: f64, lr: f64) -> f64 {
        match self {
            Decay::Coupled => 0.0,
            Decay::Decoupled => lr * weight_decay,
            Decay::FullyDecoupled { lr_max } => weight_decay * (lr / lr_max),
        }
    }
}

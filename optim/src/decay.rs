//! Where weight decay goes.

use crate::Error;
use crate::check::Check;

/// Where a rule's `weight_decay` goes. Every rule that sees single elements has this field; its default is the one under which
/// the rule is known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// Into the gradient: `g + weight_decay * p`, an L2 penalty. Momentum and normalisation see it (`torch.optim.Adam`,
    /// `SGD`).
    Coupled,
    /// Into the parameter: it loses `lr * weight_decay * p` beside the step (Loshchilov and Hutter, *Decoupled weight
    /// decay regularization*, 2019; `torch.optim.AdamW`).
    Decoupled,
    /// Into the parameter, whatever the rate's size: it loses `weight_decay * lr / lr_max * p`, so `weight_decay` is what
    /// a step at the peak of the schedule takes off, and tuning the peak leaves the decay as it was (the decoupling the
    /// paper of `Decoupled` proposes, with `lr / lr_max` as its schedule multiplier).
    FullyDecoupled {
        /// The schedule's largest learning rate; above 0.
        lr_max: f64,
    },
}

impl Decay {
    /// An error unless `weight_decay` and the peak are in range.
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

    /// The kind as a number, and the peak (0 where there is none), for ranks to compare.
    pub(crate) fn list(self) -> [(&'static str, f64); 2] {
        let (kind, lr_max) = match self {
            Decay::Coupled => (0.0, 0.0),
            Decay::Decoupled => (1.0, 0.0),
            Decay::FullyDecoupled { lr_max } => (2.0, lr_max),
        };
        [("decay", kind), ("lr_max", lr_max)]
    }

    /// The part of a parameter that one step at `lr` takes off.
    pub(crate) fn share(self, weight_decay: f64, lr: f64) -> f64 {
        match self {
            Decay::Coupled => 0.0,
            Decay::Decoupled => lr * weight_decay,
            Decay::FullyDecoupled { lr_max } => weight_decay * (lr / lr_max),
        }
    }
}

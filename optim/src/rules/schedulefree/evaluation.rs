//! The update that takes parameters to the average `x`, where a model is evaluated: parameters alone change.

use crate::engine::check::Check;
use crate::engine::frame::{Common, update_on};
use crate::engine::pass::PassKind;
use crate::engine::sweep::Step;
use crate::precision::number::Real;
use crate::{Decay, Error, Rule, Scalars, Segment, StateSlot, cuda};

/// Schedule-free AdamW's way from `y` to `x`. State is that of the rule; gradients are not used.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EvaluationPoint {
    pub(crate) beta1: f64,
}

impl EvaluationPoint {
    #[expect(clippy::unused_self, reason = "as every rule's")]
    fn common(&self) -> Common {
        Common { weight_decay: 0.0, decay: Decay::Decoupled, maximize: false }
    }
}

impl Rule for EvaluationPoint {
    fn name(&self) -> &'static str {
        "schedulefree_evaluation"
    }

    fn state(&self) -> &'static [&'static str] {
        &["z", "v"]
    }

    fn check(&self) -> Result<(), Error> {
        let works = "a number > 0 and < 1";
        let good = self.beta1 > 0.0 && self.beta1 < 1.0;
        Check { rule: self.name() }.range("beta1", self.beta1, good, works)
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        self.common().tell(&[("beta1", self.beta1)], each);
    }

    fn slot(&self, slot: usize) -> StateSlot {
        let kept = StateSlot::average(1.0);
        if slot == 0 { kept } else { kept.of_squares() }
    }

    fn on_device(&self) -> Option<cuda::Hyper> {
        Some(cuda::Hyper::new("schedulefree_evaluation", &self.common(), &[self.beta1]))
    }

    update_on!(or 2);
}

/// Constants of `x = fma(1 - 1 / beta1, z - y, y)`.
#[derive(Clone, Copy)]
pub(crate) struct EvaluationConstants<T> {
    /// True before the parameter's first update, when all points are one and `z` is not set.
    first: bool,
    beyond: T,
}

impl PassKind<2> for EvaluationPoint {
    type Step<T: Real> = EvaluationConstants<T>;

    fn constants<T: Real>(&self, _: &Scalars, &Segment { t, .. }: &Segment) -> EvaluationConstants<T> {
        EvaluationConstants { first: t == 1, beyond: T::from_f64(1.0 - 1.0 / self.beta1) }
    }
}

impl<T: Real> Step<T, 2> for EvaluationConstants<T> {
    #[inline(always)]
    fn step(&self, p: T, _: T, [z, v]: [T; 2]) -> (T, [T; 2]) {
        let x = self.beyond.fma(z - p, p);
        (if self.first { p } else { x }, [z, v])
    }

    fn reference(&self, y: T, _: T, [z, v]: [T; 2]) -> (T, [T; 2]) {
        if self.first {
            return (y, [z, v]);
        }
        (self.beyond.fma(z - y, y), [z, v])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_the_device_are_the_host_s() {
        for beta1 in [0.9, 0.5, 0.98] {
            let rule = EvaluationPoint { beta1 };
            cuda::tests::constants_equal(&rule, |scalars, segment| {
                vec![0.0, rule.constants::<f64>(scalars, segment).beyond]
            });
        }
    }
}

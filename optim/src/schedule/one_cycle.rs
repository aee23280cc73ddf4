//! PyTorch's `OneCycleLR`: the rate rises, falls, and falls further.

use super::{Curve, at_least_one};
use crate::Error;
use crate::engine::check::Check;
use std::f64::consts::PI;

/// Interpolation between two rates (`anneal_strategy`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Anneal {
    /// `"cos"`: half a cosine.
    Cos,
    /// `"linear"`.
    Linear,
}

/// Rises from `lr / div_factor` to `lr` within `pct_start` of the steps, then falls to `lr / div_factor / final_div_factor` at the last
/// one (Smith and Topin, *Super-Convergence*, 2018). The schedule's `lr` is PyTorch's `max_lr`; momentum does not cycle.
///
/// PyTorch refuses steps after the last; here they have the last rate. A phase of no steps, in which PyTorch divides by zero, is skipped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OneCycleLR {
    /// Steps of the cycle; at least 1.
    pub total_steps: u64,
    /// Fraction of the steps in which the rate rises, from 0 to 1.
    pub pct_start: f64,
    /// Interpolation between two rates.
    pub anneal_strategy: Anneal,
    /// Ratio of `lr` to the first rate; above 0.
    pub div_factor: f64,
    /// Ratio of the first rate to the last; above 0.
    pub final_div_factor: f64,
    /// True for a fall that mirrors the rise, followed by a fall from the first rate to the last.
    pub three_phase: bool,
}

impl OneCycleLR {
    /// Creates the schedule with PyTorch's defaults: cosines, rise in 0.3 of the steps, from 1/25 of `lr`, to 1/10,000 of that.
    pub fn new(total_steps: u64) -> Self {
        OneCycleLR {
            total_steps,
            pct_start: 0.3,
            anneal_strategy: Anneal::Cos,
            div_factor: 25.0,
            final_div_factor: 1e4,
            three_phase: false,
        }
    }

    /// Returns for each phase its end in steps, and the rates at its begin and end.
    fn phases(&self, max_lr: f64) -> [(f64, f64, f64); 3] {
        let initial = max_lr / self.div_factor;
        let min = initial / self.final_div_factor;
        let (total, last) = (self.total_steps as f64, (self.total_steps - 1) as f64);
        let top = self.pct_start * total - 1.0;
        if self.three_phase {
            let down = 2.0 * self.pct_start * total - 2.0;
            [(top, initial, max_lr), (down, max_lr, initial), (last, initial, min)]
        } else {
            // The second phase is the last one, so the third is never reached.
            [(top, initial, max_lr), (last, max_lr, min), (last, max_lr, min)]
        }
    }

    fn between(&self, start: f64, end: f64, pct: f64) -> f64 {
        match self.anneal_strategy {
            Anneal::Cos => end + (start - end) / 2.0 * (libm::cos(PI * pct) + 1.0),
            Anneal::Linear => (end - start) * pct + start,
        }
    }
}

impl Curve for OneCycleLR {
    fn name(&self) -> &'static str {
        "OneCycleLR"
    }

    fn check(&self, _: f64) -> Result<(), Error> {
        at_least_one(self, "total_steps", self.total_steps)?;
        let check = Check { rule: self.name() };
        let good = (0.0..=1.0).contains(&self.pct_start);
        check.range("pct_start", self.pct_start, good, "a number from 0 to 1")?;
        for (name, value) in [("div_factor", self.div_factor), ("final_div_factor", self.final_div_factor)] {
            check.range(name, value, value > 0.0 && value.is_finite(), "a finite number above 0")?;
        }
        Ok(())
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        let step = step.min(self.total_steps - 1) as f64;
        let mut begin = 0.0;
        let [first, second, third] = self.phases(lr);
        for (end, from, to) in [first, second] {
            if step <= end {
                return self.within(begin, end, from, to, step);
            }
            begin = end;
        }
        let (end, from, to) = third;
        self.within(begin, end, from, to, step)
    }
}

impl OneCycleLR {
    fn within(&self, begin: f64, end: f64, from: f64, to: f64, step: f64) -> f64 {
        let pct = if end == begin { 1.0 } else { (step - begin) / (end - begin) };
        self.between(from, to, pct)
    }
}

//! Update rules of the parameters, and their learning rate.

use anyhow::Result;
use meshstep_optim::schedule::{CosineWarmupWithMinLr, MinLr, Schedule};
use meshstep_optim::{AdamW, Muon, Sgd};
use meshstep_shard::{Groups, hidden_matrices};

use crate::args::train::Optimizer;
use crate::gpt::Param;

/// Returns the chosen rule, with weight decay for matrices and without for biases and norms. Muon updates the matrices of hidden layers,
/// beside AdamW for the other parameters.
pub(crate) fn groups(optimizer: Optimizer, params: &[Param]) -> Groups {
    let plain: Vec<&str> =
        params.iter().filter(|param| !param.decays()).map(|param| param.name.as_str()).collect();
    match optimizer {
        Optimizer::Adamw => {
            // Runs are short, so the second moment covers a hundred steps instead of a thousand.
            let rule = AdamW { beta2: 0.99, weight_decay: 0.1, ..AdamW::default() };
            let without = AdamW { weight_decay: 0.0, ..rule.clone() };
            Groups::new(rule).with(without, plain)
        }
        // Its weight decay is AdamW's.
        Optimizer::Muon => groups(Optimizer::Adamw, params).with(Muon::moonshot(), hidden_matrices),
        Optimizer::Sgd => {
            let rule = Sgd { momentum: 0.9, nesterov: true, weight_decay: 1e-4, ..Sgd::default() };
            let without = Sgd { weight_decay: 0.0, ..rule.clone() };
            Groups::new(rule).with(without, plain)
        }
    }
}

/// Returns the schedule of a run of `steps` steps: a tenth of them, at most 100, for warm-up, then a cosine down to a tenth
/// of the peak in the last step.
pub(crate) fn schedule(optimizer: Optimizer, steps: usize) -> Result<Schedule> {
    schedule_to(peak(optimizer), steps)
}

/// Returns the highest learning rate of a run.
fn peak(optimizer: Optimizer) -> f64 {
    match optimizer {
        // Updates of `Muon::moonshot` are as long as AdamW's.
        Optimizer::Adamw | Optimizer::Muon => 2e-3,
        Optimizer::Sgd => 0.1,
    }
}

/// Returns the same schedule with another peak; the last rate stays.
pub(crate) fn schedule_to(peak: f64, steps: usize) -> Result<Schedule> {
    let warmup = (steps / 10).min(100);
    let curve = CosineWarmupWithMinLr::new(warmup as u64, steps as u64, MinLr::Rate(0.1));
    Ok(Schedule::new(peak, curve)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_to_the_peak_and_falls_to_a_tenth_of_it() -> Result<()> {
        let schedule = schedule(Optimizer::Adamw, 200)?;
        let rates: Vec<f64> = (0..200).map(|step| schedule.at(step)).collect();
        assert!(rates[..20].windows(2).all(|pair| pair[0] < pair[1]));
        assert!(rates[19..].windows(2).all(|pair| pair[0] > pair[1]));
        assert_eq!((rates[0], rates[19], rates[199]), (1e-4, 2e-3, 2e-4));
        Ok(())
    }

    #[test]
    fn very_short_runs_have_a_rate_for_every_step() -> Result<()> {
        for steps in 1..=12 {
            let schedule = schedule(Optimizer::Sgd, steps)?;
            assert!((0..steps as u64).all(|step| (0.01..=0.1).contains(&schedule.at(step))), "{steps} steps");
        }
        Ok(())
    }
}

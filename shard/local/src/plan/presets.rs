//! The published methods as plans.

use crate::{Fragment, LocalPlan, Merge, Outer, Placement, Select, Slots, Timing, What};
use meshstep_optim::{Momentum, Sgd};
use std::sync::Arc;

impl LocalPlan {
    /// Local SGD (Stich, *Local SGD Converges Fast and Communicates Little*, 2019): parameters are averaged every `k` steps, and
    /// each worker keeps its own state.
    pub fn local_sgd(k: u64) -> Self {
        LocalPlan::new(vec![Fragment::mean(What::Params, Timing::every(k))])
    }

    /// Post-local SGD (Lin et al., *Don't Use Large Mini-Batches, Use Local SGD*, 2020): parameters are averaged after each of the
    /// first `every_step` steps, later every `k` steps.
    pub fn post_local_sgd(every_step: u64, k: u64) -> Self {
        let switch = every_step.saturating_add(1);
        let first = Timing { during: 0..switch, ..Timing::every(1) };
        let later = Timing { during: switch..u64::MAX, ..Timing::every(k) };
        LocalPlan::new([first, later].map(|timing| Fragment::mean(What::Params, timing)).into())
    }

    /// Local Adam (Cheng and Glasgow, *Convergence of Distributed Adaptive Optimization with Local Updates*, 2025): parameters and
    /// both moments are averaged every `k` steps. The same as `des_loc(k, k, k)`.
    pub fn local_adam(k: u64) -> Self {
        LocalPlan::des_loc(k, k, k)
    }

    /// DES-LOC (*DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models*, 2025): parameters, first
    /// moments and second moments are averaged every `kx`, `ku` and `kv` steps. With `None`, moments are never averaged.
    pub fn des_loc(kx: u64, ku: impl Into<Option<u64>>, kv: impl Into<Option<u64>>) -> Self {
        let moment = |slots, period| Fragment::mean(What::State(slots), Timing { period, ..Timing::never() });
        LocalPlan::new(vec![
            Fragment::mean(What::Params, Timing::every(kx)),
            moment(Slots::First, ku.into()),
            moment(Slots::Second, kv.into()),
        ])
    }

    /// [`des_loc`](Self::des_loc) with the paper's periods of moments, `3 kx` and `6 kx`.
    pub fn des_loc_default(kx: u64) -> Self {
        LocalPlan::des_loc(kx, kx.saturating_mul(3), kx.saturating_mul(6))
    }

    /// [`des_loc`](Self::des_loc) with each moment's [`half_life`] as its period, but at least `kx`; a moment with an infinite
    /// half-life is never averaged.
    pub fn des_loc_half_lives(kx: u64, beta1: f64, beta2: f64) -> Self {
        let period = |life: f64| life.is_finite().then(|| (life.round() as u64).max(kx));
        let [ku, kv] = [beta1, beta2].map(|beta| period(half_life(beta)));
        LocalPlan::des_loc(kx, ku, kv)
    }

    /// MT-DAO, multi-timescale distributed adaptive optimizers (2025), over a rule with several or slow first moments
    /// ([`QhAdamW`](meshstep_optim::QhAdamW), [`QhAdopt`](meshstep_optim::QhAdopt)): parameters every `kx` steps, the `j`th first
    /// moment every `ku[j]`, second moments every `kv`; `None`: never.
    pub fn mt_dao(kx: u64, ku: &[Option<u64>], kv: Option<u64>) -> Self {
        let mut plan = LocalPlan::des_loc(kx, None, kv);
        let name = |j: usize| if ku.len() == 1 { "m".to_owned() } else { format!("m{j}") };
        let moment = |(j, &period): (usize, &Option<u64>)| {
            Fragment::mean(What::State(Slots::Named(name(j))), Timing { period, ..Timing::never() })
        };
        plan.fragments.splice(1..2, ku.iter().enumerate().map(moment));
        plan
    }

    /// DiLoCo (Douillard et al., 2023): every `h` steps an outer SGD with Nesterov momentum 0.9 takes a step at the learning rate
    /// 0.7; each worker keeps its own moments.
    pub fn diloco(h: u64) -> Self {
        LocalPlan::diloco_with(h, Outer::nesterov(0.7, 0.9))
    }

    /// [`diloco`](Self::diloco) with any outer optimizer.
    pub fn diloco_with(h: u64, outer: Outer) -> Self {
        let params = Fragment::mean(What::Params, Timing::every(h));
        LocalPlan::new(vec![Fragment { merge: Merge::Outer(outer), ..params }])
    }

    /// Streaming DiLoCo (Douillard et al., *Streaming DiLoCo with Overlapping Communication*, 2025): DiLoCo in `parts` fragments,
    /// each sent every `h` steps and at different ones, with a result that arrives `delay` steps later. `alpha` is the paper's
    /// share of the worker's own values in the merged ones: from 0, which takes the result, to below 1.
    pub fn streaming_diloco(h: u64, parts: usize, delay: u64, alpha: f64) -> Self {
        let part = |index: usize| {
            let offset = (u128::from(h) * index as u128 / parts as u128) as u64;
            let timing = Timing { offset, delay, ..Timing::every(h) };
            let merge = Merge::Outer(Outer::nesterov(0.7, 0.9));
            let params = Select::Part { index, of: parts };
            Fragment { params, merge, taken: 1.0 - alpha, ..Fragment::mean(What::Params, timing) }
        };
        LocalPlan::new((0..parts).map(part).collect())
    }

    /// Returns the plan with every exchange before or after the update.
    pub fn placed(mut self, placement: Placement) -> Self {
        self.fragments.iter_mut().for_each(|fragment| fragment.timing.placement = placement);
        self
    }

    /// Returns the plan with `change` applied to every fragment.
    pub fn with(mut self, mut change: impl FnMut(&mut Fragment)) -> Self {
        self.fragments.iter_mut().for_each(&mut change);
        self
    }
}

impl Outer {
    /// SGD with Nesterov momentum (plain SGD if `momentum` is 0).
    pub fn nesterov(lr: f64, momentum: f64) -> Self {
        Outer {
            rule: Arc::new(Sgd {
                momentum,
                nesterov: momentum > 0.0,
                form: Momentum::PyTorch,
                ..Sgd::default()
            }),
            lr,
        }
    }
}

/// Returns the number of updates after which half of a moment is left: `ln 0.5 / ln beta`; infinite for `beta >= 1`.
pub fn half_life(beta: f64) -> f64 {
    if beta >= 1.0 { f64::INFINITY } else { 0.5f64.ln() / beta.ln() }
}

//! Sums over whole tensors for layer-wise rules, independent of the ranges that each rank owns.

use crate::config::param_groups::RuleGroup;
use crate::config::stage::Stage;
use crate::error::Error;
use crate::plan::bytes::fold_words;
use crate::update::exact_reduce::{Folding, from_fold};
use meshstep_comm::Communicator;
use meshstep_optim::{Sees, TensorSums};
use meshstep_tensor::Meter;
use std::sync::Arc;

/// Sums of every parameter, kept from step to step. Empty if no rule needs them.
#[derive(Debug, Default)]
pub(crate) struct TensorTotals {
    sums: Vec<TensorSums>,
    ratios: Vec<f64>,
    /// Fold over ranks, if tensors are cut.
    fold: Option<(Folding, Vec<u64>)>,
}

impl TensorTotals {
    /// Allocates sums for `count` parameters of these groups.
    pub(crate) fn new<'g>(
        count: usize,
        mut groups: impl Iterator<Item = &'g RuleGroup>,
        stage: Stage,
        comm: &Arc<dyn Communicator>,
        meter: &Meter,
    ) -> Result<Self, Error> {
        if !groups.any(|g| g.rule.sees() == Sees::TensorSums) {
            return Ok(TensorTotals::default());
        }
        let words = fold_words(Sees::TensorSums, stage, count);
        let folding = || Folding::new(Arc::clone(comm), meter)?.with_room((words, 0));
        let fold = if words > 0 { Some((folding()?, vec![0; words])) } else { None };
        Ok(TensorTotals { sums: vec![TensorSums::new(); count], ratios: vec![1.0; count], fold })
    }

    /// Returns true if a rule needs sums.
    pub(crate) fn needed(&self) -> bool {
        !self.sums.is_empty()
    }

    /// Returns the zeroed sums of this rank's ranges, by parameter.
    pub(crate) fn begin(&mut self) -> &mut [TensorSums] {
        self.sums.iter_mut().for_each(TensorSums::reset);
        &mut self.sums
    }

    /// Computes each parameter's factor from its whole tensor's sums: 1 if `lr` times it would be out of range. Collective if
    /// tensors are cut.
    pub(crate) fn finish<'g>(
        &mut self,
        group: impl Fn(usize) -> &'g RuleGroup,
        lr: f64,
    ) -> Result<(), Error> {
        if let Some((folding, words)) = &mut self.fold {
            TensorSums::fold(&mut self.sums, words, folding).map_err(from_fold)?;
        }
        for (p, (ratio, sums)) in self.ratios.iter_mut().zip(&self.sums).enumerate() {
            let RuleGroup { rule, lr_scale, .. } = group(p);
            let own = rule.ratio(sums);
            *ratio = if ((lr * lr_scale * own) as f32).is_finite() { own } else { 1.0 };
        }
        Ok(())
    }

    /// Returns parameter `p`'s factor on the learning rate.
    pub(crate) fn ratio(&self, p: usize) -> f64 {
        self.ratios.get(p).copied().unwrap_or(1.0)
    }
}

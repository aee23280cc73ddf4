//! The sums that layer-wise rules take over whole tensors, whatever part of them each rank owns.

use crate::config::param_groups::Group;
use crate::update::exact_reduce::from_fold;
use crate::{Error, Folding, Stage};
use meshstep_comm::Communicator;
use meshstep_optim::{Sees, TensorSums};
use meshstep_tensor::Meter;
use std::sync::Arc;

/// Every parameter's sums, kept from step to step. Holds nothing where no rule needs them.
#[derive(Debug, Default)]
pub(crate) struct TensorTotals {
    sums: Vec<TensorSums>,
    ratios: Vec<f64>,
    /// Where parts of tensors are on several ranks.
    fold: Option<(Folding, Vec<u64>)>,
}

/// Words of the fold for `count` parameters of which some rule needs sums; none where tensors are whole.
pub(crate) fn fold_words(sees: Sees, stage: Stage, count: usize) -> usize {
    if stage.cuts_state() && sees == Sees::TensorSums { count * TensorSums::WORDS } else { 0 }
}

impl TensorTotals {
    /// Room for `count` parameters of these groups.
    pub(crate) fn new<'g>(
        count: usize,
        mut groups: impl Iterator<Item = &'g Group>,
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

    /// Whether any rule needs sums.
    pub(crate) fn needed(&self) -> bool {
        !self.sums.is_empty()
    }

    /// Where this rank's parts go, by parameter; all zero to begin with.
    pub(crate) fn begin(&mut self) -> &mut [TensorSums] {
        self.sums.iter_mut().for_each(TensorSums::reset);
        &mut self.sums
    }

    /// Makes each parameter's factor of its whole tensor's sums: 1 where `lr` times it would be out of range. Collective where
    /// tensors are cut.
    pub(crate) fn finish<'g>(&mut self, group: impl Fn(usize) -> &'g Group, lr: f64) -> Result<(), Error> {
        if let Some((folding, words)) = &mut self.fold {
            TensorSums::fold(&mut self.sums, words, folding).map_err(from_fold)?;
        }
        for (p, (ratio, sums)) in self.ratios.iter_mut().zip(&self.sums).enumerate() {
            let Group { rule, lr_scale, .. } = group(p);
            let own = rule.ratio(sums);
            *ratio = if ((lr * lr_scale * own) as f32).is_finite() { own } else { 1.0 };
        }
        Ok(())
    }

    /// Parameter `p`'s own factor on the learning rate.
    pub(crate) fn ratio(&self, p: usize) -> f64 {
        self.ratios.get(p).copied().unwrap_or(1.0)
    }
}

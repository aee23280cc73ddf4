//! The sums that layer-wise rules take over whole tensors, whatever part of them each rank owns.

use crate::groups::Group;
use crate::{Error, Stage};
use meshstep_comm::{Communicator, Reduction};
use meshstep_optim::{Sees, TensorSums};
use meshstep_tensor::{Buffer, Category, DType, Meter};

/// Every parameter's sums, kept from step to step. Holds nothing where no rule needs them.
#[derive(Debug, Default)]
pub(crate) struct TensorTotals {
    sums: Vec<TensorSums>,
    ratios: Vec<f64>,
    /// The sums as words, where parts of tensors are on several ranks.
    wire: Option<Buffer>,
}

impl TensorTotals {
    /// Room for `count` parameters of these groups.
    pub(crate) fn new<'g>(
        count: usize,
        mut groups: impl Iterator<Item = &'g Group>,
        stage: Stage,
        meter: &Meter,
    ) -> Result<Self, Error> {
        if !groups.any(|g| g.rule.sees() == Sees::TensorSums) {
            return Ok(TensorTotals::default());
        }
        let cut = matches!(stage, Stage::Zero1 | Stage::Zero2);
        let words = count * TensorSums::WORDS;
        let wire = cut.then(|| Buffer::zeroed(words, DType::U64, meter, Category::Staging)).transpose()?;
        Ok(TensorTotals { sums: vec![TensorSums::new(); count], ratios: vec![1.0; count], wire })
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

    /// Makes each parameter's factor of its whole tensor's sums. Collective where tensors are cut.
    pub(crate) fn finish<'g>(
        &mut self,
        comm: &dyn Communicator,
        group: impl Fn(usize) -> &'g Group,
    ) -> Result<(), Error> {
        if let Some(wire) = &mut self.wire {
            let words = wire.typed_mut::<u64>()?.chunks_exact_mut(TensorSums::WORDS);
            words.zip(&self.sums).for_each(|(words, sums)| sums.write(words));
            comm.all_reduce(wire, Reduction::Sum)?;
            let words = wire.typed::<u64>()?.chunks_exact(TensorSums::WORDS);
            self.sums.iter_mut().zip(words).for_each(|(sums, words)| *sums = TensorSums::read(words));
        }
        for (p, (ratio, sums)) in self.ratios.iter_mut().zip(&self.sums).enumerate() {
            *ratio = group(p).rule.ratio(sums);
        }
        Ok(())
    }

    /// Parameter `p`'s own factor on the learning rate.
    pub(crate) fn ratio(&self, p: usize) -> f64 {
        self.ratios.get(p).copied().unwrap_or(1.0)
    }
}

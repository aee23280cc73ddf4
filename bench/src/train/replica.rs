//! A rank with a whole copy of the network, trained on batches of its own.

use std::ops::Range;

use anyhow::{Context as _, Result};
use meshstep_candle::hand_over;
use meshstep_shard::{MicroBatch, Optimizer, SlotRuns};
use meshstep_tensor::{DType, Layout, SliceMut};

use super::compare::Finals;
use super::trainer::Network;
use crate::corpus::{Corpus, Place};
use crate::gpt::{Gpt, Param};

/// Copy of the network on one of several ranks, and the data of the rank.
#[derive(Debug)]
pub(crate) struct Replica<'a> {
    pub(crate) gpt: Gpt,
    pub(crate) params: &'a [Param],
    pub(crate) corpus: &'a Corpus,
    /// Byte range of the training text that the rank reads.
    pub(crate) part: Range<usize>,
    pub(crate) seed: u64,
    /// Number of the rank; batches depend on it.
    pub(crate) rank: usize,
    /// Sequences of a batch.
    pub(crate) batch: usize,
    /// Number of ranks that share the held-out sequences.
    pub(crate) ranks: usize,
    /// Micro-batches of each rank, if it computes other than one for each step.
    pub(crate) slots: Option<SlotRuns>,
}

impl Network for Replica<'_> {
    fn weight(&self) -> u64 {
        self.batch as u64
    }

    fn batches(&self) -> Range<usize> {
        self.slots.as_ref().map_or(self.rank..self.rank + 1, |slots| slots.run(self.rank))
    }

    fn backward(&self, step: u64, batch: usize, micro_batch: &MicroBatch<'_>) -> Result<f64> {
        let place = Place { seed: self.seed, step: step as usize, rank: batch };
        let batch = self.corpus.train_batch_of(self.part.clone(), place, self.batch);
        let on_grad = |name: &str, grad: &candle_core::Tensor| Ok(hand_over(micro_batch, name, grad)?);
        Ok(f64::from(self.gpt.loss_and_grads(&batch, on_grad)?))
    }
}

impl Replica<'_> {
    /// Returns the mean loss on this rank's share of the held-out sequences: at least `sequences` on all ranks, rounded up to
    /// full batches on every rank.
    pub(crate) fn held_out(&self, sequences: usize) -> Result<f64> {
        let batches = sequences.div_ceil(self.ranks * self.batch);
        let mut sum = 0.0;
        for i in 0..batches {
            let index = i * self.ranks + self.rank % self.ranks;
            let batch = self.corpus.held_out_batch(index, batches * self.ranks, self.batch);
            sum += f64::from(self.gpt.loss(&batch)?);
        }
        Ok(sum / batches as f64)
    }

    /// Returns the values of all parameters.
    pub(crate) fn finals(&self, optimizer: &Optimizer) -> Result<Finals> {
        let values = |param: &Param| {
            let values = optimizer.param(&param.name)?.typed::<f32>()?;
            Ok((param.name.clone(), values.to_vec()))
        };
        self.params.iter().map(values).collect()
    }
}

/// Returns the layout of the parameters in f32.
pub(crate) fn layout(params: &[Param]) -> Result<Layout> {
    let add = |builder: meshstep_tensor::LayoutBuilder, param: &Param| {
        builder.param(&param.name, &param.shape, DType::F32)
    };
    params.iter().fold(Layout::builder(), add).build().context("laying out the parameters")
}

/// Returns a function that writes a parameter's initial values.
pub(crate) fn initial(
    params: &[Param],
    seed: u64,
) -> impl FnMut(&meshstep_tensor::Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    move |param, mut out| {
        let values = out.typed_mut::<f32>()?;
        let known = params.iter().find(|known| known.name == param.name());
        known.into_iter().for_each(|known| known.fill(seed, values));
        Ok(())
    }
}

//! A byte-level GPT with a segmented backward pass, which hands over gradients while it runs.
//!
//! The network is GPT-2's (Radford et al. 2019): learned positions, then layers of causal attention and of a four times
//! wider MLP, each after a layer norm and within a residual connection; no dropout. Three things differ: the output matrix
//! is not tied to the embedding, so that its gradient is available first; queries, keys and values have no bias; and the
//! MLP's nonlinearity is max(x, 0)^2 (So et al., "Primer", 2021), which is cheap on a CPU.

mod backward;
mod layers;
mod ops;
mod params;
#[cfg(test)]
mod tests;
mod weights;

use anyhow::{Result, ensure};
use candle_core::{Tensor, Var};

pub(crate) use backward::{Segments, loss_and_grads};
pub(crate) use ops::relu_squared;
pub(crate) use params::Param;
pub(crate) use weights::Weights;

use layers::{Pass, Scope, Tokens};
use ops::Constants;
use params::Segment;

/// Number of tokens: one for each byte value.
pub(crate) const VOCAB: usize = 256;

/// Sizes of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Config {
    /// Number of transformer blocks.
    pub(crate) layers: usize,
    /// Attention heads of a block; they divide `width`.
    pub(crate) heads: usize,
    /// Channels of the residual stream.
    pub(crate) width: usize,
    /// Tokens of a sequence.
    pub(crate) context: usize,
}

impl Default for Config {
    /// About a million parameters, which two cores train noticeably in half a minute.
    fn default() -> Self {
        Self { layers: 4, heads: 4, width: 144, context: 64 }
    }
}

/// Token sequences of one length: `rows` times the context, and the next token at each position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Batch {
    /// Number of sequences.
    pub(crate) rows: usize,
    /// Input tokens, row by row.
    pub(crate) inputs: Vec<u8>,
    /// Expected output tokens, row by row.
    pub(crate) targets: Vec<u8>,
}

/// A network of one rank, for batches of one size.
#[derive(Debug)]
pub(crate) struct Gpt {
    config: Config,
    rows: usize,
    constants: Constants,
    weights: Weights,
}

impl Gpt {
    /// Creates a network of zeros; [`Weights::set`] sets its values.
    pub(crate) fn new(config: Config, rows: usize) -> Result<Self> {
        let Config { layers, heads, width, context } = config;
        ensure!(
            layers * heads * width * context * rows > 0,
            "{rows} rows of {config:?}: all sizes must be at least 1"
        );
        ensure!(width.is_multiple_of(heads), "{heads} heads do not divide {width} channels");
        let (constants, weights) = (Constants::new(rows, context)?, Weights::zeros(&config.params())?);
        Ok(Self { config, rows, constants, weights })
    }

    /// Returns the parameters' values.
    pub(crate) fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Returns the parameters as variables, in the order of [`Config::params`].
    pub(crate) fn vars(&self) -> Result<Vec<(String, Var)>> {
        let params = self.config.params().into_iter();
        params.map(|param| Ok((param.name.clone(), self.weights.get(&param.name)?.clone()))).collect()
    }

    /// Returns the mean loss of a batch in nats per byte. Passes gradients to `on_grad` when the backward pass of their
    /// segment ends, in exactly the reverse order of [`Config::params`].
    pub(crate) fn loss_and_grads(
        &self,
        batch: &Batch,
        mut on_grad: impl FnMut(&str, &Tensor) -> Result<()>,
    ) -> Result<f32> {
        backward::loss_and_grads(&self.pass(batch)?, &mut on_grad)
    }

    /// Returns the mean loss of a batch in nats per byte, without gradients.
    pub(crate) fn loss(&self, batch: &Batch) -> Result<f32> {
        backward::loss(&self.pass(batch)?)
    }

    fn pass(&self, batch: &Batch) -> Result<Pass<'_>> {
        Ok(Pass { scope: self.scope(), tokens: self.tokens(batch)?, segments: Segment::all(&self.config) })
    }

    fn scope(&self) -> Scope<'_> {
        Scope { config: &self.config, weights: &self.weights, constants: &self.constants }
    }

    fn tokens(&self, batch: &Batch) -> Result<Tokens> {
        let Batch { rows, inputs, targets } = batch;
        let len = self.rows * self.config.context;
        ensure!(
            *rows == self.rows && inputs.len() == len && targets.len() == len,
            "the batch has {rows} rows, {} inputs and {} targets, but {} rows of {} bytes are needed",
            inputs.len(),
            targets.len(),
            self.rows,
            self.config.context
        );
        Tokens::new(batch)
    }
}

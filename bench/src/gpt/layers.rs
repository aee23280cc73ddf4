//! Forward pass of each segment.

use anyhow::Result;
use candle_core::{Device, Tensor, Var};

use super::backward::Segments;
use super::ops::{Constants, cross_entropy, relu_squared};
use super::params::Segment;
use super::weights::Weights;
use super::{Batch, Config};

/// Configuration, weights and constants of a network, shared by all its segments.
#[derive(Debug)]
pub(super) struct Scope<'a> {
    pub(super) config: &'a Config,
    pub(super) weights: &'a Weights,
    pub(super) constants: &'a Constants,
}

/// A batch's tokens as candle indices.
#[derive(Debug)]
pub(super) struct Tokens {
    inputs: Tensor,
    targets: Tensor,
}

impl Tokens {
    /// Both tensors have the shape `[rows * context]`.
    pub(super) fn new(batch: &Batch) -> Result<Self> {
        let indices = |bytes: &[u8]| Tensor::from_iter(bytes.iter().map(|&b| u32::from(b)), &Device::Cpu);
        Ok(Self { inputs: indices(&batch.inputs)?, targets: indices(&batch.targets)? })
    }
}

/// Pass of one batch through the network.
#[derive(Debug)]
pub(super) struct Pass<'a> {
    pub(super) scope: Scope<'a>,
    pub(super) tokens: Tokens,
    pub(super) segments: Vec<Segment>,
}

impl Segments for Pass<'_> {
    fn count(&self) -> usize {
        self.segments.len()
    }

    fn forward(&self, segment: usize, input: Option<&Tensor>) -> Result<Tensor> {
        self.scope.forward(self.segments[segment], input, &self.tokens)
    }

    fn params(&self, segment: usize) -> Result<Vec<(String, Var)>> {
        let params = self.segments[segment].params(self.scope.config).into_iter();
        params.map(|param| Ok((param.name.clone(), self.scope.weights.get(&param.name)?.clone()))).collect()
    }
}

impl Scope<'_> {
    /// Runs `segment` on its input: the residual stream, `[rows * context, width]`, or `None` for the first segment.
    pub(super) fn forward(&self, segment: Segment, x: Option<&Tensor>, tokens: &Tokens) -> Result<Tensor> {
        match (segment, x) {
            (Segment::Block(_), Some(x)) => self.block(&segment.prefix(), x),
            (Segment::Head, Some(x)) => self.head(x, &tokens.targets),
            _ => self.embed(&tokens.inputs),
        }
    }

    /// `wte[token] + wpe[position]`.
    fn embed(&self, inputs: &Tensor) -> Result<Tensor> {
        let Config { context, width, .. } = *self.config;
        let tokens = self.weights.get("wte")?.index_select(inputs, 0)?;
        let x = tokens.reshape((inputs.dim(0)? / context, context, width))?;
        Ok(x.broadcast_add(self.weights.get("wpe")?)?.flatten_to(1)?)
    }

    /// `x += attention(norm(x))`, then `x += mlp(norm(x))`.
    fn block(&self, prefix: &str, x: &Tensor) -> Result<Tensor> {
        let w = |name: &str| self.weights.get(&format!("{prefix}{name}"));
        let c = self.constants;
        let normal = c.layer_norm(x, w("ln_1.weight")?, w("ln_1.bias")?)?;
        let mixed = c.attention(&normal.matmul(w("attn.qkv.weight")?)?, self.config.heads)?;
        let x = (x + c.affine(&mixed, w("attn.proj.weight")?, w("attn.proj.bias")?)?)?;
        let normal = c.layer_norm(&x, w("ln_2.weight")?, w("ln_2.bias")?)?;
        let hidden = relu_squared(&c.affine(&normal, w("mlp.fc.weight")?, w("mlp.fc.bias")?)?)?;
        Ok((x + c.affine(&hidden, w("mlp.proj.weight")?, w("mlp.proj.bias")?)?)?)
    }

    /// Returns the mean loss of the targets in nats per byte.
    fn head(&self, x: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let w = |name| self.weights.get(name);
        let normal = self.constants.layer_norm(x, w("ln_f.weight")?, w("ln_f.bias")?)?;
        cross_entropy(&normal.matmul(w("lm_head.weight")?)?, targets)
    }
}

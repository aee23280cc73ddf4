//! One rank's part of the network: GPT-2's blocks without biases, with root mean square norms, built from the layers of
//! `meshstep-candle`.

use anyhow::{Context as _, Result};
use candle_core::{Device, Module as _, Tensor};
use meshstep_candle::parallel::{
    Collectives, ColumnLinear, Residual, RowLinear, VocabEmbedding, causal_attention, cross_entropy, rms_norm,
};

use crate::gpt::{Batch, Config, Weights, relu_squared};

const EPS: f64 = 1e-5;

/// This rank's parts of the layers and their weights.
#[derive(Debug)]
pub(super) struct Network {
    heads: usize,
    cp: Collectives,
    stream: Residual,
    weights: Weights,
    wte: VocabEmbedding,
    wpe: Tensor,
    blocks: Vec<Block>,
    ln_f: Tensor,
    lm_head: ColumnLinear,
}

#[derive(Debug)]
struct Block {
    ln_1: Tensor,
    qkv: ColumnLinear,
    attn_proj: RowLinear,
    ln_2: Tensor,
    fc: ColumnLinear,
    mlp_proj: RowLinear,
}

/// This rank's part of the sequences as candle indices, `[rows, tokens]`.
#[derive(Debug)]
pub(super) struct Tokens {
    inputs: Tensor,
    targets: Tensor,
    /// Number of tokens on all ranks together.
    all: usize,
}

impl Tokens {
    /// Creates the tokens of a batch, which has this rank's tokens out of `all`.
    pub(super) fn new(batch: &Batch, all: usize) -> Result<Self> {
        let indices = |bytes: &[u8]| {
            let tokens = Tensor::from_iter(bytes.iter().map(|&byte| u32::from(byte)), &Device::Cpu)?;
            tokens.reshape((batch.rows, bytes.len() / batch.rows))
        };
        Ok(Self { inputs: indices(&batch.inputs)?, targets: indices(&batch.targets)?, all })
    }
}

impl Network {
    /// Creates the network over `weights`, this rank's parts of the parameters.
    pub(super) fn new(sizes: &Config, weights: Weights, tp: Collectives, cp: Collectives) -> Result<Self> {
        let heads = sizes.heads / tp.world_size();
        let stream = Residual::cut(tp, 1);
        let get = |name: &str| weights.get(name).map(|var| var.as_tensor().clone());
        let column = |name: &str| Ok::<_, anyhow::Error>(ColumnLinear::new(get(name)?, stream.clone()));
        let row = |name: &str| Ok::<_, anyhow::Error>(RowLinear::new(get(name)?, stream.clone()));
        let block = |layer: usize| {
            let name = |name: &str| format!("h.{layer}.{name}");
            Ok(Block {
                ln_1: get(&name("ln_1"))?,
                qkv: column(&name("attn.qkv"))?,
                attn_proj: row(&name("attn.proj"))?,
                ln_2: get(&name("ln_2"))?,
                fc: column(&name("mlp.fc"))?,
                mlp_proj: row(&name("mlp.proj"))?,
            })
        };
        Ok(Self {
            heads,
            wte: VocabEmbedding::new(get("wte")?, stream.clone()),
            wpe: get("wpe")?,
            blocks: (0..sizes.layers).map(block).collect::<Result<_>>()?,
            ln_f: get("ln_f")?,
            lm_head: column("lm_head")?,
            cp,
            stream,
            weights,
        })
    }

    /// Returns the parameters' values.
    pub(super) fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Runs unit `unit` of the network: the embedding, a block on its residual stream, or the head, which returns the sum
    /// of this rank's losses divided by the number of all ranks' tokens.
    pub(super) fn forward(&self, unit: usize, x: Option<&Tensor>, tokens: &Tokens) -> Result<Tensor> {
        let Some(block) = unit.checked_sub(1) else { return self.embed(&tokens.inputs) };
        let x = x.context("only the embedding has no input")?;
        match self.blocks.get(block) {
            Some(block) => block.forward(x, self.heads, &self.cp),
            None => self.head(x, tokens),
        }
    }

    /// `wte[token] + wpe[position]`.
    fn embed(&self, inputs: &Tensor) -> Result<Tensor> {
        let own = inputs.dim(1)?;
        let positions = self.stream.own(&self.wpe.narrow(0, self.cp.rank() * own, own)?, 0)?;
        Ok(self.wte.forward(inputs)?.broadcast_add(&positions)?)
    }

    fn head(&self, x: &Tensor, tokens: &Tokens) -> Result<Tensor> {
        let logits = self.lm_head.forward(&rms_norm(x, &self.ln_f, EPS)?)?;
        let losses = cross_entropy(&logits, &tokens.targets, self.stream.tp())?;
        Ok((losses.sum_all()? / tokens.all as f64)?)
    }
}

impl Block {
    /// `x += attention(norm(x))`, then `x += mlp(norm(x))`.
    fn forward(&self, x: &Tensor, heads: usize, cp: &Collectives) -> Result<Tensor> {
        let qkv = self.qkv.forward(&rms_norm(x, &self.ln_1, EPS)?)?;
        let (rows, tokens, three) = qkv.dims3()?;
        let shape = (rows, tokens, 3, heads, three / 3 / heads);
        let qkv = qkv.reshape(shape)?.permute((2, 0, 3, 1, 4))?.contiguous()?;
        let mixed = causal_attention(&qkv.get(0)?, &qkv.get(1)?, &qkv.get(2)?, cp)?;
        let mixed = mixed.transpose(1, 2)?.reshape((rows, tokens, three / 3))?;
        let x = (x + self.attn_proj.forward(&mixed)?)?;
        let hidden = relu_squared(&self.fc.forward(&rms_norm(&x, &self.ln_2, EPS)?)?)?;
        Ok((&x + self.mlp_proj.forward(&hidden)?)?)
    }
}

//! Trains a tiny GPT with ZeRO-2 on four threads: `cargo run -p meshstep-candle --example gpt`.
//!
//! The graph is cut after the embedding and after each block (`Tape`): the gradients of a block travel to the other ranks while those of
//! the block before it are computed.

#![allow(clippy::print_stdout)] // a program

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{Embedding, Linear, Module, VarBuilder, VarMap, embedding, linear, loss, ops};
use meshstep_candle::{NamedVars as _, Sharded, Tape};
use meshstep_shard::prelude::*;
use std::sync::Arc;

type Failed = Box<dyn std::error::Error + Send + Sync>;
type Trained<T> = std::result::Result<T, Failed>;

const TEXT: &str = "she sells sea shells by the sea shore. the shells she sells are sea shells i am sure. ";
/// Tokens are bytes of ASCII.
const VOCABULARY: usize = 128;
const WIDTH: usize = 16;
const CONTEXT: usize = 24;
/// Sequences of a step, on all ranks together.
const BATCH: usize = 8;
const STEPS: usize = 80;

/// Block of causal attention and a layer with a nonlinearity: query, key and value together, output, up, down.
struct Block([Linear; 4]);

impl Block {
    fn new(vars: VarBuilder<'_>) -> Result<Self> {
        let parts = [("qkv", 1, 3), ("out", 1, 1), ("up", 1, 4), ("down", 4, 1)];
        let [qkv, out, up, down] =
            parts.map(|(name, from, to)| linear(from * WIDTH, to * WIDTH, vars.pp(name)));
        Ok(Block([qkv?, out?, up?, down?]))
    }

    fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let Block([qkv, out, up, down]) = self;
        let qkv = qkv.forward(&normed(x)?)?.chunk(3, D::Minus1)?;
        let scores = (qkv[0].contiguous()?.matmul(&qkv[1].t()?.contiguous()?)? / (WIDTH as f64).sqrt())?;
        let mixed = ops::softmax(&scores.broadcast_add(mask)?, D::Minus1)?.matmul(&qkv[2].contiguous()?)?;
        let x = (x + out.forward(&mixed)?)?;
        &x + down.forward(&up.forward(&normed(&x)?)?.relu()?)?
    }
}

/// Divides each token's channels by their root mean square.
fn normed(x: &Tensor) -> Result<Tensor> {
    x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?.sqrt()?)
}

/// Embeddings of tokens and of their places, blocks, and the scores of the next token.
struct Gpt(Embedding, Tensor, [Block; 2], Linear);

impl Gpt {
    fn new(map: &VarMap) -> Result<Self> {
        let vars = VarBuilder::from_varmap(map, DType::F32, &Device::Cpu);
        let tokens = embedding(VOCABULARY, WIDTH, vars.pp("tokens"))?;
        let blocks = [Block::new(vars.pp("block.0"))?, Block::new(vars.pp("block.1"))?];
        let head = linear(WIDTH, VOCABULARY, vars.pp("head"))?;
        let gpt = Gpt(tokens, vars.get((CONTEXT, WIDTH), "places")?, blocks, head);
        // The same values in every run; without this, rank 0's random ones are broadcast.
        for (n, (_, var)) in map.named_vars().into_iter().enumerate() {
            let value = |i: usize| (((i * 13 + n * 79) as f32).sin() * 437.585).fract() * 0.4;
            let values = Tensor::from_iter((0..var.elem_count()).map(value), &Device::Cpu)?;
            var.set(&values.reshape(var.shape())?)?;
        }
        Ok(gpt)
    }

    /// Scores of the next token at each place of `rows`.
    fn forward(&self, rows: &Tensor, tape: &mut Tape) -> Result<Tensor> {
        let Gpt(tokens, places, blocks, head) = self;
        let later = (0..CONTEXT * CONTEXT).map(|i| if i % CONTEXT > i / CONTEXT { -1e9f32 } else { 0.0 });
        let mask = Tensor::from_iter(later, &Device::Cpu)?.reshape((CONTEXT, CONTEXT))?;
        let mut x = tape.cut(&tokens.forward(rows)?.broadcast_add(places)?)?;
        for block in blocks {
            x = tape.cut(&block.forward(&x, &mask)?)?;
        }
        head.forward(&normed(&x)?)
    }

    /// Mean cross-entropy, in nats, of sequences `first..first + rows` of the text.
    fn loss(&self, first: usize, rows: usize, tape: &mut Tape) -> Result<Tensor> {
        let byte = |i: usize| u32::from(TEXT.as_bytes()[i % TEXT.len()]);
        let places = (first..first + rows).flat_map(|row| (0..CONTEXT).map(move |i| 37 * row + i));
        let next = Tensor::from_iter(places.clone().map(|i| byte(i + 1)), &Device::Cpu)?;
        let rows = Tensor::from_iter(places.map(byte), &Device::Cpu)?.reshape((rows, CONTEXT))?;
        loss::cross_entropy(&self.forward(&rows, tape)?.flatten_to(1)?, &next)
    }
}

/// Trains on one rank, and returns a line about it.
fn train(comm: Arc<dyn Communicator>) -> Trained<String> {
    let (map, rank, rows) = (VarMap::new(), comm.rank(), BATCH / comm.world_size());
    let gpt = Gpt::new(&map)?;
    let options = Options { stage: Stage::Zero2, bucket_len: Some(1000), ..Options::default() };
    let mut opt = Sharded::new(comm, &map, AdamW::default(), options)?;
    let (mut losses, at) = (Vec::new(), StepArgs { lr: 0.01, max_norm: Some(1.0), ..StepArgs::default() });
    for step in 0..STEPS {
        let mut tape = Tape::new();
        let loss = gpt.loss(step * BATCH + rank * rows, rows, &mut tape)?;
        losses.push(loss.to_scalar::<f32>()?);
        opt.backward_step_cut(tape, &loss, at)?;
    }
    let len: usize = opt.vars().map(|(_, var)| var.elem_count()).sum();
    Ok(format!("rank {rank}, {len} parameters: loss {:.1} to {:.1}\n", losses[0], losses[STEPS - 1]))
}

pub(crate) fn run() -> Trained<String> {
    let lines: Trained<Vec<String>> = loopback::spawn(4, train)?.into_iter().collect();
    Ok(lines?.concat())
}

fn main() -> Trained<()> {
    print!("{}", run()?);
    Ok(())
}

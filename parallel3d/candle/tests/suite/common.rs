//! A small network on fixed data, and its training on loopback ranks.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::Module as _;
use meshstep_candle::{Error, NamedVars, Sharded, Tape};
use meshstep_cases::hash;
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::AdamW;
use meshstep_shard::{Options, Outcome, Owners, Stage, StepArgs};
use std::sync::Arc;

pub const STAGES: [Stage; 4] =
    [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::WholeParams(Owners::RoundRobin)];

/// Returns numbers between -1 and 1 that depend on `salt` and the index.
pub fn tensor(shape: &[usize], salt: u64) -> Tensor {
    let len = shape.iter().product::<usize>() as u64;
    let number = |i| (hash(&[salt, i]) >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
    Tensor::from_iter((0..len).map(number), &Device::Cpu).unwrap().reshape(shape).unwrap()
}

/// MLP of two layers, whose first variable is transposed by its use.
pub struct Mlp {
    pub up: Var,
    pub bias: Var,
    pub down: Var,
}

impl Mlp {
    pub fn new(salt: u64) -> Self {
        let var = |shape: &[usize], i| Var::from_tensor(&tensor(shape, 10 * salt + i)).unwrap();
        Mlp { up: var(&[9, 5], 0), bias: var(&[9], 1), down: var(&[9, 3], 2) }
    }

    pub fn vars(&self) -> [(&'static str, Var); 3] {
        [("up.weight", self.up.clone()), ("up.bias", self.bias.clone()), ("down", self.down.clone())]
    }

    pub fn hidden(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::Linear::new(self.up.as_tensor().clone(), Some(self.bias.as_tensor().clone()))
            .forward(x)?
            .gelu()
    }

    /// Mean squared error on the batch of `step`.
    pub fn loss(&self, step: u64) -> Result<Tensor> {
        self.loss_through(step, |hidden| Ok(hidden.clone()))
    }

    /// The same loss with a cut after the first layer.
    pub fn cut_loss(&self, step: u64, tape: &mut Tape) -> Result<Tensor> {
        self.loss_through(step, |hidden| tape.cut(hidden))
    }

    fn loss_through(&self, step: u64, cut: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let (x, y) = (tensor(&[4, 5], 1000 + step), tensor(&[4, 3], 2000 + step));
        let hidden = cut(&self.hidden(&x)?)?;
        (hidden.matmul(&self.down)? - y)?.sqr()?.mean_all()
    }
}

/// Returns the bits of all variables, in their order.
pub fn bits(opt: &Sharded) -> Vec<Vec<u32>> {
    opt.vars().map(|(_, var)| numbers(var).into_iter().map(f32::to_bits).collect()).collect()
}

pub fn numbers(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

pub fn rule() -> AdamW {
    AdamW { weight_decay: 0.1, ..AdamW::default() }
}

pub fn options(stage: Stage) -> Options {
    Options { stage, bucket_len: Some(30), ..Options::default() }
}

pub fn at() -> StepArgs {
    StepArgs { lr: 0.01, max_norm: Some(0.5), ..StepArgs::default() }
}

pub fn sharded(
    comm: Arc<dyn Communicator>,
    vars: impl NamedVars,
    options: Options,
) -> std::result::Result<Sharded, Error> {
    Sharded::new(comm, vars, rule(), options)
}

/// Runs `body` on loopback ranks, and returns their results in rank order.
pub fn on_ranks<T: Send>(ranks: usize, body: impl Fn(Arc<dyn Communicator>) -> T + Sync) -> Vec<T> {
    loopback::spawn(ranks, body).unwrap()
}

pub fn applied(outcome: std::result::Result<Outcome, Error>) {
    assert!(matches!(outcome, Ok(Outcome::Applied { .. })), "{outcome:?}");
}

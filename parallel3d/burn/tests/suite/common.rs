//! A small network on fixed data, and its training on loopback ranks.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_nn::{Gelu, Linear, LinearConfig};
use meshstep_burn::{Error, Sharded};
use meshstep_cases::hash;
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::AdamW;
use meshstep_shard::{Options, Outcome, Owners, Stage, StepArgs};
use std::sync::Arc;

pub const STAGES: [Stage; 4] =
    [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::WholeParams(Owners::RoundRobin)];

/// Rows of a batch.
pub const ROWS: usize = 8;

pub fn device() -> Device {
    Device::flex().autodiff()
}

/// Returns numbers between -1 and 1 that depend on `salt` and the index.
pub fn tensor<const D: usize>(shape: [usize; D], salt: u64) -> Tensor<D> {
    let len = shape.iter().product::<usize>() as u64;
    let number = |i| (hash(&[salt, i]) >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
    Tensor::from_data(TensorData::new((0..len).map(number).collect::<Vec<f32>>(), shape), &device())
}

pub fn param<const D: usize>(shape: [usize; D], salt: u64) -> Param<Tensor<D>> {
    Param::from_tensor(tensor(shape, salt))
}

/// MLP of two layers, with a list of layers between and a vector that no layer has.
#[derive(Module, Debug)]
pub struct Mlp {
    pub up: Linear,
    pub layers: Vec<Linear>,
    pub down: Linear,
    pub shift: Param<Tensor<1>>,
    pub activation: Gelu,
}

impl Mlp {
    pub fn new(salt: u64) -> Self {
        let linear = |rows, columns, i| {
            let mut linear = LinearConfig::new(rows, columns).init(&device());
            linear.weight = param([rows, columns], 10 * salt + i);
            linear.bias = Some(param([columns], 100 * salt + i));
            linear
        };
        let layers = vec![linear(9, 9, 1), linear(9, 9, 2)];
        let (up, down) = (linear(5, 9, 0), linear(9, 3, 3));
        Mlp { up, layers, down, shift: param([3], 10 * salt + 4), activation: Gelu::new() }
    }

    pub fn hidden(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.activation.forward(self.up.forward(x));
        self.layers.iter().fold(x, |x, layer| x.clone() + layer.forward(x).tanh())
    }

    /// Mean squared error on rows `part` of the `parts` equal parts of a step's batch.
    pub fn loss_of(&self, step: u64, part: usize, parts: usize) -> Tensor<1> {
        let rows = part * ROWS / parts..(part + 1) * ROWS / parts;
        let (x, y) = (tensor([ROWS, 5], 1000 + step), tensor([ROWS, 3], 2000 + step));
        let (x, y) = (x.slice([rows.clone(), 0..5]), y.slice([rows, 0..3]));
        (self.down.forward(self.hidden(x)) + self.shift.val().unsqueeze() - y).square().mean()
    }

    pub fn loss(&self, step: u64) -> Tensor<1> {
        self.loss_of(step, 0, 1)
    }
}

/// Numbers of float tensors with their paths.
#[derive(Default)]
struct Numbers {
    path: Vec<String>,
    found: Vec<(String, Vec<f32>)>,
}

impl ModuleVisitor for Numbers {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let data = param.val().into_data().try_cast(DType::F32).unwrap();
        self.found.push((self.path.join("."), data.try_into_vec().unwrap()));
    }
}

/// Returns all float tensors of a module, in its order.
pub fn named(model: &impl Module) -> Vec<(String, Vec<f32>)> {
    let mut numbers = Numbers::default();
    model.visit(&mut numbers);
    numbers.found
}

pub fn bits(model: &impl Module) -> Vec<Vec<u32>> {
    named(model).into_iter().map(|(_, values)| values.into_iter().map(f32::to_bits).collect()).collect()
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

pub fn sharded<M: Module>(
    comm: Arc<dyn Communicator>,
    model: &mut M,
    options: Options,
) -> Result<Sharded, Error> {
    Sharded::new(comm, model, rule(), options)
}

/// Runs `body` on loopback ranks, and returns their results in rank order.
pub fn on_ranks<T: Send>(ranks: usize, body: impl Fn(Arc<dyn Communicator>) -> T + Sync) -> Vec<T> {
    loopback::spawn(ranks, body).unwrap()
}

pub fn applied(outcome: Result<Outcome, Error>) {
    assert!(matches!(outcome, Ok(Outcome::Applied { .. })), "{outcome:?}");
}

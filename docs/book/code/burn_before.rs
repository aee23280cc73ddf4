//! A network of two layers learns to multiply two numbers.

use anyhow::Result;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use burn_nn::{Linear, LinearConfig};
use burn_optim::{AdamWConfig, GradientsParams};

const BATCH: usize = 32;

#[derive(Module, Debug)]
struct Network {
    hidden: Linear,
    out: Linear,
}

/// Returns `n` samples from the `first` on: points of the plane, and the product of their coordinates.
fn samples(first: usize, n: usize, device: &Device) -> (Tensor<2>, Tensor<2>) {
    let point = |i: usize| [0.618, 0.414].map(|turn| (i as f32 * turn).fract() * 2.0 - 1.0);
    let points: Vec<f32> = (first..first + n).flat_map(point).collect();
    let x = Tensor::from_data(TensorData::new(points, [n, 2]), device);
    let y = x.clone().prod_dim(1);
    (x, y)
}

/// Gives every run the same first values.
struct Initialize;

impl ModuleMapper for Initialize {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape = param.shape();
        let value = |i: usize| (i as f32 * 0.75 + D as f32).sin() * 0.7;
        let values = TensorData::new((0..shape.num_elements()).map(value).collect::<Vec<f32>>(), shape);
        param.map(|old| Tensor::from_data(values, &old.device()).require_grad())
    }
}

fn train() -> Result<()> {
    let device = Device::flex().autodiff();
    let (hidden, out) = (LinearConfig::new(2, 32).init(&device), LinearConfig::new(32, 1).init(&device));
    let mut model = Network { hidden, out }.map(&mut Initialize);
    let mut opt = AdamWConfig::new().init();
    for step in 0..100 {
        let (x, y) = samples(step * BATCH, BATCH, &device);
        let loss = (model.out.forward(model.hidden.forward(x).tanh()) - y).square().mean();
        println!("step {step}: loss {}", loss.clone().into_scalar::<f32>());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = opt.step(0.01, model, grads);
    }
    Ok(())
}

fn main() -> Result<()> {
    train()
}

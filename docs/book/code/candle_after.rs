//! A network of two layers learns to multiply two numbers.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, VarBuilder, VarMap};
use meshstep_candle::Sharded;
use meshstep_shard::prelude::*;

const BATCH: usize = 32;

/// Returns `n` samples from the `first` on: points of the plane, and the product of their coordinates.
fn samples(first: usize, n: usize) -> Result<(Tensor, Tensor)> {
    let point = |i: usize| [0.618, 0.414].map(|turn| (i as f32 * turn).fract() * 2.0 - 1.0);
    let points: Vec<f32> = (first..first + n).flat_map(point).collect();
    let x = Tensor::from_vec(points, (n, 2), &Device::Cpu)?;
    let y = (x.narrow(1, 0, 1)? * x.narrow(1, 1, 1)?)?;
    Ok((x, y))
}

/// Gives every run the same first values: candle's generator on the CPU takes no seed.
fn initialize(map: &VarMap) -> Result<()> {
    for (name, var) in map.data().lock().unwrap().iter() {
        let value = |i: usize| (i as f32 * 0.75 + name.len() as f32).sin() * 0.7;
        var.set(&Tensor::from_iter((0..var.elem_count()).map(value), &Device::Cpu)?.reshape(var.shape())?)?;
    }
    Ok(())
}

fn train(comm: std::sync::Arc<dyn Communicator>) -> Result<()> {
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let hidden = candle_nn::linear(2, 32, vars.pp("hidden"))?;
    let out = candle_nn::linear(32, 1, vars.pp("out"))?;
    initialize(&map)?;
    let options = Options { stage: Stage::Zero2, ..Options::default() };
    let mut opt = Sharded::new(comm.clone(), &map, AdamW::default(), options)?;
    for step in 0..100 {
        let part = BATCH / comm.world_size();
        let (x, y) = samples(step * BATCH + comm.rank() * part, part)?;
        let loss = (out.forward(&hidden.forward(&x)?.tanh()?)? - y)?.sqr()?.mean_all()?;
        opt.backward_step(&loss, StepArgs { lr: 0.01, ..StepArgs::default() })?;
        println!("step {step}: loss {}", loss.to_scalar::<f32>()?);
    }
    Ok(())
}

fn main() -> Result<()> {
    match Environment::from_env() {
        Err(EnvironmentError::NoLauncher) => loopback::spawn(4, train)?.into_iter().collect(),
        launched => train(tcp::join(&launched?, &tcp::Options::default())?.communicator()),
    }
}

//! Trains a burn transformer on an NVIDIA GPU and compares the sharded optimizer with burn's AdamW, losses and time:
//! `cargo run --release -p meshstep-burn --features cuda --example cuda -- gpu 256 4`. Arguments: the optimizer's place (`gpu`: the
//! module's GPU, with NCCL; `cpu`: the host; `burn`: burn's AdamW alone), width, layers, sequences of a batch, their tokens, steps.

#![allow(clippy::print_stdout)] // a program

use burn::module::Module;
use burn::tensor::{Device, Tensor, TensorData};
use burn_nn::{Linear, LinearConfig, transformer::*};
use burn_optim::{AdamWConfig, GradientsParams};
use meshstep_burn::Sharded;
use meshstep_comm::{Communicator, loopback, nccl};
use meshstep_optim::AdamW;
use meshstep_shard::{Options, Stage, StepArgs};
use meshstep_tensor::{Queue, cuda::Stream};
use std::{sync::Arc, time::Instant};

type Failed = Box<dyn std::error::Error + Send + Sync>;
type Batch = (Tensor<3>, Tensor<3>);

const LR: f64 = 1e-3;

/// Encoder with one output for each input.
#[derive(Module, Debug)]
struct Model {
    encoder: TransformerEncoder,
    out: Linear,
}

impl Model {
    fn loss(&self, (x, y): &Batch) -> Tensor<1> {
        let encoded = self.encoder.forward(TransformerEncoderInput::new(x.clone()));
        (self.out.forward(encoded) - y.clone()).square().mean()
    }
}

/// Returns the model and the batches with which each optimizer begins.
fn task([width, layers, batch, tokens, _]: [usize; 5], device: &Device) -> (Model, Vec<Batch>) {
    device.seed(7);
    let config = TransformerEncoderConfig::new(width, 4 * width, width.div_ceil(64), layers);
    let encoder = config.with_dropout(0.0).with_norm_first(true).init(device);
    let model = Model { encoder, out: LinearConfig::new(width, width).init(device) };
    let tensor =
        |numbers: Vec<f32>| Tensor::from_data(TensorData::new(numbers, [batch, tokens, width]), device);
    let batches = (0..4).map(|b| {
        let number = |i| ((b * 7919 + i) as f32 * 0.618).fract() * 4.0 - 2.0;
        let x: Vec<f32> = (0..batch * tokens * width).map(number).collect();
        let y = x.iter().map(|x| (2.0 * x).sin()).collect();
        (tensor(x), tensor(y))
    });
    (model, batches.collect())
}

/// Runs `step` with each batch in turn; returns the losses, and a step's median of milliseconds after the first quarter.
fn timed(
    (steps, device): (usize, &Device),
    batches: &[Batch],
    mut step: impl FnMut(&Batch) -> Result<Tensor<1>, Failed>,
) -> Result<(Vec<f32>, f64), Failed> {
    let (mut losses, mut times) = (Vec::new(), Vec::new());
    for batch in batches.iter().cycle().take(steps) {
        let begun = Instant::now();
        losses.push(step(batch)?.inner());
        device.sync().map_err(|error| format!("{error:?}"))?;
        times.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    times.drain(..steps / 4);
    times.sort_by(f64::total_cmp);
    Ok((losses.into_iter().map(Tensor::into_scalar).collect(), times[times.len() / 2]))
}

/// Trains with burn's AdamW, and unless there is no rank, with ours. Compares losses.
fn train(sizes: [usize; 5], rank: Option<(Arc<dyn Communicator>, Queue)>) -> Result<(), Failed> {
    let device = Device::cuda(0).autodiff();
    let ((mut model, batches), run) = (task(sizes, &device), (sizes[4], &device));
    let (mut theirs, mut adamw) = (Some(model.clone()), AdamWConfig::new().with_epsilon(1e-8).init());
    let (expected, burn_ms) = timed(run, &batches, |batch| {
        let old = theirs.take().ok_or("no model")?;
        let loss = old.loss(batch);
        let grads = GradientsParams::from_grads(loss.backward(), &old);
        theirs = Some(adamw.step(LR, old, grads));
        Ok(loss)
    })?;
    println!("{} parameters; burn's AdamW takes {burn_ms:.3} ms a step", model.num_params());
    let Some((comm, queue)) = rank else { return Ok(()) };
    let (options, place) = (Options { stage: Stage::Zero1, ..Options::default() }, queue.place());
    let rule = AdamW { weight_decay: 1e-4, ..AdamW::default() }; // as burn's
    let mut opt = Sharded::new(comm, &mut model, rule, Options { queue, ..options })?;
    // The norm is taken, and clips nothing: burn would clip each tensor by its own norm.
    let at = StepArgs { lr: LR, max_norm: Some(1e6), ..StepArgs::default() };
    let (losses, ms) = timed(run, &batches, |batch| {
        let loss = model.loss(batch);
        opt.backward_step(&mut model, loss.clone(), at)?;
        Ok(loss)
    })?;
    let apart = losses.iter().zip(&expected).map(|(x, y)| (x - y).abs() / y).fold(0.0, f32::max);
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    println!("sharded, on {place}: {ms:.3} ms; losses {first:.5} to {last:.5}, {apart:.1e} apart");
    let agree = losses.iter().zip(&expected).all(|(x, y)| (x - y).abs() < 2e-3 * y); // false for NaN
    if agree && last < first { Ok(()) } else { Err(format!("ours {losses:?}\nburn's {expected:?}").into()) }
}

fn main() -> Result<(), Failed> {
    let (place, mut sizes) = (std::env::args().nth(1), [256, 4, 16, 64, 40]);
    for (size, arg) in sizes.iter_mut().zip(std::env::args().skip(2)) {
        *size = arg.parse()?;
    }
    match place.as_deref() {
        Some("burn") => train(sizes, None),
        Some("cpu") => loopback::spawn(1, |comm| train(sizes, Some((comm, Queue::cpu()))))?.remove(0),
        _ => {
            let on_gpu = |comm: Arc<nccl::Nccl>| {
                let queue = Queue::cuda(Stream::new(comm.device())?);
                train(sizes, Some((comm, queue)))
            };
            nccl::spawn(&[0], nccl::Options::default(), on_gpu)?.remove(0)
        }
    }
}

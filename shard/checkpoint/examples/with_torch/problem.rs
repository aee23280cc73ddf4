//! A problem that PyTorch solves too, with the same gradients to the bit: `bench/python/continue_in_torch.py` mirrors this file.

use meshstep_checkpoint::{self as checkpoint, CheckpointError};
use meshstep_comm::Communicator;
use meshstep_optim::{Adagrad, Adam, AdamW, RmsProp, Sgd};
use meshstep_shard::{Error, Groups, Optimizer, Options, Stage, StepArgs};
use meshstep_tensor::{DType, Layout, SliceMut};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Steps before the change of programs, and after it.
pub(crate) const BEFORE: u64 = 20;
pub(crate) const AFTER: u64 = 10;

/// Maximum relative distance of compared vectors, by norm.
pub(crate) const APART: f64 = 2e-6;

#[cfg(test)]
pub(crate) const CASES: [&str; 7] =
    ["adamw", "amsgrad", "adam", "nesterov", "dampening", "rmsprop", "adagrad"];

pub(crate) type Shapes = Vec<(String, Vec<usize>)>;

/// Shapes with a few numbers.
#[cfg(test)]
pub(crate) fn small() -> Shapes {
    let shapes: [(&str, &[usize]); 4] =
        [("wte.weight", &[5, 3]), ("h.0.bias", &[7]), ("scale", &[1]), ("h.0.weight", &[2, 2, 3])];
    shapes.map(|(name, shape)| (name.to_owned(), shape.to_vec())).into()
}

/// Shapes of a two-layer transformer.
pub(crate) fn large() -> Shapes {
    let mut shapes: Shapes = Vec::new();
    let mut add = |name: &str, shape: &[usize]| shapes.push((name.to_owned(), shape.to_vec()));
    add("wte.weight", &[256, 64]);
    add("wpe.weight", &[32, 64]);
    for i in 0..2 {
        let parts: [(&str, &[usize]); 10] = [
            ("ln_1.weight", &[64]),
            ("ln_1.bias", &[64]),
            ("attn.weight", &[192, 64]),
            ("attn.bias", &[192]),
            ("proj.weight", &[64, 64]),
            ("ln_2.weight", &[64]),
            ("ln_2.bias", &[64]),
            ("mlp_in.weight", &[256, 64]),
            ("mlp_in.bias", &[256]),
            ("mlp_out.weight", &[64, 256]),
        ];
        parts.into_iter().for_each(|(name, shape)| add(&format!("h.{i}.{name}"), shape));
    }
    add("ln_f.weight", &[64]);
    add("ln_f.bias", &[64]);
    shapes
}

/// Returns the rule of a case, its learning rate, and the clipping norm.
fn case(name: &str) -> (Groups, f64, Option<f64>) {
    let adamw = AdamW { beta2: 0.95, weight_decay: 0.1, ..AdamW::default() };
    let sgd = Sgd { momentum: 0.9, weight_decay: 0.01, ..Sgd::default() };
    match name {
        "adamw" => (Groups::new(adamw), 0.01, Some(1.0)),
        "amsgrad" => (Groups::new(AdamW { amsgrad: true, ..adamw }), 0.01, None),
        "adam" => (Groups::new(Adam { weight_decay: 0.1, ..Adam::default() }), 0.01, Some(1.0)),
        "nesterov" => (Groups::new(Sgd { nesterov: true, ..sgd }), 0.05, Some(1.0)),
        "dampening" => (Groups::new(Sgd { dampening: 0.3, ..sgd }), 0.05, None),
        "rmsprop" => (
            Groups::new(RmsProp { alpha: 0.9, momentum: 0.9, centered: true, ..RmsProp::default() }),
            0.001,
            None,
        ),
        "adagrad" => (Groups::new(Adagrad { lr_decay: 0.01, ..Adagrad::default() }), 0.05, None),
        other => panic!("no case is called {other:?}"),
    }
}

/// Returns a number in [-1, 1) that f32 holds exactly: SplitMix64 of its purpose.
fn number(param: usize, element: usize, salt: u64) -> f32 {
    let word = (param as u64) << 40 | (element as u64) << 8 | salt;
    let mut z = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    (z >> 40) as f32 / 8_388_608.0 - 1.0
}

/// Salts: the first value, the place of a parabola's minimum, and its steepness.
const FIRST: u64 = 0;
const MINIMUM: u64 = 1;
const STEEP: u64 = 2;

pub(crate) fn build(
    comm: Arc<dyn Communicator>,
    name: &str,
    shapes: &Shapes,
    stage: Stage,
) -> Result<Optimizer, Error> {
    let add = |layout: meshstep_tensor::LayoutBuilder, (name, shape): &(String, Vec<usize>)| {
        layout.param(name, shape, DType::F32)
    };
    let layout = shapes.iter().fold(Layout::builder(), add).build()?;
    let first = |param: &meshstep_tensor::Param, mut into: SliceMut<'_>| {
        let index = shapes.iter().position(|(name, _)| name == param.name()).unwrap_or_default();
        into.typed_mut::<f32>()?.iter_mut().enumerate().for_each(|(j, x)| *x = number(index, j, FIRST));
        Ok(())
    };
    let options = Options { stage, bucket_len: Some(1000), ..Options::default() };
    Optimizer::new(comm, layout, case(name).0, first, options)
}

/// Takes these steps; the first is 1.
pub(crate) fn train(
    opt: &mut Optimizer,
    name: &str,
    shapes: &Shapes,
    steps: std::ops::RangeInclusive<u64>,
) -> Result<(), Error> {
    let (_, lr, max_norm) = case(name);
    for t in steps {
        let mut grads = Vec::new();
        for (i, (name, _)) in shapes.iter().enumerate() {
            let grad = |(j, p): (usize, &f32)| {
                (p - number(i, j, MINIMUM)) * (number(i, j, STEEP) + 1.5) + number(i, j, 3 + t) * 0.25
            };
            let grad: Vec<f32> = opt.param(name)?.typed::<f32>()?.iter().enumerate().map(grad).collect();
            grads.push((name, grad));
        }
        let batch = opt.micro_batch(1)?;
        grads.iter().try_for_each(|(name, grad)| batch.grad(name, &grad[..]))?;
        batch.finish()?;
        let lr = lr * 8.0 / (8.0 + t as f64);
        opt.step(StepArgs { lr, max_norm, ..StepArgs::default() })?.outcome()?;
    }
    Ok(())
}

/// Returns all vectors, on rank 0.
pub(crate) fn everything(opt: &mut Optimizer) -> Result<BTreeMap<String, Vec<f32>>, checkpoint::Error> {
    let mut all: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    checkpoint::consolidate(opt, 0, &mut |window| {
        let values = window
            .values
            .typed::<f32>()
            .map_err(|error| CheckpointError::Memory { message: error.to_string() })?;
        all.entry(format!("{}:{}", window.param, window.slot)).or_default().extend(values);
        Ok(())
    })?;
    Ok(all)
}

/// Returns the distance of two vectors, relative to the norm of the second.
pub(crate) fn apart(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut a.iter().zip(b).map(|(&a, &b)| f64::from(a) - f64::from(b)));
    let size = norm(&mut b.iter().map(|&b| f64::from(b)));
    if difference == 0.0 { 0.0 } else { difference / size }
}

//! From four ranks to PyTorch and back: `cargo run -p meshstep-checkpoint --example pytorch`.
//!
//! Four ranks train, save a checkpoint and export one file with PyTorch's names. Two ranks go on from that file, and four from a file
//! that PyTorch wrote. In PyTorch the exported file is read and written as the head of `meshstep_checkpoint::pytorch` shows:
//!
//! ```text
//! tensors = safetensors.torch.load_file("trained.safetensors")
//! state = {key: value for key, value in tensors.items() if key.startswith("state.")}
//! model.load_state_dict({key: value for key, value in tensors.items() if key not in state})
//! ```

#![allow(clippy::print_stdout)] // a program

use meshstep_checkpoint::pytorch::{Import, PyTorchFile};
use meshstep_checkpoint::{self as checkpoint, Load, Save, Store};
use meshstep_shard::prelude::*;
use std::error::Error;
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

type Failed = Box<dyn Error + Send + Sync>;

/// The parameters of the model, with PyTorch's names.
const SHAPES: [(&str, &[usize]); 4] =
    [("wte.weight", &[5, 3]), ("h.0.bias", &[7]), ("scale", &[1]), ("h.0.weight", &[2, 2, 3])];
/// A file that `safetensors.torch.save_file` wrote, with the parameters and AdamW's state after 20 steps in PyTorch.
const FROM_PYTORCH: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/examples/with_torch/recorded/adamw.safetensors");

fn build(comm: Arc<dyn Communicator>, stage: Stage) -> Result<Optimizer, Failed> {
    let layout = SHAPES.iter().fold(Layout::builder(), |b, (name, shape)| b.param(*name, shape, DType::F32));
    let options = Options { stage, ..Options::default() };
    let rule = AdamW { beta2: 0.95, weight_decay: 0.1, ..AdamW::default() };
    let first = |param: &Param, mut out: SliceMut<'_>| {
        out.copy_from(Slice::from(&vec![param.len() as f32 / 10.0; param.len()][..]))
    };
    Ok(Optimizer::new(comm, layout.build()?, rule, first, options)?)
}

/// Takes five steps towards zero; returns the parameters.
fn train(opt: &mut Optimizer) -> Result<Vec<f32>, Failed> {
    let values = |opt: &Optimizer, name| Ok::<_, Failed>(opt.param(name)?.typed::<f32>()?.to_vec());
    for _ in 0..5 {
        let grads = SHAPES.map(|(name, _)| values(opt, name));
        let mb = opt.micro_batch(1)?;
        for ((name, _), grad) in SHAPES.iter().zip(grads) {
            mb.grad(name, &grad?[..])?;
        }
        mb.finish()?;
        opt.step(StepArgs { lr: 0.01, max_norm: Some(1.0), ..StepArgs::default() })?.outcome()?;
    }
    let all = SHAPES.map(|(name, _)| values(opt, name));
    Ok(all.into_iter().collect::<Result<Vec<_>, _>>()?.concat())
}

/// Names, types and shapes in the head of a safetensors file: eight bytes with the length of a JSON object, and the object.
fn head(path: &Path) -> Result<String, Failed> {
    let (bytes, mut text) = (std::fs::read(path)?, String::new());
    let (len, rest) = bytes.split_first_chunk::<8>().ok_or("the file is too short")?;
    let entries: serde_json::Map<_, _> = serde_json::from_slice(&rest[..u64::from_le_bytes(*len) as usize])?;
    for (name, entry) in entries.iter().filter(|(name, _)| *name != "__metadata__") {
        writeln!(text, "  {name} {} {}", entry["dtype"].as_str().unwrap_or_default(), entry["shape"])?;
    }
    Ok(text)
}

pub(crate) fn run() -> Result<String, Failed> {
    let folder = tempfile::tempdir()?;
    let (store, path) = (Store::new(folder.path()), folder.path().join("trained.safetensors"));
    let exported = PyTorchFile::new(&path);
    let trained = loopback::spawn(4, |comm| -> Result<_, Failed> {
        let mut opt = build(comm, Stage::Zero2)?;
        train(&mut opt)?;
        checkpoint::save(&mut opt, &store, Save::default())?;
        checkpoint::export_pytorch(&mut opt, &exported, 0)?; // rank 0 writes
        train(&mut opt)
    });
    let trained = trained?.remove(0)?;
    let mut text = format!("four ranks exported\n{}", head(&path)?);
    // The same steps after the checkpoint and after the file, on other ranks.
    for from_file in [false, true] {
        let ranks = loopback::spawn(2, |comm| -> Result<_, Failed> {
            let mut opt = build(comm, Stage::Zero1)?;
            match from_file {
                true => drop(checkpoint::import_pytorch(&mut opt, &exported, Import::default())?),
                false => drop(checkpoint::load(&mut opt, &store, Load::default())?),
            }
            train(&mut opt)
        });
        let from = if from_file { "file" } else { "checkpoint" };
        writeln!(
            text,
            "two ranks go on from the {from} with the same bits: {}",
            ranks?.remove(0)? == trained
        )?;
    }
    let ranks = loopback::spawn(4, |comm| -> Result<_, Failed> {
        let mut opt = build(comm, Stage::Zero2)?;
        let imported =
            checkpoint::import_pytorch(&mut opt, &PyTorchFile::new(FROM_PYTORCH), Import::default())?;
        train(&mut opt)?;
        Ok((imported.steps, opt.steps()))
    });
    let (before, after) = ranks?.remove(0)?;
    writeln!(text, "four ranks go on from PyTorch's step {before} to step {after}")?;
    Ok(text)
}

fn main() -> Result<(), Failed> {
    print!("{}", run()?);
    Ok(())
}

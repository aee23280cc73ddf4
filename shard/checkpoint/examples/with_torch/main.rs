//! Training that continues in PyTorch, or comes from there: the Rust half of `bench/python/continue_in_torch.py`.
//!
//! ```text
//! with_torch export CASE FOLDER    trains, writes CASE.safetensors, trains on, writes CASE-end.safetensors
//! with_torch import CASE FOLDER    reads CASE.safetensors, trains on, compares with CASE-end.safetensors
//! ```

#![allow(clippy::print_stdout, reason = "it is a program")]

#[cfg(test)]
mod continued;
mod problem;

use meshstep_checkpoint::pytorch::{Import, PyTorchFile};
use meshstep_checkpoint::{Error, export_pytorch, import_pytorch};
use meshstep_shard::Stage;
use problem::{AFTER, APART, BEFORE, apart, build, everything, large, train};
use std::collections::BTreeMap;
use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [action, case, folder] = &args[..] else {
        return Err("with_torch export|import CASE FOLDER".into());
    };
    match &**action {
        "export" => export(case, Path::new(folder)),
        "import" => import(case, Path::new(folder)),
        other => Err(format!("{other:?} is neither export nor import").into()),
    }
}

fn files(case: &str, folder: &Path) -> [PyTorchFile; 2] {
    ["", "-end"].map(|end| PyTorchFile::new(folder.join(format!("{case}{end}.safetensors"))))
}

/// Exports from four ranks that divide gradients and state.
fn export(case: &str, folder: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let (shapes, [at, end]) = (large(), files(case, folder));
    let ranks = meshstep_comm::loopback::spawn(4, |comm| -> Result<(), Error> {
        let mut opt = build(comm, case, &shapes, Stage::Zero2)?;
        train(&mut opt, case, &shapes, 1..=BEFORE)?;
        export_pytorch(&mut opt, &at, 0)?;
        train(&mut opt, case, &shapes, BEFORE + 1..=BEFORE + AFTER)?;
        export_pytorch(&mut opt, &end, 0)
    })?;
    Ok(ranks.into_iter().collect::<Result<_, _>>()?)
}

/// Imports on three ranks.
fn import(case: &str, folder: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let (shapes, [at, end]) = (large(), files(case, folder));
    let ranks = meshstep_comm::loopback::spawn(3, |comm| -> Result<_, Error> {
        let mut opt = build(comm, case, &shapes, Stage::Zero1)?;
        import_pytorch(&mut opt, &at, Import::default())?;
        train(&mut opt, case, &shapes, BEFORE + 1..=BEFORE + AFTER)?;
        let ours = everything(&mut opt)?;
        import_pytorch(&mut opt, &end, Import::default())?;
        Ok((ours, everything(&mut opt)?))
    })?;
    let (ours, theirs) = ranks.into_iter().next().ok_or("there are ranks")??;
    compare(&ours, &theirs)
}

fn compare(
    ours: &BTreeMap<String, Vec<f32>>,
    theirs: &BTreeMap<String, Vec<f32>>,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut most = (0.0, "nothing");
    for (name, ours) in ours {
        let difference = apart(ours, theirs.get(name).ok_or("all vectors are there")?);
        if difference > most.0 {
            most = (difference, name);
        }
    }
    println!("{} vectors, at most {:.1e} apart, {}", ours.len(), most.0, most.1);
    if most.0 <= APART { Ok(()) } else { Err(format!("more than {APART:e}").into()) }
}

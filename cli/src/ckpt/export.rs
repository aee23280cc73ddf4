//! Exports parameters to one safetensors file. Writes a window at a time, so that no whole tensor is in memory.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use meshstep_checkpoint::extend::PARAM;
use meshstep_checkpoint::{Piece, Saved, Type};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::Export;
use super::evaluated::Evaluations;
use crate::number::grouped;

/// Key in the header for the caller's metadata.
const RESERVED: &str = "__metadata__";

/// A vector to export.
#[derive(Clone, Copy, Debug)]
struct Vector<'s> {
    tensor: &'s str,
    slot: &'s str,
    shape: &'s [u64],
    dtype: Type,
}

/// Writes the file, and returns a summary.
pub(super) fn run(saved: &Saved, asked: &Export) -> Result<String> {
    let vectors = vectors(saved, asked.state)?;
    let (header, places) = header(&vectors, saved.manifest().step)?;
    check_free(asked)?;
    // State belongs to the trained parameters.
    let evaluations = if asked.state { None } else { Some(Evaluations::of(saved)?) };
    let is_evaluated = |vector: &Vector<'_>| evaluations.as_ref().filter(|all| all.has(vector.tensor));
    let draft = Draft::create(&asked.to)?;
    draft.file.write_all_at(&header, 0).with_context(|| draft.doing("writing"))?;
    let mut reader = saved.vectors();
    for (vector, at) in vectors.values().zip(&places) {
        let (at, size) = (header.len() as u64 + at, vector.dtype.size());
        let write = |place, bytes: &[u8]| {
            let written = draft.file.write_all_at(bytes, at + place * size);
            written.with_context(|| draft.doing("writing"))
        };
        match is_evaluated(vector) {
            Some(all) => {
                all.read(vector.tensor, &saved.manifest().tensors[vector.tensor], &mut reader, write)?
            }
            None => reader.read(vector.tensor, vector.slot, &Piece::whole(vector.shape), write)?,
        }
    }
    let len = draft.file.metadata()?.len();
    draft.publish(asked)?;
    let mut said =
        format!("wrote {} vectors, {} bytes, to {}", vectors.len(), grouped(len), asked.to.display());
    let evaluated = vectors.values().filter(|vector| is_evaluated(vector).is_some()).count();
    if evaluated > 0 {
        said += &format!("; {evaluated} of them at the average where a schedule-free rule is evaluated");
    }
    Ok(said)
}

/// Returns the exported vectors by their names in the file.
fn vectors(saved: &Saved, state: bool) -> Result<BTreeMap<String, Vector<'_>>> {
    let mut vectors = BTreeMap::new();
    for (tensor, entry) in &saved.manifest().tensors {
        ensure!(entry.slots.contains_key(PARAM), "tensor {tensor:?} has no slot {PARAM:?} to export");
        for (slot, of) in entry.slots.iter().filter(|(slot, _)| state || *slot == PARAM) {
            let name = if slot == PARAM { tensor.clone() } else { format!("{tensor}.{slot}") };
            ensure!(name != RESERVED, "a safetensors file cannot hold a tensor called {RESERVED:?}");
            let vector = Vector { tensor, slot, shape: &entry.shape, dtype: of.dtype };
            if vectors.insert(name.clone(), vector).is_some() {
                bail!("two vectors would be called {name:?}; export without --state");
            }
        }
    }
    Ok(vectors)
}

/// Returns the file's header bytes, and the offset of each vector after the header.
fn header(vectors: &BTreeMap<String, Vector<'_>>, step: u64) -> Result<(Vec<u8>, Vec<u64>)> {
    let (mut infos, mut places, mut end) = (Vec::new(), Vec::new(), 0);
    for (name, Vector { shape, dtype, .. }) in vectors {
        let next = Piece::whole(shape).len().checked_mul(dtype.size()).and_then(|len| len.checked_add(end));
        let next = next.with_context(|| format!("vectors up to {name:?} have more bytes than a file can"))?;
        let shape = shape.iter().map(|&extent| extent as usize).collect();
        let data_offsets = (end as usize, next as usize);
        infos.push((name.clone(), TensorInfo { dtype: dtype_of(*dtype), shape, data_offsets }));
        places.push(end);
        end = next;
    }
    // Other programs check for "pt" before they trust names and shapes.
    let about =
        HashMap::from([("format".to_owned(), "pt".to_owned()), ("step".to_owned(), step.to_string())]);
    let mut text = serde_json::to_vec(&Metadata::new(Some(about), infos)?)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok(([&(text.len() as u64).to_le_bytes()[..], &text].concat(), places))
}

fn dtype_of(dtype: Type) -> Dtype {
    match dtype {
        Type::F64 => Dtype::F64,
        Type::F32 => Dtype::F32,
        Type::BF16 => Dtype::BF16,
        Type::F16 => Dtype::F16,
        Type::U16 => Dtype::U16,
        Type::U8 => Dtype::U8,
    }
}

fn check_free(asked: &Export) -> Result<()> {
    let there = asked.to.symlink_metadata().is_ok();
    ensure!(asked.force || !there, "{} exists; name another file, or pass --force", asked.to.display());
    Ok(())
}

/// The file under a temporary name until it is complete; removed if it is never completed.
struct Draft {
    file: File,
    path: PathBuf,
    published: bool,
}

impl Draft {
    fn create(to: &Path) -> Result<Self> {
        let name = to.file_name().with_context(|| format!("{} names no file", to.display()))?;
        let path = to.with_file_name(format!(".{}.tmp-{}", name.to_string_lossy(), std::process::id()));
        let file = OpenOptions::new().write(true).create_new(true).open(&path);
        let file = file.with_context(|| format!("creating {}", path.display()))?;
        Ok(Draft { file, path, published: false })
    }

    fn doing(&self, what: &str) -> String {
        format!("{what} {}", self.path.display())
    }

    fn publish(mut self, asked: &Export) -> Result<()> {
        self.file.sync_all().with_context(|| self.doing("syncing"))?;
        // Another process may have created the file meanwhile.
        check_free(asked)?;
        fs::rename(&self.path, &asked.to).with_context(|| self.doing("renaming"))?;
        self.published = true;
        let parent = asked.to.parent().filter(|parent| !parent.as_os_str().is_empty());
        let folder = File::open(parent.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all());
        folder.with_context(|| format!("syncing the folder of {}", asked.to.display()))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.published {
            // If the removal fails, the remaining file has a name that marks it as temporary.
            let _ = fs::remove_file(&self.path);
        }
    }
}

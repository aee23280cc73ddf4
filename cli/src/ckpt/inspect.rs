//! Prints a checkpoint's manifest as tables.

use std::collections::BTreeSet;

use meshstep_checkpoint::{Manifest, PieceEntry, Saved, SlotEntry, TensorEntry};

use super::table::{aligned, shown};
use crate::number::grouped;

/// Returns the whole report as text.
pub(super) fn report(saved: &Saved) -> String {
    let manifest = saved.manifest();
    let Manifest { format, step, run, mesh, files, tensors, settings, blobs } = manifest;
    let run = run.map_or_else(String::new, |run| format!("run {run}, "));
    let mut text = format!("step {step}, {run}saved on {}, format {format}\n\n", shown(mesh));
    text += &tensor_table(manifest);
    let slots = tensors.values().flat_map(|tensor| tensor.slots.values());
    let (vectors, pieces) = slots.fold((0, 0), |(n, pieces), slot| (n + 1, pieces + slot.pieces.len()));
    let stored = sum(manifest.stored().map(|(_, stored)| stored.bytes));
    let (names, vectors, pieces) =
        (count(tensors.len(), "tensor"), count(vectors, "vector"), count(pieces, "piece"));
    text += &format!("{names}, {vectors}, {pieces}, {} bytes\n\n", grouped(stored));
    let rows: Vec<_> = files.iter().map(|file| [shown(&file.name), grouped(file.bytes)]).collect();
    text += &aligned(["file", "bytes"], [false, true], &rows);
    let all = sum(files.iter().map(|file| file.bytes));
    text += &format!("{}, {} bytes\n", count(files.len(), "file"), grouped(all));
    if !blobs.is_empty() {
        let row = |(name, stored): (&String, &meshstep_checkpoint::Stored)| {
            [shown(name), grouped(stored.bytes), shown(&files[stored.file].name)]
        };
        let rows: Vec<_> = blobs.iter().map(row).collect();
        text += &format!("\n{}", aligned(["blob", "bytes", "file"], [false, true, false], &rows));
    }
    if !settings.is_empty() {
        let rows: Vec<_> = settings.iter().map(|(name, value)| [shown(name), value.to_string()]).collect();
        text += &format!("\n{}", aligned(["setting", "value"], [false, false], &rows));
    }
    text
}

fn tensor_table(manifest: &Manifest) -> String {
    let rows: Vec<_> = manifest.tensors.iter().map(|(name, tensor)| row(manifest, name, tensor)).collect();
    let heads = ["tensor", "dtype", "shape", "t", "pieces", "files", "bytes", "slots"];
    aligned(heads, [false, false, false, true, true, false, true, false], &rows)
}

fn row(manifest: &Manifest, name: &str, tensor: &TensorEntry) -> [String; 8] {
    let pieces = || tensor.slots.values().flat_map(|slot| &slot.pieces);
    let files: BTreeSet<usize> = pieces().map(|piece| piece.stored.file).collect();
    let size = sum(pieces().map(|PieceEntry { stored, .. }| stored.bytes));
    let dtype = tensor.slots.get("param").map(|slot| format!("{:?}", slot.dtype));
    let slot = |(name, slot): (&String, &SlotEntry)| format!("{} {:?}", shown(name), slot.dtype);
    [
        shown(name),
        dtype.unwrap_or_else(|| "-".to_owned()),
        format!("{:?}", tensor.shape),
        tensor.t.to_string(),
        grouped(pieces().count() as u64),
        owners(manifest, &files),
        grouped(size),
        tensor.slots.iter().map(slot).collect::<Vec<_>>().join(", "),
    ]
}

/// Returns the files that hold parts of a tensor: their names, or their number if there are more than two.
fn owners(manifest: &Manifest, files: &BTreeSet<usize>) -> String {
    let name = |&file: &usize| shown(manifest.files[file].name.trim_end_matches(".safetensors"));
    match files.len() {
        0..=2 => files.iter().map(name).collect::<Vec<_>>().join(" "),
        many => format!("{many} of {}", manifest.files.len()),
    }
}

/// Sums lengths in 128 bits, because lengths in a manifest may be wrong and overflow 64 bits.
fn sum(lens: impl Iterator<Item = u64>) -> u128 {
    lens.map(u128::from).sum()
}

fn count(n: usize, what: &str) -> String {
    format!("{} {what}{}", grouped(n as u64), if n == 1 { "" } else { "s" })
}

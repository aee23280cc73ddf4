//! Bodies of the fuzz targets; the tests run them on the corpus. For any input nothing panics, and accepted input has the
//! contents that an obvious reference computes.

pub mod optimizers;

use crate::Memory;
use meshstep_checkpoint::{
    CheckpointError, Manifest, Piece, Region, Saved, SavedVectors, SlotEntry, Store, WINDOW,
};
use std::path::Path;
use std::sync::Arc;

const LATEST: &str = "/run/LATEST";
const STEP: &str = "/run/step-000000000001";

/// Maximum number of elements for a slow reference.
const FEW: u64 = 1 << 12;

/// Parses bytes of a manifest, with and without a corrected hash.
pub fn manifest(input: &[u8]) {
    let path = Path::new("manifest.json");
    drop(Manifest::from_text(path, input));
    let Ok(manifest) = Manifest::from_text(path, &sealed(input)) else { return };
    // It parses to the same manifest when it is written again.
    let text = manifest.to_text();
    assert_eq!(Manifest::from_text(path, text.as_bytes()).as_ref(), Ok(&manifest));
    for tensor in manifest.tensors.values() {
        let Some(len) = Region::whole(&tensor.shape).elements().filter(|&len| len <= FEW) else { continue };
        for slot in tensor.slots.values() {
            let mut seen = vec![0; len as usize];
            places(&tensor.shape, slot).for_each(|(place, _)| seen[place as usize] += 1);
            assert!(seen.iter().all(|&times| times == 1), "{tensor:?}");
        }
    }
}

/// Reads bytes of LATEST beside a complete step.
pub fn latest(input: &[u8]) {
    let text = sealed(EMPTY.as_bytes());
    let hash = blake3::hash(&text).to_hex().to_string();
    let mut disk = Memory::default();
    disk.0.insert(Path::new(STEP).join("manifest.json"), text.into());
    disk.0.insert(LATEST.into(), input.into());
    let latest = Store::on(Arc::new(disk), "/run").latest();
    if latest.is_ok() {
        let mut said: serde_json::Value = serde_json::from_slice(input).unwrap();
        // The run is the only member that may be missing, and null is as good as missing.
        let run = said.as_object_mut().unwrap().remove("run");
        let digits = |run: &str| run.len() == 16 && run.bytes().all(|c| b"0123456789abcdef".contains(&c));
        assert!(run.is_none_or(|run| run.is_null() || run.as_str().is_some_and(digits)));
        assert_eq!(said, serde_json::json!({ "step": 1, "manifest": hash }));
    }
}

/// A step without contents.
pub const EMPTY: &str = r#"{"format":1,"step":1,"mesh":"","files":[],"tensors":{},"settings":{},"blobs":{}"#;

/// Reads a whole step: flags, a manifest without its hash, and the files' bytes one after the other.
pub fn shard(input: &[u8]) {
    let Some((&[flags, low, high], rest)) = input.split_first_chunk() else { return };
    let (body, bytes) = rest.split_at(usize::from(u16::from_le_bytes([low, high])).min(rest.len()));
    let Ok(mut manifest) = Manifest::from_text(Path::new("manifest.json"), &sealed(body)) else { return };
    let repaired = flags & 1 != 0;
    let total = manifest.files.iter().try_fold(0u64, |sum, file| sum.checked_add(file.bytes));
    if total.is_none_or(|total| total > 3 * WINDOW) {
        return absurd(&saved(&manifest, &files(&manifest, bytes, false)));
    }
    let files = files(&manifest, bytes, repaired);
    if repaired {
        repair(&mut manifest, &files);
    }
    let saved = saved(&manifest, &files);
    let verified = saved.verify();
    // With correct hashes everything can be read, for any headers; and so can a verified step.
    let readable = repaired || verified.is_ok();
    assert!(!repaired || matches!(verified, Ok(_) | Err(CheckpointError::Header { .. })), "{verified:?}");
    for (name, tensor) in &manifest.tensors {
        for (slot, entry) in &tensor.slots {
            let read = |wanted: &Piece| read(&mut saved.vectors(), (name, slot), wanted, entry.dtype.size());
            let whole = Piece::whole(&tensor.shape);
            let all = read(&whole);
            assert!(all.is_ok() || !readable, "{:?}", all.unwrap_err());
            let Ok(all) = all else { continue };
            assert_eq!(all, expected(&tensor.shape, entry, &files));
            // Reading a part returns that part of the whole.
            let cut = u64::from(flags >> 1) * whole.len() / 128;
            let size = entry.dtype.size() as usize;
            let part = read(&Piece { range: cut..whole.len(), ..whole.clone() });
            assert_eq!(part.as_deref(), Ok(&all[cut as usize * size..]));
        }
    }
}

/// Reads a step that claims an impossible size.
fn absurd(saved: &Saved) {
    assert!(saved.verify().is_err());
    for (name, tensor) in &saved.manifest().tensors {
        for slot in tensor.slots.keys() {
            let whole = Piece::whole(&tensor.shape);
            let read = saved.vectors().read(name, slot, &whole, |_, _| Ok::<_, CheckpointError>(()));
            drop(read);
        }
    }
}

/// Returns the files' bytes as far as they go; if hashes are corrected, zeros correct the lengths too.
fn files(manifest: &Manifest, mut bytes: &[u8], repaired: bool) -> Vec<Vec<u8>> {
    let file = |len: u64| {
        let (here, rest) = bytes.split_at(bytes.len().min(usize::try_from(len).unwrap_or(usize::MAX)));
        bytes = rest;
        let mut here = here.to_vec();
        if repaired {
            here.resize(len as usize, 0);
        }
        here
    };
    manifest.files.iter().map(|file| file.bytes).map(file).collect()
}

/// Sets all hashes to those of the files.
pub fn repair(manifest: &mut Manifest, files: &[Vec<u8>]) {
    for (entry, bytes) in manifest.files.iter_mut().zip(files) {
        entry.blake3 = blake3::hash(bytes).to_hex().to_string();
    }
    let slots = manifest.tensors.values_mut().flat_map(|tensor| tensor.slots.values_mut());
    let pieces = slots.flat_map(|slot| slot.pieces.iter_mut().map(|piece| &mut piece.stored));
    for stored in pieces.chain(manifest.blobs.values_mut()) {
        let bytes = &files[stored.file][stored.at as usize..][..stored.bytes as usize];
        stored.xxh3 = bytes.chunks(WINDOW as usize).map(twox_hash::XxHash3_64::oneshot).collect();
    }
}

/// Opens the step of these files.
fn saved(manifest: &Manifest, files: &[Vec<u8>]) -> Saved {
    let mut disk = Memory::default();
    for (entry, bytes) in manifest.files.iter().zip(files) {
        disk.0.insert(Path::new(STEP).join(&entry.name), bytes.as_slice().into());
    }
    // The step that the folder is named after.
    let manifest = Manifest { step: 1, ..manifest.clone() };
    disk.0.insert(Path::new(STEP).join("manifest.json"), manifest.to_text().into_bytes().into());
    Store::on(Arc::new(disk), "/run").open(1).unwrap()
}

/// Reads `wanted` of a slot, every byte once.
pub fn read(
    vectors: &mut SavedVectors<'_>,
    (tensor, slot): (&str, &str),
    wanted: &Piece,
    size: u64,
) -> Result<Vec<u8>, CheckpointError> {
    let mut all = vec![None; (wanted.len() * size) as usize];
    vectors.read(tensor, slot, wanted, |place, bytes| {
        assert!(!bytes.is_empty());
        for (to, byte) in all[(place * size) as usize..].iter_mut().zip(bytes) {
            assert!(to.replace(*byte).is_none(), "{place} is read twice");
        }
        Ok::<_, CheckpointError>(())
    })?;
    Ok(all.into_iter().map(Option::unwrap).collect())
}

/// Computes the same by every element's index.
pub fn expected(shape: &[u64], slot: &SlotEntry, files: &[Vec<u8>]) -> Vec<u8> {
    let size = slot.dtype.size() as usize;
    let mut all = vec![0; places(shape, slot).count() * size];
    for (place, (file, at)) in places(shape, slot) {
        all[place as usize * size..][..size].copy_from_slice(&files[file][at as usize..][..size]);
    }
    all
}

/// Returns the place of each element in the tensor, and its file and place there.
fn places(shape: &[u64], slot: &SlotEntry) -> impl Iterator<Item = (u64, (usize, u64))> {
    let size = slot.dtype.size();
    slot.pieces.iter().flat_map(move |entry| {
        let ats = (entry.stored.at..).step_by(size as usize).map(|at| (entry.stored.file, at));
        indices(shape, &entry.piece()).into_iter().zip(ats)
    })
}

/// Returns the row-major indices of a piece's elements in the whole tensor, in order.
pub fn indices(shape: &[u64], piece: &Piece) -> Vec<u64> {
    let Region { offsets, extents } = &piece.region;
    piece
        .range
        .clone()
        .map(|within| {
            let (mut index, mut rest, mut stride) = (0, within, 1);
            for dim in (0..shape.len()).rev() {
                index += (offsets[dim] + rest % extents[dim]) * stride;
                rest /= extents[dim];
                stride *= shape[dim];
            }
            index
        })
        .collect()
}

/// Returns the text of a manifest with these members, including its hash.
pub fn sealed(body: &[u8]) -> Vec<u8> {
    let hash = blake3::hash(body).to_hex();
    [body, b",\n\"blake3\": \"", hash.as_bytes(), b"\"}\n"].concat()
}

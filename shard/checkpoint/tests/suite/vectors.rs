//! Reads of vectors from their pieces, compared with every element by its index.

use crate::allocator;
use crate::common::{cases, long};
use crate::pieces::{any_cover, any_piece};
use meshstep_checkpoint::{
    CheckpointError, FORMAT, FileEntry, Manifest, Piece, PieceEntry, SlotEntry, Store, Stored, TensorEntry,
    Type, WINDOW,
};
use meshstep_checkpoint_cases::Memory;
use meshstep_checkpoint_cases::fuzzed::{expected, indices, read, repair};
use rand::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Returns a step with one slot of a tensor of this shape; its pieces are spread over some files with gaps between them.
fn step(random: &mut StdRng, shape: &[u64], pieces: Vec<Piece>, dtype: Type) -> (Manifest, Vec<Vec<u8>>) {
    let mut files = vec![Vec::new(); random.random_range(1..4)];
    let mut entries = Vec::new();
    for Piece { region, range } in pieces {
        let file = random.random_range(0..files.len());
        let bytes = (range.end - range.start) * dtype.size();
        let gap = random.random_range(0..20);
        let at = files[file].len() + gap;
        let more = (0..gap as u64 + bytes).map(|_| random.random::<u8>());
        files[file].extend(more);
        let stored = Stored { file, at: at as u64, bytes, xxh3: Vec::new() };
        let range = [range.start, range.end];
        let (offsets, extents) = (region.offsets, region.extents);
        entries.push(PieceEntry { offsets, extents, range, key: "w".to_owned(), stored });
    }
    let entry = |(rank, bytes): (usize, &Vec<u8>)| FileEntry {
        name: format!("rank-{rank}.safetensors"),
        bytes: bytes.len() as u64,
        blake3: String::new(),
    };
    let slots = [("m".to_owned(), SlotEntry { dtype, pieces: entries })].into();
    let tensors = [("w".to_owned(), TensorEntry { shape: shape.to_vec(), t: 1, slots })].into();
    let (settings, blobs) = (BTreeMap::new(), BTreeMap::new());
    let listed = files.iter().enumerate().map(entry).collect();
    let (run, mesh) = (None, String::new());
    let mut manifest =
        Manifest { format: FORMAT, step: 1, run, mesh, files: listed, tensors, settings, blobs };
    repair(&mut manifest, &files);
    manifest.check().unwrap();
    (manifest, files)
}

fn store(manifest: &Manifest, files: &[Vec<u8>]) -> Store {
    let dir = Path::new("/run/step-000000000001");
    let mut disk = Memory::default();
    for (entry, bytes) in manifest.files.iter().zip(files) {
        disk.0.insert(dir.join(&entry.name), bytes.as_slice().into());
    }
    disk.0.insert(dir.join("manifest.json"), manifest.to_text().into_bytes().into());
    Store::on(Arc::new(disk), "/run")
}

#[test]
fn what_is_read_is_what_is_there() {
    let types = [Type::F64, Type::F32, Type::BF16];
    for seed in 0..u64::from(cases(500, 1500)) {
        let random = &mut StdRng::seed_from_u64(seed);
        let shape: Vec<u64> = (0..random.random_range(0..4)).map(|_| random.random_range(1..6)).collect();
        let pieces = any_cover(random, &shape);
        let dtype = *types.choose(random).unwrap();
        let (manifest, files) = step(random, &shape, pieces, dtype);
        let saved = store(&manifest, &files).open(1).unwrap();
        let all = expected(&shape, &manifest.tensors["w"].slots["m"], &files);
        let vectors = &mut saved.vectors();
        assert!(
            read(vectors, ("w", "m"), &Piece::whole(&shape), dtype.size()).unwrap() == all,
            "seed {seed}"
        );
        for _ in 0..4 {
            let wanted = any_piece(random, &shape);
            let size = dtype.size() as usize;
            let part = indices(&shape, &wanted).into_iter().flat_map(|i| &all[i as usize * size..][..size]);
            let part: Vec<u8> = part.copied().collect();
            assert!(
                read(vectors, ("w", "m"), &wanted, dtype.size()).unwrap() == part,
                "seed {seed}: {wanted:?}"
            );
        }
    }
}

/// Columns of a matrix in two files, each of several windows, the last one not full.
fn columns() -> (Manifest, Vec<Vec<u8>>) {
    let shape = [if long() { 300 } else { 140 }, 2 * WINDOW / 256 + 6];
    let half = shape[1] / 2;
    let piece = |at| {
        let mut piece = Piece::whole(&[shape[0], half]);
        piece.region.offsets[1] = at;
        piece
    };
    step(&mut StdRng::seed_from_u64(1), &shape, vec![piece(0), piece(half)], Type::F32)
}

#[test]
fn windows_are_read_that_have_something() {
    let (manifest, mut files) = columns();
    let entry = manifest.tensors["w"].slots["m"].clone();
    let shape = manifest.tensors["w"].shape.clone();
    let all = expected(&shape, &entry, &files);
    assert!(entry.pieces[0].stored.bytes > 2 * WINDOW);
    // The last byte of the second piece's last window is damaged.
    let Stored { file, at, bytes, .. } = entry.pieces[1].stored;
    *files[file].last_mut().unwrap() ^= 1;
    let end = files[file].len() as u64;
    assert!(at + bytes == end || entry.pieces[0].stored.file == file);
    let saved = store(&manifest, &files).open(1).unwrap();
    let rows = |from: u64, to: u64| Piece { range: from * shape[1]..to * shape[1], ..Piece::whole(&shape) };
    let first = read(&mut saved.vectors(), ("w", "m"), &rows(0, 100), 4).unwrap();
    assert!(first == all[..first.len()]);
    let error = read(&mut saved.vectors(), ("w", "m"), &Piece::whole(&shape), 4).unwrap_err();
    let CheckpointError::Hash { path, what, .. } = &error else { panic!("{error}") };
    let name = &manifest.files[file].name;
    assert!(path.ends_with(name) && what.contains("slot \"m\" of tensor \"w\""), "{error}");
    assert!(error.to_string().contains(name.as_str()), "{error}");
}

#[test]
fn reading_takes_a_window_of_memory() {
    let (manifest, files) = columns();
    let saved = store(&manifest, &files).open(1).unwrap();
    let whole = Piece::whole(&manifest.tensors["w"].shape);
    let mut bytes = 0;
    let take = |_, part: &[u8]| {
        bytes += part.len() as u64;
        Ok::<_, CheckpointError>(())
    };
    let (read, most) = allocator::most(|| saved.vectors().read("w", "m", &whole, take));
    read.unwrap();
    assert_eq!(bytes, whole.len() * 4);
    assert!(most < WINDOW as usize + (64 << 10), "{most}");
    let (checked, most) = allocator::most(|| saved.damage(|_| ()));
    assert!(checked.windows > 4 && most < WINDOW as usize + (64 << 10), "{most}");
}

#[test]
fn what_is_not_there_is_named() {
    let (manifest, files) = columns();
    let saved = store(&manifest, &files).open(1).unwrap();
    let whole = Piece::whole(&manifest.tensors["w"].shape);
    for (tensor, slot) in [("w", "v"), ("v", "m"), ("", "")] {
        let error = read(&mut saved.vectors(), (tensor, slot), &whole, 4).unwrap_err();
        assert_eq!(error, CheckpointError::Unknown { tensor: tensor.into(), slot: slot.into() });
    }
}

#[test]
fn all_damage_is_listed_where_it_is() {
    let (manifest, files) = columns();
    let whole = store(&manifest, &files).open(1).unwrap();
    let stored = &manifest.tensors["w"].slots["m"].pieces;
    let windows: usize = stored.iter().map(|piece| piece.stored.xxh3.len()).sum();
    let all: usize = files.iter().map(Vec::len).sum();
    let mut errors = Vec::new();
    let checked = whole.damage(|error| errors.push(error));
    assert_eq!((checked.files, checked.bytes), (files.len(), all as u64));
    assert_eq!((checked.tensors, checked.slots, checked.windows), (1, 1, windows as u64));
    // These files are no safetensors, and nothing else is wrong.
    assert!(errors.iter().all(|error| matches!(error, CheckpointError::Header { .. })), "{errors:?}");
    let mut damaged = files.clone();
    for PieceEntry { stored, .. } in stored {
        for at in [stored.at, stored.at + WINDOW, stored.at + stored.bytes - 1] {
            damaged[stored.file][at as usize] ^= 0x80;
        }
    }
    let mut found = Vec::new();
    store(&manifest, &damaged).open(1).unwrap().damage(|error| {
        if let CheckpointError::Hash { what, .. } = error {
            found.push(what);
        }
    });
    assert_eq!(found.len(), 6, "{found:?}");
    assert!(found.iter().all(|what| what.ends_with("of slot \"m\" of tensor \"w\"")), "{found:?}");
}

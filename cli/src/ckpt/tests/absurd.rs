//! Manifests with numbers that overflow 64 bits.

use super::{ckpt, saved, text};
use meshstep_checkpoint::{FileEntry, Manifest, SlotEntry, TensorEntry, Type};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Saves a checkpoint and edits the manifest of a step; removes LATEST, which has the old hash.
fn edited(edit: impl FnOnce(&mut Manifest)) -> (TempDir, PathBuf) {
    let (dir, step) = saved();
    let path = step.join("manifest.json");
    let mut manifest = Manifest::from_text(Path::new("m"), &fs::read(&path).unwrap()).unwrap();
    edit(&mut manifest);
    fs::write(&path, manifest.to_text()).unwrap();
    fs::remove_file(dir.path().join("LATEST")).unwrap();
    (dir, step)
}

#[test]
fn lengths_are_added_up_whatever_they_are() {
    let mut all = 0;
    let (_dir, step) = edited(|manifest| {
        for name in ["huge-0", "huge-1"] {
            let blake3 = String::new();
            manifest.files.push(FileEntry { name: name.to_owned(), bytes: u64::MAX, blake3 });
        }
        all = manifest.files.iter().map(|file| u128::from(file.bytes)).sum();
    });
    let (shown, _) = ckpt(&["inspect", text(&step)]).unwrap();
    let line = shown.lines().find(|line| line.starts_with("4 files, ")).unwrap();
    assert_eq!(line.replace(',', ""), format!("4 files {all} bytes"));
}

#[test]
fn a_shape_that_is_none_is_not_exported() {
    let (dir, step) = edited(|manifest| {
        let slots = [("param".to_owned(), SlotEntry { dtype: Type::F32, pieces: Vec::new() })].into();
        let shape = vec![1 << 40, 1 << 40, 0];
        manifest.tensors.insert("none".to_owned(), TensorEntry { shape, t: 0, slots });
    });
    let to = dir.path().join("all.safetensors");
    // Writing a header sums the lengths in order, so the product overflows before the zero.
    let error = ckpt(&["export", text(&step), "--to", text(&to)]).unwrap_err();
    assert!(error.to_string().contains("overflow"), "{error}");
    assert!(!to.exists());
}

#[test]
fn a_step_that_is_not_there_is_no_damage_unless_latest_names_it() {
    let (dir, step) = saved();
    let error = ckpt(&["verify", text(dir.path()), "--step", "9"]).unwrap_err().to_string();
    assert!(error.contains("step-000000000009") && error.contains("is gone"), "{error}");
    fs::remove_dir_all(&step).unwrap();
    let (said, verdict) = ckpt(&["verify", text(dir.path())]).unwrap();
    assert!(verdict == super::Verdict::Damaged && said.contains("is gone"), "{said}");
}

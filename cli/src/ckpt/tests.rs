//! The `ckpt` subcommands on a checkpoint of two tensors on two ranks, intact and damaged.

mod absurd;
mod evaluated;

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser as _;
use meshstep_checkpoint::{
    FORMAT, Manifest, PieceEntry, Region, SlotEntry, Store, TensorEntry, Type, Vector,
};
use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

use super::{Verdict, run};
use crate::cli::{Cli, Command};

/// Saves `w`, a 4 x 6 matrix split by columns, and `b`, 5 numbers split into 3 and 2. Both have a slot `m`, and there is a
/// blob.
fn save(store: &Store, step: u64) {
    let draft = store.begin(step).unwrap();
    let mut manifest = Manifest {
        format: FORMAT,
        step,
        run: Some(draft.run()),
        mesh: "tp=2".to_owned(),
        files: Vec::new(),
        tensors: [("w", [4, 6].to_vec()), ("b", vec![5])]
            .map(|(name, shape)| (name.to_owned(), TensorEntry { shape, t: step, slots: [].into() }))
            .into(),
        settings: [("rule".to_owned(), serde_json::json!({ "lr": 0.001 }))].into(),
        blobs: [].into(),
    };
    for rank in 0..2 {
        let parts = [
            ("w", "param", Type::F32, Region { offsets: vec![0, 3 * rank], extents: vec![4, 3] }, 0..12),
            ("w", "m", Type::F32, Region { offsets: vec![0, 3 * rank], extents: vec![4, 3] }, 0..12),
            ("b", "param", Type::BF16, Region::whole(&[5]), [0..3, 3..5][rank as usize].clone()),
            ("b", "m", Type::F32, Region::whole(&[5]), [0..3, 3..5][rank as usize].clone()),
        ];
        let vector = |(tensor, slot, dtype, _, range): &(&str, &str, Type, Region, std::ops::Range<u64>)| {
            let (key, shape) = (format!("{tensor}.{slot}"), vec![range.end - range.start]);
            Vector { key, dtype: *dtype, shape }
        };
        let mut vectors: Vec<Vector> = parts.iter().map(vector).collect();
        vectors.push(Vector { key: "loader".to_owned(), dtype: Type::U16, shape: vec![4] });
        let name = format!("rank-{rank}.safetensors");
        let mut file = draft.file(rank as usize, &name, &vectors).unwrap();
        for (tensor, slot, _, region, range) in &parts {
            file.begin();
            file.write(&values((tensor, slot), region, range.clone())).unwrap();
        }
        file.begin();
        file.write(b"position").unwrap();
        let (entry, mut stored) = file.finish().unwrap();
        manifest.files.push(entry);
        manifest.blobs.insert(format!("loader@{rank}"), stored.pop().unwrap());
        for ((tensor, slot, dtype, region, range), stored) in parts.into_iter().zip(stored) {
            let (key, range) = (format!("{tensor}.{slot}"), [range.start, range.end]);
            let piece = PieceEntry { offsets: region.offsets, extents: region.extents, range, key, stored };
            let slots = &mut manifest.tensors.get_mut(tensor).unwrap().slots;
            let entry = SlotEntry { dtype, pieces: Vec::new() };
            slots.entry(slot.to_owned()).or_insert(entry).pieces.push(piece);
        }
    }
    draft.publish(&manifest).unwrap();
}

/// Each element encodes its identity: its index in the whole tensor, plus 100 in `w`'s state and 200 in `b`'s state.
fn values(which: (&str, &str), region: &Region, range: std::ops::Range<u64>) -> Vec<u8> {
    let value = |at: u64| {
        let index = match region.extents[..] {
            [_, columns] => at / columns * 6 + region.offsets[1] + at % columns,
            _ => at,
        };
        index as f32
            + match which {
                ("w", "m") => 100.0,
                ("b", "m") => 200.0,
                _ => 0.0,
            }
    };
    match which {
        // A small whole number has no bits in the lower half of its f32.
        ("b", "param") => range.flat_map(|at| value(at).to_le_bytes()[2..].to_vec()).collect(),
        _ => range.flat_map(|at| value(at).to_le_bytes()).collect(),
    }
}

fn saved() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    save(&store, 7);
    save(&store, 8);
    let step = dir.path().join("step-000000000008");
    (dir, step)
}

/// Runs `ckpt`. Returns its output and its verdict.
fn ckpt(words: &[&str]) -> anyhow::Result<(String, Verdict)> {
    let Command::Ckpt(asked) = Cli::try_parse_from([&["meshstep-bench", "ckpt"], words].concat())?.command
    else {
        panic!("not ckpt")
    };
    let mut out = Vec::new();
    let verdict = run(&asked, &mut out)?;
    Ok((String::from_utf8(out)?, verdict))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Tables of the tensors of [`saved`], after the first line of the report.
const TABLES: &str = "\
tensor  dtype  shape   t  pieces  files          bytes  slots
b       BF16   [5]     8       4  rank-0 rank-1     30  m F32, param BF16
w       F32    [4, 6]  8       4  rank-0 rank-1    192  m F32, param F32
2 tensors, 4 vectors, 8 pieces, 238 bytes

file                bytes
";

#[test]
fn a_checkpoint_is_shown_as_tables() {
    let (dir, step) = saved();
    let (shown, _) = ckpt(&["inspect", text(dir.path())]).unwrap();
    let run = Store::new(dir.path()).latest().unwrap().manifest().run.unwrap();
    let expected = format!("step 8, run {run}, saved on tp=2, format 1\n\n{TABLES}");
    assert!(shown.starts_with(&expected), "{shown}");
    for part in ["2 files, ", "loader@1      8  rank-1.safetensors", "rule     {\"lr\":0.001}"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert_eq!(ckpt(&["inspect", text(&step)]).unwrap().0, shown);
    let (other, _) = ckpt(&["inspect", text(dir.path()), "--step", "7"]).unwrap();
    assert!(other.starts_with("step 7"), "{other}");
    assert!(ckpt(&["inspect", text(dir.path()), "--step", "9"]).is_err());
}

#[test]
fn a_whole_checkpoint_is_verified_and_a_damaged_one_listed() {
    let (dir, step) = saved();
    let (said, verdict) = ckpt(&["verify", text(dir.path())]).unwrap();
    assert_eq!(verdict, Verdict::Whole, "{said}");
    assert!(said.contains("2 tensors in 4 vectors covered exactly, 10 windows"), "{said}");
    assert!(said.contains("the hash that LATEST has"), "{said}");
    assert!(ckpt(&["verify", text(&step)]).unwrap().0.contains("the hash that LATEST has"));
    let (other, _) = ckpt(&["verify", text(dir.path()), "--step", "7"]).unwrap();
    assert!(other.contains("LATEST names another step"), "{other}");
    // The last bytes of a file are the blob, preceded by the last vector; the missing file held all other pieces.
    let path = step.join("rank-0.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let len = bytes.len();
    bytes[len - 1] ^= 1;
    bytes[len - 9] ^= 1;
    fs::write(&path, bytes).unwrap();
    fs::remove_file(step.join("rank-1.safetensors")).unwrap();
    let (said, verdict) = ckpt(&["verify", text(dir.path())]).unwrap();
    assert_eq!(verdict, Verdict::Damaged);
    let damage: Vec<&str> = said.lines().filter(|line| line.starts_with("damaged: ")).collect();
    assert_eq!(damage.len(), 3, "{said}");
    for (line, parts) in damage.iter().zip([
        ["rank-0.safetensors", "slot \"m\" of tensor \"b\""],
        ["rank-0.safetensors", "blob \"loader@0\""],
        ["rank-1.safetensors", "with 4 more pieces"],
    ]) {
        assert!(parts.iter().all(|part| line.contains(part)), "{line}");
    }
    assert!(said.ends_with("3 damaged\n"), "{said}");
}

#[test]
fn a_manifest_that_is_not_latests_is_damage() {
    let (dir, step) = saved();
    let path = step.join("manifest.json");
    let text_of = fs::read_to_string(&path).unwrap();
    fs::write(&path, text_of.replacen("\"t\":8", "\"t\":9", 1)).unwrap();
    for (words, whole) in [(vec!["verify", text(dir.path())], false), (vec!["verify", text(&step)], false)] {
        let (said, verdict) = ckpt(&words).unwrap();
        assert_eq!(verdict == Verdict::Whole, whole, "{said}");
        assert!(said.contains("manifest.json") && said.contains("have hash"), "{said}");
    }
    // Also with a valid hash of its own.
    let mut other = Manifest::from_text(&path, text_of.as_bytes()).unwrap();
    other.mesh = "another".to_owned();
    fs::write(&path, other.to_text()).unwrap();
    for words in [
        &["verify", text(dir.path())][..],
        &["verify", text(&step)],
        &["verify", text(dir.path()), "--step", "8"],
    ] {
        let (said, verdict) = ckpt(words).unwrap();
        assert_eq!(verdict, Verdict::Damaged, "{words:?}: {said}");
    }
    fs::remove_file(&path).unwrap();
    assert_eq!(ckpt(&["verify", text(dir.path())]).unwrap().1, Verdict::Damaged);
    let empty = tempfile::tempdir().unwrap();
    assert!(ckpt(&["verify", text(empty.path())]).unwrap_err().to_string().contains("holds no checkpoint"));
}

#[test]
fn parameters_are_exported_whole() {
    let (dir, _) = saved();
    let to = dir.path().join("w.safetensors");
    let (said, _) = ckpt(&["export", text(dir.path()), "--to", text(&to)]).unwrap();
    assert!(said.starts_with("wrote 2 vectors"), "{said}");
    let bytes = fs::read(&to).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["step"], "8");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.len(), 2);
    let (w, b) = (file.tensor("w").unwrap(), file.tensor("b").unwrap());
    assert_eq!((w.dtype(), w.shape()), (Dtype::F32, &[4, 6][..]));
    assert_eq!((b.dtype(), b.shape()), (Dtype::BF16, &[5][..]));
    let floats = |data: &[u8]| -> Vec<f32> {
        data.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    let count = |from: usize, n: usize| (from..from + n).map(|i| i as f32).collect::<Vec<f32>>();
    assert_eq!(floats(w.data()), count(0, 24));
    let wide: Vec<u8> = b.data().chunks(2).flat_map(|half| [0, 0, half[0], half[1]]).collect();
    assert_eq!(floats(&wide), count(0, 5));

    let again = ckpt(&["export", text(dir.path()), "--to", text(&to)]).unwrap_err();
    assert!(again.to_string().contains("--force"), "{again}");
    assert_eq!(fs::read(&to).unwrap(), bytes);
    ckpt(&["export", text(dir.path()), "--to", text(&to), "--state", "--force"]).unwrap();
    let bytes = fs::read(&to).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = file.names();
    names.sort_unstable();
    assert_eq!(names, ["b", "b.m", "w", "w.m"]);
    assert_eq!(floats(file.tensor("w.m").unwrap().data()), count(100, 24));
    assert_eq!(floats(file.tensor("b.m").unwrap().data()), count(200, 5));
}

#[test]
fn an_export_of_damage_leaves_what_was_there() {
    let (dir, step) = saved();
    let to = dir.path().join("w.safetensors");
    fs::write(&to, b"precious").unwrap();
    let path = step.join("rank-1.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    // Damage the first vector's data, which begins at a multiple of 64.
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[header] ^= 1;
    fs::write(&path, bytes).unwrap();
    let error = ckpt(&["export", text(dir.path()), "--to", text(&to), "--force"]).unwrap_err().to_string();
    assert!(
        error.contains("rank-1.safetensors") && error.contains("slot \"param\" of tensor \"w\""),
        "{error}"
    );
    assert_eq!(fs::read(&to).unwrap(), b"precious");
    let left = dir.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(left.into_iter().all(|name| !name.contains("tmp")));
}

//! Writes first inputs into the corpus, from which the targets go on: a valid one of each kind, and what begins to be wrong.

#[allow(dead_code, reason = "seeds are only written here")]
#[path = "../../tests/checkpoint/fuzzed/mod.rs"]
mod fuzzed;

use meshstep_shard::checkpoint::{
    FORMAT, FileEntry, Manifest, PieceEntry, ShardWriter, SlotEntry, Stored, TensorEntry, Type, Vector,
    Writer,
};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

fn main() -> io::Result<()> {
    let (manifest, files) = step();
    let text = manifest.to_text();
    let body = &text[..text.rfind(",\n\"blake3\"").unwrap_or_default()];
    for (name, from, to) in [
        ("whole", "", ""),
        ("shape", "[2,3]", "[2,4]"),
        ("large", "[2,3]", "[4294967296,4294967296,2]"),
        ("dtype", "F32", "F16"),
        ("overlap", "\"range\":[3,6]", "\"range\":[2,5]"),
        ("hole", "\"range\":[0,3]", "\"range\":[0,2]"),
        ("bytes", "\"bytes\":12", "\"bytes\":18446744073709551604"),
        ("parent", "rank-1", "../rank-1"),
        ("twice", "\"step\":1", "\"step\":1,\"step\":2"),
        ("unknown", "\"step\":1", "\"step\":1,\"more\":[[[[[[]]]]]]"),
        ("float", "\"lr\":0.0001", "\"lr\":3.14159265358979312e-7"),
    ] {
        let body = body.replacen(from, to, 1);
        seed("manifest", name, body.as_bytes())?;
        for (name, flags) in [(name.to_owned(), 0), (format!("{name}-repaired"), 1 | 80)] {
            let len = (body.len() as u16).to_le_bytes();
            seed("shard", &name, &[&[flags, len[0], len[1]], body.as_bytes(), &files.concat()].concat())?;
        }
    }
    seed("manifest", "empty", fuzzed::EMPTY.as_bytes())?;
    let hash = blake3::hash(&fuzzed::sealed(fuzzed::EMPTY.as_bytes())).to_hex().to_string();
    for (name, step, hash) in [("whole", "1", &*hash), ("other", "2", &*hash), ("hash", "1", "00")] {
        seed("latest", name, format!("{{\"step\":{step},\"manifest\":\"{hash}\"}}").as_bytes())?;
    }
    Ok(())
}

fn seed(target: &str, name: &str, bytes: &[u8]) -> io::Result<()> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    fs::create_dir_all(&dir)?;
    fs::write(dir.join(name), bytes)
}

/// A matrix in ranges, and one in boxes, in two files.
fn step() -> (Manifest, Vec<Vec<u8>>) {
    let (mut files, mut entries, mut w, mut u) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for rank in 0..2u64 {
        let file = File::default();
        let name = format!("rank-{rank}.safetensors");
        let vector = |key: &str, dtype, shape| Vector { key: key.to_owned(), dtype, shape };
        let vectors = [vector("w", Type::F32, vec![3]), vector("u", Type::BF16, vec![2, 1])];
        let written = (|| {
            let mut writer =
                ShardWriter::new(Box::new(file.clone()), Path::new(&name), rank as usize, &vectors)?;
            for bytes in [&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11][..], &[12, 13, 14, 15]] {
                writer.begin();
                writer.write(bytes)?;
            }
            writer.finish()
        })();
        let Ok((entry, stored)) = written else { continue };
        let [first, second]: [Stored; 2] = stored.try_into().unwrap_or_else(|_| unreachable!("two vectors"));
        let piece = |offsets, extents, range, key: &str, stored| PieceEntry {
            offsets,
            extents,
            range,
            key: key.to_owned(),
            stored,
        };
        w.push(piece(vec![0, 0], vec![2, 3], [rank * 3, rank * 3 + 3], "w", first));
        u.push(piece(vec![0, rank], vec![2, 1], [0, 2], "u", second));
        entries.push(FileEntry { name, ..entry });
        files.push(file.bytes());
    }
    let tensor = |shape: &[u64], dtype, pieces| {
        let slots = [("param".to_owned(), SlotEntry { dtype, pieces })].into();
        TensorEntry { shape: shape.to_vec(), t: 1, slots }
    };
    let tensors = [("w", tensor(&[2, 3], Type::F32, w)), ("u", tensor(&[2, 2], Type::BF16, u))];
    let tensors = tensors.map(|(name, tensor)| (name.to_owned(), tensor)).into();
    let settings = [("rule".to_owned(), serde_json::json!({ "lr": 1e-4, "betas": [0.9, 0.95] }))].into();
    let mesh = "dp=2".to_owned();
    let blobs = Default::default();
    (Manifest { format: FORMAT, step: 1, mesh, files: entries, tensors, settings, blobs }, files)
}

/// A file in memory.
#[derive(Clone, Debug, Default)]
struct File(Arc<Mutex<Vec<u8>>>);

impl File {
    fn bytes(&self) -> Vec<u8> {
        self.0.lock().map(|bytes| bytes.clone()).unwrap_or_default()
    }
}

impl Writer for File {
    fn write_at(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let Ok(mut all) = self.0.lock() else { return Err(io::ErrorKind::Other.into()) };
        let end = at as usize + bytes.len();
        let len = all.len().max(end);
        all.resize(len, 0);
        all[at as usize..end].copy_from_slice(bytes);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

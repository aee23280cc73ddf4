//! Writes the initial inputs into the corpus, from which the targets start: a valid one of each kind, and slightly damaged ones.

use meshstep_checkpoint::{
    FORMAT, FileEntry, Manifest, PieceEntry, ShardWriter, SlotEntry, Stored, TensorEntry, Type, Vector,
    Writer,
};
use meshstep_checkpoint_cases::fuzzed;
use serde_json::{Value, json};
use std::collections::BTreeMap;
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
        ("run", r#""step":1"#, r#""step":1,"run":"00000000000000ff""#),
        ("run-zero", r#""step":1"#, r#""step":1,"run":"0000000000000000""#),
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
    for (name, run) in [("run", "00000000000000ff"), ("run-short", "ff")] {
        let text = format!(r#"{{"step":1,"run":"{run}","manifest":"{hash}"}}"#);
        seed("latest", name, text.as_bytes())?;
    }
    pytorch()?;
    bytes()
}

/// A file of all vectors, one of parameters only, and slightly damaged ones.
fn pytorch() -> io::Result<()> {
    let vector = |dtype: &str, shape: &[u64], from: u64, to: u64| {
        let offsets = [from, to];
        json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets })
    };
    let params = [("w", vector("F32", &[2, 3], 0, 24)), ("none", vector("F32", &[0], 24, 24))];
    let params = params.into_iter().chain([("still", vector("BF16", &[2], 24, 28))]);
    let state = [
        ("state.w.step", vector("F32", &[], 28, 32)),
        ("state.w.exp_avg", vector("F32", &[2, 3], 32, 56)),
        ("state.w.exp_avg_sq", vector("BF16", &[2, 3], 56, 68)),
        ("state.none.step", vector("F32", &[], 68, 72)),
        ("state.none.exp_avg", vector("F32", &[0], 72, 72)),
        ("state.none.exp_avg_sq", vector("F32", &[0], 72, 72)),
    ];
    let text = |vectors: &mut dyn Iterator<Item = (&str, Value)>| {
        json!(vectors.collect::<BTreeMap<_, _>>()).to_string()
    };
    let (bare, whole) = (text(&mut params.clone()), text(&mut params.chain(state)));
    let numbers: Vec<u8> = (1..18).flat_map(|x| (x as f32).to_le_bytes()).collect();
    let mut data = numbers[..28].to_vec();
    data.extend(3f32.to_le_bytes());
    data.extend(&numbers[32..68]);
    data.extend(3f32.to_le_bytes());
    let write = |name: &str, flags: u8, header: &str, data: &[u8]| {
        let len = header.len() as u16;
        let input = [&[flags | 1][..], &len.to_le_bytes(), header.as_bytes(), data].concat();
        seed("pytorch", name, &input)
    };
    write("bare", 2, &bare, &data[..28])?;
    write("bare-refused", 0, &bare, &data[..28])?;
    for (name, from, to) in [
        ("whole", "", ""),
        ("shape", "[2,3]", "[3,2]"),
        ("large", "[2,3]", "[4294967296,4294967296,2]"),
        ("wider", "\"F32\"", "\"F64\""),
        ("dtype", "\"F32\"", "\"F8_E5M2\""),
        ("overlap", "[32,56]", "[24,48]"),
        ("hole", "[32,56]", "[36,56]"),
        ("bytes", "[32,56]", "[32,18446744073709551615]"),
        ("backwards", "[32,56]", "[56,32]"),
        ("key", "state.w.exp_avg_sq", "state.w.momentum_buffer"),
        ("twice", "\"still\"", "\"w\""),
        ("metadata", "{\"none\"", "{\"__metadata__\":{\"format\":\"pt\"},\"none\""),
        ("nested", "{\"none\"", "{\"__metadata__\":[[[[[[]]]]]],\"none\""),
    ] {
        write(name, 0, &whole.replacen(from, to, 1), &data)?;
    }
    for (name, step) in
        [("half", 2.5f32), ("minus", -1.0), ("nan", f32::NAN), ("often", 1e30), ("never", 0.0)]
    {
        let data = [&data[..28], &step.to_le_bytes(), &data[32..]].concat();
        write(name, 0, &whole, &data)?;
    }
    let len = (whole.len() as u64).to_le_bytes();
    seed("pytorch", "raw", &[&[0][..], &len, whole.as_bytes(), &data].concat())
}

/// The output of an optimizer, and slightly damaged ones.
fn bytes() -> io::Result<()> {
    let mut opt = fuzzed::optimizers::optimizer();
    let stepped = (0..2).try_for_each(|_| fuzzed::optimizers::step(&mut opt));
    stepped.map_err(io::Error::other)?;
    let (header, data) = fuzzed::optimizers::parts(&mut opt);
    let whole = header.to_string();
    for (name, from, to) in [
        ("whole", "", ""),
        ("format", "\"format\":1", "\"format\":2"),
        ("rank", "\"rank\":0", "\"rank\":1"),
        ("ranks", "\"ranks\":1", "\"ranks\":18446744073709551615"),
        ("mesh", "\"ranks=1\"", "\"\""),
        ("range", "\"range\":[0,6]", "\"range\":[6,0]"),
        ("large", "\"range\":[0,6]", "\"range\":[0,18446744073709551615]"),
        ("dtype", "\"F32\"", "\"F64\""),
        ("shape", "[2,3]", "[3,2]"),
        ("steps", "\"steps\":2", "\"steps\":9007199254740992"),
        ("no-steps", "\"steps\":2", "\"steps\":null"),
        ("skips", "\"skips\":0", "\"skips\":4294967295"),
        ("scale", "\"scale\":\"4\"", "\"scale\":\"NaN\""),
        ("tracker", "\"growth_tracker\":2", "\"growth_tracker\":18446744073709551615"),
        ("updates", "\"t\":[2,", "\"t\":[18446744073709551615,"),
        ("fewer", "\"t\":[2,", "\"t\":["),
        ("unknown", "\"moment\":0", "\"moment\":0,\"more\":[[[[[[]]]]]]"),
        ("twice", "\"moment\":0", "\"moment\":0,\"moment\":1"),
        ("rule", "beta1=0.9 ", "beta1=0.8 "),
    ] {
        let header = whole.replacen(from, to, 1);
        let len = (header.len() as u16).to_le_bytes();
        seed("bytes", name, &[&[1][..], &len, header.as_bytes(), &data].concat())?;
    }
    let body = [&(whole.len() as u64).to_le_bytes()[..], whole.as_bytes(), &data].concat();
    seed("bytes", "raw", &[&[0][..], &fuzzed::optimizers::framed(&body)].concat())
}

fn seed(target: &str, name: &str, bytes: &[u8]) -> io::Result<()> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    fs::create_dir_all(&dir)?;
    fs::write(dir.join(name), bytes)
}

/// One matrix in ranges, and one in boxes, in two files.
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
    let settings = [("rule".to_owned(), json!({ "lr": 1e-4, "betas": [0.9, 0.95] }))].into();
    let mesh = "dp=2".to_owned();
    let blobs = Default::default();
    (Manifest { format: FORMAT, step: 1, run: None, mesh, files: entries, tensors, settings, blobs }, files)
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

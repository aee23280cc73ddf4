//! Manifests that were edited and given a matching hash: each is refused with its fault, and takes no more memory than its text justifies.

use crate::allocator;
use crate::common::{cases, draws};
use crate::crash::{DIR, save};
use meshstep_checkpoint::{CheckpointError, Manifest, Piece, Saved, Store, WINDOW};
use meshstep_checkpoint_cases::Memory;
use meshstep_checkpoint_cases::Sim;
use meshstep_checkpoint_cases::fuzzed::sealed;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Returns the manifest, without its hash, of a step with two files, and the files.
fn step() -> (String, Memory) {
    let sim = Sim::new(DIR);
    let store = Store::on(Arc::new(sim.clone()), DIR);
    save(&store, 1, 40).unwrap();
    let mut memory = Memory::default();
    for path in sim.files() {
        sim.damage(&path, |bytes| drop(memory.0.insert(path.clone(), bytes.as_slice().into())));
    }
    let text = store.latest().unwrap().manifest().to_text();
    (text.rsplit_once(",\n\"blake3\"").unwrap().0.to_owned(), memory)
}

fn open(memory: &Memory, text: Vec<u8>) -> Result<Saved, CheckpointError> {
    let mut memory = memory.clone();
    memory.0.insert(Path::new(DIR).join("step-000000000001/manifest.json"), text.into());
    Store::on(Arc::new(memory), DIR).open(1)
}

/// Reads everything that can be read, and discards the bytes.
fn look(saved: &Saved) -> Result<(), CheckpointError> {
    let mut vectors = saved.vectors();
    for (name, tensor) in &saved.manifest().tensors {
        for slot in tensor.slots.keys() {
            let whole = Piece::whole(&tensor.shape);
            vectors.read(name, slot, &whole, |_, _| Ok::<_, CheckpointError>(()))?;
        }
    }
    saved.verify().map(drop)
}

#[test]
fn what_is_edited_with_a_right_hash_is_refused() {
    let (body, memory) = step();
    open(&memory, sealed(body.as_bytes())).map(|saved| look(&saved).unwrap()).unwrap();
    let deep = format!("\"settings\":{{\"x\":{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let dims = format!("\"shape\":[2,40{}]", ",1".repeat(70));
    let pieces = body.split_once("\"pieces\":[").unwrap().1.split_once("]}}}").unwrap().0;
    let edits = [
        // A member twice: of the manifest, a file, a tensor, a slot, a piece, and within settings.
        ("\"step\":1", "\"step\":1,\"step\":1", "the member \"step\" is there twice"),
        ("\"name\":", "\"name\":\"x\",\"name\":", "the member \"name\" is there twice"),
        ("\"tensors\":{", "\"tensors\":{\"w\":{\"shape\":[0],\"t\":1,\"slots\":{}},", "\"w\" is there twice"),
        (
            "\"slots\":{",
            &format!("\"slots\":{{\"param\":{{\"dtype\":\"F32\",\"pieces\":[{pieces}]}},"),
            "twice",
        ),
        ("\"range\":[0,40]", "\"range\":[0,40],\"range\":[0,40]", "the member \"range\" is there twice"),
        ("\"settings\":{", "\"settings\":{\"a\":[{\"lr\":1,\"lr\":2}]", "the member \"lr\" is there twice"),
        // Missing and unknown members.
        ("\"mesh\":\"dp=2\",", "", "missing field `mesh`"),
        ("\"key\":", "\"more\":[[]],\"key\":", "unknown field `more`"),
        ("\"blake3\":", "\"sha\":0,\"blake3\":", "unknown field `sha`"),
        ("\"t\":1", "\"t\":1,\"u\":{}", "unknown field `u`"),
        // Invalid numbers, and files outside of the folder.
        ("\"step\":1", "\"step\":-1", "invalid value"),
        ("\"step\":1", "\"step\":1.5", "invalid type"),
        ("\"step\":1", "\"step\":18446744073709551616", "invalid type"),
        ("\"bytes\":160", "\"bytes\":1e400", "number out of range"),
        ("\"range\":[0,40]", "\"range\":[0,40,80]", "trailing characters"),
        ("\"range\":[0,40]", "\"range\":[0]", "invalid length"),
        ("\"range\":[0,40]", "\"range\":null", "invalid type"),
        ("\"at\":128", "\"at\":18446744073709551615", "do not lie in \"rank-0.safetensors\""),
        ("\"at\":128", "\"at\":129", "do not lie in \"rank-0.safetensors\""),
        ("rank-1.safetensors", "..", "a file's name"),
        ("rank-1.safetensors", "", "a file's name"),
        ("rank-1.safetensors", ".", "a file's name"),
        ("rank-1.safetensors", "a/b", "a file's name"),
        ("rank-1.safetensors", "a\\\\b", "a file's name"),
        ("rank-1.safetensors", "a\\u0000", "a file's name"),
        ("rank-1.safetensors", "a\\u0301", "a file's name"),
        ("rank-1.safetensors", "c:a", "a file's name"),
        // Unlimited nesting, and unlimited dimensions.
        ("\"settings\":{", &deep, "recursion limit exceeded"),
        ("\"shape\":[2,40]", &dims, "it has 72 dimensions, 64 are the most"),
        // Consistent manifests that do not match the files.
        ("\"bytes\":288", "\"bytes\":289", "has 288 bytes, not 289"),
        ("rank-1.safetensors", "rank-2.safetensors", "opening"),
        ("\"at\":128", "\"at\":127", "have hash"),
        ("\"key\":\"w.0\"", "\"key\":\"w.1\"", "it has no vector called \"w.1\""),
        ("\"dtype\":\"F32\"", "\"dtype\":\"F64\"", "are not 160 bytes"),
    ];
    for (from, to, reason) in edits {
        assert!(body.contains(from), "{from} is in {body}");
        let edited = sealed(body.replacen(from, to, 1).as_bytes());
        let len = edited.len();
        let (result, most) = allocator::most(|| open(&memory, edited).and_then(|saved| look(&saved)));
        let error = result.unwrap_err().to_string();
        assert!(error.contains(reason), "{from} -> {to}: {error}");
        assert!(most < 40 * len + 3 * WINDOW as usize, "{from} -> {to}: {most} bytes for {len}");
    }
    // Another type of the same size is consistent, but the file's own header has the right type.
    let edited = body.replace("\"dtype\":\"F32\"", "\"dtype\":\"F16\"").replace("[2,40]", "[2,80]");
    let edited = edited.replace("[40,80]", "[80,160]").replace("[0,40]", "[0,80]");
    let saved = open(&memory, sealed(edited.as_bytes())).unwrap();
    let error = look(&saved).unwrap_err().to_string();
    for part in ["rank-0.safetensors", "slot \"param\" of tensor \"w\"", "\"F32\", not F16"] {
        assert!(error.contains(part), "{error}");
    }
}

/// Texts of a megabyte that ask for more memory, and their errors.
fn greedy() -> Vec<(&'static str, String)> {
    let (body, _) = step();
    let many = |text: &str| text.repeat((1 << 20) / text.len());
    let list = |text: &str| many(&format!("{text},")).trim_end_matches(',').to_owned();
    let settings = |value: String| body.replace("\"settings\":{", &format!("\"settings\":{{\"x\":{value}"));
    let keys = (0..70_000).map(|i| format!("\"{i:x}\":0")).collect::<Vec<_>>().join(",");
    let pieces = body.split_once("\"pieces\":[").unwrap().1.split_once("]}}}").unwrap().0;
    let piece = pieces.split_once("},{").unwrap().0.to_owned() + "}";
    let half = (1 << 19) / piece.len();
    let long = "n".repeat(1 << 19);
    vec![
        ("numbers", settings(format!("[{}]", list("0")))),
        ("lists", settings(format!("[{}]", list("[]")))),
        ("objects", settings(format!("[{}]", list("{}")))),
        ("words", settings(format!("[{}]", list("\"\"")))),
        ("members", settings(format!("{{{keys}}}"))),
        ("hashes", body.replacen("\"xxh3\":[", &format!("\"xxh3\":[{},", list("\"\"")), 1)),
        ("dims", body.replacen("[2,40]", &format!("[{}]", list("1")), 1)),
        ("extents", body.replacen("\"extents\":[2,40]", &format!("\"extents\":[{}]", list("1")), 1)),
        ("name and pieces", {
            let pieces = vec![piece.as_str(); half].join(",");
            let named = body.replace("\"w\":{", &format!("\"{long}\":{{"));
            named.replace(body.split_once("\"pieces\":[").unwrap().1.split_once("]}}}").unwrap().0, &pieces)
        }),
        ("a huge tensor", body.replace("[2,40]", "[1099511627776,8]")),
        ("a huge piece", body.replace("\"bytes\":160", "\"bytes\":1152921504606846976")),
        ("a huge file", body.replace("\"bytes\":288", "\"bytes\":1152921504606846976")),
        ("an unfinished list", settings("[".to_owned() + &many("0,"))),
    ]
}

#[test]
fn memory_follows_from_what_is_there() {
    let (_, memory) = step();
    let mut drawn = draws(1);
    for (what, body) in greedy().into_iter().filter(|_| drawn()) {
        let text = sealed(body.as_bytes());
        let len = text.len();
        let work = || open(&memory, text).and_then(|saved| look(&saved));
        let (result, most) = allocator::most(work);
        assert!(most < 64 * len + 3 * WINDOW as usize, "{what}: {most} bytes for {len}");
        eprintln!("{what}: {most} bytes for {len}: {}", result.is_ok());
    }
}

/// Lengths come from the file system, and need no bytes behind them.
#[test]
fn files_without_end_are_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    save(&store, 1, 40).unwrap();
    let folder = dir.path().join("step-000000000001");
    for (path, named) in [(dir.path().join("LATEST"), true), (folder.join("manifest.json"), false)] {
        let text = std::fs::read(&path).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(1 << 42).unwrap();
        let (result, most) = allocator::most(|| store.latest());
        let error = result.unwrap_err();
        assert!(matches!(error, CheckpointError::TooLarge { .. }), "{error}");
        assert!(error.to_string().contains(path.file_name().unwrap().to_str().unwrap()), "{error}");
        assert!(most < 1 << 16, "{most}");
        assert_eq!(store.open(1).is_ok(), named);
        std::fs::write(&path, text).unwrap();
    }
    let path = folder.join("rank-1.safetensors");
    File::options().write(true).open(&path).unwrap().set_len(1 << 42).unwrap();
    let (result, most) = allocator::most(|| store.latest().and_then(|saved| saved.verify()));
    let error = result.unwrap_err();
    let CheckpointError::Unreadable { what, source } = &error else { panic!("{error}") };
    assert!(matches!(**source, CheckpointError::Size { found, .. } if found == 1 << 42), "{error}");
    assert_eq!(what, "slot \"param\" of tensor \"w\"");
    assert!(most < 3 * WINDOW as usize, "{most}");
}

#[test]
fn numbers_come_back_to_the_last_bit() {
    let (body, _) = step();
    for bits in (0..u64::from(cases(1000, 2000))).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 2) {
        let number = f64::from_bits(bits);
        let edited = body.replace("\"settings\":{", &format!("\"settings\":{{\"lr\":{number:e}"));
        let manifest = Manifest::from_text(Path::new("m"), &sealed(edited.as_bytes())).unwrap();
        let again = Manifest::from_text(Path::new("m"), manifest.to_text().as_bytes()).unwrap();
        assert_eq!(again.settings["lr"].as_f64().map(f64::to_bits), Some(bits), "{number}");
    }
}

//! Any change of a checkpoint is reported, and nothing panics.

use crate::common::turns;
use crate::crash::{DIR, load, save};
use meshstep_cases::stride;
use meshstep_checkpoint::{CheckpointError, Manifest, Store};
use meshstep_checkpoint_cases::Sim;
use std::path::Path;
use std::sync::Arc;

fn saved() -> (Sim, Store) {
    let sim = Sim::new(DIR);
    let store = Store::on(Arc::new(sim.clone()), DIR);
    save(&store, 1, 40).unwrap();
    (sim, store)
}

/// Returns true if an error names the damaged file, and the tensor if the file has its bytes.
fn names(error: &CheckpointError, path: &Path) -> bool {
    let (text, name) = (error.to_string(), path.file_name().unwrap().to_str().unwrap());
    // The error may be about the step that LATEST names, or about the manifest's hash.
    let latest = name == "LATEST" && text.contains("manifest.json");
    let tensor = !name.ends_with("safetensors") || text.contains("slot \"param\" of tensor \"w\"");
    (text.contains(name) || latest) && tensor
}

#[test]
fn flipped_bits_are_noticed() {
    let (sim, store) = saved();
    for path in sim.files() {
        let bytes = sim.bytes(&path);
        assert!(!bytes.is_empty());
        // A normal run flips two bits of each byte, another pair than in the byte before.
        let bits = |at: usize| turns(&[0, 1, 2, 3, 4, 5, 6, 7], 3 * at, 2).map(move |bit| (at, bit));
        for (at, bit) in (0..bytes.len()).step_by(stride(1)).flat_map(bits) {
            sim.damage(&path, |bytes| bytes[at] ^= 1 << bit);
            let error = load(&store, 40).unwrap_err();
            let latest = store.latest().and_then(|saved| saved.verify()).unwrap_err();
            sim.damage(&path, |bytes| bytes[at] ^= 1 << bit);
            // A header belongs to no tensor.
            let header = at < 128 && path.to_str().unwrap().ends_with("safetensors");
            for error in [error, latest] {
                assert!(header || names(&error, &path), "{path:?}, bit {bit} of byte {at}: {error}");
            }
        }
        assert_eq!(sim.bytes(&path), bytes);
    }
    load(&store, 40).unwrap();
}

#[test]
fn every_truncation_and_missing_file_is_noticed() {
    let (sim, store) = saved();
    for path in sim.files() {
        let bytes = sim.bytes(&path);
        for at in 0..bytes.len() {
            sim.damage(&path, |bytes| bytes.truncate(at));
            load(&store, 40).unwrap_err();
            let error = store.latest().and_then(|saved| saved.verify()).unwrap_err();
            assert!(names(&error, &path), "{path:?}, {at} bytes: {error}");
            sim.damage(&path, |all| *all = bytes.clone());
        }
        sim.damage(&path, |bytes| bytes.push(b'\n'));
        // JSON may end in white space; LATEST has no other use for it.
        let harmless = path.ends_with("LATEST");
        assert_eq!(load(&store, 40).is_ok(), harmless, "{path:?}");
        sim.damage(&path, |all| *all = bytes);
    }
    for path in sim.files() {
        let (sim, store) = saved();
        sim.forget(&path);
        load(&store, 40).unwrap_err();
        let error = store.latest().and_then(|saved| saved.verify()).unwrap_err();
        let none = path.ends_with("LATEST") && matches!(error, CheckpointError::Nothing { .. });
        assert!(none || names(&error, &path), "{path:?}: {error}");
    }
}

/// Each edit has a matching hash, so that its contents are checked.
#[test]
fn a_manifest_that_contradicts_itself_is_refused() {
    let (_, store) = saved();
    let text = store.latest().unwrap().manifest().to_text();
    let edits = [
        ("\"shape\":[2,40]", "\"shape\":[2,41]", "boxes do not tile"),
        ("\"shape\":[2,40]", "\"shape\":[1,40]", "does not lie"),
        ("\"shape\":[2,40]", "\"shape\":[80]", "does not lie"),
        ("\"shape\":[2,40]", "\"shape\":[4294967296,4294967296,2]", "2^64"),
        ("\"dtype\":\"F32\"", "\"dtype\":\"F16\"", "are not 160 bytes"),
        ("\"dtype\":\"F32\"", "\"dtype\":\"F31\"", "unknown variant"),
        ("\"range\":[40,80]", "\"range\":[39,79]", "stored twice"),
        ("\"range\":[40,80]", "\"range\":[41,81]", "not in a box"),
        ("\"range\":[40,80]", "\"range\":[80,40]", "are not 160 bytes"),
        ("\"range\":[0,40]", "\"range\":[40,80]", "missing"),
        (
            "\"extents\":[2,40],\"range\":[40,80]",
            "\"extents\":[2,39],\"range\":[38,78]",
            "elements 0 to 38 are missing",
        ),
        ("\"offsets\":[0,0]", "\"offsets\":[0,18446744073709551615]", "does not lie"),
        ("rank-1.safetensors", "../rank-1.safetensors", "a file's name"),
        ("rank-1.safetensors", "/etc/passwd", "a file's name"),
        ("rank-1.safetensors", "rank-0.safetensors", "listed twice"),
        ("\"file\":1", "\"file\":0", "shares bytes"),
        ("\"file\":1", "\"file\":2", "there are 2 files"),
        ("\"bytes\":160,\"xxh3\":[\"", "\"bytes\":160,\"xxh3\":[\"0123456789abcdef\",\"", "windows"),
        ("\"xxh3\":[\"", "\"xxh3\":[\"ABCDEF0123456789\",\"", "16 lower-case hexadecimal digits"),
        ("\"xxh3\":[\"", "\"xxh3\":[\"+123456789abcdef\",\"", "16 lower-case hexadecimal digits"),
        ("\"xxh3\":[\"", "\"xxh3\":[\"0123456789abcde\",\"", "16 lower-case hexadecimal digits"),
        ("\"bytes\":160", "\"bytes\":18446744073709551615", "are not"),
        ("\"format\":1", "\"format\":2", "format 2"),
        ("\"format\":1", "\"format\":1,\"more\":1", "unknown field"),
    ];
    for (from, to, reason) in edits {
        let body = text.rsplit_once(",\n\"blake3\"").unwrap().0;
        assert!(body.contains(from), "{from} is in {body}");
        let body = body.replacen(from, to, 1);
        let text = format!("{body},\n\"blake3\": \"{}\"}}\n", blake3::hash(body.as_bytes()).to_hex());
        let error = Manifest::from_text(Path::new("manifest.json"), text.as_bytes()).unwrap_err();
        assert!(error.to_string().contains(reason), "{from} -> {to}: {error}");
    }
}

//! Whatever is changed in a checkpoint, it is said and nothing panics.

use crate::crash::{DIR, load, save};
use crate::sim::Sim;
use meshstep_shard::checkpoint::{CheckpointError, Manifest, Store};
use std::path::Path;
use std::sync::Arc;

fn saved() -> (Sim, Store) {
    let sim = Sim::new(DIR);
    let store = Store::on(Arc::new(sim.clone()), DIR);
    save(&store, 1, 40).unwrap();
    (sim, store)
}

#[test]
fn every_flipped_bit_truncation_and_missing_file_is_noticed() {
    let (sim, _) = saved();
    for path in sim.files() {
        let mut len = 0;
        sim.damage(&path, |bytes| len = bytes.len());
        assert!(len > 0);
        for at in 0..len {
            let (sim, store) = saved();
            sim.damage(&path, |bytes| bytes[at] ^= 1 << (at % 8));
            // Headers of safetensors are not read, but hashed.
            let error = load(&store, 40).unwrap_err();
            assert!(!matches!(error, CheckpointError::Locked { .. }), "{error}");
        }
        for at in 0..len {
            let (sim, store) = saved();
            sim.damage(&path, |bytes| bytes.truncate(at));
            load(&store, 40).unwrap_err();
        }
        let (sim, store) = saved();
        sim.damage(&path, |bytes| bytes.push(b'\n'));
        // JSON may end in white space; LATEST has no other use for it.
        let harmless = path.ends_with("LATEST");
        assert_eq!(load(&store, 40).is_ok(), harmless, "{path:?}");
        let (sim, store) = saved();
        sim.forget(&path);
        load(&store, 40).unwrap_err();
    }
}

/// Each edit has a right hash, so that what it says is looked at.
#[test]
fn a_manifest_that_contradicts_itself_is_refused() {
    let (_, store) = saved();
    let text = store.latest().unwrap().manifest().to_text();
    let edits = [
        ("\"shape\":[2,40]", "\"shape\":[2,41]", "is not cut into boxes"),
        ("\"shape\":[2,40]", "\"shape\":[1,40]", "does not lie"),
        ("\"shape\":[2,40]", "\"shape\":[80]", "does not lie"),
        ("\"shape\":[2,40]", "\"shape\":[4294967296,4294967296,2]", "2^64"),
        ("\"dtype\":\"F32\"", "\"dtype\":\"F16\"", "are not 160 bytes"),
        ("\"dtype\":\"F32\"", "\"dtype\":\"F31\"", "unknown variant"),
        ("\"range\":[40,80]", "\"range\":[39,79]", "there twice"),
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
        ("\"bytes\":160,\"xxh3\":[\"", "\"bytes\":160,\"xxh3\":[\"\",\"", "windows"),
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

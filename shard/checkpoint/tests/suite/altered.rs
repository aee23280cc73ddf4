//! Files of a checkpoint that are damaged, cut short, removed, exchanged, or edited with a matching hash: loading them is the same error on
//! every rank of any group, and changes nothing.

use crate::common::{F32_MASTER, Run, turns};
use crate::failures::failed;
use crate::layouts::{DIR, on, train};
use crate::whole::part;
use meshstep_cases::{stride, tried};
use meshstep_checkpoint::{
    self as checkpoint, Disk, Failed, Load, Manifest, PieceEntry, Save, SlotEntry, Store, TensorEntry, Type,
};
use meshstep_checkpoint_cases::Sim;
use meshstep_checkpoint_cases::fuzzed::sealed;
use meshstep_comm::loopback;
use meshstep_shard::Options;
use meshstep_tensor::DType;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

const MANIFEST: &str = "/run/step-000000000003/manifest.json";
const LATEST: &str = "/run/LATEST";

/// Damage to files, and the expected error.
struct Harm {
    what: String,
    /// New bytes of each file; `None` removes the file.
    files: Vec<(PathBuf, Option<Vec<u8>>)>,
    /// Texts in the error; `None` if no rank needs to notice the damage.
    says: Option<Vec<String>>,
}

fn run() -> Run {
    let options = Options { precision: F32_MASTER, ..Options::default() };
    Run { lens: vec![400, 0, 133], dtype: DType::BF16, grads: DType::F32, options, ..Run::default() }
}

/// Saves on three ranks, each of which has a part of everything.
fn saved(store: &Store) {
    let run = on((3, 3, 300), &run());
    let saved = loopback::spawn(run.ranks, |comm| {
        let mut opt = run.build(comm).unwrap();
        train(&run, &mut opt, 1..4);
        // No rank reads the blobs of a rank that does not exist.
        let own_blobs = if opt.comm().rank() == 0 { vec![("rng", &[7; 20][..])] } else { Vec::new() };
        checkpoint::save(
            &mut opt,
            store,
            Save { own_blobs, blobs: vec![("loader", &[5; 9])], ..Save::default() },
        )
        .unwrap();
    });
    saved.unwrap();
}

fn in_memory() -> (Sim, Store) {
    let sim = Sim::new(DIR);
    let store = Store::on(Arc::new(sim.clone()), DIR);
    saved(&store);
    (sim, store)
}

/// Groups of ranks that load.
fn others() -> [Run; 3] {
    [on((2, 1, 50), &run()), on((3, 3, 9), &run()), on((1, 0, 300), &run())]
}

/// Does and undoes each harm; returns the errors of all ranks of `run` that load meanwhile.
fn told(run: &Run, (sim, store): (&Sim, &Store), harms: &[&Harm]) -> Vec<Option<Failed>> {
    let ranks = loopback::spawn(run.ranks, |comm| {
        let mut opt = run.build(Arc::clone(&comm)).unwrap();
        train(run, &mut opt, 1..2);
        let mut before = part(&opt);
        let told = harms.iter().map(|harm| {
            let sound = if comm.rank() == 0 { put(sim, &harm.files) } else { Vec::new() };
            comm.barrier().unwrap();
            let loaded = checkpoint::load(&mut opt, store, Load::default());
            comm.barrier().unwrap();
            put(sim, &sound);
            match loaded {
                Ok(_) => {
                    before = part(&opt);
                    None
                }
                Err(error) => {
                    assert!(part(&opt) == before, "{}: {error} has changed something", harm.what);
                    Some(failed(error))
                }
            }
        });
        let told: Vec<_> = told.collect();
        comm.barrier().unwrap();
        // No damage is left.
        assert_eq!(
            checkpoint::load(&mut opt, store, Load::default()).unwrap().saved.verify().map(drop),
            Ok(())
        );
        assert_eq!(opt.steps(), 3);
        train(run, &mut opt, 4..5);
        told
    });
    let mut ranks = ranks.unwrap();
    for (i, harm) in harms.iter().enumerate() {
        assert!(ranks.iter().all(|told| told[i] == ranks[0][i]), "{}: ranks are told apart", harm.what);
    }
    ranks.remove(0)
}

/// Replaces files by `files`, and returns the previous ones.
fn put(sim: &Sim, files: &[(PathBuf, Option<Vec<u8>>)]) -> Vec<(PathBuf, Option<Vec<u8>>)> {
    let there = |path: &PathBuf| sim.files().contains(path).then(|| sim.bytes(path));
    let before = files.iter().map(|(path, _)| (path.clone(), there(path))).collect();
    for (path, bytes) in files {
        if there(path).is_some() {
            sim.forget(path);
        }
        if let Some(bytes) = bytes {
            sim.create(path).unwrap().write_at(0, bytes).unwrap();
        }
    }
    before
}

/// Checks the errors of harms: each harm on `groups` of the three groups, in turn, and on all of them in a long run.
fn check(disk: (&Sim, &Store), harms: &[Harm], groups: u32) {
    assert!(harms.len() > 2, "each group has some");
    for (g, run) in others().into_iter().enumerate() {
        let has = |i: usize| turns(&[0, 1, 2], i, groups).any(|group| group == g);
        let harms: Vec<&Harm> = (0..harms.len()).filter(|i| has(*i)).map(|i| &harms[i]).collect();
        for (harm, told) in harms.iter().zip(told(&run, disk, &harms)) {
            let Some(says) = &harm.says else { continue };
            let told = told.unwrap_or_else(|| panic!("{}: {} ranks load it", harm.what, run.ranks));
            let text = told.to_string();
            assert!(says.iter().all(|part| text.contains(part)), "{}: {text:?} says {says:?}", harm.what);
        }
    }
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// Returns the texts in the error of a damaged file.
fn names(path: &Path) -> Vec<String> {
    match path {
        // The error may be about the step that LATEST names, or about its hash.
        path if path.ends_with("LATEST") => Vec::new(),
        path => vec![text(path)],
    }
}

#[test]
fn any_damage_to_any_file_is_told_to_all_ranks() {
    let (sim, store) = in_memory();
    let mut harms = Vec::new();
    for (f, path) in sim.files().into_iter().enumerate() {
        let bytes = sim.bytes(&path);
        // Some rank reads every byte behind a file's header.
        let shard = path.extension().is_some_and(|extension| extension == "safetensors");
        let data = if shard { 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize } else { 0 };
        let step = stride(if shard { 41 } else { 149 });
        for at in (0..bytes.len()).step_by(step).chain([bytes.len() - 1]) {
            let (mut flipped, mut says) = (bytes.clone(), names(&path));
            flipped[at] ^= 1 << (at % 8);
            if shard {
                // The owner is a vector or a blob.
                says.push(" of ".to_owned());
            }
            let what = format!("byte {at} of {}", path.display());
            harms.push(Harm {
                what,
                files: vec![(path.clone(), Some(flipped))],
                says: (at >= data).then_some(says),
            });
        }
        let cuts = [0, 1, 7, 8, data / 2, data, data + 1, bytes.len() / 2, bytes.len() - 1];
        for (_, len) in cuts.into_iter().enumerate().filter(|(i, _)| tried(10 * f + i, 1)) {
            assert!(len < bytes.len(), "each rank has a part");
            let what = format!("{len} bytes of {}", path.display());
            let files = vec![(path.clone(), Some(bytes[..len].to_vec()))];
            let says =
                if shard { [names(&path), vec![" cannot be read: ".into()]].concat() } else { names(&path) };
            harms.push(Harm { what, files, says: Some(says) });
        }
        let says = if path == Path::new(LATEST) { vec!["holds no checkpoint".into()] } else { names(&path) };
        harms.push(Harm {
            what: format!("no {}", path.display()),
            files: vec![(path, None)],
            says: Some(says),
        });
    }
    println!("{} harms", harms.len());
    check((&sim, &store), &harms, 1);
}

/// Returns the manifest and LATEST, both with matching hashes.
fn edited(manifest: Vec<u8>) -> Vec<(PathBuf, Option<Vec<u8>>)> {
    let hash = blake3::hash(&manifest).to_hex();
    let latest = format!("{{\"step\":3,\"manifest\":\"{hash}\"}}").into_bytes();
    vec![(MANIFEST.into(), Some(manifest)), (LATEST.into(), Some(latest))]
}

fn tensor(manifest: &mut Manifest) -> &mut TensorEntry {
    manifest.tensors.get_mut("p0").unwrap()
}

fn slot<'m>(manifest: &'m mut Manifest, slot: &str) -> &'m mut SlotEntry {
    tensor(manifest).slots.get_mut(slot).unwrap()
}

/// A piece between two others.
fn piece(manifest: &mut Manifest) -> &mut PieceEntry {
    &mut slot(manifest, "m").pieces[1]
}

/// Edit of a manifest, and texts in the error beside the name of the owner.
type Edit = (fn(&mut Manifest), &'static [&'static str]);

const OF: &str = "slot \"m\" of tensor \"p0\"";

const EDITS: &[Edit] = &[
    // Shapes and types.
    (|m| tensor(m).shape = vec![401], &["of tensor \"p0\"", "boxes do not tile"]),
    (|m| tensor(m).shape = vec![35, 2], &["of tensor \"p0\"", "does not lie"]),
    (|m| tensor(m).shape = vec![], &["of tensor \"p0\"", "does not lie"]),
    (|m| slot(m, "m").dtype = Type::F16, &[OF, "are not"]),
    (|m| slot(m, "param").dtype = Type::F16, &["slot \"param\" of \"p0\"", "F16", "BF16"]),
    (|m| slot(m, "param").dtype = Type::U16, &["slot \"param\" of \"p0\"", "BF16"]),
    // Elements twice, or not at all.
    (|m| piece(m).range = piece(m).range.map(|at| at - 1), &[OF, "stored twice"]),
    (|m| piece(m).range = piece(m).range.map(|at| at + 1), &[OF, "missing"]),
    (|m| drop(slot(m, "m").pieces.remove(1)), &[OF, "missing"]),
    (|m| slot(m, "m").pieces.clear(), &[OF, "boxes do not tile"]),
    (
        |m| {
            let again = piece(m).clone();
            slot(m, "m").pieces.push(again);
        },
        &[OF, "stored twice"],
    ),
    (|m| piece(m).range.reverse(), &[OF, "0 elements"]),
    // Absurd sizes.
    (|m| tensor(m).shape = vec![1 << 40], &["of tensor \"p0\"", "boxes do not tile"]),
    (|m| tensor(m).shape = vec![1 << 40, 1 << 40], &["of tensor \"p0\"", "2^64"]),
    (|m| tensor(m).shape = vec![1; 65], &["of tensor \"p0\"", "65 dimensions"]),
    (|m| piece(m).stored.bytes = 1 << 60, &[OF, "are not"]),
    (|m| piece(m).range = [0, 1 << 62], &[OF, "are not"]),
    (|m| piece(m).extents = vec![u64::MAX], &[OF, "does not lie"]),
    (|m| piece(m).offsets = vec![u64::MAX], &[OF, "does not lie"]),
    (|m| tensor(m).t = u64::MAX, &["tensor \"p0\"", "is no count of updates"]),
    // Files.
    (|m| m.files[1].name = "..".into(), &["file \"..\"", "a file's name"]),
    (|m| m.files[1].name = "../rank-00001.safetensors".into(), &["\"../rank-00001", "a file's name"]),
    (|m| m.files[1].name = "/etc/passwd".into(), &["\"/etc/passwd\"", "a file's name"]),
    (|m| m.files[1].name = "a/b".into(), &["\"a/b\"", "a file's name"]),
    (|m| m.files[1].name = "".into(), &["file \"\"", "a file's name"]),
    (|m| m.files[1].name = m.files[0].name.clone(), &["rank-00000", "listed twice"]),
    (|m| drop(m.files.pop()), &["p", "there are 2 files"]),
    (|m| piece(m).stored.file = 9, &[OF, "there are 3 files"]),
    (|m| piece(m).stored.at = 1 << 30, &[OF, "do not lie in \"rank-0000"]),
    (|m| piece(m).stored.at = u64::MAX, &[OF, "do not lie in \"rank-0000"]),
    (|m| piece(m).stored.at -= 4, &["p0", "shares bytes"]),
    (|m| m.blobs.get_mut("loader").unwrap().at = 1 << 30, &["blob \"loader\"", "do not lie in"]),
    // Hashes.
    (|m| piece(m).stored.xxh3.push(0), &[OF, "windows, not 2"]),
    (|m| piece(m).stored.xxh3.clear(), &[OF, "windows, not 0"]),
    (|m| piece(m).stored.xxh3 = vec![0], &[OF, "have hash", "/rank-0000"]),
    (|m| m.blobs.get_mut("loader").unwrap().xxh3 = vec![0], &["blob \"loader\"", "have hash"]),
    // Contents.
    (|m| drop(m.tensors.remove("p2")), &["has nothing for \"p2\""]),
    (|m| drop(tensor(m).slots.remove("v")), &["has nothing for \"p0:v\""]),
    (
        |m| {
            let none = m.tensors["p1"].clone();
            m.tensors.insert("p9".into(), none);
        },
        &["has \"p9\", which are not here"],
    ),
    (|m| m.step = 4, &["step-000000000003 holds step 4"]),
    (|m| m.format = 2, &["manifest.json", "format 2"]),
];

#[test]
fn manifests_that_are_edited_with_right_hashes_are_refused_on_all_ranks() {
    let (sim, store) = in_memory();
    let sound = store.latest().unwrap().manifest().clone();
    let mut harms = Vec::new();
    for (i, (edit, says)) in EDITS.iter().enumerate() {
        let mut manifest = sound.clone();
        edit(&mut manifest);
        assert!(manifest != sound, "edit {i} is none");
        let says = says.iter().map(|&part| part.to_owned()).collect();
        let files = edited(manifest.to_text().into_bytes());
        harms.push(Harm { what: format!("edit {i}"), files, says: Some(says) });
    }
    // Texts that no parsed manifest can have.
    let text = sound.to_text();
    let body = text.rsplit_once(",\n\"blake3\"").unwrap().0;
    for (from, to, says) in [
        ("\"p1\":{", "\"p0\":{", "\"p0\" is there twice"),
        ("\"m\":{", "\"v\":{", "\"v\" is there twice"),
        ("\"step\":3", "\"step\":3,\"step\":3", "the member \"step\" is there twice"),
        ("\"step\":3", "\"step\":-3", "invalid value"),
        ("\"dtype\":\"F32\"", "\"dtype\":\"F31\"", "unknown variant"),
        ("\"t\":3", "\"t\":3,\"more\":1", "unknown field `more`"),
        ("\"t\":3", "\"t\":1e999", "out of range"),
        ("\"xxh3\":[\"", "\"xxh3\":[\"\",\"", "16 lower-case hexadecimal digits"),
    ] {
        assert!(body.contains(from), "{from}");
        let files = edited(sealed(body.replacen(from, to, 1).as_bytes()));
        let says = Some(vec![MANIFEST.to_owned(), says.to_owned()]);
        harms.push(Harm { what: format!("{from} -> {to}"), files, says });
    }
    // And LATEST.
    let hash = blake3::hash(text.as_bytes()).to_hex();
    for (latest, says) in [
        (format!("{{\"step\":4,\"manifest\":\"{hash}\"}}"), "step-000000000004/manifest.json"),
        (format!("{{\"step\":3,\"manifest\":\"{}\"}}", "0".repeat(64)), "not 0000"),
        ("{\"step\":3,\"manifest\":\"\"}".into(), MANIFEST),
        (format!("{{\"step\":3,\"manifest\":\"{hash}\",\"more\":1}}"), "unknown field"),
        (format!("{{\"step\":3,\"step\":3,\"manifest\":\"{hash}\"}}"), "duplicate field"),
        (format!("{{\"step\":\"../3\",\"manifest\":\"{hash}\"}}"), "invalid type"),
        (" ".repeat(5000), "more than the 4096"),
        ("[]".into(), LATEST),
    ] {
        let files = vec![(LATEST.into(), Some(latest.clone().into_bytes()))];
        harms.push(Harm { what: latest, files, says: Some(vec![says.to_owned()]) });
    }
    check((&sim, &store), &harms, 3);
}

/// In a folder of the operating system, a name may denote any kind of file.
#[test]
fn what_is_no_plain_file_is_refused_on_all_ranks() {
    for name in ["LATEST", "step-000000000003/manifest.json", "step-000000000003/rank-00001.safetensors"] {
        for kind in ["a link", "a pipe", "a folder", "a link to nothing"] {
            let dir = tempfile::tempdir().unwrap();
            let store = Store::new(dir.path());
            saved(&store);
            let (path, moved) = (dir.path().join(name), dir.path().join("moved"));
            std::fs::rename(&path, &moved).unwrap();
            match kind {
                "a pipe" => assert!(Command::new("mkfifo").arg(&path).status().unwrap().success()),
                "a folder" => std::fs::create_dir(&path).unwrap(),
                "a link" => symlink(&moved, &path).unwrap(),
                _ => symlink(dir.path().join("nothing"), &path).unwrap(),
            }
            for run in others() {
                let ranks = loopback::spawn(run.ranks, |comm| {
                    let mut opt = run.build(comm).unwrap();
                    let before = part(&opt);
                    let told =
                        failed(checkpoint::load(&mut opt, &store, Load::default()).map(drop).unwrap_err());
                    assert!(part(&opt) == before, "{told} has changed something");
                    told
                });
                let ranks = ranks.unwrap();
                let text_of_all = ranks[0].to_string();
                assert!(ranks.iter().all(|told| *told == ranks[0]), "{ranks:?}");
                assert!(text_of_all.contains(&format!("opening {}", text(&path))), "{kind}: {text_of_all}");
            }
        }
    }
}

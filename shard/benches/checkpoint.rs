//! Saving and loading against a plain write with fsync, and a plain read, of as many bytes on the same disk, in turns.
//!
//! `cargo bench -p meshstep-shard --features checkpoint --bench checkpoint -- --mb 2048 --rounds 5 --dir DIR`; DIR is on the disk
//! to measure. Reads are measured twice: with nothing of the files in the page cache, and with all of them.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program whose answer is what it prints")]

use meshstep_shard::checkpoint::{
    CheckpointError, FORMAT, Manifest, Piece, PieceEntry, Saved, SlotEntry, Store, TensorEntry, Type, Vector,
};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hint::black_box;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Bytes of a vector; those of a layer of a model with some billion parameters.
const VECTOR: usize = 64 << 20;

/// Bytes handed over at a time: what a rank stages.
const STAGED: usize = 16 << 20;

struct Asked {
    bytes: usize,
    rounds: usize,
    dir: PathBuf,
}

fn main() {
    let asked = asked();
    fs::create_dir_all(&asked.dir).unwrap();
    let dir = tempfile::tempdir_in(&asked.dir).unwrap();
    let bytes = asked.bytes.next_multiple_of(4);
    println!("{} MB in vectors of {} MB, {} rounds", bytes >> 20, VECTOR >> 20, asked.rounds);
    let data = noise(bytes);
    let writes = [plain_write as fn(&[u8], &Path), save];
    compare("write with fsync", bytes, asked.rounds, |which| {
        let at = dir.path().join("written");
        fs::create_dir(&at).unwrap();
        // What the round before, and others, left to the disk is no part of this one.
        rustix::fs::syncfs(File::open(&at).unwrap()).unwrap();
        let time = timed(|| writes[which](&data, &at));
        fs::remove_dir_all(&at).unwrap();
        time
    });
    let at = dir.path().join("read");
    fs::create_dir(&at).unwrap();
    save(&data, &at);
    plain_write(&data, &at);
    let saved = Store::new(&at).latest().unwrap();
    let (plain, file) = (at.join("plain"), saved.dir().join("rank-0.safetensors"));
    let mut room = vec![1; bytes];
    for (state, cached) in [("read, nothing cached", false), ("read, all cached", true)] {
        compare(state, bytes, asked.rounds, |which| {
            for path in [&plain, &file] {
                if cached { warm(path) } else { forget(path) }
            }
            match which {
                0 => timed(|| plain_read(&plain, &mut room)),
                _ => timed(|| load(&saved, &mut room)),
            }
        });
        assert!(room == data, "what was read is what was written");
    }
    let verified = timed(|| _ = black_box(saved.verify().unwrap()));
    println!("every checksum, all cached: {:.0} MB/s", bytes as f64 / 1e6 / verified);
}

fn asked() -> Asked {
    let words: Vec<String> = std::env::args().collect();
    let value = |name: &str| words.iter().position(|word| word == name).and_then(|at| words.get(at + 1));
    // `cargo test --benches` asks for no measurement.
    let measured = words.iter().any(|word| word == "--bench");
    let number = |name, usual| value(name).map_or(usual, |text| text.parse().unwrap());
    Asked {
        bytes: number("--mb", if measured { 2048 } else { 3 }) << 20,
        rounds: number("--rounds", if measured { 3 } else { 1 }),
        dir: value("--dir").map_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).to_owned(), PathBuf::from),
    }
}

/// Times the plain way and ours in turns, each first as often as the other, and prints medians and their ratio.
fn compare(what: &str, bytes: usize, rounds: usize, mut run: impl FnMut(usize) -> f64) {
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        for turn in 0..2 {
            let which = (round + turn) % 2;
            times[which].push(run(which));
        }
    }
    let medians = times.each_mut().map(|times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    let [plain, ours] = medians.map(|time| bytes as f64 / 1e6 / time);
    println!("{what}: plain {plain:.0} MB/s, ours {ours:.0} MB/s, {:.0}%", 100.0 * ours / plain);
    println!("  seconds, plain {:.2?}, ours {:.2?}", times[0], times[1]);
}

fn timed(work: impl FnOnce()) -> f64 {
    let started = Instant::now();
    work();
    started.elapsed().as_secs_f64()
}

fn noise(bytes: usize) -> Vec<u8> {
    let mut x = 1u64;
    let word = |_| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x.to_le_bytes()
    };
    let mut data: Vec<u8> = (0..bytes.div_ceil(8)).flat_map(word).collect();
    data.truncate(bytes);
    data
}

fn plain_write(data: &[u8], dir: &Path) {
    let mut file = File::create_new(dir.join("plain")).unwrap();
    data.chunks(STAGED).for_each(|part| file.write_all(part).unwrap());
    file.sync_all().unwrap();
    File::open(dir).unwrap().sync_all().unwrap();
}

/// A step of one rank.
fn save(data: &[u8], dir: &Path) {
    let draft = Store::new(dir).begin(1).unwrap();
    let vector = |(at, part): (usize, &[u8])| Vector {
        key: format!("v{at}"),
        dtype: Type::F32,
        shape: vec![part.len() as u64 / 4],
    };
    let vectors: Vec<Vector> = data.chunks(VECTOR).enumerate().map(vector).collect();
    let mut file = draft.file(0, "rank-0.safetensors", &vectors).unwrap();
    for vector in data.chunks(VECTOR) {
        file.begin();
        vector.chunks(STAGED).for_each(|part| file.write(part).unwrap());
    }
    let (entry, stored) = file.finish().unwrap();
    let tensor = |(Vector { key, dtype, shape }, stored): (Vector, _)| {
        let range = [0, shape[0]];
        let piece = PieceEntry { offsets: vec![0], extents: shape.clone(), range, key: key.clone(), stored };
        let slots = [("param".to_owned(), SlotEntry { dtype, pieces: vec![piece] })].into();
        (key, TensorEntry { shape, t: 1, slots })
    };
    let tensors = vectors.into_iter().zip(stored).map(tensor).collect();
    let (settings, blobs) = (BTreeMap::new(), BTreeMap::new());
    let (files, mesh) = (vec![entry], "dp=1".to_owned());
    draft.publish(&Manifest { format: FORMAT, step: 1, mesh, files, tensors, settings, blobs }).unwrap();
}

fn plain_read(path: &Path, room: &mut [u8]) {
    let mut file = File::open(path).unwrap();
    room.chunks_mut(STAGED).for_each(|part| file.read_exact(part).unwrap());
}

fn load(saved: &Saved, room: &mut [u8]) {
    let mut vectors = saved.vectors();
    for (at, part) in room.chunks_mut(VECTOR).enumerate() {
        let whole = Piece::whole(&[part.len() as u64 / 4]);
        let copy = |place: u64, bytes: &[u8]| {
            part[place as usize * 4..][..bytes.len()].copy_from_slice(bytes);
            Ok::<_, CheckpointError>(())
        };
        vectors.read(&format!("v{at}"), "param", &whole, copy).unwrap();
    }
}

/// Takes a file out of the page cache; it is synced.
fn forget(path: &Path) {
    let file = File::open(path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// Brings a file into the page cache.
fn warm(path: &Path) {
    let (mut file, mut room) = (File::open(path).unwrap(), vec![0; STAGED]);
    while file.read(&mut room).unwrap() > 0 {}
}

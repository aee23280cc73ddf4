//! Saving and loading against a plain write with fsync, and a plain read, of as many bytes on the same disk, in turns.
//!
//! `cargo bench -p meshstep-checkpoint --bench checkpoint -- --mb 2048 --rounds 5 --dir DIR`; DIR is on the disk
//! to measure. Reads are measured twice: with nothing of the files in the page cache, and with all of them. A plain read goes into
//! memory that is there already; a load takes as much anew, which is its own to pay for, but not that the host of a virtual machine may
//! have taken it back: so that is asked for before. Last comes what a save in the background stops training for, beside a copy of as
//! many bytes.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program whose answer is what it prints")]

use meshstep_checkpoint::{self as checkpoint, Load, Save, Saver, Store, save_async};
use meshstep_comm::Communicator;
use meshstep_optim::AdamW;
use meshstep_shard::{Optimizer, Options, Stage, StepArgs};
use meshstep_tensor::{Buffer, Category, DType, Layout, Meter, SliceMut};
use std::fs::{self, File};
use std::hint::black_box;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Elements of a parameter.
const LEN: usize = 1 << 24;

/// Bytes of a plain call.
const STAGED: usize = 16 << 20;

struct Asked {
    bytes: usize,
    rounds: usize,
    dir: PathBuf,
}

fn main() {
    let asked = asked();
    // One rank: what it reaches is what the disk is asked for by each of several.
    meshstep_comm::loopback::spawn(1, |comm| measure(&asked, &mut optimizer(comm, &asked))).unwrap();
}

/// AdamW's parameters, m and v, none of them zeros.
fn optimizer(comm: Arc<dyn Communicator>, asked: &Asked) -> Optimizer {
    let elements = asked.bytes / 12;
    let lens = (0..elements.div_ceil(LEN)).map(|i| LEN.min(elements - i * LEN));
    let layout =
        lens.enumerate().fold(Layout::builder(), |b, (i, len)| b.param(format!("p{i}"), &[len], DType::F32));
    let options = Options { stage: Stage::Zero1, ..Options::default() };
    let values = |param: &meshstep_tensor::Param, mut to: SliceMut<'_>| {
        to.bytes_mut()?.copy_from_slice(&noise(param.len() * 4));
        Ok(())
    };
    let mut opt = Optimizer::new(comm, layout.build().unwrap(), AdamW::default(), values, options).unwrap();
    step(&mut opt);
    opt
}

/// A step with gradients that are no zeros.
fn step(opt: &mut Optimizer) {
    let names: Vec<String> = opt.params().map(|param| param.name().to_owned()).collect();
    let batch = opt.micro_batch(1).unwrap();
    for name in names.iter().rev() {
        let mut slot = batch.slot(name).unwrap();
        let values = slot.as_mut().unwrap().into_typed::<f32>().unwrap();
        values.iter_mut().zip(1u32..).for_each(|(x, i)| *x = (i % 7919) as f32 / 7919.0);
        slot.fill().unwrap();
    }
    batch.finish().unwrap();
    opt.step(StepArgs::default()).unwrap().outcome().unwrap();
}

fn measure(asked: &Asked, opt: &mut Optimizer) {
    fs::create_dir_all(&asked.dir).unwrap();
    let dir = tempfile::tempdir_in(&asked.dir).unwrap();
    let at = dir.path().join("read");
    fs::create_dir(&at).unwrap();
    let store = Store::new(&at);
    checkpoint::save(opt, &store, Save::default()).unwrap();
    let saved = store.latest().unwrap();
    let (plain, file) = (at.join("plain"), saved.dir().join(&saved.manifest().files[0].name));
    let bytes = saved.manifest().files[0].bytes;
    println!("{} MB, {} rounds", bytes >> 20, asked.rounds);
    let part = noise(STAGED);
    plain_write(&part, bytes, &at);
    compare("save, write with fsync", bytes, asked.rounds, |which| {
        let at = dir.path().join("written");
        fs::create_dir(&at).unwrap();
        // What the round before, and others, left to the disk is no part of this one.
        rustix::fs::syncfs(File::open(&at).unwrap()).unwrap();
        let time = match which {
            0 => timed(|| plain_write(&part, bytes, &at)),
            _ => timed(|| _ = checkpoint::save(opt, &Store::new(&at), Save::default()).unwrap()),
        };
        fs::remove_dir_all(&at).unwrap();
        time
    });
    let mut room = vec![1; bytes as usize];
    for (state, cached) in [("load, read: nothing cached", false), ("load, read: all cached", true)] {
        compare(state, bytes, asked.rounds, |which| {
            for path in [&plain, &file] {
                if cached { warm(path) } else { forget(path) }
            }
            touch(bytes as usize);
            match which {
                0 => timed(|| plain_read(&plain, &mut room)),
                _ => timed(|| _ = checkpoint::load(opt, &store, Load::default()).unwrap()),
            }
        });
    }
    for (state, cached) in [("nothing", false), ("all", true)] {
        if cached {
            warm(&file)
        } else {
            forget(&file)
        }
        let verified = timed(|| _ = black_box(saved.verify().unwrap()));
        println!("every checksum, {state} cached: {:.0} MB/s", bytes as f64 / 1e6 / verified);
    }
    drop(saved);
    fs::remove_dir_all(&at).unwrap();
    background(asked.rounds, opt, &Store::new(dir.path()), &mut room);
}

/// Prints how long a save in the background stops training, in turns with a copy of as many bytes, and that steps go on.
fn background(rounds: usize, opt: &mut Optimizer, store: &Store, room: &mut [u8]) {
    let save = || Save { keep: Some(1), ..Save::default() };
    // The first one's memory stays for the others.
    let mut saver = Saver::default();
    let first = save_async(opt, &mut saver, store, save()).unwrap();
    let (first, _) = (first.stall(), first.join().unwrap());
    let [mut stalls, mut copies, mut written, mut alone, mut meanwhile] = [(); 5].map(|()| Vec::new());
    for round in 0..rounds {
        for turn in 0..2 {
            alone.push(timed(|| step(opt)));
            if (round + turn) % 2 == 0 {
                copies.push(timed(|| assert_eq!(copy(opt, room), first.bytes)));
                continue;
            }
            let begun = Instant::now();
            let saving = save_async(opt, &mut saver, store, save()).unwrap();
            stalls.push(saving.stall().whole.as_secs_f64());
            while !saving.is_done() {
                meanwhile.push(timed(|| step(opt)));
            }
            saving.join().unwrap();
            written.push(begun.elapsed().as_secs_f64());
        }
    }
    let steps = meanwhile.len();
    let [stall, copied, written, alone, beside] =
        [stalls, copies, written, alone, meanwhile].map(|mut times| median(&mut times));
    println!(
        "save_async: stalls {stall:.3} s, a copy of as many bytes {copied:.3} s, written in {written:.2} s"
    );
    println!("  {:.3} s where it allocates, which the first one does", first.whole.as_secs_f64());
    println!("  {steps} steps meanwhile, of {beside:.3} s; alone {alone:.3} s");
}

/// Copies all that an optimizer has, as a save does; tells how many bytes that are.
fn copy(opt: &Optimizer, room: &mut [u8]) -> u64 {
    let mut at = 0;
    for param in opt.params() {
        let state = opt.state(param.name()).unwrap();
        for values in [state.values].into_iter().chain(state.slots.iter().map(|(_, values)| *values)) {
            let bytes = values.bytes().unwrap();
            room[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        }
    }
    black_box(room);
    at as u64
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
fn compare(what: &str, bytes: u64, rounds: usize, mut run: impl FnMut(usize) -> f64) {
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        for turn in 0..2 {
            let which = (round + turn) % 2;
            times[which].push(run(which));
        }
    }
    let medians = times.each_mut().map(|times| median(times));
    let [plain, ours] = medians.map(|time| bytes as f64 / 1e6 / time);
    println!("{what}: plain {plain:.0} MB/s, ours {ours:.0} MB/s, {:.0}%", 100.0 * ours / plain);
    println!("  seconds, plain {:.2?}, ours {:.2?}", times[0], times[1]);
}

/// Where there are none, nothing.
fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
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

/// As many bytes, from memory that is read over and over: no slower than from more of it.
fn plain_write(part: &[u8], bytes: u64, dir: &Path) {
    let mut file = File::create_new(dir.join("plain")).unwrap();
    for at in (0..bytes).step_by(STAGED) {
        file.write_all(&part[..STAGED.min((bytes - at) as usize)]).unwrap();
    }
    file.sync_all().unwrap();
    File::open(dir).unwrap().sync_all().unwrap();
}

fn plain_read(path: &Path, room: &mut [u8]) {
    let mut file = File::open(path).unwrap();
    room.chunks_mut(STAGED).for_each(|part| file.read_exact(part).unwrap());
}

/// Takes memory and gives it back, so that the next who takes some has it from the system. Linux hands free memory back to the host of
/// a virtual machine 2 s after something was freed: first that is waited for, so that it does not come in between.
fn touch(bytes: usize) {
    if bytes < STAGED {
        return;
    }
    thread::sleep(Duration::from_millis(2500));
    let mut memory =
        Buffer::zeroed(bytes.div_ceil(8), DType::U64, &Meter::default(), Category::Staging).unwrap();
    memory.as_mut().bytes_mut().unwrap().fill(1);
    black_box(memory);
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

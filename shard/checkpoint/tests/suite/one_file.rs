//! All ranks import the same file of PyTorch's, or none does: bytes that differ are not read, or cause an error on all ranks.

use crate::common::{Run, cases, draws, long, turns};
use crate::faulty::Faulty;
use crate::hooked::{Call, Hooked};
use crate::layouts::train;
use crate::pytorch::{DIR, FILE, on};
use crate::whole::{Whole, join, part};
use meshstep_checkpoint::pytorch::{Import, PyTorchFile};
use meshstep_checkpoint::{self as checkpoint, Error};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::loopback::spawn;
use meshstep_shard::{Options, Stage};
use rand::prelude::*;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Number of bytes compared together.
const GRAIN: usize = 256 << 10;

fn exported(run: &Run) -> Sim {
    let sim = Sim::new(DIR);
    let done = spawn(run.ranks, |comm| {
        let mut opt = run.build(comm).unwrap();
        train(run, &mut opt, 1..3);
        checkpoint::export_pytorch(&mut opt, &on(&sim), 0).unwrap();
    });
    done.unwrap();
    sim
}

/// Returns the result of rank `q` importing file `q`: parts, or an error that has changed nothing.
fn imported(run: &Run, files: &[PyTorchFile]) -> Result<Whole, Error> {
    let ends = spawn(run.ranks, |comm| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        let before = part(&opt);
        let imported = checkpoint::import_pytorch(&mut opt, &files[rank], Import::default());
        let after = part(&opt);
        assert!(imported.is_ok() || after == before, "nothing has changed");
        imported.map(|_| after)
    });
    let ends = ends.unwrap();
    let texts: Vec<_> = ends.iter().map(|end| end.as_ref().err().map(ToString::to_string)).collect();
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    ends.into_iter().collect::<Result<Vec<_>, _>>().map(join)
}

fn changed(sim: &Sim, at: usize) -> Sim {
    let (bytes, other) = (sim.bytes(Path::new(FILE)), Sim::new(DIR));
    let mut file = meshstep_checkpoint::Disk::create(&other, Path::new(FILE)).unwrap();
    file.write_at(0, &bytes).unwrap();
    other.damage(Path::new(FILE), |bytes| bytes[at] ^= 1);
    other
}

/// Files of a few grains that end within vectors; each rank needs other parts of them.
fn runs() -> Vec<Run> {
    let lens = vec![90_001, 3, 120_000, 70_007];
    let options = Options { bucket_len: Some(100_000), ..Options::default() };
    let run = Run { ranks: 3, lens, options, ..Run::default() };
    [Stage::Replicated, Stage::Zero1, Stage::Zero3].map(|stage| run.stage(stage)).into()
}

#[test]
fn what_differs_on_one_rank_is_told_or_is_not_taken_in() {
    let mut drawn = draws(1);
    for (r, run) in runs().into_iter().filter(|_| drawn()).enumerate() {
        let sim = exported(&run);
        let bytes = sim.bytes(Path::new(FILE));
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert!(bytes.len() > 8 * GRAIN);
        let whole = imported(&run, &vec![on(&sim); 3]).unwrap();
        let random = &mut StdRng::seed_from_u64(5);
        let edges = [header, bytes.len() - 1, 3 * GRAIN - 1, 3 * GRAIN];
        let (mut changes, mut told) = ([0; 3], [0; 3]);
        let places = edges.into_iter().chain((0..8).map(|_| random.random_range(header..bytes.len())));
        for (i, at) in places.take(cases(5, 12).max(3) as usize).enumerate() {
            let other = on(&changed(&sim, at));
            for rank in turns(&[0, 1, 2], r + i, 1) {
                changes[rank] += 1;
                let mut files = vec![on(&sim); 3];
                files[rank] = other.clone();
                let error = match imported(&run, &files) {
                    // Rank 0's file is the reference.
                    Ok(all) => {
                        assert!(rank > 0 && all == whole, "byte {at} of rank {rank}'s is taken in");
                        continue;
                    }
                    Err(error) => error.to_string(),
                };
                told[rank] += 1;
                let [from, to] = [at / GRAIN * GRAIN, bytes.len().min((at / GRAIN + 1) * GRAIN)];
                assert!(
                    error.contains(&format!("bytes {from} to {to} of {FILE} are not those")),
                    "{at}: {error}"
                );
                assert!(rank == 0 || error.starts_with(&format!("on rank {rank}: ")), "{error}");
            }
        }
        assert!(told[0] == changes[0] && (!long() || told[1] > 2 && told[2] > 2), "{told:?}");
        // Each replica needs the whole file.
        assert!(run.options.stage != Stage::Replicated || told == changes, "{told:?} of {changes:?}");
    }
}

#[test]
fn rank_0_reads_all_of_the_file_once() {
    let mut drawn = draws(1);
    for run in runs().into_iter().filter(|_| drawn()) {
        let (sim, whole) = {
            let sim = exported(&run);
            let whole = imported(&run, &vec![on(&sim); 3]).unwrap();
            (sim, whole)
        };
        let len = sim.bytes(Path::new(FILE)).len() as u64;
        let read: [Arc<AtomicU64>; 3] = Default::default();
        let files = read.each_ref().map(|read| PyTorchFile::on(Arc::new(counting(&sim, read)), FILE));
        assert!(imported(&run, &files).unwrap() == whole);
        for (rank, read) in read.iter().map(|read| read.load(SeqCst)).enumerate() {
            // Vectors of a parameter lie apart, and each part has two ends.
            let most = len + if run.options.stage == Stage::Replicated { len / 2 } else { len };
            assert!(
                read < most && (rank > 0 || read >= len),
                "rank {rank} of {:?}: {read} of {len}",
                run.options.stage
            );
        }
    }
}

#[test]
fn every_refusal_of_a_disk_is_one_error() {
    let run = Run { lens: vec![70_000, 3], ranks: 2, ..Run::default() }.stage(Stage::Zero3);
    let sim = exported(&run);
    let mut drawn = draws(1);
    for rank in (0..2).filter(|_| drawn()) {
        let mut refused = 0;
        loop {
            let disk = Faulty::new(sim.clone(), false, ErrorKind::PermissionDenied);
            disk.after(refused);
            let mut files = vec![on(&sim); 2];
            files[rank] = PyTorchFile::on(disk.disk(), FILE);
            let Err(error) = imported(&run, &files) else { break };
            let error = error.to_string();
            assert!(
                error.starts_with(&format!("on rank {rank}: ")) && error.contains("as was asked for"),
                "{error}"
            );
            refused += 1;
        }
        assert!(refused > 5, "{refused}");
    }
}

/// Returns a disk that counts the bytes read.
fn counting(sim: &Sim, read: &Arc<AtomicU64>) -> Hooked<Sim> {
    let read = Arc::clone(read);
    Hooked::new(sim.clone(), move |call| {
        if let Call::Read(_, bytes) = call {
            read.fetch_add(bytes as u64, SeqCst);
        }
        Ok(())
    })
}

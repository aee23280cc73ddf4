//! State without PyTorch names, and files with other contents, are one error on all ranks, and change nothing.

use crate::bytes;
use crate::common::{Run, WhichRule, name};
use crate::faulty::Faulty;
use crate::layouts::train;
use crate::pytorch::{DIR, FILE, on, read};
use crate::whole::part;
use meshstep_cases::stride;
use meshstep_checkpoint::pytorch::{Import, PyTorchFile};
use meshstep_checkpoint::{self as checkpoint, Disk};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::loopback::spawn;
use meshstep_shard::Stage;
use rand::prelude::*;
use std::io::ErrorKind;
use std::path::Path;

type Entry = (String, String, Vec<u64>, Vec<u8>);

fn run() -> Run {
    Run { ranks: 2, lens: vec![6, 5], ..Run::default() }.stage(Stage::Zero1)
}

fn exported(run: &Run) -> Sim {
    let sim = Sim::new(DIR);
    let done = spawn(run.ranks, |comm| {
        let mut opt = run.build(comm).unwrap();
        train(run, &mut opt, 1..4);
        checkpoint::export_pytorch(&mut opt, &on(&sim), 0).unwrap();
    });
    done.unwrap();
    sim
}

/// Returns the error of all ranks that import the file. Nothing must change.
fn refused(run: &Run, sim: &Sim, import: Import) -> String {
    bytes::told(run, |opt| checkpoint::import_pytorch(opt, &on(sim), import).map(drop))
}

fn write(sim: &Sim, entries: &[Entry]) {
    let (mut header, mut data) = (Vec::new(), Vec::new());
    for (key, dtype, shape, bytes) in entries {
        let from = data.len();
        data.extend(bytes);
        let to = data.len();
        header.push(format!(
            "{key:?}:{{\"dtype\":{dtype:?},\"shape\":{shape:?},\"data_offsets\":[{from},{to}]}}"
        ));
    }
    write_raw(sim, &format!("{{{}}}", header.join(",")), &data);
}

fn write_raw(sim: &Sim, header: &str, data: &[u8]) {
    sim.damage(Path::new(FILE), |file| {
        *file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat();
    });
}

fn entries(sim: &Sim) -> Vec<Entry> {
    read(sim).into_iter().map(|(key, (dtype, shape, bytes))| (key, dtype, shape, bytes)).collect()
}

#[test]
fn what_a_file_says_otherwise_is_told_by_name() {
    let run = run();
    let (sim, strict) = (exported(&run), Import::default());
    let sound = entries(&sim);
    let key = |key: &str| sound.iter().position(|entry| entry.0 == key).unwrap();
    type Edit<'a> = Box<dyn Fn(&mut Vec<Entry>) + 'a>;
    let drop_key = |of: &'static str| -> Edit<'_> { Box::new(move |all| drop(all.remove(key(of)))) };
    let step = |value: f32| -> Edit<'_> {
        Box::new(move |all| all[key("state.p0.step")].3 = value.to_le_bytes().to_vec())
    };
    let typed = |of: &'static str, dtype: &'static str, size: usize| -> Edit<'_> {
        Box::new(move |all| {
            let entry = &mut all[key(of)];
            (entry.1, entry.3) = (dtype.to_owned(), vec![0; size * 6]);
        })
    };
    let table: Vec<(Edit<'_>, &str)> = vec![
        (drop_key("p1"), "no entry \"p1\""),
        (drop_key("state.p1.exp_avg"), "no entry \"state.p1.exp_avg\""),
        (drop_key("state.p1.step"), "no entry \"state.p1.step\""),
        (Box::new(|all| all[key("p1")].0 = "q".to_owned()), "no entry \"p1\""),
        (
            Box::new(|all| all.push(("state.p0.sum".to_owned(), "F32".to_owned(), vec![1], vec![0; 4]))),
            "the file has \"state.p0.sum\", which is not here",
        ),
        (Box::new(|all| all[key("p0")].2 = vec![2, 3]), "\"p0\" has shape [2, 3] in the file, and [6] here"),
        (typed("p0", "F64", 8), "\"p0\" is F64 in the file, and F32 here"),
        (typed("state.p0.exp_avg", "I32", 4), "\"state.p0.exp_avg\" is I32 in the file"),
        (typed("p0", "U16", 2), "\"p0\" is U16 in the file"),
        (step(1.5), "\"state.p0.step\" is 1.5, which is no count"),
        (step(-1.0), "is -1, which is no count"),
        (step(f32::NAN), "is NaN, which is no count"),
        (step(f32::INFINITY), "is inf, which is no count"),
        (step(1e30), "which is no count"),
        (
            Box::new(|all| {
                let step = &mut all[key("state.p0.step")];
                (step.2, step.3) = (vec![2], vec![0; 8]);
            }),
            "\"state.p0.step\" has shape [2] in the file, and [] here",
        ),
        (typed("state.p0.step", "BF16", 0), "has 0 bytes"),
    ];
    for (edit, text) in table {
        let mut edited = sound.clone();
        edit(&mut edited);
        write(&sim, &edited);
        let error = refused(&run, &sim, strict);
        assert!(error.starts_with("on rank 0: ") && error.contains(text), "{error} says {text}");
    }
    // The file has no state, as one of a model. `fresh` imports it.
    write(&sim, &sound.iter().filter(|entry| !entry.0.starts_with("state.")).cloned().collect::<Vec<_>>());
    assert!(refused(&run, &sim, strict).contains("begins anew with `fresh`"));
    write(&sim, &sound.iter().filter(|entry| !entry.0.starts_with("state.p1.")).cloned().collect::<Vec<_>>());
    assert!(refused(&run, &sim, strict).contains("\"state.p1.exp_avg\""));
    let fresh = spawn(2, |comm| {
        let mut opt = run.build(comm).unwrap();
        train(&run, &mut opt, 1..2);
        let imported =
            checkpoint::import_pytorch(&mut opt, &on(&sim), Import { fresh: true, steps: None }).unwrap();
        (imported.fresh, imported.steps, opt.state("p0").unwrap().t, opt.state("p1").unwrap().t, part(&opt))
    });
    let fresh = fresh.unwrap();
    assert_eq!((&fresh[0].0, fresh[0].1, fresh[0].2, fresh[0].3), (&vec![name(1)], 3, 3, 0));
    let zero = |part: &crate::whole::Whole| {
        part.tensors["p1"].1.get("m").is_none_or(|m| m.values().iter().all(|&b| b == 0))
    };
    assert!(fresh.iter().all(|(.., part)| zero(part)), "moments begin anew");
}

#[test]
fn a_header_that_contradicts_itself_is_refused() {
    let run = run();
    let sim = exported(&run);
    let path = Path::new(FILE);
    let mut sound = Vec::new();
    sim.damage(path, |file| sound = file.clone());
    for at in (0..sound.len()).step_by(stride(3)) {
        sim.damage(path, |file| *file = sound[..at].to_vec());
        let error = refused(&run, &sim, Import::default());
        assert!(error.contains("is no safetensors file"), "{error}");
    }
    sim.damage(path, |file| *file = [&sound[..], &[0]].concat());
    assert!(refused(&run, &sim, Import::default()).contains("cut short"));
    let entry =
        |from: u64, to: u64| format!("{{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[{from},{to}]}}");
    let (a, b) = (entry(0, 24), entry(24, 48));
    let huge = "{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,24]}";
    let table = [
        (format!("{{\"p0\":{a},\"p0\":{b}}}"), "\"p0\" is there twice"),
        (format!("{{\"p0\":{a},\"p1\":{a}}}"), "begins at 24"),
        (format!("{{\"p0\":{},\"p1\":{b}}}", entry(0, 20)), "has 20 bytes"),
        (format!("{{\"p0\":{a},\"p1\":{}}}", entry(28, 48)), "begins at 24"),
        (format!("{{\"p0\":{},\"p1\":{b}}}", entry(24, 0)), "begins at 0"),
        (format!("{{\"p0\":{},\"p1\":{b}}}", entry(0, u64::MAX)), "bytes"),
        (format!("{{\"p0\":{huge},\"p1\":{b}}}"), "has 24 bytes"),
        ("{\"p0\":7}".to_owned(), "invalid type"),
        ("[]".to_owned(), "an object of vectors"),
    ];
    for (header, text) in table {
        write_raw(&sim, &header, &[0; 48]);
        let error = refused(&run, &sim, Import::default());
        assert!(error.contains("is no safetensors file") && error.contains(text), "{error} says {text}");
    }
    sim.damage(path, |file| *file = [&u64::MAX.to_le_bytes()[..], &[0; 40]].concat());
    assert!(refused(&run, &sim, Import::default()).contains("does not fit in its 48"));
    sim.forget(path);
    assert!(refused(&run, &sim, Import::default()).contains("opening"));
}

#[test]
fn rules_that_pytorch_has_not_are_refused_on_all_ranks() {
    let table = [
        (WhichRule::Lion, "none of adam"),
        (WhichRule::Adopt, "its rule, adopt"),
        (WhichRule::Lamb, "its rule, lamb"),
        (WhichRule::Lars, "its rule, lars"),
        (WhichRule::QhAdamW, "its rule, qhadamw"),
        (WhichRule::SgdAverage, "the momentum of \"p0\" is not what PyTorch's SGD keeps"),
        (WhichRule::SgdLrInside, "the momentum of \"p0\" is not what PyTorch's SGD keeps"),
    ];
    for (rule, text) in table {
        let (run, sim) = (Run { rule, ..run() }, exported(&run()));
        let before = read(&sim);
        let refused = refused(&run, &sim, Import::default());
        assert!(refused.contains(text), "{refused}");
        let errors = spawn(2, |comm| {
            let mut opt = run.build(comm).unwrap();
            let error = checkpoint::export_pytorch(&mut opt, &on(&sim), 1).unwrap_err().to_string();
            train(&run, &mut opt, 1..2);
            error
        });
        assert!(errors.unwrap().iter().all(|error| *error == refused), "{refused}");
        assert!(read(&sim) == before && sim.files() == [Path::new(FILE)], "what was there is there");
    }
}

/// Each call of the writer's disk is refused in turn: the old file stays. Without a refusal the new file is there.
#[test]
fn every_refusal_of_a_disk_leaves_the_file_of_before() {
    let run = run();
    let sim = exported(&run);
    let before = read(&sim);
    let calls = spawn(2, |comm| {
        let disk = Faulty::new(sim.clone(), false, ErrorKind::StorageFull);
        let mut opt = run.build(comm).unwrap();
        train(&run, &mut opt, 1..2);
        for calls in 0.. {
            disk.after(if opt.comm().rank() == 1 { calls } else { usize::MAX });
            let done = checkpoint::export_pytorch(&mut opt, &PyTorchFile::on(disk.disk(), FILE), 1);
            let Err(error) = done else { return calls };
            assert!(
                error.to_string().starts_with("on rank 1: ")
                    && error.to_string().contains("as was asked for")
            );
            if opt.comm().rank() == 1 {
                assert_eq!(sim.files(), [Path::new(FILE)], "call {calls}: nothing else is left");
            }
            // The last call syncs the new name.
            assert!(
                error.to_string().contains("syncing /run:") || read(&sim) == before,
                "call {calls}: {error}"
            );
        }
        0
    });
    let calls = calls.unwrap();
    assert!(calls[0] == calls[1] && calls[0] > 9, "{calls:?}");
    assert!(read(&sim) != before);
    assert_eq!(sim.files(), [Path::new(FILE)], "nothing else is left");
    let mut random = StdRng::seed_from_u64(1);
    for _ in 0..50 {
        assert!(read(&sim.crashed(sim.events(), &mut random)) == read(&sim), "a crash takes nothing back");
    }
    // The remains of an attempt before a crash are no obstacle.
    sim.create(&Path::new(FILE).with_extension("safetensors.tmp")).unwrap();
    let again = spawn(1, |comm| {
        let run = Run { ranks: 1, ..run.clone() };
        checkpoint::export_pytorch(&mut run.build(comm).unwrap(), &on(&sim), 0).unwrap();
    });
    again.unwrap();
    assert_eq!(sim.files(), [Path::new(FILE)]);
}

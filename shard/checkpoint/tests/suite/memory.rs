//! Memory that a save needs beside the state, as the operating system counts it.
#![cfg(target_os = "linux")]

use crate::common::{adamw, alone, long, turns};
use meshstep_cases::{Effort, effort};
use meshstep_checkpoint::{self as checkpoint, Save, Store};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::Sgd;
use meshstep_shard::{Groups, Optimizer, Options, Stage, StepArgs};
use meshstep_tensor::{DType, Layout, Meter};
use std::process::Command;
use std::sync::Arc;

/// Folder to save to, set if this binary runs as the child.
const DIR: &str = "MESHSTEP_TEST_LARGE";
/// Maximum memory of a rank beside its state.
const WINDOWS: usize = 2 * (16 << 20);
/// Allowance for the system and for threads.
const SLACK: usize = 6 << 20;

/// Number of ranks; a tenth of the tests takes one, which may have half as much memory.
fn ranks() -> usize {
    if effort() == Effort::Tenth { 1 } else { 2 }
}

/// Number of saved vectors of each parameter; in a long run two moments are among them.
fn vectors() -> usize {
    if long() { 3 } else { 1 }
}

/// Total size in bytes. One vector of the long parameter is more than a save may take.
fn state() -> usize {
    match effort() {
        Effort::Tenth => 48 << 20,
        Effort::Normal => 84 << 20,
        Effort::Long => 256 << 20,
    }
}

/// Length of all parameters in elements.
fn len() -> usize {
    state() / 4 / vectors()
}

/// Returns the bytes in a line of the process's status.
fn status(line: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let found = text.lines().find_map(|text| text.strip_prefix(line)).unwrap();
    found.trim_matches(|c: char| !c.is_ascii_digit()).parse::<usize>().unwrap() << 10
}

/// Makes a few long vectors and many short ones.
fn build(comm: Arc<dyn Communicator>, stage: Stage) -> Optimizer {
    let short = 200 * 5_000;
    let layout = (0..200)
        .fold(Layout::builder(), |layout, i| layout.param(format!("short.{i}"), &[5_000], DType::F32));
    let layout = layout.param("long", &[len() - short], DType::F32).build().unwrap();
    let options = Options { stage, meter: Meter::new(), ..Options::default() };
    let fill = |_: &meshstep_tensor::Param, mut values: meshstep_tensor::SliceMut<'_>| {
        values.typed_mut::<f32>()?.fill(1.5);
        Ok(())
    };
    let groups = if long() { Groups::new(adamw()) } else { Groups::new(Sgd::default()) };
    Optimizer::new(comm, layout, groups, fill, options).unwrap()
}

fn step(opt: &mut Optimizer) {
    let grad = vec![1.0f32; len()];
    let names: Vec<(String, usize)> = opt.params().map(|p| (p.name().to_owned(), p.len())).collect();
    let mb = opt.micro_batch(1).unwrap();
    names.iter().for_each(|(name, len)| mb.grad(name, &grad[..*len]).unwrap());
    mb.finish().unwrap();
    opt.step(StepArgs { lr: 0.01, ..StepArgs::default() }).unwrap().outcome().unwrap();
}

/// Does nothing in a run of tests.
#[test]
fn child() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let store = Store::new(dir);
    for (number, stage) in turns(&[(1, Stage::Zero1), (2, Stage::Zero3)], 0, 1) {
        let told = loopback::spawn(ranks(), |comm| {
            let mut opt = build(Arc::clone(&comm), stage);
            // Pages that were never written do not count.
            step(&mut opt);
            comm.barrier().unwrap();
            let before = status("VmRSS:");
            if comm.rank() == 0 && std::fs::write("/proc/self/clear_refs", "5").is_err() {
                println!("\nskipped: this system counts no peaks anew");
                std::process::exit(0);
            }
            comm.barrier().unwrap();
            checkpoint::save(&mut opt, &store, Save { step: Some(number), keep: Some(1), ..Save::default() })
                .unwrap();
            comm.barrier().unwrap();
            let most = status("VmHWM:");
            comm.barrier().unwrap();
            (before, most)
        });
        let (before, most) = told.unwrap()[0];
        assert!(before > state() && most >= before, "{before} {most}");
        let more = most - before;
        println!("{stage:?}: {more} bytes beside {before}");
        assert!(more <= ranks() * WINDOWS + SLACK, "{stage:?}: {more} bytes beside {before}");
        let stored: u64 = store.latest().unwrap().manifest().stored().map(|(_, stored)| stored.bytes).sum();
        assert!(stored > state() as u64 - (1 << 20));
    }
    println!("\nmeasured");
}

#[test]
fn a_save_takes_two_windows_of_each_rank_at_most() {
    let dir = tempfile::tempdir().unwrap();
    let told = alone("memory::child", Command::new(std::env::current_exe().unwrap()).env(DIR, dir.path()));
    println!("{told}");
    assert!(told.contains("\nmeasured") || told.contains("\nskipped:"), "{told}");
}

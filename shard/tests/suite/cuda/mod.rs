//! The same steps on GPUs, through NCCL, as on loopback: on real GPUs, or on the stand-ins (`cargo xtask ci --only standin`).

mod among;
mod apart;
#[cfg(feature = "checkpoint")]
mod checkpoint;
#[cfg(feature = "checkpoint")]
mod consolidate;
mod disagreement;
mod equality;
mod events;
mod failing;
mod graph;
mod launches;
mod lbfgs;
mod missing;
mod pair;
mod propagate;
mod ranks;
mod reads;
mod replicas;
mod shared;
mod verify;
mod windows;

use crate::common::{End, PRECISIONS, Run, WhichRule, long, turns};
use meshstep_comm::nccl;
use meshstep_optim::Norm;
use meshstep_shard::{Optimizer, Options};
use meshstep_tensor::cuda::{self, Stream};
use meshstep_tensor::{Meter, Queue};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Lock held by every test: the order of work is chosen for the whole process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the number of devices; prints a skip message without one, and fails if REQUIRE_GPU=1.
fn devices() -> usize {
    let missing = match (cuda::probe(), nccl::probe()) {
        (Ok(driver), Ok(_)) => return driver.devices,
        (Err(missing), _) => missing.to_string(),
        (_, Err(missing)) => missing.to_string(),
    };
    assert!(std::env::var_os("REQUIRE_GPU").is_none(), "{missing}");
    println!("skipped: {missing}");
    0
}

fn stand_in() -> bool {
    devices() > 0 && cuda::probe().unwrap().stand_in && nccl::probe().unwrap().stand_in
}

fn seed(seed: u64) {
    type Seed = extern "C" fn(u64);
    // SAFETY: the stand-in is loaded and stays, and documents this type.
    unsafe {
        let driver = libloading::Library::new("libcuda.so.1").unwrap();
        driver.get::<Seed>(b"meshstep_standin_seed").unwrap()(seed);
    }
}

/// Returns true if every combination is tried: in a long run, and on real GPUs, which are quick.
fn all() -> bool {
    long() || !stand_in()
}

/// Returns [`turns`] on the stand-ins, all entries on real GPUs.
fn some<T: Copy>(of: &[T], first: usize, normal: u32) -> impl Iterator<Item = T> {
    turns(of, first, if all() { of.len() as u32 } else { normal })
}

/// Returns true if `ranks` ranks can run: each on its own device, or several on a stand-in device.
fn room_for(ranks: usize) -> bool {
    let room = devices() >= ranks || stand_in();
    if !room {
        println!("skipped: {ranks} ranks, {} devices", devices());
    }
    room
}

/// Runs on GPUs; all ranks must end alike, and leave no memory behind.
fn on_gpus(run: &Run) -> End {
    let devices: Vec<usize> = (0..run.ranks).map(|rank| rank % devices()).collect();
    let options = nccl::Options { check: false, ..nccl::Options::default() };
    let ends = nccl::spawn(&devices, options, |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let run = Run { options: Options { queue, ..run.options.clone() }, ..run.clone() };
        run.on_rank(comm).unwrap()
    });
    let ends = ends.unwrap();
    assert!(ends.iter().all(|end| *end == ends[0]), "ranks end apart: {run:?}");
    ends.into_iter().next().unwrap()
}

#[test]
fn what_a_gpu_cannot_do_is_refused_at_construction() {
    let _alone = alone();
    if !room_for(1) {
        return;
    }
    let base = Run { ranks: 1, ..Run::default() };
    let with = |options: Options| Run { options, ..base.clone() };
    let options = || base.options.clone();
    let cases = [
        (Run { rule: WhichRule::Lamb, ..base.clone() }, "lamb has no CUDA kernels"),
        (Run { rule: WhichRule::Lars, ..base.clone() }, "lars has no CUDA kernels"),
        (with(Options { norm: Norm::P(3.0), ..options() }), "on a GPU"),
    ];
    let told = nccl::spawn(&[0], nccl::Options::default(), |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let comm: std::sync::Arc<dyn meshstep_comm::Communicator> = comm;
        let refused = |(run, _): &(Run, &str)| {
            let run = Run { options: Options { queue: queue.clone(), ..run.options.clone() }, ..run.clone() };
            run.build(comm.clone()).map(|_: Optimizer| ()).unwrap_err().to_string()
        };
        cases.iter().map(refused).collect::<Vec<_>>()
    });
    for (told, (run, expected)) in told.unwrap()[0].iter().zip(&cases) {
        assert!(told.to_lowercase().contains(&expected.to_lowercase()), "{:?}: {told}", run.rule);
    }
}

#[test]
fn memory_is_counted_and_given_back() {
    let _alone = alone();
    if !room_for(1) {
        return;
    }
    let meter = Meter::new();
    let run = Run { ranks: 1, ..Run::default() };
    nccl::spawn(&[0], nccl::Options::default(), |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let options = Options { queue, meter: meter.clone(), ..run.options.clone() };
        let zeros = |_: &meshstep_tensor::Param, _: meshstep_tensor::SliceMut<'_>| Ok(());
        let mut optimizer = Optimizer::new(comm, run.layout(), run.groups(), zeros, options).unwrap();
        run.hand_over(&mut optimizer, 1, 0).unwrap_err();
        assert!(meter.live_total() > 0);
    })
    .unwrap();
    assert_eq!(meter.live_total(), 0);
}

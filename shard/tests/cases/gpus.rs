//! Ranks on GPUs, or on the stand-ins for driver and NCCL (`cargo xtask ci --only standin`).

use crate::{Run, long, turns};
use meshstep_comm::{Communicator, loopback, nccl};
use meshstep_shard::Options;
use meshstep_tensor::Queue;
use meshstep_tensor::cuda::{self, Stream};
use std::ffi::{CStr, c_char};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Long enough for calls that succeed, short enough to notice a rank that waits.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// Lock held by every test: the order of work is chosen for the whole process.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the number of devices; prints a skip message without one, and fails if REQUIRE_GPU=1.
#[expect(clippy::print_stdout, reason = "a test says that it is skipped")]
pub fn devices() -> usize {
    let missing = match (cuda::probe(), nccl::probe()) {
        (Ok(driver), Ok(_)) => return driver.devices,
        (Err(missing), _) => missing.to_string(),
        (_, Err(missing)) => missing.to_string(),
    };
    assert!(std::env::var_os("REQUIRE_GPU").is_none(), "{missing}");
    println!("skipped: {missing}");
    0
}

/// Returns true on the stand-ins.
pub fn stand_in() -> bool {
    devices() > 0 && cuda::probe().unwrap().stand_in && nccl::probe().unwrap().stand_in
}

/// Sets the order of work of the stand-in.
pub fn seed(seed: u64) {
    type Seed = extern "C" fn(u64);
    // SAFETY: the stand-in is loaded and stays, and documents this type.
    unsafe {
        let driver = libloading::Library::new("libcuda.so.1").unwrap();
        driver.get::<Seed>(b"meshstep_standin_seed").unwrap()(seed);
    }
}

/// Makes the next call of a function of the stand-in fail with `code`.
pub fn fail(function: &CStr, code: i32) {
    type Fail = extern "C" fn(*const c_char, i32);
    // SAFETY: the stand-in is loaded and stays, and documents this type.
    unsafe {
        let driver = libloading::Library::new("libcuda.so.1").unwrap();
        driver.get::<Fail>(b"meshstep_standin_fail").unwrap()(function.as_ptr(), code);
    }
}

/// Returns [`turns`], or all entries in a long run. NCCL takes most of a second to start, and each combination starts it.
pub fn some<T: Copy>(of: &[T], first: usize, normal: u32) -> impl Iterator<Item = T> {
    turns(of, first, if long() { of.len() as u32 } else { normal })
}

/// Returns true if `ranks` ranks can run: each on its own device, or several on a stand-in device.
#[expect(clippy::print_stdout, reason = "a test says that it is skipped")]
pub fn room_for(ranks: usize) -> bool {
    let room = devices() >= ranks || stand_in();
    if !room {
        println!("skipped: {ranks} ranks, {} devices", devices());
    }
    room
}

/// Runs `body` on a GPU for each rank.
pub fn on_ranks<T: Send>(run: &Run, body: impl Fn(Arc<dyn Communicator>, &Run) -> T + Sync) -> Vec<T> {
    let devices: Vec<usize> = (0..run.ranks).map(|rank| rank % devices()).collect();
    let options = nccl::Options { check: false, ..nccl::Options::default() };
    let ranks = nccl::spawn(&devices, options, |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let run = Run { options: Options { queue, ..run.options.clone() }, ..run.clone() };
        body(comm, &run)
    });
    ranks.unwrap()
}

/// Runs `body` on GPUs or on the CPU.
pub fn on<T: Send>(gpus: bool, run: &Run, body: impl Fn(Arc<dyn Communicator>, &Run) -> T + Sync) -> Vec<T> {
    if gpus { on_ranks(run, body) } else { loopback::spawn(run.ranks, |comm| body(comm, run)).unwrap() }
}

/// Runs `body` on two ranks; neither may wait for its deadline.
pub fn two<T: Send>(body: impl Fn(Run, Arc<nccl::Nccl>) -> T + Sync) -> Vec<T> {
    let options = nccl::Options { deadline: DEADLINE, ..nccl::Options::default() };
    let began = Instant::now();
    let ends = nccl::spawn(&[0, 1 % devices()], options, |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let base = Run { ranks: 2, ..Run::default() };
        body(Run { options: Options { queue, ..base.options.clone() }, ..base }, comm)
    });
    assert!(began.elapsed() < DEADLINE, "a rank waited for one that did not come");
    ends.unwrap()
}

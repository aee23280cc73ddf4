//! Test bench: devices, ranks as threads, injected failures.

use meshstep_comm::nccl::{self, Nccl, Options};
use meshstep_comm::{Communicator, Error};
use meshstep_tensor::cuda::{self, Stream};
use meshstep_tensor::{Buffer, Category, Element, Meter, Queue};
use std::ffi::{CStr, CString, c_char};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Held by every test: plans, seeds and aborts affect the whole process.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns true if there are this many devices, and NCCL; otherwise prints a note, or fails without any device under
/// REQUIRE_GPU=1.
pub(crate) fn available(devices: usize) -> bool {
    let missing = match (cuda::probe(), nccl::probe()) {
        (Ok(driver), Ok(_)) if driver.devices >= devices => return true,
        (Ok(driver), Ok(_)) => {
            println!("skipped: needs {devices} devices, and there are {}", driver.devices);
            return false;
        }
        (Err(missing), _) => missing.to_string(),
        (_, Err(missing)) => missing.to_string(),
    };
    assert!(std::env::var_os("REQUIRE_GPU").is_none(), "{missing}");
    println!("skipped: {missing}");
    false
}

pub(crate) fn stand_in(devices: usize) -> bool {
    let stand_in = available(devices) && nccl::probe().unwrap().stand_in && cuda::probe().unwrap().stand_in;
    if !stand_in {
        println!("skipped: needs the stand-ins");
    }
    stand_in
}

/// Returns true if this NCCL has factors.
pub(crate) fn multiplies() -> bool {
    nccl::probe().unwrap().version >= 21_100
}

fn in_stand_in<F: Copy>(library: &str, name: &str) -> F {
    // SAFETY: the stand-in is loaded and stays; each caller names the type that it documents.
    unsafe { *libloading::Library::new(library).unwrap().get::<F>(name.as_bytes()).unwrap() }
}

/// Chooses the order of work.
pub(crate) fn seed(seed: u64) {
    in_stand_in::<extern "C" fn(u64)>("libcuda.so.1", "meshstep_standin_seed")(seed);
}

/// Plans a failure, once.
pub(crate) fn plan(text: &str) {
    let text = CString::new(text).unwrap();
    in_stand_in::<extern "C" fn(*const c_char)>("libnccl.so.2", "meshstep_standin_nccl")(text.as_ptr());
}

/// Makes the next call of a driver function return this error without effect.
pub(crate) fn fail(function: &CStr, code: i32) {
    type Fail = extern "C" fn(*const c_char, i32);
    in_stand_in::<Fail>("libcuda.so.1", "meshstep_standin_fail")(function.as_ptr(), code);
}

/// Returns the number of communicators that NCCL has not freed.
pub(crate) fn comms() -> usize {
    in_stand_in::<extern "C" fn() -> usize>("libnccl.so.2", "meshstep_standin_comms")()
}

/// Returns the numbers of windows and of NCCL allocations.
pub(crate) fn windows() -> (u32, u32) {
    let both = in_stand_in::<extern "C" fn() -> u64>("libnccl.so.2", "meshstep_standin_windows")();
    (both as u32, (both >> 32) as u32)
}

/// Returns the result of a function of the stand-in for NCCL.
pub(crate) fn nccl_function<F: Copy>(name: &str) -> F {
    in_stand_in("libnccl.so.2", name)
}

/// Returns the number of graphs that can be launched.
pub(crate) fn graphs() -> usize {
    in_stand_in::<extern "C" fn() -> usize>("libcuda.so.1", "meshstep_standin_graphs")()
}

/// Runs ranks as threads, on the first devices.
pub(crate) fn ranks<T: Send>(n: usize, options: &Options, body: impl Fn(Arc<Nccl>) -> T + Sync) -> Vec<T> {
    nccl::spawn(&(0..n).collect::<Vec<_>>(), options.clone(), body).unwrap()
}

pub(crate) fn options(deadline: Duration) -> Options {
    Options { deadline, check: false, ..Options::default() }
}

/// A minute: longer than any passing test.
pub(crate) fn patient() -> Options {
    options(Duration::from_secs(60))
}

/// A rank's own stream, and its buffers there.
pub(crate) struct Rank {
    pub(crate) comm: Arc<Nccl>,
    pub(crate) queue: Queue,
    pub(crate) meter: Meter,
}

impl Rank {
    pub(crate) fn new(comm: Arc<Nccl>) -> Self {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        Rank { comm, queue, meter: Meter::new() }
    }

    pub(crate) fn dyn_comm(&self) -> &dyn Communicator {
        &*self.comm
    }

    /// Uploads values to the device; returns once they are there.
    pub(crate) fn buffer<T: Element>(&self, values: &[T]) -> Buffer {
        let zeros = Buffer::zeroed_on(&self.queue, values.len(), T::DTYPE, &self.meter, Category::Grads);
        let mut buffer = zeros.unwrap();
        self.queue.upload(values.into(), buffer.as_mut()).unwrap();
        self.queue.synchronize().unwrap();
        buffer
    }

    pub(crate) fn read<T: Element + Default + Clone>(&self, buffer: &Buffer) -> Vec<T> {
        let mut values = vec![T::default(); buffer.len()];
        self.queue.download(buffer.as_slice(), (&mut values[..]).into()).unwrap();
        values
    }

    /// Sums one number over all ranks.
    pub(crate) fn sum(&self, x: f32) -> Result<f32, Error> {
        let mut buffer = self.buffer(&[x]);
        self.dyn_comm().all_reduce(&mut buffer, meshstep_comm::Reduction::Sum)?;
        Ok(self.read::<f32>(&buffer)[0])
    }
}

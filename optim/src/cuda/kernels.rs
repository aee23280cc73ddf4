//! Kernels: loaded on a device when they are first asked for, and kept as long as the process.

use super::THREADS;
use super::texts::{Code, codes};
use crate::Error;
use meshstep_tensor::cuda::{self, Device, Footprint, Function, Module, Stream};
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A kernel of ours on one device.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    function: Function,
    /// Blocks that keep the device busy.
    resident: u32,
}

/// A kernel that is loaded.
struct Loaded {
    ordinal: usize,
    name: String,
    kernel: Kernel,
    took: Duration,
}

/// What is loaded, in the order it was asked for.
static LOADED: Mutex<Vec<Loaded>> = Mutex::new(Vec::new());

/// A kernel that this process has loaded on a device.
#[derive(Clone, Debug)]
pub struct LoadedKernel {
    /// Its name.
    pub name: String,
    /// How long loading took: unpacking, and the driver's compiler where it was given PTX it had not kept.
    pub took: Duration,
    /// The driver's account of it, in blocks of [`THREADS`].
    pub footprint: Footprint,
}

/// The kernels that are loaded on a device so far.
pub fn loaded_kernels(device: &Device) -> Result<Vec<LoadedKernel>, Error> {
    let loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let here = loaded.iter().filter(|loaded| loaded.ordinal == device.ordinal());
    let told = here.map(|Loaded { name, kernel, took, .. }| {
        let footprint = kernel.function.footprint(THREADS)?;
        Ok(LoadedKernel { name: name.clone(), took: *took, footprint })
    });
    told.collect()
}

impl Kernel {
    /// The kernel of this name on `device`; its name begins with that of its file.
    pub(crate) fn find(device: &Device, name: &str) -> Result<Kernel, Error> {
        if let Some(kernel) = Kernel::known(device, name) {
            return Ok(kernel);
        }
        // Without the lock: a load may wait for the device, and others must launch meanwhile.
        let begun = Instant::now();
        let kernel = Kernel::load(device, name)?;
        let took = begun.elapsed();
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.push(Loaded {
            ordinal: device.ordinal(),
            name: name.to_owned(),
            kernel: kernel.clone(),
            took,
        });
        Ok(kernel)
    }

    fn known(device: &Device, name: &str) -> Option<Kernel> {
        let loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let mut here =
            loaded.iter().filter(|loaded| loaded.ordinal == device.ordinal() && loaded.name == name);
        here.next().map(|loaded| loaded.kernel.clone())
    }

    /// Machine code comes first; text does where the driver is too old for it, or has none of it.
    fn load(device: &Device, name: &str) -> Result<Kernel, Error> {
        let mut refused = Error::from(cuda::Error::NoKernel { name: name.to_owned() });
        for code in codes(name, device.capability()?) {
            let module = match &code {
                Code::Ptx(text) => Module::load(device, text),
                // SAFETY: the build has looked at the file that it embedded, which unpacking gives whole.
                Code::Machine(cubin) => unsafe { Module::load_cubin(device, cubin) },
            };
            match module {
                Ok(module) => {
                    let function = module.function(name)?;
                    return Ok(Kernel { resident: function.resident_blocks(THREADS)?, function });
                }
                Err(error) => refused = error.into(),
            }
        }
        Err(refused)
    }

    /// Runs it on `stream`, with enough blocks for `tiles` tiles.
    ///
    /// # Safety
    /// As [`Stream::launch`]'s, for blocks of [`THREADS`] threads.
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        tiles: u64,
        arguments: &mut [*mut c_void],
    ) -> Result<(), Error> {
        let blocks = u32::try_from(tiles).unwrap_or(u32::MAX).min(self.resident);
        // SAFETY: the caller's promise.
        unsafe { stream.launch(&self.function, (blocks, THREADS), arguments)? };
        Ok(())
    }
}

/// A place to point at for a kernel's parameter.
pub(crate) fn argument<T>(value: &mut T) -> *mut c_void {
    (&raw mut *value).cast()
}

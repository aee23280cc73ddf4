//! Kernels, loaded on a device on first use and kept until the process ends.

use super::THREADS;
use super::texts::{Code, codes};
use crate::Error;
use meshstep_tensor::cuda::{self, Device, Footprint, Function, Module, Stream};
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Kernel of this crate on one device.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    function: Function,
    /// Number of blocks that the device holds at once.
    resident: u32,
    /// Largest number of blocks of a launch.
    most_blocks: u32,
}

/// Largest number of blocks of a grid.
const MOST_BLOCKS: u32 = i32::MAX as u32;

/// Entry of the table of loaded kernels.
struct Loaded {
    ordinal: usize,
    name: String,
    kernel: Kernel,
    took: Duration,
}

/// Loaded kernels, in load order.
static LOADED: Mutex<Vec<Loaded>> = Mutex::new(Vec::new());

/// Kernel that this process has loaded on a device.
#[derive(Clone, Debug)]
pub struct LoadedKernel {
    /// Name of the kernel.
    pub name: String,
    /// Load time: unpacking, and the driver's compilation if it was given PTX that it had not cached.
    pub took: Duration,
    /// Resource use reported by the driver, for blocks of [`THREADS`].
    pub footprint: Footprint,
}

/// Returns the kernels loaded on a device so far.
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
    /// Returns the kernel with this name on `device`; the name begins with that of its file.
    pub(crate) fn find(device: &Device, name: &str) -> Result<Kernel, Error> {
        if let Some(kernel) = Kernel::known(device, name) {
            return Ok(kernel);
        }
        // The lock is released: a load may wait for the device, and other threads must be able to launch meanwhile.
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

    /// Tries machine code first, then PTX if the driver is too old for the machine code or none is embedded.
    fn load(device: &Device, name: &str) -> Result<Kernel, Error> {
        let mut refused = Error::from(cuda::Error::NoKernel { name: name.to_owned() });
        for code in codes(name, device.capability()?) {
            let module = match &code {
                Code::Ptx(text) => Module::load(device, text),
                // SAFETY: the build checked the file that it embedded, and unpacking restores it in full.
                Code::Machine(cubin) => unsafe { Module::load_cubin(device, cubin) },
            };
            match module {
                Ok(module) => {
                    let function = module.function(name)?;
                    let resident = function.resident_blocks(THREADS)?;
                    return Ok(Kernel { resident, most_blocks: resident, function });
                }
                Err(error) => refused = error.into(),
            }
        }
        Err(refused)
    }

    /// Returns the kernel with launches of up to `waves` times as many blocks as the device holds at once, or with `None` of a block for
    /// each tile. A kernel from [`find`](Self::find) has one wave: the device holds all blocks at once, and each processes many tiles.
    pub(crate) fn in_waves(self, waves: Option<u32>) -> Kernel {
        let most_blocks =
            waves.map_or(MOST_BLOCKS, |waves| self.resident.saturating_mul(waves).min(MOST_BLOCKS));
        Kernel { most_blocks, ..self }
    }

    /// Runs the kernel on `stream`, with enough blocks for `tiles` tiles.
    ///
    /// # Safety
    /// Same as [`Stream::launch`], for blocks of [`THREADS`] threads.
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        tiles: u64,
        arguments: &mut [*mut c_void],
    ) -> Result<(), Error> {
        let blocks = u32::try_from(tiles).unwrap_or(u32::MAX).min(self.most_blocks);
        // SAFETY: the caller's promise.
        unsafe { stream.launch(&self.function, (blocks, THREADS), arguments)? };
        Ok(())
    }
}

/// Returns the pointer to a kernel argument.
pub(crate) fn argument<T>(value: &mut T) -> *mut c_void {
    (&raw mut *value).cast()
}

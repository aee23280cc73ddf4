//! Kernels: loaded on a device when they are first asked for, and kept as long as the process.

use super::THREADS;
use super::texts::{Code, code};
use crate::Error;
use meshstep_tensor::cuda::{self, Device, Function, Module, Stream};
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

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
}

impl Kernel {
    /// The kernel of this name on `device`; its name begins with that of its file.
    pub(crate) fn find(device: &Device, name: &str) -> Result<Kernel, Error> {
        static LOADED: Mutex<Vec<Loaded>> = Mutex::new(Vec::new());
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let here = |l: &&Loaded| l.ordinal == device.ordinal() && l.name == name;
        if let Some(known) = loaded.iter().find(here) {
            return Ok(known.kernel.clone());
        }
        let kernel = Kernel::load(device, name)?;
        loaded.push(Loaded { ordinal: device.ordinal(), name: name.to_owned(), kernel: kernel.clone() });
        Ok(kernel)
    }

    fn load(device: &Device, name: &str) -> Result<Kernel, Error> {
        let code = code(name, device.capability()?);
        let module = match code.ok_or_else(|| cuda::Error::NoKernel { name: name.to_owned() })? {
            Code::Ptx(text) => Module::load(device, &text)?,
            // SAFETY: the build has embedded a file that ptxas wrote, and unpacking it gives as many bytes.
            Code::Machine(cubin) => unsafe { Module::load_cubin(device, &cubin)? },
        };
        let function = module.function(name)?;
        Ok(Kernel { resident: function.resident_blocks(THREADS)?, function })
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

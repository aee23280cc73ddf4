//! Kernels that the benchmark launches directly, from embedded PTX.

use super::Result;
use super::race::stream;
use meshstep_tensor::Queue;
use meshstep_tensor::cuda::{Function, Module};
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// Loaded PTX modules, shared by the rows that use the same PTX.
static LOADED: Mutex<Vec<(&'static str, Module)>> = Mutex::new(Vec::new());

pub(crate) struct Kernel {
    function: Function,
    threads: u32,
    /// Number of blocks that fit on the device at the same time.
    pub(crate) resident: u32,
}

impl Kernel {
    /// Loads the kernel `name` of `ptx`, for blocks of `threads` threads.
    pub(crate) fn load(ptx: &'static str, name: &str, threads: u32, queue: &Queue) -> Result<Self> {
        let function = module(ptx, queue)?.function(name)?;
        Ok(Kernel { resident: function.resident_blocks(threads)?, function, threads })
    }

    /// Launches `blocks` blocks.
    ///
    /// # Safety
    /// As for [`Stream::launch`](meshstep_tensor::cuda::Stream::launch).
    pub(crate) unsafe fn launch(
        &self,
        blocks: u64,
        arguments: &mut [*mut c_void],
        queue: &Queue,
    ) -> Result<()> {
        // SAFETY: the caller guarantees the requirements of `Stream::launch`.
        unsafe { stream(queue)?.launch(&self.function, (u32::try_from(blocks)?, self.threads), arguments)? };
        Ok(())
    }
}

fn module(ptx: &'static str, queue: &Queue) -> Result<Module> {
    let device = stream(queue)?.device();
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let same = |(text, module): &&(&str, Module)| {
        std::ptr::eq(*text, ptx) && module.device().ordinal() == device.ordinal()
    };
    if let Some((_, module)) = loaded.iter().find(same) {
        return Ok(module.clone());
    }
    let module = Module::load(device, ptx)?;
    loaded.push((ptx, module.clone()));
    Ok(module)
}

/// Returns a pointer to a kernel argument.
pub(crate) fn argument<T>(value: &mut T) -> *mut c_void {
    (&raw mut *value).cast()
}

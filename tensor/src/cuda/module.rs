//! Kernels: loaded from PTX or a cubin, launched on streams.

use super::driver::call;
use super::{Device, Error, Stream};
use cudarc::driver::sys;
use std::ffi::{CString, c_void};
use std::sync::Arc;

/// Bytes of the log of the driver's compiler.
const LOG: usize = 4096;

/// Kernels loaded on a device.
#[derive(Clone, Debug)]
pub struct Module(Arc<ModuleInner>);

#[derive(Debug)]
struct ModuleInner {
    device: Device,
    handle: sys::CUmodule,
}

/// Kernel of a [`Module`].
#[derive(Clone, Debug)]
pub struct Function {
    module: Module,
    handle: sys::CUfunction,
}

// SAFETY: a module is a handle with the driver's own locking; every call makes its context current first.
unsafe impl Send for ModuleInner {}
// SAFETY: as above.
unsafe impl Sync for ModuleInner {}
// SAFETY: as above; the function holds its module, which keeps the handle valid.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module {
    /// Compiles PTX for `device`; the driver caches the result on disk. An error carries the compiler's log.
    pub fn load(device: &Device, ptx: &str) -> Result<Self, Error> {
        let text = CString::new(ptx).map_err(|_| Error::Ptx { log: "a zero byte in the text".to_owned() })?;
        // SAFETY: the text ends in a null byte.
        unsafe { Self::load_image(device, text.as_ptr().cast()) }
    }

    /// Loads a cubin, machine code for `device`'s chip that needs no compilation.
    ///
    /// # Safety
    /// `cubin` is complete: the driver reads as far as its headers say.
    pub unsafe fn load_cubin(device: &Device, cubin: &[u8]) -> Result<Self, Error> {
        // SAFETY: the caller's guarantee.
        unsafe { Self::load_image(device, cubin.as_ptr().cast()) }
    }

    /// # Safety
    /// The image is text that ends in a null byte, or a complete cubin.
    unsafe fn load_image(device: &Device, image: *const c_void) -> Result<Self, Error> {
        device.enter()?;
        let (mut handle, mut log) = (std::ptr::null_mut(), vec![0u8; LOG]);
        let mut options = [
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), std::ptr::without_provenance_mut(LOG)];
        // SAFETY: the caller's guarantee; each option has its value, and all outlive the call.
        let loaded = unsafe {
            call!(cuModuleLoadDataEx(&mut handle, image, 2, options.as_mut_ptr(), values.as_mut_ptr()))
        };
        loaded.map_err(|error| refused(error, &log))?;
        Ok(Module(Arc::new(ModuleInner { device: device.clone(), handle })))
    }

    /// Returns the kernel of this name.
    pub fn function(&self, name: &str) -> Result<Function, Error> {
        let unknown = || Error::NoKernel { name: name.to_owned() };
        let text = CString::new(name).map_err(|_| unknown())?;
        self.0.device.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the module is live; the name ends in a null byte; the place outlives the call.
        match unsafe { sys::cuModuleGetFunction(&mut handle, self.0.handle, text.as_ptr()) } {
            sys::CUresult::CUDA_ERROR_NOT_FOUND => Err(unknown()),
            other => super::driver::told("cuModuleGetFunction", other)
                .map(|()| Function { module: self.clone(), handle }),
        }
    }

    /// Device of the kernels.
    pub fn device(&self) -> &Device {
        &self.0.device
    }
}

impl Drop for ModuleInner {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once; the driver waits for running kernels of the module.
        self.device.late(|| unsafe { call!(cuModuleUnload(self.handle)) });
    }
}

/// Resources of a kernel on its device, as the driver reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of local memory per thread.
    pub local: u32,
    /// Bytes of shared memory per block.
    pub shared: u32,
    /// Resident blocks per multiprocessor at the given block size.
    pub blocks: u32,
}

impl Function {
    /// Returns the kernel's resources for blocks of `threads` threads.
    pub fn footprint(&self, threads: u32) -> Result<Footprint, Error> {
        use sys::CUfunction_attribute as About;
        let blocks = self.blocks_at_once(threads)?;
        let attribute = |what: About| {
            let mut value = 0;
            // SAFETY: the function is live; the place outlives the call.
            unsafe { call!(cuFuncGetAttribute(&mut value, what, self.handle))? };
            Ok::<_, Error>(u32::try_from(value).unwrap_or(0))
        };
        Ok(Footprint {
            registers: attribute(About::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local: attribute(About::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            shared: attribute(About::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            blocks,
        })
    }

    /// Returns the number of blocks of `threads` threads that are resident on the whole device at once: a grid of this size fills
    /// it.
    pub fn resident_blocks(&self, threads: u32) -> Result<u32, Error> {
        Ok(self.blocks_at_once(threads)?.max(1) * self.module.device().multiprocessors()?)
    }

    /// Returns the resident blocks per multiprocessor; 0 if such a block does not fit.
    fn blocks_at_once(&self, threads: u32) -> Result<u32, Error> {
        self.module.device().enter()?;
        let (mut blocks, threads) = (0, i32::try_from(threads).unwrap_or(i32::MAX));
        // SAFETY: the function is live; the place outlives the call.
        unsafe { call!(cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, self.handle, threads, 0))? };
        Ok(u32::try_from(blocks).unwrap_or(0))
    }
}

impl Stream {
    /// Launches a kernel with `blocks` blocks of `threads` threads, after all work so far. Does nothing if `blocks` is 0.
    ///
    /// # Safety
    /// - `arguments` points at as many values as the kernel has parameters, each of its parameter's type. They are read before
    ///   the call returns.
    /// - The memory that the kernel reads and writes stays alive, and no other code accesses it, until the kernel has run.
    pub unsafe fn launch(
        &self,
        function: &Function,
        (blocks, threads): (u32, u32),
        arguments: &mut [*mut c_void],
    ) -> Result<(), Error> {
        let (own, given) = (self.device().ordinal(), function.module.device().ordinal());
        if own != given {
            return Err(Error::Elsewhere { given: crate::Place::Cuda(given), ordinal: own });
        }
        self.device().enter()?;
        if blocks == 0 {
            return Ok(());
        }
        let arguments = arguments.as_mut_ptr();
        // SAFETY: the function and the stream are live and of one device; the caller guarantees the arguments.
        unsafe {
            let (stream, none) = (self.as_raw().cast(), std::ptr::null_mut());
            call!(cuLaunchKernel(function.handle, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, none))
        }
    }
}

/// Maps the driver's codes to errors: a fault of the PTX, or a missing part of the driver with advice.
fn refused(error: Error, log: &[u8]) -> Error {
    use sys::CUresult as Code;
    let Error::Call { code, name, .. } = &error else { return error };
    let said = String::from_utf8_lossy(log);
    let said = said.trim_end_matches('\0').trim();
    let log = if said.is_empty() { name.clone() } else { format!("{name}: {said}") };
    let is = |known: Code| known as u32 == *code;
    if is(Code::CUDA_ERROR_JIT_COMPILER_NOT_FOUND) {
        Error::NoPtxCompiler
    } else if is(Code::CUDA_ERROR_JIT_COMPILATION_DISABLED) {
        Error::PtxDisabled
    } else if is(Code::CUDA_ERROR_UNSUPPORTED_PTX_VERSION) {
        Error::PtxTooNew { log }
    } else if [
        Code::CUDA_ERROR_INVALID_PTX,
        Code::CUDA_ERROR_INVALID_IMAGE,
        Code::CUDA_ERROR_NO_BINARY_FOR_GPU,
    ]
    .into_iter()
    .any(is)
    {
        Error::Ptx { log }
    } else {
        error
    }
}

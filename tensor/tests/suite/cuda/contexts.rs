//! The stand-in refuses objects of a context other than the current one, as a driver does.

use crate::cuda::stand_in;
use cudarc::driver::sys::{self, CUresult};
use meshstep_tensor::cuda::{self, Device, Stream};
use std::ptr::null_mut;

const PTX: &std::ffi::CStr = c".version 7.0\n.visible .entry cast_f32_f16 (\n)";
const NAME: &std::ffi::CStr = c"cast_f32_f16";

/// Objects of a device's context: a module, its kernel, a stream, an event, a little memory.
struct Objects {
    device: Device,
    stream: Stream,
    module: sys::CUmodule,
    function: sys::CUfunction,
    event: sys::CUevent,
    memory: sys::CUdeviceptr,
}

impl Objects {
    fn new(ordinal: usize) -> Self {
        let device = Device::open(ordinal).unwrap();
        let stream = Stream::new(&device).unwrap();
        device.make_current().unwrap();
        let (mut module, mut function, mut event, mut memory) = (null_mut(), null_mut(), null_mut(), 0);
        // SAFETY: a context is current; the places and texts outlive the calls.
        unsafe {
            let load = sys::cuModuleLoadDataEx(&mut module, PTX.as_ptr().cast(), 0, null_mut(), null_mut());
            assert_eq!(load, CUresult::CUDA_SUCCESS);
            let get = sys::cuModuleGetFunction(&mut function, module, NAME.as_ptr());
            assert_eq!(get, CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuEventCreate(&mut event, 0), CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuMemAlloc_v2(&mut memory, 64), CUresult::CUDA_SUCCESS);
        }
        Objects { device, stream, module, function, event, memory }
    }

    fn stream(&self) -> sys::CUstream {
        self.stream.as_raw().cast()
    }

    /// Runs the kernel on this stream, on zero elements.
    fn launch(&self, stream: sys::CUstream) -> CUresult {
        let (mut to, mut from, mut len) = (self.memory, self.memory, 0u64);
        let mut arguments = [(&raw mut to).cast(), (&raw mut from).cast(), (&raw mut len).cast()];
        // SAFETY: three arguments of the kernel's types, which touches nothing.
        unsafe {
            sys::cuLaunchKernel(
                self.function,
                1,
                1,
                1,
                32,
                1,
                1,
                0,
                stream,
                arguments.as_mut_ptr(),
                null_mut(),
            )
        }
    }
}

#[test]
fn objects_of_another_context_are_refused() {
    if !stand_in() || cuda::probe().unwrap().devices < 2 {
        return println!("skipped: needs the stand-in with two devices");
    }
    let (own, other) = (Objects::new(0), Objects::new(1));
    own.device.make_current().unwrap();
    let refused = CUresult::CUDA_ERROR_INVALID_HANDLE;
    let mut function = null_mut();
    // SAFETY: all objects live; refused calls do nothing, the others touch memory that lives.
    unsafe {
        assert_eq!(own.launch(own.stream()), CUresult::CUDA_SUCCESS);
        assert_eq!(own.launch(other.stream()), refused, "a stream of another device");
        assert_eq!(other.launch(own.stream()), refused, "a kernel of another device");
        assert_eq!(other.launch(other.stream()), refused, "all of another device");
        assert_eq!(sys::cuMemsetD8Async(other.memory, 0, 64, other.stream()), refused);
        assert_eq!(sys::cuEventRecord(other.event, own.stream()), refused);
        assert_eq!(sys::cuModuleGetFunction(&mut function, other.module, NAME.as_ptr()), refused);
        assert_eq!(sys::cuModuleUnload(other.module), refused);
        // These calls need no context of their own.
        assert_eq!(sys::cuEventRecord(other.event, other.stream()), CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuStreamWaitEvent(own.stream(), other.event, 0), CUresult::CUDA_SUCCESS);
        assert_eq!(
            sys::cuMemcpyDtoDAsync_v2(own.memory, other.memory, 64, other.stream()),
            CUresult::CUDA_SUCCESS
        );
        assert_eq!(sys::cuStreamSynchronize(other.stream()), CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuStreamSynchronize(own.stream()), CUresult::CUDA_SUCCESS);
    }
}

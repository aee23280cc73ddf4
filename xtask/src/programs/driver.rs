//! Probe for a CUDA driver with a GPU, before a build that takes minutes. `meshstep-tensor` has the whole one; xtask depends on no member.

use libloading::Library;
use std::ffi::{c_int, c_uint};
use std::fmt;

/// File name of an installed driver.
const INSTALLED: &str = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };

/// Driver's error code if there is no device.
const NO_DEVICE: c_int = 100;

/// Reason why nothing can run on a GPU here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unavailable {
    /// No driver can be loaded.
    NoDriver { library: String },
    /// A driver's function failed, or is missing.
    Start { function: &'static str, code: Option<c_int> },
    /// The driver finds no GPU.
    NoDevice,
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unavailable::NoDriver { library } => {
                write!(f, "no CUDA driver: {library} cannot be loaded; install NVIDIA's driver")
            }
            Unavailable::Start { function, code: Some(code) } => {
                write!(
                    f,
                    "the CUDA driver does not start: {function} returned {code}; `nvidia-smi` may say why"
                )
            }
            Unavailable::Start { function, code: None } => {
                write!(f, "the library is no CUDA driver: it has no {function}; install NVIDIA's driver")
            }
            Unavailable::NoDevice => f.write_str("the CUDA driver finds no GPU (see CUDA_VISIBLE_DEVICES)"),
        }
    }
}

impl std::error::Error for Unavailable {}

/// Returns the number of GPUs that the installed driver finds.
pub(crate) fn gpus() -> Result<usize, Unavailable> {
    gpus_of(INSTALLED)
}

fn gpus_of(name: &str) -> Result<usize, Unavailable> {
    // SAFETY: a driver may be loaded at any time, as every CUDA program does.
    let library = unsafe { Library::new(name) };
    let library = library.map_err(|_| Unavailable::NoDriver { library: name.to_owned() })?;
    call("cuInit", &library, |f: extern "C" fn(c_uint) -> c_int| f(0))?;
    let mut devices = 0;
    call("cuDeviceGetCount", &library, |f: extern "C" fn(*mut c_int) -> c_int| f(&raw mut devices))?;
    // A driver that has started stays loaded until the process ends.
    std::mem::forget(library);
    usize::try_from(devices).ok().filter(|devices| *devices > 0).ok_or(Unavailable::NoDevice)
}

/// Calls a function of the library, of the type that `with` takes.
fn call<F: Copy>(
    function: &'static str,
    library: &Library,
    with: impl FnOnce(F) -> c_int,
) -> Result<(), Unavailable> {
    // SAFETY: each caller gives the type that the driver documents for the function.
    let found = unsafe { library.get::<F>(function.as_bytes()) };
    match found.map(|found| with(*found)) {
        Ok(0) => Ok(()),
        Ok(NO_DEVICE) => Err(Unavailable::NoDevice),
        Ok(code) => Err(Unavailable::Start { function, code: Some(code) }),
        Err(_) => Err(Unavailable::Start { function, code: None }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_driver_and_a_library_that_is_none_are_told_apart() {
        let missing = gpus_of("libno-such-driver.so.1").unwrap_err();
        assert_eq!(missing, Unavailable::NoDriver { library: "libno-such-driver.so.1".to_owned() });
        assert!(missing.to_string().contains("libno-such-driver.so.1 cannot be loaded"), "{missing}");
        #[cfg(target_os = "linux")]
        assert_eq!(gpus_of("libc.so.6"), Err(Unavailable::Start { function: "cuInit", code: None }));
    }
}

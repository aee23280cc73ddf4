//! Probe for a CUDA driver, run once per process and without a panic.

use libloading::Library;
use std::error::Error as _;
use std::ffi::{c_int, c_uint};
use std::sync::OnceLock;

/// Oldest driver with all functions that this crate calls: CUDA 12.0.
const NEEDED: i32 = 12_000;
/// File name of an installed driver.
const INSTALLED: &str = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
/// File name in development packages and toolkits' stubs. cudarc tries it before [`INSTALLED`], unless another crate links cudarc
/// to the driver, as candle does.
const DEVELOPMENT: Option<&str> = if cfg!(windows) { None } else { Some("libcuda.so") };
/// Driver's error code if there is no device.
const NO_DEVICE: c_int = 100;
/// Error code of every function of a toolkit's stub.
const STUB: c_int = 34;
/// Symbol that only the stand-in exports.
const MARK: &[u8] = b"meshstep_standin\0";

/// CUDA driver that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// Newest supported CUDA version: 1000 times the major version plus 10 times the minor one.
    pub version: i32,
    /// Number of visible GPUs.
    pub devices: usize,
    /// True for the stand-in that tests use in place of a driver (`MESHSTEP_STANDIN=1`).
    pub stand_in: bool,
}

/// Reason why CUDA cannot be used on this machine.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// No driver is installed, or it cannot be loaded.
    #[error("no CUDA driver: {library} cannot be loaded ({reason}); install NVIDIA's driver")]
    NoDriver {
        /// The library.
        library: String,
        /// Loader's error message.
        reason: String,
    },
    /// The library lacks a function that every driver has.
    #[error("{library} is no CUDA driver: it has no {function}")]
    NotADriver {
        /// The library.
        library: String,
        /// The function.
        function: &'static str,
    },
    /// The library is a toolkit's stub, for linking only.
    #[error(
        "{library} is a toolkit's stub and not a driver; take the stubs folder (lib64/stubs) out of LD_LIBRARY_PATH, so that \
         the libcuda.so.1 of NVIDIA's driver is loaded"
    )]
    Stub {
        /// The library.
        library: String,
    },
    /// The driver is too old.
    #[error("the CUDA driver speaks version {found}; update it to one of {needed} or later")]
    TooOld {
        /// Its CUDA version.
        found: i32,
        /// Oldest version that works.
        needed: i32,
    },
    /// The driver cannot be initialised: it does not match the kernel module, or access is denied.
    #[error("the CUDA driver does not start: {function} returned {code}")]
    Start {
        /// The function that failed.
        function: &'static str,
        /// Driver's error code.
        code: i32,
    },
    /// The driver finds no GPU.
    #[error("the CUDA driver finds no GPU (see CUDA_VISIBLE_DEVICES)")]
    NoDevice,
    /// The library is the tests' stand-in, and `MESHSTEP_STANDIN` is not set to 1.
    #[error("{library} is a stand-in for tests; take it out of the loader's path, or set MESHSTEP_STANDIN=1")]
    StandIn {
        /// The library.
        library: String,
    },
}

crate::debug_is_display!(Unavailable);

/// Returns the driver, or the reason why there is none. Runs once per process, before any other CUDA call.
pub fn probe() -> Result<&'static Driver, Unavailable> {
    static FOUND: OnceLock<Result<Driver, Unavailable>> = OnceLock::new();
    FOUND.get_or_init(look).as_ref().map_err(Clone::clone)
}

fn look() -> Result<Driver, Unavailable> {
    let (library, name) = load()?;
    // SAFETY: the symbol is not called; only its presence is checked.
    let stand_in = unsafe { library.get::<*const ()>(MARK) }.is_ok();
    if stand_in && std::env::var_os("MESHSTEP_STANDIN").is_none_or(|value| value != "1") {
        return Err(Unavailable::StandIn { library: name });
    }
    let driver = ask(&library, &name, stand_in)?;
    // The library stays loaded: a driver cannot be stopped and started again within a process.
    std::mem::forget(library);
    Ok(driver)
}

/// Loads the driver library that cudarc calls: the installed one if cudarc is linked to it, else the first of cudarc's names. Two
/// copies of the library in one process would not share contexts.
pub(super) fn load() -> Result<(Library, String), Unavailable> {
    let installed = open(INSTALLED);
    if let Ok(library) = &installed
        && is_linked(library)
    {
        return installed.map_err(|reason| missing(&reason));
    }
    if let Some(Ok(found)) = DEVELOPMENT.map(open) {
        return Ok(found);
    }
    installed.map_err(|reason| missing(&reason))
}

/// Loads a library; returns it with its name.
fn open(name: &str) -> Result<(Library, String), libloading::Error> {
    // SAFETY: a driver may be loaded any number of times, from any thread, as every CUDA program does.
    unsafe { Library::new(name) }.map(|library| (library, name.to_owned()))
}

/// Returns true if cudarc is linked to the library: cudarc's function is then the library's own. With dynamic loading it is a
/// wrapper that looks the function up.
fn is_linked((library, _): &(Library, String)) -> bool {
    // SAFETY: the function is not called; only its address is compared.
    let own = unsafe { library.get::<*const ()>(b"cuDriverGetVersion\0") };
    own.is_ok_and(|own| *own == cudarc::driver::sys::cuDriverGetVersion as *const ())
}

fn missing(error: &libloading::Error) -> Unavailable {
    let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    Unavailable::NoDriver { library: INSTALLED.to_owned(), reason }
}

fn ask(library: &Library, name: &str, stand_in: bool) -> Result<Driver, Unavailable> {
    let mut version = 0;
    // SAFETY: the driver's documented signature, as in the calls below; the place for the number outlives the call.
    call("cuDriverGetVersion", library, name, |f: extern "C" fn(*mut c_int) -> c_int| f(&mut version))?;
    if version < NEEDED {
        return Err(Unavailable::TooOld { found: version, needed: NEEDED });
    }
    call("cuInit", library, name, |f: extern "C" fn(c_uint) -> c_int| f(0))?;
    let mut devices = 0;
    call("cuDeviceGetCount", library, name, |f: extern "C" fn(*mut c_int) -> c_int| f(&mut devices))?;
    match usize::try_from(devices) {
        Ok(devices) if devices > 0 => Ok(Driver { version, devices, stand_in }),
        _ => Err(Unavailable::NoDevice),
    }
}

/// Calls a function of the library, of the type that `with` takes.
fn call<F: Copy>(
    function: &'static str,
    library: &Library,
    name: &str,
    with: impl FnOnce(F) -> c_int,
) -> Result<(), Unavailable> {
    // SAFETY: each caller gives the type that the driver documents for the function.
    let found = unsafe { library.get::<F>(function.as_bytes()) };
    let found = found.map_err(|_| Unavailable::NotADriver { library: name.to_owned(), function })?;
    match with(*found) {
        0 => Ok(()),
        NO_DEVICE => Err(Unavailable::NoDevice),
        STUB => Err(Unavailable::Stub { library: name.to_owned() }),
        code => Err(Unavailable::Start { function, code }),
    }
}

//! Table of NCCL's functions, loaded once from its library.

#[cfg(test)]
mod abi;

use crate::Error;
use libloading::Library;
use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// File names of the library in search order: NCCL's package, then its development package.
const LIBRARIES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// Oldest version with all needed functions: NCCL 2.10, the first with averages and bf16.
const NEEDED: i32 = 21_000;
/// Oldest version that multiplies by factors before a sum.
const NEEDED_FOR_FACTORS: i32 = 21_100;
/// Oldest version that registers memory as windows.
const NEEDED_FOR_WINDOWS: i32 = 22_700;
/// Symbol that only the stand-in exports.
const MARK: &[u8] = b"meshstep_standin\0";

/// NCCL library that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundLibrary {
    /// Version: 10,000 times the major number, 100 times the minor one, and the patch.
    pub version: i32,
    /// True for the stand-in that tests use in place of NCCL (`MESHSTEP_STANDIN=1`).
    pub stand_in: bool,
    /// Abilities beyond those of every version.
    pub abilities: Vec<Ability>,
}

/// Ability of newer versions of NCCL, available if all its functions are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Ability {
    /// Nonblocking communicators: calls return before they are done.
    NonBlocking,
    /// Splitting a communicator.
    Split,
    /// Factors of each rank before a sum.
    Factors,
    /// NCCL's allocator, and registration of its memory with a communicator.
    Registration,
    /// Registration of the same memory on all ranks, as a window.
    Windows,
    /// Creating a communicator without some ranks of another one.
    Shrink,
    /// Revoking operations in flight, so that the ranks can form another communicator.
    Revoke,
    /// Creating a communicator with more ranks than another one.
    Grow,
}

/// Reason why NCCL cannot be used on this machine.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// The library is not installed, or cannot be loaded.
    #[error(
        "no NCCL: neither {tried} can be loaded ({reason}); install NCCL, or add its folder to LD_LIBRARY_PATH"
    )]
    NoLibrary {
        /// File names tried.
        tried: String,
        /// Loader's error message about the first.
        reason: String,
    },
    /// The library lacks a function that every NCCL has.
    #[error("{library} is no NCCL: it has no {function}")]
    NotNccl {
        /// The library.
        library: &'static str,
        /// The function.
        function: &'static str,
    },
    /// The library is too old.
    #[error("{library} is NCCL {found}; update it to {needed} or later")]
    TooOld {
        /// The library.
        library: &'static str,
        /// Its version.
        found: i32,
        /// Oldest version that works.
        needed: i32,
    },
    /// The library is the tests' stand-in, and `MESHSTEP_STANDIN` is not set to 1.
    #[error("{library} is a stand-in for tests; take it out of the loader's path, or set MESHSTEP_STANDIN=1")]
    StandIn {
        /// The library.
        library: &'static str,
    },
}

meshstep_tensor::debug_is_display!(Unavailable);

/// Returns the NCCL library found, or the reason why there is none. Runs once per process.
pub fn probe() -> Result<FoundLibrary, Unavailable> {
    Table::get().map(|table| table.found.clone())
}

/// NCCL's communicator handle.
pub(super) type Handle = *mut c_void;

/// Result of a completed call.
const SUCCESS: c_int = 0;
/// Result of a call that returned before its completion.
pub(super) const IN_PROGRESS: c_int = 7;
/// Color of a rank that joins no group of a split.
pub(super) const NO_COLOR: c_int = -1;

/// NCCL's window handle.
pub(super) type NcclWindow = *mut c_void;
/// Flag of symmetric windows: collectives begin at the same offset on every rank.
pub(super) const SYMMETRIC: c_int = 1;

/// Id of a new communicator, as NCCL passes it: by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawId(pub(super) [c_char; 128]);

/// Creates a reduction for a factor. Arguments: place of its number, the factor, its type, its location, the communicator.
pub(super) type MakeReduction = unsafe extern "C" fn(*mut c_int, *mut c_void, c_int, c_int, Handle) -> c_int;
pub(super) type DropReduction = unsafe extern "C" fn(c_int, Handle) -> c_int;

pub(super) type AllocMemory = unsafe extern "C" fn(*mut *mut c_void, usize) -> c_int;
pub(super) type FreeMemory = unsafe extern "C" fn(*mut c_void) -> c_int;
/// Creates a window. Arguments: communicator, address, bytes, place of the window (written perhaps after the call), flags.
pub(super) type MakeWindow =
    unsafe extern "C" fn(Handle, *mut c_void, usize, *mut NcclWindow, c_int) -> c_int;
pub(super) type EndWindow = unsafe extern "C" fn(Handle, NcclWindow) -> c_int;

/// Leading fields of NCCL's config as of 2.17; later versions fill in the fields that they have appended.
#[repr(C)]
pub(super) struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cluster_size: c_int,
    min_blocks: c_int,
    max_blocks: c_int,
    net_name: *const c_char,
}

impl NcclConfig {
    /// Returns the config of a nonblocking communicator, so that no call can hang (docs/decisions/01-nccl-does-not-block.md).
    pub(super) fn not_blocking() -> Self {
        // NCCL marks an unset field with the smallest integer.
        let unset = c_int::MIN;
        NcclConfig {
            size: size_of::<NcclConfig>(),
            magic: 0xcafe_beef,
            version: 21_700,
            blocking: 0,
            cluster_size: unset,
            min_blocks: unset,
            max_blocks: unset,
            net_name: std::ptr::null(),
        }
    }
}

/// Declares the table and its loader: functions of every version, and functions of newer ones only.
macro_rules! table {
    (
        needed { $($need:ident = $need_name:literal ($($need_arg:ty),*) -> $need_result:ty;)* }
        newer { $($new:ident = $new_name:literal ($($new_arg:ty),*) -> $new_result:ty, since $since:literal;)* }
    ) => {
        /// Functions with the types of NCCL's header.
        pub(super) struct Table {
            found: FoundLibrary,
            name: &'static str,
            $(pub(super) $need: unsafe extern "C" fn($($need_arg),*) -> $need_result,)*
            $(pub(super) $new: Option<unsafe extern "C" fn($($new_arg),*) -> $new_result>,)*
        }

        impl Table {
            fn fill(library: &Library, name: &'static str, found: FoundLibrary) -> Result<Self, Unavailable> {
                Ok(Table {
                    found,
                    name,
                    // SAFETY: the header of every version since 2.10 gives each function the type that stands here.
                    $($need: *unsafe { library.get($need_name.as_bytes()) }
                        .map_err(|_| Unavailable::NotNccl { library: name, function: $need_name })?,)*
                    // SAFETY: as above, for versions that have the function.
                    $($new: unsafe { library.get($new_name.as_bytes()) }.ok().map(|found| *found),)*
                })
            }
        }

        #[cfg(test)]
        impl Table {
            /// Returns each function of this version: its name, with the kinds of its result and of its arguments.
            fn signatures(version: i32) -> Vec<(&'static str, Vec<String>)> {
                let all = [
                    $((NEEDED, $need_name, vec![abi::kind::<$need_result>(), $(abi::kind::<$need_arg>()),*]),)*
                    $(($since, $new_name, vec![abi::kind::<$new_result>(), $(abi::kind::<$new_arg>()),*]),)*
                ];
                let there = all.into_iter().filter(|(since, ..)| *since <= version);
                there.map(|(_, name, kinds)| (name, kinds)).collect()
            }

            /// Returns the newer functions that this version lacks according to the table.
            fn later(version: i32) -> Vec<&'static str> {
                let newer = [$(($new_name, $since)),*];
                newer.into_iter().filter(|(_, since)| *since > version).map(|(name, _)| name).collect()
            }

            /// Returns the newer functions that the library lacks.
            fn lacking(&self) -> Vec<&'static str> {
                let newer = [$(($new_name, self.$new.is_some())),*];
                newer.into_iter().filter(|(_, found)| !found).map(|(name, _)| name).collect()
            }
        }
    };
}

table! {
    needed {
        error_string = "ncclGetErrorString"(c_int) -> *const c_char;
        unique_id = "ncclGetUniqueId"(*mut RawId) -> c_int;
        init = "ncclCommInitRank"(*mut Handle, c_int, RawId, c_int) -> c_int;
        destroy = "ncclCommDestroy"(Handle) -> c_int;
        abort = "ncclCommAbort"(Handle) -> c_int;
        group_start = "ncclGroupStart"() -> c_int;
        group_end = "ncclGroupEnd"() -> c_int;
        all_reduce = "ncclAllReduce"(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
        reduce_scatter = "ncclReduceScatter"(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
        all_gather = "ncclAllGather"(*const c_void, *mut c_void, usize, c_int, Handle, *mut c_void) -> c_int;
        broadcast = "ncclBroadcast"(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
        send = "ncclSend"(*const c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
        recv = "ncclRecv"(*mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
    }
    newer {
        last_error = "ncclGetLastError"(Handle) -> *const c_char, since 21_300;
        init_config = "ncclCommInitRankConfig"(*mut Handle, c_int, RawId, c_int, *mut NcclConfig) -> c_int, since 21_400;
        async_error = "ncclCommGetAsyncError"(Handle, *mut c_int) -> c_int, since 21_000;
        split = "ncclCommSplit"(Handle, c_int, c_int, *mut Handle, *mut NcclConfig) -> c_int, since 21_800;
        finalize = "ncclCommFinalize"(Handle) -> c_int, since 21_400;
        make_reduction = "ncclRedOpCreatePreMulSum"(*mut c_int, *mut c_void, c_int, c_int, Handle) -> c_int, since 21_100;
        drop_reduction = "ncclRedOpDestroy"(c_int, Handle) -> c_int, since 21_100;
        mem_alloc = "ncclMemAlloc"(*mut *mut c_void, usize) -> c_int, since 21_900;
        mem_free = "ncclMemFree"(*mut c_void) -> c_int, since 21_900;
        register = "ncclCommRegister"(Handle, *mut c_void, usize, *mut *mut c_void) -> c_int, since 21_900;
        deregister = "ncclCommDeregister"(Handle, *mut c_void) -> c_int, since 21_900;
        window_register = "ncclCommWindowRegister"(Handle, *mut c_void, usize, *mut NcclWindow, c_int) -> c_int, since 22_700;
        window_deregister = "ncclCommWindowDeregister"(Handle, NcclWindow) -> c_int, since 22_700;
        shrink = "ncclCommShrink"(Handle, *mut c_int, c_int, *mut Handle, *mut NcclConfig, c_int) -> c_int, since 22_700;
        revoke = "ncclCommRevoke"(Handle, c_int) -> c_int, since 22_809;
        grow = "ncclCommGrow"(Handle, c_int, *const RawId, c_int, *mut Handle, *mut NcclConfig) -> c_int, since 22_900;
    }
}

impl Table {
    /// Returns the table, or the reason why there is none. Loaded once per process; the library stays loaded.
    pub(super) fn get() -> Result<&'static Self, Unavailable> {
        static FOUND: OnceLock<Result<Table, Unavailable>> = OnceLock::new();
        FOUND.get_or_init(look).as_ref().map_err(Clone::clone)
    }

    /// Returns the abilities for which all functions are present.
    fn abilities(&self) -> Vec<Ability> {
        let has = [
            (Ability::NonBlocking, self.init_config.is_some() && self.async_error.is_some()),
            (Ability::Split, self.split.is_some()),
            (Ability::Factors, self.factors().is_ok()),
            (Ability::Registration, self.memory().is_ok() && self.register.zip(self.deregister).is_some()),
            (Ability::Windows, self.memory().is_ok() && self.windows().is_ok()),
            (Ability::Shrink, self.shrink.is_some()),
            (Ability::Revoke, self.revoke.is_some()),
            (Ability::Grow, self.grow.is_some()),
        ];
        has.into_iter().filter(|(_, has)| *has).map(|(ability, _)| ability).collect()
    }

    /// Returns the functions of NCCL's allocator.
    pub(super) fn memory(&self) -> Result<(AllocMemory, FreeMemory), Unavailable> {
        self.mem_alloc.zip(self.mem_free).ok_or_else(|| self.too_old(NEEDED_FOR_WINDOWS))
    }

    /// Returns the functions that create and end windows.
    pub(super) fn windows(&self) -> Result<(MakeWindow, EndWindow), Unavailable> {
        self.window_register.zip(self.window_deregister).ok_or_else(|| self.too_old(NEEDED_FOR_WINDOWS))
    }

    fn too_old(&self, needed: i32) -> Unavailable {
        Unavailable::TooOld { library: self.name, found: self.found.version, needed }
    }

    /// Returns the functions that create and drop reductions with factors.
    pub(super) fn factors(&self) -> Result<(MakeReduction, DropReduction), Unavailable> {
        self.make_reduction.zip(self.drop_reduction).ok_or_else(|| self.too_old(NEEDED_FOR_FACTORS))
    }

    /// Converts a result code: true for a completed call, false for one in progress.
    pub(super) fn told(&self, function: &'static str, code: c_int, comm: Handle) -> Result<bool, Error> {
        match code {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            _ => {
                // SAFETY: for every code, and for every communicator including null, NCCL returns constant text or text of its
                // own that stays valid.
                let (name, last) = unsafe { ((self.error_string)(code), self.last_error.map(|f| f(comm))) };
                let last_error = last.map_or_else(String::new, text);
                Err(Error::Nccl { function, code, name: text(name), last_error })
            }
        }
    }
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.found.fmt(f)
    }
}

fn text(text: *const c_char) -> String {
    if text.is_null() {
        return "nothing".to_owned();
    }
    // SAFETY: `told` passes text of NCCL, which ends in a null byte.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn look() -> Result<Table, Unavailable> {
    let (library, name) = load()?;
    // SAFETY: the symbol is not called; only its presence is checked.
    let stand_in = unsafe { library.get::<*const ()>(MARK) }.is_ok();
    if stand_in && std::env::var_os("MESHSTEP_STANDIN").is_none_or(|value| value != "1") {
        return Err(Unavailable::StandIn { library: name });
    }
    let version = version(&library, name)?;
    if version < NEEDED {
        return Err(Unavailable::TooOld { library: name, found: version, needed: NEEDED });
    }
    let mut table = Table::fill(&library, name, FoundLibrary { version, stand_in, abilities: Vec::new() })?;
    table.found.abilities = table.abilities();
    // The library stays loaded: the table points into it.
    std::mem::forget(library);
    Ok(table)
}

fn load() -> Result<(Library, &'static str), Unavailable> {
    let mut reason = None;
    for name in LIBRARIES {
        // SAFETY: NCCL may be loaded any number of times, from any thread, as every program with NCCL does.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok((library, name)),
            Err(error) => {
                let said = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                reason.get_or_insert(said);
            }
        }
    }
    Err(Unavailable::NoLibrary { tried: LIBRARIES.join(" nor "), reason: reason.unwrap_or_default() })
}

fn version(library: &Library, name: &'static str) -> Result<i32, Unavailable> {
    let function = "ncclGetVersion";
    // SAFETY: the type that NCCL's header gives the function; the place for the number outlives the call.
    unsafe {
        let ask = library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(function.as_bytes());
        let mut version = 0;
        match ask.map(|ask| ask(&mut version)) {
            Ok(SUCCESS) => Ok(version),
            _ => Err(Unavailable::NotNccl { library: name, function }),
        }
    }
}

//! NCCL's functions, looked up once in its library.

#[cfg(test)]
mod abi;

use crate::Error;
use libloading::Library;
use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// The files to look for, in this order: what NCCL's package installs, and what its development package adds.
const LIBRARIES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// The oldest version that has all we need: NCCL 2.10, the first with averages and bf16.
const NEEDED: i32 = 21_000;
/// The oldest that multiplies by factors before it sums.
const NEEDED_FOR_FACTORS: i32 = 21_100;
/// The oldest that registers memory as windows.
const NEEDED_FOR_WINDOWS: i32 = 22_700;
/// A name that only a stand-in exports.
const MARK: &[u8] = b"meshstep_standin\0";

/// The library that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its version: 10,000 times the major one, 100 times the minor one, and the patch.
    pub version: i32,
    /// Whether it is the stand-in that tests use in place of NCCL (`MESHSTEP_STANDIN=1`).
    pub stand_in: bool,
    /// The abilities that it has beside what every version has.
    pub abilities: Vec<Ability>,
}

/// What newer versions of NCCL can do. An ability is there if all its functions are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Ability {
    /// Communicators whose calls return before they are done.
    NonBlocking,
    /// Splitting a communicator.
    Split,
    /// Factors of each rank's own before a sum.
    Factors,
    /// Memory of NCCL's own, and its registration with a communicator.
    Registration,
    /// Registration of the same memory on all ranks, as a window.
    Windows,
    /// A communicator without some of another one's ranks.
    Shrink,
    /// An end to what is in flight, after which the communicator's ranks can form another.
    Revoke,
    /// A communicator with more ranks than another one.
    Grow,
}

/// Why NCCL cannot be used on this machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// It is not installed, or cannot be loaded.
    #[error(
        "no NCCL: neither {tried} can be loaded ({reason}); install it, or add its folder to LD_LIBRARY_PATH"
    )]
    NoLibrary {
        /// The files looked for.
        tried: String,
        /// The loader's words about the first.
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
    /// The library is older than what we call.
    #[error("{library} is NCCL {found}; update it to {needed} or later")]
    TooOld {
        /// The library.
        library: &'static str,
        /// Its version.
        found: i32,
        /// The oldest that works.
        needed: i32,
    },
    /// The stand-in for tests, which nobody has asked for.
    #[error("{library} is a stand-in for tests; take it out of the loader's path, or set MESHSTEP_STANDIN=1")]
    StandIn {
        /// The library.
        library: &'static str,
    },
}

/// NCCL, or why there is none. Asked once in a process.
pub fn probe() -> Result<Found, Unavailable> {
    Table::get().map(|table| table.found.clone())
}

/// NCCL's name for a communicator.
pub(super) type Handle = *mut c_void;

/// NCCL's result of a call that is done.
const SUCCESS: c_int = 0;
/// NCCL's result of a call that returned before it was done.
pub(super) const IN_PROGRESS: c_int = 7;
/// NCCL's colour of a rank that is in no group of a split.
pub(super) const NO_COLOR: c_int = -1;

/// NCCL's name for a window.
pub(super) type Window = *mut c_void;
/// Windows whose memory the ranks use alike: collectives begin at the same offset in it on every rank.
pub(super) const SYMMETRIC: c_int = 1;

/// What the ranks of a communicator to be made have in common, as NCCL passes it: by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawId(pub(super) [c_char; 128]);

/// Makes a reduction for a factor: its number goes to the first; then the factor, its type and where it lies.
pub(super) type MakeReduction = unsafe extern "C" fn(*mut c_int, *mut c_void, c_int, c_int, Handle) -> c_int;
pub(super) type DropReduction = unsafe extern "C" fn(c_int, Handle) -> c_int;

pub(super) type AllocMemory = unsafe extern "C" fn(*mut *mut c_void, usize) -> c_int;
pub(super) type FreeMemory = unsafe extern "C" fn(*mut c_void) -> c_int;
/// Makes a window of so many bytes from an address on; its name goes to the place, perhaps after the call.
pub(super) type MakeWindow = unsafe extern "C" fn(Handle, *mut c_void, usize, *mut Window, c_int) -> c_int;
pub(super) type EndWindow = unsafe extern "C" fn(Handle, Window) -> c_int;

/// The beginning of NCCL's settings, as of 2.17; what later versions have appended they fill in by themselves.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cluster_size: c_int,
    min_blocks: c_int,
    max_blocks: c_int,
    net_name: *const c_char,
}

impl Config {
    /// Calls return before they are done, so that none can hang (docs/decisions/01-nccl-does-not-block.md).
    pub(super) fn not_blocking() -> Self {
        // The least number is NCCL's sign for what is left to it.
        let unset = c_int::MIN;
        Config {
            size: size_of::<Config>(),
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

/// Declares the table and how it is filled: what every version has, and what only newer ones have.
macro_rules! table {
    (
        needed { $($need:ident = $need_name:literal ($($need_arg:ty),*) -> $need_result:ty;)* }
        newer { $($new:ident = $new_name:literal ($($new_arg:ty),*) -> $new_result:ty, since $since:literal;)* }
    ) => {
        /// Functions with the types that NCCL's header gives them.
        pub(super) struct Table {
            found: Found,
            name: &'static str,
            $(pub(super) $need: unsafe extern "C" fn($($need_arg),*) -> $need_result,)*
            $(pub(super) $new: Option<unsafe extern "C" fn($($new_arg),*) -> $new_result>,)*
        }

        impl Table {
            fn fill(library: &Library, name: &'static str, found: Found) -> Result<Self, Unavailable> {
                Ok(Table {
                    found,
                    name,
                    // SAFETY: the header of every version since 2.10 gives each function the type that stands here.
                    $($need: *unsafe { library.get($need_name.as_bytes()) }
                        .map_err(|_| Unavailable::NotNccl { library: name, function: $need_name })?,)*
                    // SAFETY: the same, for versions that have the function.
                    $($new: unsafe { library.get($new_name.as_bytes()) }.ok().map(|found| *found),)*
                })
            }
        }

        #[cfg(test)]
        impl Table {
            /// Each function of this version: its name, with the kinds of its result and of its arguments.
            fn signatures(version: i32) -> Vec<(&'static str, Vec<String>)> {
                let all = [
                    $((NEEDED, $need_name, vec![abi::kind::<$need_result>(), $(abi::kind::<$need_arg>()),*]),)*
                    $(($since, $new_name, vec![abi::kind::<$new_result>(), $(abi::kind::<$new_arg>()),*]),)*
                ];
                let there = all.into_iter().filter(|(since, ..)| *since <= version);
                there.map(|(_, name, kinds)| (name, kinds)).collect()
            }

            /// The newer functions that this version is without, as the table says.
            fn later(version: i32) -> Vec<&'static str> {
                let newer = [$(($new_name, $since)),*];
                newer.into_iter().filter(|(_, since)| *since > version).map(|(name, _)| name).collect()
            }

            /// The newer functions that the library lacks.
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
        init_config = "ncclCommInitRankConfig"(*mut Handle, c_int, RawId, c_int, *mut Config) -> c_int, since 21_400;
        async_error = "ncclCommGetAsyncError"(Handle, *mut c_int) -> c_int, since 21_000;
        split = "ncclCommSplit"(Handle, c_int, c_int, *mut Handle, *mut Config) -> c_int, since 21_800;
        finalize = "ncclCommFinalize"(Handle) -> c_int, since 21_400;
        make_reduction = "ncclRedOpCreatePreMulSum"(*mut c_int, *mut c_void, c_int, c_int, Handle) -> c_int, since 21_100;
        drop_reduction = "ncclRedOpDestroy"(c_int, Handle) -> c_int, since 21_100;
        mem_alloc = "ncclMemAlloc"(*mut *mut c_void, usize) -> c_int, since 21_900;
        mem_free = "ncclMemFree"(*mut c_void) -> c_int, since 21_900;
        register = "ncclCommRegister"(Handle, *mut c_void, usize, *mut *mut c_void) -> c_int, since 21_900;
        deregister = "ncclCommDeregister"(Handle, *mut c_void) -> c_int, since 21_900;
        window_register = "ncclCommWindowRegister"(Handle, *mut c_void, usize, *mut Window, c_int) -> c_int, since 22_700;
        window_deregister = "ncclCommWindowDeregister"(Handle, Window) -> c_int, since 22_700;
        shrink = "ncclCommShrink"(Handle, *mut c_int, c_int, *mut Handle, *mut Config, c_int) -> c_int, since 22_700;
        revoke = "ncclCommRevoke"(Handle, c_int) -> c_int, since 22_809;
        grow = "ncclCommGrow"(Handle, c_int, *const RawId, c_int, *mut Handle, *mut Config) -> c_int, since 22_900;
    }
}

impl Table {
    /// The table, or why there is none. Looked for once in a process; the library stays.
    pub(super) fn get() -> Result<&'static Self, Unavailable> {
        static FOUND: OnceLock<Result<Table, Unavailable>> = OnceLock::new();
        FOUND.get_or_init(look).as_ref().map_err(Clone::clone)
    }

    /// The abilities that all functions are there for.
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

    /// How memory of NCCL's own is had and freed.
    pub(super) fn memory(&self) -> Result<(AllocMemory, FreeMemory), Unavailable> {
        self.mem_alloc.zip(self.mem_free).ok_or_else(|| self.too_old(NEEDED_FOR_WINDOWS))
    }

    /// How windows are made and ended.
    pub(super) fn windows(&self) -> Result<(MakeWindow, EndWindow), Unavailable> {
        self.window_register.zip(self.window_deregister).ok_or_else(|| self.too_old(NEEDED_FOR_WINDOWS))
    }

    fn too_old(&self, needed: i32) -> Unavailable {
        Unavailable::TooOld { library: self.name, found: self.found.version, needed }
    }

    /// How reductions with factors are made and dropped.
    pub(super) fn factors(&self) -> Result<(MakeReduction, DropReduction), Unavailable> {
        self.make_reduction.zip(self.drop_reduction).ok_or_else(|| self.too_old(NEEDED_FOR_FACTORS))
    }

    /// What a call returned: whether it is done, or still going on.
    pub(super) fn told(&self, function: &'static str, code: c_int, comm: Handle) -> Result<bool, Error> {
        match code {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            _ => {
                // SAFETY: NCCL answers for every number, and for every communicator, none included, with constant text or
                // text of its own that stays.
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
    // SAFETY: `told` gives what NCCL returned, which has an end.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn look() -> Result<Table, Unavailable> {
    let (library, name) = load()?;
    // SAFETY: no function of this name is called; only whether it is there counts.
    let stand_in = unsafe { library.get::<*const ()>(MARK) }.is_ok();
    if stand_in && std::env::var_os("MESHSTEP_STANDIN").is_none_or(|value| value != "1") {
        return Err(Unavailable::StandIn { library: name });
    }
    let version = version(&library, name)?;
    if version < NEEDED {
        return Err(Unavailable::TooOld { library: name, found: version, needed: NEEDED });
    }
    let mut table = Table::fill(&library, name, Found { version, stand_in, abilities: Vec::new() })?;
    table.found.abilities = table.abilities();
    // It stays: the table points into it.
    std::mem::forget(library);
    Ok(table)
}

fn load() -> Result<(Library, &'static str), Unavailable> {
    let mut reason = None;
    for name in LIBRARIES {
        // SAFETY: NCCL may be loaded any number of times, from any thread; that is how every program gets it.
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
    // SAFETY: the type that NCCL's header gives the function; a place for a number outlives the call.
    unsafe {
        let ask = library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(function.as_bytes());
        let mut version = 0;
        match ask.map(|ask| ask(&mut version)) {
            Ok(SUCCESS) => Ok(version),
            _ => Err(Unavailable::NotNccl { library: name, function }),
        }
    }
}

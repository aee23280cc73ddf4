//! CUDA kernels compiled for the CPU, for the tests of `meshstep-optim`: their unmodified source after `simt.h`, which
//! stands in for a device's threads. Each shared library is built once and stored beside the test programs; its name is a
//! hash of its text, its options, the headers and the compiler's version.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking and print why they skip"
)]

use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Options of [`Device::compile`] under which other blocks may run at every load and store. ThreadSanitizer's
/// instrumentation calls a function at each access; the sanitizer's library is not linked, and `simt.h` defines these
/// functions.
pub const EVERY_ACCESS: &str = "-fsanitize=thread -nodefaultlibs -lstdc++ -lm -lgcc_s -lgcc -lc";

/// A loaded library of kernels.
#[derive(Debug)]
pub struct Device {
    library: Library,
    file: PathBuf,
}

type Launch = unsafe extern "C" fn(*const c_char, u32, u32, *mut *mut c_void) -> *const c_char;

impl Device {
    /// Loads the kernels of `optim/src/rules/<rule>/<rule>.cu`, or of `optim/src/<folder>/<file>.cu`.
    pub fn of(rule: &str) -> Option<Device> {
        Device::compile(&text(rule), "")
    }

    /// Compiles a text of kernels with these additional options. Returns `None` without a C++ compiler; with
    /// `REQUIRE_SIMT=1` that panics.
    pub fn compile(text: &str, options: &str) -> Option<Device> {
        let Ok(version) = Command::new("c++").arg("--version").output() else {
            println!("skipped: no C++ compiler");
            assert_ne!(std::env::var("REQUIRE_SIMT").as_deref(), Ok("1"), "a C++ compiler is required");
            return None;
        };
        let file = build(text, options, &version.stdout);
        // SAFETY: loading the library only registers the names of its kernels.
        let library = unsafe { Library::new(&file) }.unwrap();
        Some(Device { library, file })
    }

    /// Returns the path of the shared library.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Runs a kernel with pointers to its arguments.
    ///
    /// # Safety
    /// The pointers have the types of the kernel's parameters, and the kernel may read and write the memory that they refer
    /// to.
    pub unsafe fn launch(
        &self,
        kernel: &str,
        blocks: u32,
        threads: u32,
        args: &mut [*mut c_void],
    ) -> Result<(), String> {
        let name = std::ffi::CString::new(kernel).unwrap();
        // SAFETY: the signature is that of simt.h; the caller guarantees the arguments.
        let error = unsafe {
            let launch = self.library.get::<Launch>(b"simt_launch").unwrap();
            launch(name.as_ptr(), blocks, threads, args.as_mut_ptr())
        };
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: a pointer other than null is a string of the library, which is still loaded.
        Err(unsafe { CStr::from_ptr(error) }.to_str().unwrap().to_owned())
    }

    /// Sets whether blocks and threads run in reverse order from now on.
    pub fn reverse(&self, reverse: bool) {
        // SAFETY: the signature is that of simt.h.
        unsafe {
            self.library.get::<unsafe extern "C" fn(c_int)>(b"simt_reverse").unwrap()(reverse.into());
        }
    }

    /// Runs the blocks of a grid in an order drawn from the seed from now on; 0 restores the default order.
    pub fn shuffle(&self, seed: u64) {
        // SAFETY: the signature is that of simt.h.
        unsafe { self.library.get::<unsafe extern "C" fn(u64)>(b"simt_shuffle").unwrap()(seed) }
    }

    /// Keeps this number of blocks of a grid in flight from now on, at most 8. They take turns, drawn from the seed of
    /// [`Device::shuffle`]. With 1, each block runs to its end before the next begins.
    pub fn interleave(&self, in_flight: u32) {
        // SAFETY: the signature is that of simt.h.
        unsafe { self.library.get::<unsafe extern "C" fn(u32)>(b"simt_interleave").unwrap()(in_flight) }
    }

    /// Runs only these blocks of every grid from now on.
    pub fn blocks(&self, blocks: Range<u32>) {
        // SAFETY: the signature is that of simt.h.
        unsafe {
            self.library.get::<unsafe extern "C" fn(u32, u32)>(b"simt_blocks").unwrap()(
                blocks.start,
                blocks.end,
            );
        }
    }

    /// Returns the number of 16-byte stores so far.
    pub fn wide_stores(&self) -> u64 {
        // SAFETY: the signature is that of simt.h.
        unsafe { self.library.get::<unsafe extern "C" fn() -> u64>(b"simt_wide_stores").unwrap()() }
    }

    /// Returns the names of all kernels.
    pub fn kernels(&self) -> Vec<String> {
        type Name = unsafe extern "C" fn(u32) -> *const c_char;
        // SAFETY: the signature is that of simt.h.
        let name = |i| unsafe { self.library.get::<Name>(b"simt_kernel").unwrap()(i) };
        // SAFETY: a pointer other than null is a string of the library.
        let owned = |name| unsafe { CStr::from_ptr(name) }.to_str().unwrap().to_owned();
        (0..).map(name).take_while(|name| !name.is_null()).map(owned).collect()
    }
}

/// Returns a rule's kernels, or those of another folder of optim, after all shared files, as `cargo xtask kernels` assembles them.
pub fn text(rule: &str) -> String {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../optim/src");
    let entries = fs::read_dir(src.join("cuda")).unwrap().map(|entry| entry.unwrap().path());
    let shared = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with(|first: char| first.is_ascii_digit()) && name.ends_with(".cu")
    };
    let mut files: Vec<PathBuf> = entries.filter(shared).collect();
    files.sort();
    let (folder, file) = rule.split_once('/').unwrap_or((rule, rule));
    let rules = src.join("rules").join(folder);
    let folder = if rules.is_dir() { rules } else { src.join(folder) };
    files.push(folder.join(format!("{file}.cu")));
    files.iter().map(|file| fs::read_to_string(file).unwrap()).collect()
}

/// Returns the shared library of a text; builds it unless an earlier test has.
fn build(text: &str, options: &str, version: &[u8]) -> PathBuf {
    let [header, scheduler] =
        ["simt.h", "scheduler.h"].map(|name| Path::new(env!("CARGO_MANIFEST_DIR")).join(name));
    let headers = [&header, &scheduler].map(|path| fs::read(path).unwrap());
    let mut hasher = DefaultHasher::new();
    (text, FLAGS, options, headers, version).hash(&mut hasher);
    // In the folder of the test programs, so that all tests share it.
    let folder = std::env::current_exe().unwrap().with_file_name("simt");
    fs::create_dir_all(&folder).unwrap();
    let stem = folder.join(format!("{:016x}", hasher.finish()));
    // Only one process builds at a time; closing the file releases the lock.
    let lock = File::create(stem.with_extension("lock")).unwrap();
    lock.lock().unwrap();
    let library = stem.with_extension("so");
    if !library.exists() {
        let unit = stem.with_extension("cpp");
        fs::write(&unit, text).unwrap();
        let names = kernel_names(&compiler(&["-E", "-P"]).arg(&unit).output().unwrap().stdout);
        let register: String = names.iter().map(|name| format!("SIMT_KERNEL({name})\n")).collect();
        fs::write(&unit, format!("#include \"{}\"\n{text}\n{register}", header.display())).unwrap();
        // Renamed when complete.
        let part = stem.with_extension("part");
        // The linker needs libraries after the objects that use them.
        let output =
            compiler(&["-o"]).arg(&part).args(FLAGS).arg(&unit).args(options.split_whitespace()).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        fs::rename(part, &library).unwrap();
    }
    library
}

/// Compiler flags. A misaligned access ends the test, as it would end a launch on a device.
const FLAGS: [&str; 8] = [
    "-O1",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error",
    "-fvisibility=hidden",
    "-shared",
    "-fPIC",
];

fn compiler(flags: &[&str]) -> Command {
    let mut command = Command::new("c++");
    command.args(["-std=c++17", "-x", "c++"]).args(flags);
    command
}

/// Returns the names after `__global__` in the preprocessed text.
fn kernel_names(expanded: &[u8]) -> Vec<String> {
    let expanded = String::from_utf8_lossy(expanded);
    let heads = expanded.split("__global__").skip(1).filter_map(|rest| rest.split('{').next());
    let names =
        heads.filter_map(|head| head.rsplit_once('(')?.0.split_whitespace().last().map(str::to_owned));
    let names: Vec<String> = names.collect();
    assert!(!names.is_empty(), "the text has no kernels");
    names
}

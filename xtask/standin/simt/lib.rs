//! A rule's CUDA kernels compiled for the CPU: their text, unmodified, behind `simt.h`, which stands in for a device's threads.
//! For the tests of `meshstep-optim`. A shared library is built once and kept beside the test programs, named by a hash of its
//! text, its options, the headers and the compiler's version.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking and say what they skip"
)]

use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Options of [`Device::compile`] with which every load and store is a point at which another block may go on. The compiler
/// calls a function at each, for a sanitizer whose library is left out.
pub const EVERY_ACCESS: &str = "-fsanitize=thread -nodefaultlibs -lstdc++ -lm -lgcc_s -lgcc -lc";

/// A rule's kernels, loaded.
#[derive(Debug)]
pub struct Device {
    library: Library,
    file: PathBuf,
}

type Launch = unsafe extern "C" fn(*const c_char, u32, u32, *mut *mut c_void) -> *const c_char;

impl Device {
    /// The kernels of `optim/src/<rule>/<rule>.cu`, or of `optim/src/<folder>/<file>.cu`.
    pub fn of(rule: &str) -> Option<Device> {
        Device::compile(&text(rule), "")
    }

    /// Compiles the text of kernels with these further options; none, if there is no C++ compiler. `REQUIRE_SIMT=1` makes
    /// that a failure.
    pub fn compile(text: &str, options: &str) -> Option<Device> {
        let Ok(version) = Command::new("c++").arg("--version").output() else {
            println!("skipped: no C++ compiler");
            assert_ne!(std::env::var("REQUIRE_SIMT").as_deref(), Ok("1"), "a C++ compiler is required");
            return None;
        };
        let file = build(text, options, &version.stdout);
        // SAFETY: what the library does when it is loaded is to note the names of its kernels.
        let library = unsafe { Library::new(&file) }.unwrap();
        Some(Device { library, file })
    }

    /// The shared library.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Runs a kernel with pointers to its arguments.
    ///
    /// # Safety
    /// They are of the kernel's types, and what they point at it may read and write.
    pub unsafe fn launch(
        &self,
        kernel: &str,
        blocks: u32,
        threads: u32,
        args: &mut [*mut c_void],
    ) -> Result<(), String> {
        let name = std::ffi::CString::new(kernel).unwrap();
        // SAFETY: the function's type is that of simt.h; the caller promises the arguments.
        let error = unsafe {
            let launch = self.library.get::<Launch>(b"simt_launch").unwrap();
            launch(name.as_ptr(), blocks, threads, args.as_mut_ptr())
        };
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: what is not null is a string of the library, which is still loaded.
        Err(unsafe { CStr::from_ptr(error) }.to_str().unwrap().to_owned())
    }

    /// Whether blocks and threads run in reverse order from now on.
    pub fn reverse(&self, reverse: bool) {
        // SAFETY: the function's type is that of simt.h.
        unsafe {
            self.library.get::<unsafe extern "C" fn(c_int)>(b"simt_reverse").unwrap()(reverse.into());
        }
    }

    /// Blocks of a grid run in the order that the seed draws from now on; 0 ends that.
    pub fn shuffle(&self, seed: u64) {
        // SAFETY: the function's type is that of simt.h.
        unsafe { self.library.get::<unsafe extern "C" fn(u64)>(b"simt_shuffle").unwrap()(seed) }
    }

    /// So many blocks of a grid, at most 8, are in flight from now on. They take turns, which the seed of [`Device::shuffle`]
    /// draws. 1: each block runs to its end before the next begins.
    pub fn interleave(&self, in_flight: u32) {
        // SAFETY: the function's type is that of simt.h.
        unsafe { self.library.get::<unsafe extern "C" fn(u32)>(b"simt_interleave").unwrap()(in_flight) }
    }

    /// Of every grid only these blocks run from now on.
    pub fn blocks(&self, blocks: Range<u32>) {
        // SAFETY: the function's type is that of simt.h.
        unsafe {
            self.library.get::<unsafe extern "C" fn(u32, u32)>(b"simt_blocks").unwrap()(
                blocks.start,
                blocks.end,
            );
        }
    }

    /// Stores of 16 bytes so far.
    pub fn wide_stores(&self) -> u64 {
        // SAFETY: the function's type is that of simt.h.
        unsafe { self.library.get::<unsafe extern "C" fn() -> u64>(b"simt_wide_stores").unwrap()() }
    }

    /// The names of all kernels.
    pub fn kernels(&self) -> Vec<String> {
        type Name = unsafe extern "C" fn(u32) -> *const c_char;
        // SAFETY: the function's type is that of simt.h.
        let name = |i| unsafe { self.library.get::<Name>(b"simt_kernel").unwrap()(i) };
        // SAFETY: what is not null is a string of the library.
        let owned = |name| unsafe { CStr::from_ptr(name) }.to_str().unwrap().to_owned();
        (0..).map(name).take_while(|name| !name.is_null()).map(owned).collect()
    }
}

/// A rule's kernels behind all that they share, as `cargo xtask kernels` puts it together.
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
    files.push(src.join(folder).join(format!("{file}.cu")));
    files.iter().map(|file| fs::read_to_string(file).unwrap()).collect()
}

/// The shared library of a text, built unless an earlier test has.
fn build(text: &str, options: &str, version: &[u8]) -> PathBuf {
    let [header, scheduler] =
        ["simt.h", "scheduler.h"].map(|name| Path::new(env!("CARGO_MANIFEST_DIR")).join(name));
    let headers = [&header, &scheduler].map(|path| fs::read(path).unwrap());
    let mut hasher = DefaultHasher::new();
    (text, FLAGS, options, headers, version).hash(&mut hasher);
    // Beside the test, so that all tests share it.
    let folder = std::env::current_exe().unwrap().with_file_name("simt");
    fs::create_dir_all(&folder).unwrap();
    let stem = folder.join(format!("{:016x}", hasher.finish()));
    // One builds, others wait; the lock goes with the file.
    let lock = File::create(stem.with_extension("lock")).unwrap();
    lock.lock().unwrap();
    let library = stem.with_extension("so");
    if !library.exists() {
        let unit = stem.with_extension("cpp");
        fs::write(&unit, text).unwrap();
        let names = kernel_names(&compiler(&["-E", "-P"]).arg(&unit).output().unwrap().stdout);
        let register: String = names.iter().map(|name| format!("SIMT_KERNEL({name})\n")).collect();
        fs::write(&unit, format!("#include \"{}\"\n{text}\n{register}", header.display())).unwrap();
        // Moved into place when complete.
        let part = stem.with_extension("part");
        // Libraries come behind what needs them.
        let output =
            compiler(&["-o"]).arg(&part).args(FLAGS).arg(&unit).args(options.split_whitespace()).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        fs::rename(part, &library).unwrap();
    }
    library
}

/// An access out of line ends the test, as it would end a launch on a device.
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

/// The names behind `__global__`, once macros are expanded.
fn kernel_names(expanded: &[u8]) -> Vec<String> {
    let expanded = String::from_utf8_lossy(expanded);
    let heads = expanded.split("__global__").skip(1).filter_map(|rest| rest.split('{').next());
    let names =
        heads.filter_map(|head| head.rsplit_once('(')?.0.split_whitespace().last().map(str::to_owned));
    let names: Vec<String> = names.collect();
    assert!(!names.is_empty(), "kernels in the text");
    names
}

//! NVRTC, the compiler from CUDA C++ to PTX, as a library that is loaded where it was unpacked. It needs no GPU and no driver.

use anyhow::{Context, bail, ensure};
use libloading::{Library, Symbol};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

type Program = *mut c_void;

/// The library, and what it would look for by name.
#[derive(Debug)]
pub(crate) struct Nvrtc {
    library: Library,
    _builtins: Library,
}

impl Nvrtc {
    /// Loads the two libraries of the wheel.
    pub(crate) fn open(builtins: &Path, library: &Path) -> anyhow::Result<Self> {
        // Loaded first: NVRTC asks for it by name, and gets what is loaded already.
        let _builtins = load(builtins)?;
        Ok(Self { library: load(library)?, _builtins })
    }

    /// The PTX of a text. What the compiler has to say, warnings too, is an error.
    pub(crate) fn compile(&self, name: &str, text: &str, options: &[&str]) -> anyhow::Result<String> {
        let program = self.create(name, text)?;
        let result = self.compile_program(program, options);
        self.destroy(program);
        result.with_context(|| format!("NVRTC does not compile {name}"))
    }

    fn create(&self, name: &str, text: &str) -> anyhow::Result<Program> {
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        let (text, name) = (CString::new(text)?, CString::new(name)?);
        let mut program = ptr::null_mut();
        // SAFETY: nvrtc.h declares the function so; both texts outlive the call, and there are no headers.
        let code = unsafe {
            let create: Symbol<'_, Create> = self.library.get(b"nvrtcCreateProgram")?;
            create(&mut program, text.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null())
        };
        ensure!(code == 0, "nvrtcCreateProgram: {}", self.meaning(code));
        Ok(program)
    }

    fn compile_program(&self, program: Program, options: &[&str]) -> anyhow::Result<String> {
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        let options = options.iter().map(|option| CString::new(*option)).collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: nvrtc.h declares the function so; the program is alive, and there are as many options as it is told.
        let code = unsafe {
            let compile: Symbol<'_, Compile> = self.library.get(b"nvrtcCompileProgram")?;
            compile(program, c_int::try_from(pointers.len())?, pointers.as_ptr())
        };
        let log = self.text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")?;
        if code != 0 {
            bail!("{}\n{log}", self.meaning(code));
        }
        ensure!(log.trim().is_empty(), "warnings\n{log}");
        self.text(program, "nvrtcGetPTXSize", "nvrtcGetPTX")
    }

    /// One of the texts that a program has once it was compiled.
    fn text(&self, program: Program, size: &str, get: &str) -> anyhow::Result<String> {
        type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
        type Get = unsafe extern "C" fn(Program, *mut u8) -> c_int;
        let mut len = 0;
        // SAFETY: nvrtc.h declares both functions so; the program is alive.
        let code = unsafe { self.library.get::<Size>(size.as_bytes())?(program, &mut len) };
        ensure!(code == 0, "{size}: {}", self.meaning(code));
        let mut bytes = vec![0u8; len];
        // SAFETY: as above; there is room for the bytes that it said it has.
        let code = unsafe { self.library.get::<Get>(get.as_bytes())?(program, bytes.as_mut_ptr()) };
        ensure!(code == 0, "{get}: {}", self.meaning(code));
        // A zero ends it.
        Ok(CStr::from_bytes_until_nul(&bytes)
            .map_or(String::new(), |text| text.to_string_lossy().into_owned()))
    }

    fn destroy(&self, mut program: Program) {
        type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
        // SAFETY: nvrtc.h declares the function so; the program is alive, and nobody uses it afterwards.
        unsafe {
            if let Ok(destroy) = self.library.get::<Destroy>(b"nvrtcDestroyProgram") {
                destroy(&mut program);
            }
        }
    }

    /// An error's name.
    fn meaning(&self, code: c_int) -> String {
        type Meaning = unsafe extern "C" fn(c_int) -> *const c_char;
        // SAFETY: nvrtc.h declares the function so; the text that it returns is the library's own and stays.
        unsafe {
            match self.library.get::<Meaning>(b"nvrtcGetErrorString") {
                Ok(meaning) => CStr::from_ptr(meaning(code)).to_string_lossy().into_owned(),
                Err(_) => format!("error {code}"),
            }
        }
    }
}

fn load(path: &Path) -> anyhow::Result<Library> {
    // SAFETY: the file is one of the wheel's, which was compared with its hash; it runs nothing of ours when loaded.
    unsafe { Library::new(path) }.with_context(|| format!("cannot load {}", path.display()))
}

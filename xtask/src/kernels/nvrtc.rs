//! NVRTC, the compiler from CUDA C++ to PTX, loaded as a library from the unpacked wheel. It needs no GPU and no driver.

use anyhow::{Context, bail, ensure};
use libloading::{Library, Symbol};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

type Program = *mut c_void;

/// The NVRTC library, and the library of builtins that it loads by name.
#[derive(Debug)]
pub(crate) struct Nvrtc {
    library: Library,
    _builtins: Library,
}

impl Nvrtc {
    /// Loads the two libraries of the wheel.
    pub(crate) fn open(builtins: &Path, library: &Path) -> anyhow::Result<Self> {
        // Loaded first: when NVRTC loads the builtins by name, the loader returns the loaded library.
        let _builtins = load(builtins)?;
        Ok(Self { library: load(library)?, _builtins })
    }

    /// Compiles a text to PTX. Any message of the compiler, even a warning, is an error.
    pub(crate) fn compile(&self, name: &str, text: &str, options: &[&str]) -> anyhow::Result<String> {
        let program = self.create(name, text)?;
        let result = self.compile_program(program, options);
        self.destroy(program);
        result.with_context(|| format!("NVRTC cannot compile {name}"))
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
        // SAFETY: the signature is that of nvrtc.h; both texts outlive the call, and there are no headers.
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
        // SAFETY: the signature is that of nvrtc.h; the program is alive, and the count is the number of pointers.
        let code = unsafe {
            let compile: Symbol<'_, Compile> = self.library.get(b"nvrtcCompileProgram")?;
            compile(program, c_int::try_from(pointers.len())?, pointers.as_ptr())
        };
        let log = self.text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")?;
        if code != 0 {
            bail!("{}\n{log}", self.meaning(code));
        }
        ensure!(log.trim().is_empty(), "the compiler printed warnings\n{log}");
        self.text(program, "nvrtcGetPTXSize", "nvrtcGetPTX")
    }

    /// Returns a text that belongs to a compiled program, such as its log or its PTX.
    fn text(&self, program: Program, size: &str, get: &str) -> anyhow::Result<String> {
        type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
        type Get = unsafe extern "C" fn(Program, *mut u8) -> c_int;
        let mut len = 0;
        // SAFETY: the signatures are those of nvrtc.h; the program is alive.
        let code = unsafe { self.library.get::<Size>(size.as_bytes())?(program, &mut len) };
        ensure!(code == 0, "{size}: {}", self.meaning(code));
        let mut bytes = vec![0u8; len];
        // SAFETY: as above; the buffer has the length that NVRTC asked for.
        let code = unsafe { self.library.get::<Get>(get.as_bytes())?(program, bytes.as_mut_ptr()) };
        ensure!(code == 0, "{get}: {}", self.meaning(code));
        // The text is terminated by a zero byte.
        Ok(CStr::from_bytes_until_nul(&bytes)
            .map_or(String::new(), |text| text.to_string_lossy().into_owned()))
    }

    fn destroy(&self, mut program: Program) {
        type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
        // SAFETY: the signature is that of nvrtc.h; the program is alive and not used afterwards.
        unsafe {
            if let Ok(destroy) = self.library.get::<Destroy>(b"nvrtcDestroyProgram") {
                destroy(&mut program);
            }
        }
    }

    /// Returns the name of an error code.
    fn meaning(&self, code: c_int) -> String {
        type Meaning = unsafe extern "C" fn(c_int) -> *const c_char;
        // SAFETY: the signature is that of nvrtc.h; the returned text is static data of the library.
        unsafe {
            match self.library.get::<Meaning>(b"nvrtcGetErrorString") {
                Ok(meaning) => CStr::from_ptr(meaning(code)).to_string_lossy().into_owned(),
                Err(_) => format!("error {code}"),
            }
        }
    }
}

fn load(path: &Path) -> anyhow::Result<Library> {
    // SAFETY: the file is part of the wheel, which pip checked against its hash; loading it runs no code of this workspace.
    unsafe { Library::new(path) }.with_context(|| format!("cannot load {}", path.display()))
}

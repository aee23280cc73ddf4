//! Kernels: compiled for a device when they are first asked for, and kept as long as the process.

use super::THREADS;
use crate::Error;
use meshstep_tensor::cuda::{self, Device, Function, Module, Stream};
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// The PTX of one `.cu`, made by `cargo xtask kernels`.
#[derive(Clone, Copy, Debug)]
struct Text {
    name: &'static str,
    ptx: &'static str,
}

const TEXTS: [Text; 14] = [
    Text { name: "accumulate", ptx: include_str!("accumulate.ptx") },
    Text { name: "adagrad", ptx: include_str!("../adagrad/adagrad.ptx") },
    Text { name: "adam", ptx: include_str!("../adam/adam.ptx") },
    Text { name: "adopt", ptx: include_str!("../adopt/adopt.ptx") },
    Text { name: "cast", ptx: include_str!("cast.ptx") },
    Text { name: "decide", ptx: include_str!("../norm/decide.ptx") },
    Text { name: "lbfgs", ptx: include_str!("../lbfgs/lbfgs.ptx") },
    Text { name: "lion", ptx: include_str!("../lion/lion.ptx") },
    Text { name: "merge", ptx: include_str!("../merge/merge.ptx") },
    Text { name: "norm", ptx: include_str!("../norm/norm.ptx") },
    Text { name: "qhadamw", ptx: include_str!("../qhadamw/qhadamw.ptx") },
    Text { name: "rmsprop", ptx: include_str!("../rmsprop/rmsprop.ptx") },
    Text { name: "sgd", ptx: include_str!("../sgd/sgd.ptx") },
    Text { name: "uncorrected", ptx: include_str!("../uncorrected/uncorrected.ptx") },
];

/// A kernel of ours on one device.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    function: Function,
    /// Blocks that keep the device busy.
    resident: u32,
}

/// What is loaded: the device, the text, and its kernels by name.
struct Loaded {
    ordinal: usize,
    text: &'static str,
    module: Module,
    kernels: Vec<(String, Kernel)>,
}

impl Kernel {
    /// The kernel of this name on `device`; its name begins with that of its text.
    pub(crate) fn find(device: &Device, name: &str) -> Result<Kernel, Error> {
        static LOADED: Mutex<Vec<Loaded>> = Mutex::new(Vec::new());
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let text = TEXTS.iter().find(|text| text.name == super::module(name));
        let text = text.ok_or_else(|| cuda::Error::NoKernel { name: name.to_owned() })?;
        let here = |l: &Loaded| l.ordinal == device.ordinal() && l.text == text.name;
        let index = match loaded.iter().position(here) {
            Some(index) => index,
            None => {
                let module = Module::load(device, text.ptx)?;
                loaded.push(Loaded {
                    ordinal: device.ordinal(),
                    text: text.name,
                    module,
                    kernels: Vec::new(),
                });
                loaded.len() - 1
            }
        };
        loaded[index].kernel(name)
    }

    /// Runs it on `stream`, with enough blocks for `tiles` tiles.
    ///
    /// # Safety
    /// As [`Stream::launch`]'s, for blocks of [`THREADS`] threads.
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        tiles: u64,
        arguments: &mut [*mut c_void],
    ) -> Result<(), Error> {
        let blocks = u32::try_from(tiles).unwrap_or(u32::MAX).min(self.resident);
        // SAFETY: the caller's promise.
        unsafe { stream.launch(&self.function, (blocks, THREADS), arguments)? };
        Ok(())
    }
}

impl Loaded {
    fn kernel(&mut self, name: &str) -> Result<Kernel, Error> {
        if let Some((_, kernel)) = self.kernels.iter().find(|(known, _)| known == name) {
            return Ok(kernel.clone());
        }
        let function = self.module.function(name)?;
        let kernel = Kernel { resident: function.resident_blocks(THREADS)?, function };
        self.kernels.push((name.to_owned(), kernel.clone()));
        Ok(kernel)
    }
}

/// A place to point at for a kernel's parameter.
pub(crate) fn argument<T>(value: &mut T) -> *mut c_void {
    (&raw mut *value).cast()
}

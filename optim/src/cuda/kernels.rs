//! Kernels: compiled for a device when they are first asked for, and kept as long as the process.

use super::THREADS;
use crate::Error;
use meshstep_tensor::cuda::{Device, Function, Module, Stream};
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// The PTX of one `.cu`, made by `cargo xtask kernels`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text {
    pub(crate) name: &'static str,
    pub(crate) ptx: &'static str,
}

/// The kernels of a rule's family.
pub(crate) fn text(family: &str) -> Option<Text> {
    let known = |&text: &Text| text.name == super::module(family);
    TEXTS.into_iter().find(known)
}

const TEXTS: [Text; 2] = [
    Text { name: "adam", ptx: include_str!("../adam/adam.ptx") },
    Text { name: "sgd", ptx: include_str!("../sgd/sgd.ptx") },
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
    /// The kernel `name` of `text` on `device`.
    pub(crate) fn find(device: &Device, text: Text, name: &str) -> Result<Kernel, Error> {
        static LOADED: Mutex<Vec<Loaded>> = Mutex::new(Vec::new());
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
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

//! Scratch memory of updates of matrices, on a device.

use super::kernels::Kernel;
use super::update::stream;
use super::{MatrixSizes, norm_kernel};
use crate::{Error, Norm};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::sync::{Mutex, PoisonError};

/// Scratch memory in which tensors of one type are updated, one after another: for all [`Update`](super::Update)s and
/// [`Orthogonalizer`](super::Orthogonalizer)s of one queue. It is allocated once, and stays where it is.
#[derive(Debug)]
pub struct MatrixMemory {
    dtype: DType,
    sizes: MatrixSizes,
    pub(super) kernels: MatrixKernels,
    step: Buffer,
    product: Buffer,
    gram: Buffer,
    square: Buffer,
    norms: Mutex<Buffer>,
}

/// Kernels that orthogonalise matrices of one type.
#[derive(Debug)]
pub(super) struct MatrixKernels {
    pub(super) norm: Kernel,
    pub(super) scale: Kernel,
    pub(super) product: Kernel,
}

/// Addresses of the scratch memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scratch {
    pub(super) product: u64,
    pub(super) gram: u64,
    pub(super) square: u64,
    pub(super) norms: u64,
}

impl MatrixMemory {
    /// Allocates memory on the queue's device for tensors of these sizes, whose rule computes in `dtype`: f32 or f64.
    pub fn new(dtype: DType, sizes: MatrixSizes, queue: &Queue, meter: &Meter) -> Result<Self, Error> {
        let stream = stream(queue)?;
        let refused = Error::DType { what: "a step", given: dtype, works: "f32 or f64" };
        let norm = norm_kernel(Norm::L2, dtype).filter(|_| matches!(dtype, DType::F32 | DType::F64));
        let norm = norm.ok_or(refused)?;
        let find = |name: &str| Kernel::find(stream.device(), name);
        let kernels = MatrixKernels {
            norm: find(&norm)?,
            scale: find(&format!("muon_scale_{dtype}"))?,
            product: find(&format!("muon_product_{dtype}"))?,
        };
        let room = |len, dtype| Buffer::zeroed_on(queue, len, dtype, meter, Category::Staging);
        Ok(MatrixMemory {
            dtype,
            sizes,
            kernels,
            step: room(sizes.step, dtype)?,
            product: room(sizes.tensor, dtype)?,
            gram: room(sizes.gram, dtype)?,
            square: room(sizes.gram, dtype)?,
            norms: Mutex::new(room(sizes.matrices * MatrixSizes::NORM, DType::U64)?),
        })
    }

    /// Returns the type that matrices have.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Checks that tensors of a type and these sizes are updated here.
    pub(super) fn check(&self, dtype: DType, sizes: &MatrixSizes, queue: &Queue) -> Result<(), Error> {
        self.gram.place().check(queue.place())?;
        if self.dtype != dtype {
            return Err(Error::DType { what: "a step", given: dtype, works: "that of its scratch memory" });
        }
        if self.sizes.holds(sizes) {
            return Ok(());
        }
        let what = "scratch memory of matrices";
        Err(Error::Len { what, given: self.sizes.tensor, expected: sizes.tensor })
    }

    /// Returns the address of the step.
    pub(super) fn step(&self) -> u64 {
        self.step.as_slice().address() as u64
    }

    /// Clears the norms of so many matrices, and returns the addresses.
    pub(super) fn begin(&self, matrices: usize, queue: &Queue) -> Result<Scratch, Error> {
        let mut norms = self.norms.lock().unwrap_or_else(PoisonError::into_inner);
        queue.zero(norms.as_mut().slice(0..matrices * MatrixSizes::NORM)?)?;
        let at = |buffer: &Buffer| buffer.as_slice().address() as u64;
        Ok(Scratch {
            product: at(&self.product),
            gram: at(&self.gram),
            square: at(&self.square),
            norms: at(&norms),
        })
    }
}

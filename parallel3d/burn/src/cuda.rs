//! Tensors of burn in a GPU's memory: their addresses, and copies on the device.
//!
//! Burn works on streams of its own, which it does not show. So the host waits at each border: for burn's stream before copies on the
//! optimizer's queue, and for the queue before burn's memory is released or read.

use crate::walk::ReadParam;
use crate::{Error, memory};
use burn::backend::tensor::FloatTensor;
use burn::module::Param;
use burn::tensor::Tensor;
use burn_cubecl::cubecl::client::Client;
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::cubecl::future::block_on;
use burn_cubecl::cubecl::server::Handle;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{Cube, CubeDevice};
use cubecl_runtime::runtime::Runtime;
use meshstep_shard::MicroBatch;
use meshstep_tensor::{DType, Place, Queue, Slice, SliceMut};

/// Server of burn's CUDA devices, which knows the addresses of handles.
type Server = <CudaRuntime as Runtime>::Server;

/// Memory of a tensor in row-major order. Burn neither frees, moves nor hands it out again while this lives.
struct Held {
    address: u64,
    len: usize,
    dtype: DType,
    _allocation: Box<dyn Send>,
}

/// Memory of burn that work on the optimizer's queue uses. A drop waits for that work.
struct Borrowed {
    queue: Queue,
    /// Client of burn's device.
    client: Option<Client>,
    held: Vec<Held>,
}

impl Borrowed {
    fn new(queue: &Queue) -> Self {
        Borrowed { queue: queue.clone(), client: None, held: Vec::new() }
    }

    /// Keeps the memory of `handle` in its place.
    fn hold(
        &mut self,
        name: &str,
        (client, handle): (&Client, &Handle),
        (len, dtype): (usize, DType),
    ) -> Result<(), Error> {
        self.client.get_or_insert_with(|| client.clone());
        if len == 0 {
            self.held.push(Held { address: 0, len, dtype, _allocation: Box::new(()) });
            return Ok(());
        }
        let found = client.get_resource::<Server>(handle.clone());
        let found = found.map_err(|error| memory::unread(name, format!("{error:?}")))?;
        let (address, bytes) = (found.resource().ptr, found.resource().size);
        if bytes < (len * dtype.size()) as u64 {
            return Err(memory::unread(name, format!("{len} elements of {dtype} in {bytes} bytes")));
        }
        // Work of burn that overwrites its input does not, as long as this handle lives.
        self.held.push(Held { address, len, dtype, _allocation: Box::new((found, handle.clone())) });
        Ok(())
    }

    /// Waits for burn's work on the memory so far.
    fn wait_for_burn(&self) -> Result<(), Error> {
        let Some(client) = &self.client else { return Ok(()) };
        block_on(client.sync()).map_err(|error| memory::unread("burn's device", format!("{error:?}")))
    }

    /// Waits for the queue's work on the memory, and gives the memory back.
    fn give_back(mut self) -> Result<(), Error> {
        self.queue.synchronize()?;
        self.held.clear();
        Ok(())
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if !self.held.is_empty() && self.queue.synchronize().is_err() {
            // The device may still use the memory, so burn never gets it back.
            std::mem::forget(std::mem::take(&mut self.held));
        }
    }
}

/// Gradients of one pass, handed over together.
pub(crate) struct GpuGrads {
    names: Vec<String>,
    borrowed: Borrowed,
}

impl GpuGrads {
    /// Returns no gradients yet, or `None` if the queue is the CPU's.
    pub(crate) fn new(queue: &Queue) -> Option<Self> {
        let borrowed = || Borrowed::new(queue);
        (queue.place() != Place::Cpu).then(|| GpuGrads { names: Vec::new(), borrowed: borrowed() })
    }

    /// Takes a gradient, in order and in the type that the optimizer takes.
    pub(crate) fn add<const D: usize>(
        &mut self,
        micro_batch: &MicroBatch<'_>,
        name: &str,
        grad: Tensor<D>,
    ) -> Result<(), Error> {
        let dtype = micro_batch.grad_dtype(name)?;
        let grad = into_contiguous(primitive(name, grad.cast(memory::of_burn(dtype)), micro_batch.queue())?);
        let len = grad.meta.shape().num_elements();
        self.borrowed.hold(name, (&grad.client, &grad.handle), (len, dtype))?;
        self.names.push(name.to_owned());
        Ok(())
    }

    /// Copies the gradients into their buckets.
    pub(crate) fn hand_over(self, micro_batch: &MicroBatch<'_>) -> Result<(), Error> {
        self.borrowed.wait_for_burn()?;
        for (name, held) in self.names.iter().zip(&self.borrowed.held) {
            // SAFETY: burn has written the elements, which it neither writes nor frees while `borrowed` lives; its drop waits for the queue.
            let grad =
                unsafe { Slice::from_raw_on(&self.borrowed.queue, held.address, held.len, held.dtype)? };
            micro_batch.grad(name, grad)?;
        }
        self.borrowed.give_back()
    }
}

/// New tensors of burn, filled together.
pub(crate) struct GpuTensors<'a> {
    values: Vec<Slice<'a>>,
    borrowed: Borrowed,
}

impl<'a> GpuTensors<'a> {
    /// Returns no tensors yet, or `None` if the queue is the CPU's.
    pub(crate) fn new(queue: &Queue) -> Option<Self> {
        let borrowed = || Borrowed::new(queue);
        (queue.place() != Place::Cpu).then(|| GpuTensors { values: Vec::new(), borrowed: borrowed() })
    }

    /// Makes a tensor with the shape, device and autodiff of `like`. It has `values` after [`fill`](Self::fill).
    pub(crate) fn add<const D: usize>(
        &mut self,
        name: &str,
        values: Slice<'a>,
        like: &Tensor<D>,
    ) -> Result<Tensor<D>, Error> {
        let old = primitive(name, like.clone(), &self.borrowed.queue)?;
        let handle = old.client.empty(values.size());
        self.borrowed.hold(name, (&old.client, &handle), (values.len(), values.dtype()))?;
        self.values.push(values);
        let made = CubeTensor::new_contiguous(old.client, old.device, like.shape(), handle, old.dtype);
        let mut made = Tensor::from_primitive::<Cube>(made);
        if let Some(strategy) = like.gradient_checkpointing_strategy() {
            made = made.autodiff().with_gradient_checkpointing_strategy(strategy);
        }
        Ok(made.set_require_grad(like.is_require_grad()))
    }

    /// Copies the values into the tensors, and waits until they are there.
    pub(crate) fn fill(self) -> Result<(), Error> {
        // Earlier work of burn may still use the memory that it gave to the tensors.
        self.borrowed.wait_for_burn()?;
        let queue = &self.borrowed.queue;
        for (values, held) in self.values.iter().zip(&self.borrowed.held) {
            // SAFETY: the memory is that of a new tensor, which no other code has read or written; `borrowed` keeps it in its place
            // until the queue's work is done.
            let into = unsafe { SliceMut::from_raw_on(queue, held.address, held.len, held.dtype)? };
            queue.copy(*values, into)?;
        }
        self.borrowed.give_back()
    }
}

/// Returns the tensor in burn's memory on the queue's GPU.
fn primitive<const D: usize>(name: &str, tensor: Tensor<D>, queue: &Queue) -> Result<CubeTensor, Error> {
    let device = format!("{:?}", tensor.device());
    let found = tensor.inner().try_into_primitive::<Cube>().ok().map(burn_needs_its_feature_fusion_off);
    let found = found.filter(|tensor| match &tensor.device {
        CubeDevice::Cuda(device) => Place::Cuda(device.index) == queue.place(),
        _ => false,
    });
    found.ok_or_else(|| Error::Device { name: name.to_owned(), device, place: queue.place() })
}

/// Returns the tensor itself. With burn's feature `fusion` this does not compile, because tensors then are promises of later kernels.
fn burn_needs_its_feature_fusion_off(tensor: FloatTensor<Cube>) -> CubeTensor {
    tensor
}

/// Checks that every parameter is on the queue's GPU.
pub(crate) struct OnGpu<'a>(pub(crate) &'a Queue);

impl ReadParam for OnGpu<'_> {
    fn read<const D: usize>(&mut self, name: &str, _: bool, param: &Param<Tensor<D>>) -> Result<(), Error> {
        if memory::dtype(param.base().dtype()).is_none() {
            return Ok(());
        }
        primitive(name, param.base(), self.0).map(drop)
    }
}

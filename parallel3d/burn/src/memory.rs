//! Copies between burn tensors and flat memory.

use crate::Error;
use burn::tensor::{DType as BurnType, Element as BurnElement, Tensor, TensorData};
use meshstep_shard::MicroBatch;
use meshstep_tensor::{DType, Element, Queue, Slice, SliceMut, Threads, bf16, f16};

/// Hands `grad` to a micro-batch as the gradient of the parameter `name`, in the type that the optimizer takes
/// ([`Options::grads`](meshstep_shard::Options::grads)). [`Sharded`](crate::Sharded) calls it for every parameter.
///
/// `grad` has the parameter's number of elements. On the CPU its memory is read in place where this is its only handle. If the optimizer
/// is on a GPU, `grad` is there too, and the host waits for burn's work on it and for the copy.
///
/// # Errors
/// [`Error::Read`], [`Error::DType`] and [`Error::Device`] of a gradient that is not read, and [`Error::Shard`] of the micro-batch.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use meshstep_optim::Sgd;
/// use meshstep_shard::{Optimizer, Options, StepArgs};
/// use meshstep_tensor::{DType, Layout};
///
/// let worlds = meshstep_comm::loopback::spawn(2, |comm| -> Result<f32, meshstep_burn::Error> {
///     let layout = Layout::builder().param("w", &[2], DType::F32).build()?;
///     let mut opt = Optimizer::new(comm, layout, Sgd::default(), |_, _| Ok(()), Options::default())?;
///     let mb = opt.micro_batch(1)?;
///     meshstep_burn::hand_over(&mb, "w", Tensor::<1>::from_floats([1.0, 2.0], &Device::flex()))?;
///     mb.finish()?;
///     opt.step(StepArgs { lr: 0.5, ..StepArgs::default() })?.outcome()?;
///     Ok(opt.param("w")?.typed::<f32>()?[1])
/// })?;
/// assert!(worlds.into_iter().all(|w| w.is_ok_and(|w| w == -1.0)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn hand_over<const D: usize>(
    micro_batch: &MicroBatch<'_>,
    name: &str,
    grad: Tensor<D>,
) -> Result<(), Error> {
    #[cfg(feature = "cuda")]
    if let Some(mut on_gpu) = crate::cuda::GpuGrads::new(micro_batch.queue()) {
        on_gpu.add(micro_batch, name, grad)?;
        return on_gpu.hand_over(micro_batch);
    }
    let grad = grad.inner().try_into_data().map_err(|error| unread(name, error))?;
    match with_values(name, &grad, |values| micro_batch.grad(name, values))? {
        Err(meshstep_shard::Error::GradDType { expected, .. }) => cast(micro_batch, name, grad, expected),
        done => Ok(done?),
    }
}

/// Rounds a gradient to `dtype` in its place in the bucket, or beside it if earlier micro-batches are summed there.
fn cast(micro_batch: &MicroBatch<'_>, name: &str, grad: TensorData, dtype: DType) -> Result<(), Error> {
    match micro_batch.slot(name) {
        Ok(mut slot) => {
            let place = slot.as_mut()?;
            with_values(name, &grad, |values| meshstep_tensor::cast(values, place))??;
            Ok(slot.fill()?)
        }
        Err(meshstep_shard::Error::SlotTaken { .. }) => {
            let rounded = grad.try_cast(of_burn(dtype)).map_err(|error| unread(name, error))?;
            Ok(with_values(name, &rounded, |values| micro_batch.grad(name, values))??)
        }
        Err(error) => Err(error.into()),
    }
}

/// Calls `read` with the values of a tensor in place, in row-major order.
pub(crate) fn with_values<T>(
    name: &str,
    data: &TensorData,
    read: impl FnOnce(Slice<'_>) -> T,
) -> Result<T, Error> {
    let values = match data.dtype() {
        BurnType::F32 => data.as_slice::<f32>().map(Slice::from),
        BurnType::F64 => data.as_slice::<f64>().map(Slice::from),
        BurnType::BF16 => data.as_slice::<bf16>().map(Slice::from),
        BurnType::F16 => data.as_slice::<f16>().map(Slice::from),
        dtype => return Err(Error::DType { name: name.to_owned(), dtype }),
    };
    Ok(read(values.map_err(|error| unread(name, error))?))
}

/// Returns a tensor with `values`, which are at the queue's place, on the device of `like`, with its shape and its place in autodiff.
pub(crate) fn tensor<const D: usize>(
    name: &str,
    values: Slice<'_>,
    like: &Tensor<D>,
    queue: &Queue,
) -> Result<Tensor<D>, Error> {
    #[cfg(feature = "cuda")]
    if let Some(mut on_gpu) = crate::cuda::GpuTensors::new(queue) {
        let made = on_gpu.add(name, values, like)?;
        return on_gpu.fill().map(|()| made);
    }
    let (_, threads) = (name, queue.threads());
    let data = match values.dtype() {
        DType::F64 => data::<f64, D>(values, like, threads)?,
        DType::BF16 => data::<bf16, D>(values, like, threads)?,
        DType::F16 => data::<f16, D>(values, like, threads)?,
        _ => data::<f32, D>(values, like, threads)?,
    };
    let made = Tensor::from_data(data, (&like.device(), like.dtype()));
    Ok(made.set_require_grad(like.is_require_grad()))
}

fn data<T: Element + BurnElement + Default, const D: usize>(
    values: Slice<'_>,
    like: &Tensor<D>,
    threads: &Threads,
) -> Result<TensorData, Error> {
    let mut copied = vec![T::default(); values.len()];
    copy(values, (&mut copied).into(), threads)?;
    Ok(TensorData::new(copied, like.shape()))
}

/// Bytes that one thread copies at a time.
const PART: usize = 1 << 20;

/// Copies on several threads; one core does not saturate the memory bandwidth.
fn copy(from: Slice<'_>, mut into: SliceMut<'_>, threads: &Threads) -> Result<(), meshstep_tensor::Error> {
    if from.size() <= PART || from.dtype() != into.dtype() {
        return into.copy_from(from);
    }
    let parts = into.bytes_mut()?.chunks_mut(PART).zip(from.bytes()?.chunks(PART));
    threads.for_each(parts, |(into, from)| into.copy_from_slice(from));
    Ok(())
}

/// Returns the type of flat memory for a burn type.
pub(crate) fn dtype(dtype: BurnType) -> Option<DType> {
    match dtype {
        BurnType::F32 => Some(DType::F32),
        BurnType::F64 => Some(DType::F64),
        BurnType::BF16 => Some(DType::BF16),
        BurnType::F16 => Some(DType::F16),
        _ => None,
    }
}

/// Returns the burn type of a gradient, which has one of four types.
pub(crate) fn of_burn(dtype: DType) -> BurnType {
    match dtype {
        DType::F64 => BurnType::F64,
        DType::BF16 => BurnType::BF16,
        DType::F16 => BurnType::F16,
        _ => BurnType::F32,
    }
}

/// Returns burn's error as one of this crate.
pub(crate) fn unread(name: &str, error: impl std::fmt::Display) -> Error {
    Error::Read { name: name.to_owned(), reason: error.to_string() }
}

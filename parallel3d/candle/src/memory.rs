//! Copies between candle tensors and flat memory, without memory in between.

use crate::Error;
use candle_core::backend::BackendStorage as _;
use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Storage, Tensor, Var};
use meshstep_shard::MicroBatch;
use meshstep_tensor::{DType, Slice, SliceMut, Threads};

/// Hands `grad` to a micro-batch as the gradient of the parameter `name`, in the type that the optimizer takes
/// ([`Options::grads`](meshstep_shard::Options::grads)). [`Sharded`](crate::Sharded) calls it for every variable.
///
/// `grad` has the parameter's number of elements. One that is not contiguous is made so by candle first.
///
/// # Errors
/// [`Error::Device`] and [`Error::DType`] of a gradient that is not read, and [`Error::Shard`] of the micro-batch.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use meshstep_optim::Sgd;
/// use meshstep_shard::{Optimizer, Options, StepArgs};
/// use meshstep_tensor::{DType, Layout};
///
/// let worlds = meshstep_comm::loopback::spawn(2, |comm| -> Result<f32, meshstep_candle::Error> {
///     let layout = Layout::builder().param("w", &[2], DType::F32).build()?;
///     let mut opt = Optimizer::new(comm, layout, Sgd::default(), |_, _| Ok(()), Options::default())?;
///     let mb = opt.micro_batch(1)?;
///     meshstep_candle::hand_over(&mb, "w", &Tensor::new(&[1f32, 2.0], &Device::Cpu)?)?;
///     mb.finish()?;
///     opt.step(StepArgs { lr: 0.5, ..StepArgs::default() })?.outcome()?;
///     Ok(opt.param("w")?.typed::<f32>()?[1])
/// })?;
/// assert!(worlds.into_iter().all(|w| w.is_ok_and(|w| w == -1.0)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn hand_over(micro_batch: &MicroBatch<'_>, name: &str, grad: &Tensor) -> Result<(), Error> {
    let grad = grad.contiguous()?;
    let given = with_values(name, &grad, |values| micro_batch.grad(name, values))?;
    match given {
        Err(meshstep_shard::Error::GradDType { expected, .. }) => cast(micro_batch, name, &grad, expected),
        done => Ok(done?),
    }
}

/// Rounds a gradient to `dtype` in its place in the bucket, or beside it if earlier micro-batches are summed there.
fn cast(micro_batch: &MicroBatch<'_>, name: &str, grad: &Tensor, dtype: DType) -> Result<(), Error> {
    match micro_batch.slot(name) {
        Ok(mut slot) => {
            let place = slot.as_mut()?;
            with_values(name, grad, |values| meshstep_tensor::cast(values, place))??;
            Ok(slot.fill()?)
        }
        Err(meshstep_shard::Error::SlotTaken { .. }) => {
            let rounded = grad.to_dtype(of_candle(dtype))?;
            Ok(with_values(name, &rounded, |values| micro_batch.grad(name, values))??)
        }
        Err(error) => Err(error.into()),
    }
}

/// Calls `read` with the values of a tensor in place, in row-major order.
pub(crate) fn with_values<T>(
    name: &str,
    tensor: &Tensor,
    read: impl FnOnce(Slice<'_>) -> T,
) -> Result<T, Error> {
    check_device(name, tensor)?;
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else { return Err(strided(name)) };
    match &*storage {
        Storage::Cpu(storage) => {
            let values = values(storage).ok_or_else(|| unknown(name, &tensor))?;
            Ok(read(values.slice(start..end)?))
        }
        _ => Err(elsewhere(name, &tensor)),
    }
}

/// Copies `values`, in row-major order, into a variable.
pub(crate) fn overwrite(name: &str, var: &Var, values: Slice<'_>, threads: &Threads) -> Result<(), Error> {
    check_device(name, var)?;
    Ok(var.inplace_op1(&Overwrite { values, threads })?)
}

/// Bytes that one thread copies at a time.
const PART: usize = 1 << 20;

/// Copies on several threads; one core does not saturate the memory bandwidth.
fn copy(from: Slice<'_>, mut into: SliceMut<'_>, threads: &Threads) -> Result<(), meshstep_tensor::Error> {
    if from.size() <= PART || (from.dtype(), from.len()) != (into.dtype(), into.len()) {
        return into.copy_from(from);
    }
    let parts = into.bytes_mut()?.chunks_mut(PART).zip(from.bytes()?.chunks(PART));
    threads.for_each(parts, |(into, from)| into.copy_from_slice(from));
    Ok(())
}

/// Checks that a variable can be trained.
pub(crate) fn check(name: &str, var: &Var) -> Result<DType, Error> {
    check_device(name, var)?;
    if !var.is_contiguous() {
        return Err(strided(name));
    }
    dtype(var.dtype()).ok_or_else(|| unknown(name, var))
}

/// Returns the type of flat memory for a candle type.
fn dtype(dtype: candle_core::DType) -> Option<DType> {
    match dtype {
        candle_core::DType::F32 => Some(DType::F32),
        candle_core::DType::F64 => Some(DType::F64),
        candle_core::DType::BF16 => Some(DType::BF16),
        candle_core::DType::F16 => Some(DType::F16),
        _ => None,
    }
}

/// Returns the candle type of a gradient, which has one of four types.
fn of_candle(dtype: DType) -> candle_core::DType {
    match dtype {
        DType::F64 => candle_core::DType::F64,
        DType::BF16 => candle_core::DType::BF16,
        DType::F16 => candle_core::DType::F16,
        _ => candle_core::DType::F32,
    }
}

fn values(storage: &CpuStorage) -> Option<Slice<'_>> {
    match storage {
        CpuStorage::F32(values) => Some(values.into()),
        CpuStorage::F64(values) => Some(values.into()),
        CpuStorage::BF16(values) => Some(values.into()),
        CpuStorage::F16(values) => Some(values.into()),
        _ => None,
    }
}

fn values_mut(storage: &mut CpuStorage) -> Option<SliceMut<'_>> {
    match storage {
        CpuStorage::F32(values) => Some(values.into()),
        CpuStorage::F64(values) => Some(values.into()),
        CpuStorage::BF16(values) => Some(values.into()),
        CpuStorage::F16(values) => Some(values.into()),
        _ => None,
    }
}

fn check_device(name: &str, tensor: &Tensor) -> Result<(), Error> {
    if matches!(tensor.device(), Device::Cpu) { Ok(()) } else { Err(elsewhere(name, tensor)) }
}

fn elsewhere(name: &str, tensor: &Tensor) -> Error {
    Error::Device { name: name.to_owned(), device: tensor.device().location() }
}

fn unknown(name: &str, tensor: &Tensor) -> Error {
    Error::DType { name: name.to_owned(), dtype: tensor.dtype() }
}

fn strided(name: &str) -> Error {
    Error::Strided { name: name.to_owned() }
}

/// Replaces a variable's values; `Var::set` would need a tensor.
struct Overwrite<'a> {
    values: Slice<'a>,
    threads: &'a Threads,
}

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let dtype = storage.dtype();
        let (Some((start, end)), Some(memory)) = (layout.contiguous_offsets(), values_mut(storage)) else {
            candle_core::bail!("a variable has become {dtype:?} with the layout {layout:?}; keep its storage")
        };
        let copied = memory.slice(start..end).and_then(|memory| copy(self.values, memory, self.threads));
        copied.map_err(candle_core::Error::wrap)
    }
}

//! Values and state of an optimizer, as bytes, and memory of the optimizer's place.

use meshstep_shard::{Optimizer, Stage};
use meshstep_tensor::{Buffer, Category, DType, Queue, Slice, SliceMut, bf16, f16};

pub fn params(opt: &Optimizer) -> Vec<Vec<u8>> {
    opt.params().map(|p| param(opt, p.name())).collect()
}

/// Returns a copy of an f32 parameter.
pub fn floats(opt: &Optimizer, name: &str) -> Vec<f32> {
    let bytes = param(opt, name);
    let mut floats = vec![0f32; bytes.len() / 4];
    SliceMut::from(&mut floats[..]).bytes_mut().unwrap().copy_from_slice(&bytes);
    floats
}

/// Returns a copy of a parameter, gathered if it is sharded: then collective.
pub fn param(opt: &Optimizer, name: &str) -> Vec<u8> {
    let queue = &opt.options().queue;
    match opt.unit_of(name).unwrap().filter(|_| opt.options().stage == Stage::Zero3) {
        Some(unit) => fetch(opt.gather(unit).unwrap().param(name).unwrap(), queue),
        None => fetch(opt.param(name).unwrap(), queue),
    }
}

/// Copies values to the queue's place.
pub fn put(values: Slice<'_>, queue: &Queue) -> Buffer {
    let (len, dtype, meter) = (values.len(), values.dtype(), meshstep_tensor::Meter::new());
    let mut buffer = Buffer::zeroed_on(queue, len, dtype, &meter, Category::Grads).unwrap();
    queue.upload(values, buffer.as_mut()).unwrap();
    buffer
}

/// Copies bytes from the queue's place.
pub fn fetch(values: Slice<'_>, queue: &Queue) -> Vec<u8> {
    let (len, dtype, meter) = (values.len(), values.dtype(), meshstep_tensor::Meter::new());
    let mut buffer = Buffer::zeroed(len, dtype, &meter, Category::Staging).unwrap();
    queue.download(values, buffer.as_mut()).unwrap();
    buffer.as_slice().bytes().unwrap().to_vec()
}

/// Returns the bytes of this rank's state, and each parameter's `t`.
pub fn state(opt: &Optimizer) -> Vec<(u64, Vec<Vec<u8>>)> {
    let of = |p: &meshstep_tensor::Param| {
        let state = opt.state(p.name()).unwrap();
        (state.t, state.slots.iter().map(|(_, s)| fetch(*s, &opt.options().queue)).collect())
    };
    opt.params().map(of).collect()
}

pub(super) fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&v| v as f32).collect()
}

pub fn with_dtype<T>(dtype: DType, values: &[f64], then: impl FnOnce(Slice<'_>) -> T) -> T {
    match dtype {
        DType::F32 => then(Slice::from(&narrow(values)[..])),
        DType::BF16 => {
            then(Slice::from(&values.iter().map(|&v| bf16::from_f32(v as f32)).collect::<Vec<_>>()[..]))
        }
        DType::F16 => {
            then(Slice::from(&values.iter().map(|&v| f16::from_f32(v as f32)).collect::<Vec<_>>()[..]))
        }
        _ => then(Slice::from(values)),
    }
}

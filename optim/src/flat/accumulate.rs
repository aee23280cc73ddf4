//! Weighted addition of one vector to another: accumulates gradients.

use crate::engine::check::check_isa;
use crate::engine::cpu::Cpu;
use crate::precision::number::{Real, Stored};
use crate::{Error, Isa};
use meshstep_tensor::simd::Body;
use meshstep_tensor::{DType, Element, Queue, Slice, SliceMut, Threads, bf16, f16};

/// Least number of elements of a part: waking a second thread costs more than shorter ones save.
const PART: usize = 64 << 10;

/// Computes `dst = weight * src` if `first`, else `dst = fma(weight, src, dst)`, for vectors of one type: f32, f64, bf16 or f16.
///
/// 16-bit types compute in f32 and round once. Weight 1 is a plain copy or a plain addition, bit for bit. All checks come before anything
/// is written. Both vectors must be at the queue's place.
///
/// ```
/// use meshstep_optim::accumulate;
/// use meshstep_tensor::Queue;
///
/// let (mut sum, grad) = ([0f32; 2], [1f32, 2.0]);
/// accumulate((&mut sum[..]).into(), grad[..].into(), 1.0, true, &Queue::cpu())?;
/// accumulate((&mut sum[..]).into(), grad[..].into(), 3.0, false, &Queue::cpu())?;
/// assert_eq!(sum, [4.0, 8.0]);
/// # Ok::<(), meshstep_optim::Error>(())
/// ```
pub fn accumulate(
    dst: SliceMut<'_>,
    src: Slice<'_>,
    weight: f64,
    first: bool,
    queue: &Queue,
) -> Result<(), Error> {
    #[cfg(feature = "cuda")]
    if let Some(stream) = queue.stream() {
        check(&dst, src, weight)?;
        return crate::cuda::flat::accumulate(stream, dst, src, weight, first);
    }
    accumulate_on(Isa::detect(), queue.threads(), dst, src, weight, first)
}

/// Same as [`accumulate`] on the CPU with given instructions, for tests and benches, and threads: the bits are the same with any.
pub fn accumulate_on(
    isa: Isa,
    threads: &Threads,
    dst: SliceMut<'_>,
    src: Slice<'_>,
    weight: f64,
    first: bool,
) -> Result<(), Error> {
    check_isa(isa)?;
    check(&dst, src, weight)?;
    let on = Cpu { isa, threads };
    match dst.dtype() {
        DType::F32 => typed::<f32, f32>(on, dst, src, weight, first),
        DType::BF16 => typed::<f32, bf16>(on, dst, src, weight, first),
        DType::F16 => typed::<f32, f16>(on, dst, src, weight, first),
        _ => typed::<f64, f64>(on, dst, src, weight, first),
    }
}

fn check(dst: &SliceMut<'_>, src: Slice<'_>, weight: f64) -> Result<(), Error> {
    if dst.len() != src.len() {
        return Err(Error::Len { what: "src", given: src.len(), expected: dst.len() });
    }
    if dst.dtype() != src.dtype() {
        return Err(Error::DType { what: "src", given: src.dtype(), works: "the type of dst" });
    }
    let (fits, works) = match dst.dtype() {
        DType::F64 => (weight.is_finite(), f64::FITS),
        DType::F32 | DType::BF16 | DType::F16 => ((weight as f32).is_finite(), f32::FITS),
        given => return Err(Error::DType { what: "dst", given, works: "f32, f64, bf16 or f16" }),
    };
    if fits { Ok(()) } else { Err(Error::Scalar { name: "weight", value: weight, works }) }
}

fn typed<T: Real, X: Stored<T>>(
    on: Cpu<'_>,
    dst: SliceMut<'_>,
    src: Slice<'_>,
    weight: f64,
    first: bool,
) -> Result<(), Error> {
    let factor = T::from_f64(weight);
    let how = match (first, weight == 1.0) {
        (true, true) => How::Copy,
        (true, false) => How::Scale(factor),
        (false, _) => How::Add(factor),
    };
    spread(on, how, dst.into_typed::<X>()?, src.typed()?);
    Ok(())
}

#[derive(Clone, Copy)]
enum How<T> {
    Copy,
    Scale(T),
    Add(T),
}

/// Accumulates on several threads if the vectors are long.
fn spread<T: Real, X: Stored<T>>(Cpu { isa, threads }: Cpu<'_>, how: How<T>, dst: &mut [X], src: &[X]) {
    let part = threads.part_len(dst.len(), PART);
    threads.for_each(dst.chunks_mut(part).zip(src.chunks(part)), |(dst, src)| match isa {
        Isa::Reference => plainly(how, dst, src),
        _ => isa.run(Pass { how, dst, src }),
    });
}

/// Accumulates element by element: the definition.
fn plainly<T: Real, X: Stored<T>>(how: How<T>, dst: &mut [X], src: &[X]) {
    for (d, &s) in dst.iter_mut().zip(src) {
        *d = match how {
            How::Copy => s,
            How::Scale(w) => X::narrow_plainly(w * s.widen_plainly()),
            How::Add(w) => X::narrow_plainly(w.fma(s.widen_plainly(), d.widen_plainly())),
        };
    }
}

/// Fast loop.
struct Pass<'a, T, X: Element> {
    how: How<T>,
    dst: &'a mut [X],
    src: &'a [X],
}

impl<T: Real, X: Stored<T>> Body for Pass<'_, T, X> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let both = self.dst.iter_mut().zip(self.src);
        match self.how {
            How::Copy => self.dst.copy_from_slice(self.src),
            How::Scale(w) => both.for_each(|(d, s)| *d = X::narrow(w * s.widen())),
            How::Add(w) => both.for_each(|(d, s)| *d = X::narrow(w.fma(s.widen(), d.widen()))),
        }
    }
}

//! From untyped memory to one typed sweep: everything is checked here, before anything is written.

use crate::check::check_isa;
use crate::number::{Real, Stored};
use crate::sweep::{CopyOut, Step, Streams, Sweep};
use crate::{Error, Flat, Isa, Scalars, Segment};
use meshstep_tensor::{DType, SliceMut, bf16, f16};

/// A rule with `S` state vectors, as a pass sees it.
pub(crate) trait Kind<const S: usize>: Sync {
    /// What one element goes through, with the constants of one segment.
    type Step<T: Real>: Step<T, S>;

    /// Host scalars in f64, cast once.
    fn constants<T: Real>(&self, scalars: &Scalars, segment: &Segment) -> Self::Step<T>;
}

/// A rule's name and the names of its state.
pub(crate) type About = (&'static str, &'static [&'static str]);

/// Checks `flat`, `segments` and `scalars`, then sweeps once over the segments.
pub(crate) fn pass<const S: usize>(
    kind: &impl Kind<S>,
    about: About,
    isa: Isa,
    flat: Flat<'_, '_>,
    segments: &[Segment],
    scalars: &Scalars,
) -> Result<(), Error> {
    check(about, isa, &flat, segments)?;
    let run = Run { kind, isa, segments, scalars };
    match (flat.params.dtype(), flat.grads.dtype()) {
        (DType::F32, DType::F32) => run.typed::<f32, f32, S>(flat),
        (DType::F32, DType::BF16) => run.typed::<f32, bf16, S>(flat),
        (DType::F32, DType::F16) => run.typed::<f32, f16, S>(flat),
        (DType::F64, DType::F64) => run.typed::<f64, f64, S>(flat),
        (DType::F32, given) => Err(refused("grads of f32 parameters", given, "f32, bf16 or f16")),
        (DType::F64, given) => Err(refused("grads of f64 parameters", given, "f64")),
        (given, _) => Err(refused("params", given, "f32 or f64; 16-bit parameters go into `copy`")),
    }
}

/// Checks everything that does not depend on types.
pub(crate) fn check(
    (rule, names): About,
    isa: Isa,
    flat: &Flat<'_, '_>,
    segments: &[Segment],
) -> Result<(), Error> {
    check_isa(isa)?;
    let len = flat.params.len();
    if flat.state.len() != names.len() {
        return Err(Error::StateCount { rule, given: flat.state.len(), expected: names });
    }
    check_lens(flat, len)?;
    check_segments(segments, len)
}

fn refused(what: &'static str, given: DType, works: &'static str) -> Error {
    Error::DType { what, given, works }
}

fn check_lens(flat: &Flat<'_, '_>, expected: usize) -> Result<(), Error> {
    let state = flat.state.iter().map(|s| ("state", s.len()));
    let copy = flat.copy.iter().map(|c| ("copy", c.len()));
    let mut all = std::iter::once(("grads", flat.grads.len())).chain(state).chain(copy);
    let wrong = all.find(|&(_, given)| given != expected);
    wrong.map_or(Ok(()), |(what, given)| Err(Error::Len { what, given, expected }))
}

fn check_segments(segments: &[Segment], len: usize) -> Result<(), Error> {
    let mut last = 0;
    for (index, Segment { range, t, .. }) in segments.iter().enumerate() {
        let (start, end) = (range.start, range.end);
        if start > end || end > len {
            return Err(Error::SegmentBounds { index, start, end, len });
        }
        if start < last {
            return Err(Error::SegmentOrder { index, start, end: last });
        }
        if *t == 0 {
            return Err(Error::SegmentTime { index });
        }
        last = end;
    }
    Ok(())
}

fn check_scalars<T: Real>(scalars: &Scalars) -> Result<(), Error> {
    let fits = |name, value: f64| match T::from_f64(value).finite() {
        true => Ok(()),
        false => Err(Error::Scalar { name, value, works: T::FITS }),
    };
    fits("lr", scalars.lr)?;
    fits("grad_scale", scalars.grad_scale)?;
    if scalars.lr < 0.0 {
        return Err(Error::Scalar { name: "lr", value: scalars.lr, works: "a finite number >= 0" });
    }
    Ok(())
}

/// What a sweep needs besides memory.
struct Run<'a, K> {
    kind: &'a K,
    isa: Isa,
    segments: &'a [Segment],
    scalars: &'a Scalars,
}

impl<K> Run<'_, K> {
    fn typed<T: Real, G: Stored<T>, const S: usize>(self, flat: Flat<'_, '_>) -> Result<(), Error>
    where
        K: Kind<S>,
    {
        check_scalars::<T>(self.scalars)?;
        let streams = streams::<T, G, S>(flat)?;
        let constants = |segment: &Segment| self.kind.constants::<T>(self.scalars, segment);
        let sweep = Sweep { constants, isa: self.isa, zero_grads: self.scalars.zero_grads };
        sweep.run(streams, self.segments);
        Ok(())
    }
}

fn streams<'s, T: Real, G: Stored<T>, const S: usize>(
    flat: Flat<'_, 's>,
) -> Result<Streams<'s, T, G, S>, Error> {
    let mut state: [&mut [T]; S] = std::array::from_fn(|_| Default::default());
    for (typed, slot) in state.iter_mut().zip(flat.state) {
        if slot.dtype() != T::DTYPE {
            return Err(refused("state", slot.dtype(), "the type of the parameters"));
        }
        *typed = slot.typed_mut()?;
    }
    let copy = flat.copy.map_or(Ok(CopyOut::None), |copy| copy_out(T::DTYPE, copy))?;
    Ok(Streams { params: flat.params.into_typed()?, grads: flat.grads.into_typed()?, state, copy })
}

fn copy_out(params: DType, copy: SliceMut<'_>) -> Result<CopyOut<'_>, Error> {
    match (params, copy.dtype()) {
        (DType::F32, DType::BF16) => Ok(CopyOut::BF16(copy.into_typed()?)),
        (DType::F32, DType::F16) => Ok(CopyOut::F16(copy.into_typed()?)),
        (DType::F32, given) => Err(refused("a copy of f32 parameters", given, "bf16 or f16")),
        (_, given) => Err(refused("a copy of f64 parameters", given, "no copy")),
    }
}

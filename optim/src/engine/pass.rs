//! From untyped memory to one typed sweep: all checks are done here, before anything is written.

use crate::engine::check::check_isa;
use crate::engine::cpu::Cpu;
use crate::engine::streams::{Stream, Streams};
use crate::engine::sweep::{Step, Sweep};
use crate::engine::view::View;
use crate::precision::number::Real;
use crate::precision::recipe::check_types;
use crate::{Error, Flat, Isa, Rounding, Rule, Scalars, Segment};
use meshstep_tensor::{DType, Slice, SliceMut};

/// Rule with `S` state vectors, as seen by a pass.
pub(crate) trait PassKind<const S: usize>: Sync {
    /// Update of one element, with the constants of one segment.
    type Step<T: Real>: Step<T, S>;

    /// Returns the constants of a segment: host scalars in f64, cast once.
    fn constants<T: Real>(&self, scalars: &Scalars, segment: &Segment) -> Self::Step<T>;
}

/// Checks `flat`, `segments` and `scalars`, then sweeps once over the segments.
pub(crate) fn pass<const S: usize>(
    kind: &impl PassKind<S>,
    rule: &dyn Rule,
    on: Cpu<'_>,
    flat: Flat<'_, '_>,
    segments: &[Segment],
    scalars: &Scalars,
) -> Result<(), Error> {
    check(rule, on.isa, &flat, segments, scalars)?;
    let run = Run { kind, on, segments, scalars };
    if flat.params.dtype() == DType::F64 { run.typed::<f64, S>(flat) } else { run.typed::<f32, S>(flat) }
}

/// Checks everything: lengths, types, segments, scalars.
pub(crate) fn check(
    rule: &dyn Rule,
    isa: Isa,
    flat: &Flat<'_, '_>,
    segments: &[Segment],
    scalars: &Scalars,
) -> Result<(), Error> {
    check_isa(isa)?;
    check_memory(rule, flat, scalars.rounding)?;
    check_numbers(rule, flat, segments, scalars)
}

/// Checks everything but the number of state vectors.
pub(crate) fn check_stateless(
    rule: &dyn Rule,
    isa: Isa,
    flat: &Flat<'_, '_>,
    segments: &[Segment],
    scalars: &Scalars,
) -> Result<(), Error> {
    check_isa(isa)?;
    check_lens(flat, flat.params.len())?;
    check_types(rule, flat, scalars.rounding)?;
    check_numbers(rule, flat, segments, scalars)
}

/// Checks segments and scalars.
fn check_numbers(
    rule: &dyn Rule,
    flat: &Flat<'_, '_>,
    segments: &[Segment],
    scalars: &Scalars,
) -> Result<(), Error> {
    let len = flat.params.len();
    if flat.params.dtype() == DType::F64 {
        check_scalars::<f64>(scalars)?;
        check_segments(segments, len, scalars.lr, f64::is_finite)?;
        check_reach(rule, segments, scalars.lr, f64::is_finite)
    } else {
        check_scalars::<f32>(scalars)?;
        check_segments(segments, len, scalars.lr, |x| (x as f32).is_finite())?;
        check_reach(rule, segments, scalars.lr, |x| (x as f32).is_finite())
    }
}

/// Checks the vectors of `flat`: their number, lengths and types.
pub(crate) fn check_memory(rule: &dyn Rule, flat: &Flat<'_, '_>, rounding: Rounding) -> Result<(), Error> {
    if flat.state.len() != rule.state().len() {
        return Err(Error::StateCount { rule: rule.name(), given: flat.state.len(), expected: rule.state() });
    }
    check_lens(flat, flat.params.len())?;
    check_types(rule, flat, rounding)
}

/// Checks that the numbers which the rule derives from the learning rate fit the type.
fn check_reach(rule: &dyn Rule, segments: &[Segment], lr: f64, fits: fn(f64) -> bool) -> Result<(), Error> {
    let works = "a rate that fits the type also times the weight decay, or adjusted to the matrix";
    let all = segments.iter().all(|segment| fits(rule.reach(lr, segment.matrix)));
    if all { Ok(()) } else { Err(Error::Scalar { name: "lr", value: lr, works }) }
}

fn check_lens(flat: &Flat<'_, '_>, expected: usize) -> Result<(), Error> {
    let state = flat.state.iter().map(|s| ("state", s.len()));
    let copy = flat.copy.iter().map(|c| ("copy", c.len()));
    let remainder = flat.remainder.iter().map(|r| ("remainder", r.len()));
    let mut all = std::iter::once(("grads", flat.grads.len())).chain(state).chain(copy).chain(remainder);
    let wrong = all.find(|&(_, given)| given != expected);
    wrong.map_or(Ok(()), |(what, given)| Err(Error::Len { what, given, expected }))
}

/// Checks that segments ascend within `len` elements without overlap, with counts and ratios in range.
pub(crate) fn check_segments(
    segments: &[Segment],
    len: usize,
    lr: f64,
    fits: fn(f64) -> bool,
) -> Result<(), Error> {
    let mut last = 0;
    for (index, Segment { range, t, ratio, strided, .. }) in segments.iter().enumerate() {
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
        if strided.run == 0 {
            return Err(Error::SegmentRun { index });
        }
        let scaled = lr * ratio;
        if *ratio < 0.0 || !fits(scaled) {
            return Err(Error::SegmentRatio { index, ratio: *ratio, lr });
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

/// Arguments of a sweep besides memory.
struct Run<'a, K> {
    kind: &'a K,
    on: Cpu<'a>,
    segments: &'a [Segment],
    scalars: &'a Scalars,
}

impl<K> Run<'_, K> {
    fn typed<T: Real, const S: usize>(self, flat: Flat<'_, '_>) -> Result<(), Error>
    where
        K: PassKind<S>,
    {
        let Scalars { zero_grads, rounding, .. } = *self.scalars;
        let streams = streams::<T, S>(flat)?;
        let constants = |segment: &Segment| self.kind.constants::<T>(self.scalars, segment);
        Sweep { constants, on: self.on, zero_grads, rounding }.run(streams, self.segments);
        Ok(())
    }
}

/// Converts checked memory to typed streams.
pub(crate) fn streams<'s, T: Real, const S: usize>(flat: Flat<'_, 's>) -> Result<Streams<'s, T, S>, Error> {
    let mut state: [Stream<'_, T>; S] = std::array::from_fn(|_| Stream::Same(&mut []));
    for (typed, slot) in state.iter_mut().zip(flat.state) {
        *typed = stream(slot.reborrow(), None)?;
    }
    let copy = flat.copy.map(|copy| stream(copy, None)).transpose()?;
    let (params, grads) = (stream(flat.params, flat.remainder)?, stream(flat.grads, None)?);
    Ok(Streams { params, grads, state, copy })
}

fn stream<'a, T: Real>(
    memory: SliceMut<'a>,
    remainder: Option<SliceMut<'a>>,
) -> Result<Stream<'a, T>, Error> {
    Ok(match (memory.dtype(), remainder) {
        (DType::BF16, Some(low)) => Stream::Halves(memory.into_typed()?, low.into_typed()?),
        (DType::BF16, None) => Stream::BF16(memory.into_typed()?),
        (DType::F16, _) => Stream::F16(memory.into_typed()?),
        _ => Stream::Same(memory.into_typed()?),
    })
}

/// Same for reading.
pub(crate) fn view<'a, T: Real>(
    memory: Slice<'a>,
    remainder: Option<Slice<'a>>,
) -> Result<View<'a, T>, Error> {
    Ok(match (memory.dtype(), remainder) {
        (DType::BF16, Some(low)) => View::Halves(memory.typed()?, low.typed()?),
        (DType::BF16, None) => View::BF16(memory.typed()?),
        (DType::F16, _) => View::F16(memory.typed()?),
        _ => View::Same(memory.typed()?),
    })
}

//! Merges of the mean of several copies of a vector into one of the copies: element by element in f64, rounded once. On the CPU, or on a
//! GPU in a stream's order, with the same bits.

mod cpu;
#[cfg(feature = "cuda")]
mod gpu;

use crate::{Error, Rule};
use meshstep_tensor::{Buffer, DType, Meter, Queue, Slice, SliceMut};

/// A mean, and its merge into a copy. All vectors have one length and are at the queue's place; the anchor and `sent` have the copy's
/// type: f32, f64, bf16 or f16.
///
/// ```
/// use meshstep_optim::{Merge, OuterStep, Sgd};
/// use meshstep_tensor::{Meter, Queue};
///
/// let (queue, mean) = (Queue::cpu(), [2f32, 4.0]);
/// let merge = || Merge { mean: (&mean).into(), differences: false, anchor: None, sent: None, taken: 0.5, squares: false };
/// let mut own = [0f32, 0.0];
/// merge().mean((&mut own).into(), &queue)?;
/// assert_eq!(own, [1.0, 2.0]); // half of the way to the mean
///
/// // DiLoCo: SGD steps from the last result against the mean's difference from it.
/// let mut anchor = [0f32, 0.0];
/// let outer = OuterStep { rule: &Sgd::default(), lr: 0.5, state: &mut [], t: 1 };
/// let merge = Merge { anchor: Some((&mut anchor).into()), taken: 1.0, ..merge() };
/// merge.outer((&mut own).into(), outer, &queue, &Meter::new())?;
/// assert_eq!((own, anchor), ([1.0, 2.0], [1.0, 2.0]));
/// # Ok::<(), meshstep_optim::Error>(())
/// ```
#[derive(Debug)]
pub struct Merge<'a> {
    /// Mean of all copies, or with `differences` the mean of their distances from `anchor`.
    pub mean: Slice<'a>,
    /// True if the mean is relative to the anchor.
    pub differences: bool,
    /// Last result, which the new one replaces.
    pub anchor: Option<SliceMut<'a>>,
    /// For a delayed merge, the values that this copy sent, and the fraction of them that is left.
    pub sent: Option<(Slice<'a>, f64)>,
    /// Share of the result in the merged copy.
    pub taken: f64,
    /// True if the values are never negative, such as averages of squares: a merge with `sent` then clamps results at 0 that rounding
    /// would make negative.
    pub squares: bool,
}

/// Step of an optimizer over means, with f64 state.
#[derive(Debug)]
pub struct OuterStep<'a> {
    /// Update rule, which must see single elements only.
    pub rule: &'a dyn Rule,
    /// Learning rate.
    pub lr: f64,
    /// State of the rule, as long as the vectors.
    pub state: &'a mut [Buffer],
    /// Number of the step, from 1.
    pub t: u64,
}

impl Merge<'_> {
    /// Merges the mean: `x = mean`; with a share below 1 `x + taken (mean - x)`; with `sent` `x + taken left (mean - sent)`, at least 0
    /// for squares.
    pub fn mean(self, values: SliceMut<'_>, queue: &Queue) -> Result<(), Error> {
        self.check(values.as_slice())?;
        #[cfg(feature = "cuda")]
        if let Some(stream) = queue.stream() {
            return gpu::mean(self, values, stream);
        }
        Ok(cpu::mean(self, values, queue.threads())?)
    }

    /// Takes a step of an outer optimizer from the anchor `a` with gradient `d = a - mean`. The result is `mean + (p - (a - d))` for a
    /// rule that returns `p`: bit for bit the mean itself if the rule subtracts `d`. On a GPU it uses memory for two f64 vectors of at
    /// most 4 Mi elements, and the host waits for the queue.
    pub fn outer(
        self,
        values: SliceMut<'_>,
        outer: OuterStep<'_>,
        queue: &Queue,
        meter: &Meter,
    ) -> Result<(), Error> {
        self.check(values.as_slice())?;
        if self.anchor.is_none() {
            return Err(Error::Len { what: "anchor", given: 0, expected: values.len() });
        }
        for slot in outer.state.iter() {
            check("outer state", slot.as_slice(), DType::F64, values.as_slice())?;
        }
        #[cfg(feature = "cuda")]
        if queue.stream().is_some() {
            return gpu::outer(self, values, outer, queue, meter);
        }
        let _ = (queue, meter);
        cpu::outer(self, values, outer)
    }

    fn check(&self, values: Slice<'_>) -> Result<(), Error> {
        let anchor = self.anchor.as_ref().map(SliceMut::as_slice);
        if self.differences && anchor.is_none() {
            return Err(Error::Len { what: "anchor", given: 0, expected: values.len() });
        }
        check("mean", self.mean, self.mean.dtype(), values)?;
        let (own, sent) = (values.dtype(), self.sent.map(|(sent, _)| sent));
        let others =
            anchor.map(|anchor| ("anchor", anchor)).into_iter().chain(sent.map(|sent| ("sent", sent)));
        others.into_iter().try_for_each(|(what, vector)| check(what, vector, own, values))?;
        check("values", values, own, values)
    }
}

/// Mixes zeros into a vector by `taken`: `x + taken (0 - x)`, and zeros if `taken` is 1.
pub fn mix_zeros(values: SliceMut<'_>, taken: f64, queue: &Queue) -> Result<(), Error> {
    check("values", values.as_slice(), values.dtype(), values.as_slice())?;
    #[cfg(feature = "cuda")]
    if let Some(stream) = queue.stream() {
        return gpu::mix_zeros(values, taken, stream);
    }
    let _ = queue;
    Ok(cpu::mix_zeros(values, taken)?)
}

/// Writes `values`, or their difference from `anchor`, into memory of another type, rounded once.
pub fn pack(
    values: Slice<'_>,
    anchor: Option<Slice<'_>>,
    into: SliceMut<'_>,
    queue: &Queue,
) -> Result<(), Error> {
    for (what, vector) in [("values", Some(values)), ("anchor", anchor)] {
        vector.map_or(Ok(()), |vector| check(what, vector, values.dtype(), into.as_slice()))?;
    }
    check("packed", into.as_slice(), into.dtype(), values)?;
    #[cfg(feature = "cuda")]
    if let Some(stream) = queue.stream() {
        return gpu::pack(values, anchor, into, stream);
    }
    Ok(cpu::pack(values, anchor, into, queue.threads())?)
}

/// Checks that `vector` has a type that merges support, equal to `dtype`, and the length of `like`.
fn check(what: &'static str, vector: Slice<'_>, dtype: DType, like: Slice<'_>) -> Result<(), Error> {
    let given = vector.dtype();
    if !matches!(given, DType::F32 | DType::F64 | DType::BF16 | DType::F16) {
        return Err(Error::DType { what, given, works: "f32, f64, bf16 or f16" });
    }
    if given != dtype {
        return Err(Error::DType {
            what,
            given,
            works: if dtype == DType::F64 { "f64" } else { "the type of the values" },
        });
    }
    if vector.len() != like.len() {
        return Err(Error::Len { what, given: vector.len(), expected: like.len() });
    }
    Ok(())
}

//! The mean of several copies of a vector, merged into one of them: element by element in f64, rounded once. On the CPU, or on a
//! GPU in a stream's order, with the same bits.

mod cpu;
#[cfg(feature = "cuda")]
mod gpu;

use crate::{Error, Rule};
use meshstep_tensor::{Buffer, DType, Meter, Queue, Slice, SliceMut};

/// A mean, and how it is merged into a copy. All vectors are of one length and of the queue's place; the anchor and what was sent
/// are of the copy's type: f32, f64, bf16 or f16.
#[derive(Debug)]
pub struct Merge<'a> {
    /// The mean of all copies; with `differences` of what they have moved from `anchor`.
    pub mean: Slice<'a>,
    /// Whether the mean counts from the anchor.
    pub differences: bool,
    /// The last result, which the new one replaces.
    pub anchor: Option<SliceMut<'a>>,
    /// What this copy has sent, where that was earlier, and how much of it is left.
    pub sent: Option<(Slice<'a>, f64)>,
    /// The share of the result in what the copy becomes.
    pub taken: f64,
    /// Whether the values are never negative, as averages of squares are: what a difference from `sent` makes of them is 0 where
    /// rounding would take it below.
    pub squares: bool,
}

/// A step of an optimizer over means, whose state is f64.
#[derive(Debug)]
pub struct OuterStep<'a> {
    /// Its rule, which sees single elements.
    pub rule: &'a dyn Rule,
    /// Its learning rate.
    pub lr: f64,
    /// The rule's state, as long as the vectors.
    pub state: &'a mut [Buffer],
    /// Which step it is, from 1.
    pub t: u64,
}

impl Merge<'_> {
    /// Takes the mean: `x = mean`; where a share is taken `x + taken (mean - x)`; of what was sent earlier
    /// `x + taken left (mean - sent)`, of squares at least 0.
    pub fn mean(self, values: SliceMut<'_>, queue: &Queue) -> Result<(), Error> {
        self.check(values.as_slice())?;
        #[cfg(feature = "cuda")]
        if let Some(stream) = queue.stream() {
            return gpu::mean(self, values, stream);
        }
        let _ = queue;
        Ok(cpu::mean(self, values)?)
    }

    /// Takes a step of an outer optimizer from the anchor `a`, whose gradient is `d = a - mean`. It ends at `mean + (p - (a - d))`
    /// where the rule ends at `p`: at the mean itself, to the bit, where the rule undoes `d`. On a GPU it takes memory for two f64
    /// vectors of at most 4 Mi elements, and the host waits for the queue.
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

/// Mixes zeros into a vector by `taken`: `x + taken (0 - x)`, and zeros where `taken` is 1.
pub fn mix_zeros(values: SliceMut<'_>, taken: f64, queue: &Queue) -> Result<(), Error> {
    check("values", values.as_slice(), values.dtype(), values.as_slice())?;
    #[cfg(feature = "cuda")]
    if let Some(stream) = queue.stream() {
        return gpu::mix_zeros(values, taken, stream);
    }
    let _ = queue;
    Ok(cpu::mix_zeros(values, taken)?)
}

/// Writes `values`, or by how much they are away from `anchor`, into memory of another type, rounded once.
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
    let _ = queue;
    Ok(cpu::pack(values, anchor, into)?)
}

/// Whether `vector` is of a type that merges know, of `dtype`, and as long as `like`.
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

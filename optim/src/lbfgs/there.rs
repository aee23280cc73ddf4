//! Passes on GPU memory, in the order of a stream. The host waits only in measurements.

use super::fold::{Fold, Scalar};
use super::launches::{Launches, Ranges, Which};
use super::passes::{Asked, Measure, NewPair, Passes, Rows};
use crate::{Error, ExactSum};
use meshstep_tensor::cuda::{Mail, Stream};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Slice, SliceMut};
use std::ops::Range;

/// Word offsets of measured values. A direction keeps its values until the next direction.
mod at {
    use crate::ExactSum;

    /// Non-finite count and bits of the largest magnitude of the direction.
    pub(super) const DIRECTION: [usize; 2] = [0, 1];
    /// Words before those of a measurement.
    pub(super) const MEASURED: usize = 2;
    /// Same for the gradient.
    pub(super) const GRADIENT: [usize; 2] = [2, 3];
    /// Same for the newest pair.
    pub(super) const PAIR: [usize; 2] = [4, 5];
    /// Unused results.
    pub(super) const REST: [usize; 2] = [6, 7];
    pub(super) const SQUARES: usize = 8;
    pub(super) const MAGNITUDES: usize = SQUARES + ExactSum::WORDS;
    pub(super) const SLOPE: usize = MAGNITUDES + ExactSum::WORDS;
    /// Products of a new pair.
    pub(super) const CURVATURE: usize = SLOPE + ExactSum::WORDS;
    pub(super) const NEW_SQUARES: usize = CURVATURE + ExactSum::WORDS;
    /// Product of each row with the gradient.
    pub(super) const PRODUCTS: usize = NEW_SQUARES + ExactSum::WORDS;
    /// Dummy sum offset for a norm without a sum.
    pub(super) const NOWHERE: usize = SQUARES;
}

/// Passes over vectors of one length and type on a stream's device.
#[derive(Debug)]
pub(super) struct There {
    dtype: DType,
    queue: Queue,
    stream: Stream,
    meter: Meter,
    launches: Launches,
    /// Range of all elements, and ranges of the counted elements.
    whole: Ranges,
    counted: Ranges,
    /// Addresses and coefficients of rows: on the host, in transfer, and on the device.
    told: Vec<u64>,
    mail: Mail,
    table: Buffer,
    /// Measured values on the device, and on the host.
    measured: Buffer,
    words: Vec<u64>,
}

impl There {
    /// Creates passes over vectors of `len` elements of f32 or f64, with `history_len` pairs.
    pub(super) fn new(
        history_len: usize,
        (len, dtype): (usize, DType),
        stream: &Stream,
        meter: &Meter,
    ) -> Result<Self, Error> {
        let queue = Queue::cuda(stream.clone());
        let room = |words| Buffer::zeroed_on(&queue, words, DType::U64, meter, Category::Staging);
        let all = || Ranges::new(std::iter::once(0..len).collect());
        let rows = 2 * (history_len + 1);
        // Addresses and coefficients of all rows.
        let told = 2 * rows;
        let words = at::PRODUCTS + rows * ExactSum::WORDS;
        let mut there = There {
            dtype,
            stream: stream.clone(),
            meter: meter.clone(),
            launches: Launches::new(len, dtype, stream)?,
            whole: all(),
            counted: all(),
            told: Vec::with_capacity(told),
            mail: Mail::new(stream.device(), told * size_of::<u64>(), meter),
            table: room(told)?,
            measured: room(words)?,
            words: vec![0; words],
            queue,
        };
        // Made now, because an iteration computes a direction without an exchange that could report a failure to the other ranks.
        there.whole.there(there.dtype, &there.queue, &there.meter)?;
        Ok(there)
    }

    /// Writes the addresses of `vectors` into the device table, followed by `coefs`.
    fn tell<'a>(
        &mut self,
        vectors: impl Iterator<Item = Slice<'a>> + Clone,
        coefs: impl IntoIterator<Item = f64>,
    ) -> Result<(), Error> {
        self.launches.check(vectors.clone())?;
        self.told.clear();
        self.told.extend(vectors.map(|vector| vector.address() as u64));
        self.told.extend(coefs.into_iter().map(f64::to_bits));
        let into = self.table.as_mut().slice(0..self.told.len())?;
        Ok(self.mail.send(&self.stream, bytemuck::cast_slice(&self.told), into)?)
    }

    /// Launches the kernels of the requested measurement.
    fn launch(&mut self, Measure { g, d, asked, mut pair, .. }: Measure<'_>) -> Result<(), Error> {
        let Asked { gradient, magnitudes, slope } = asked;
        let ranges = self.counted.there(self.dtype, &self.queue, &self.meter)?;
        let older = pair.as_ref().map_or(0, |pair| pair.rows.len());
        match &pair {
            Some(NewPair { y, rows, .. }) => self.tell(rows.slices().chain([d, y.as_slice()]), [])?,
            None if slope => self.tell(std::iter::once(d), [])?,
            None => {}
        }
        let There { launches, table, measured, .. } = self;
        if gradient {
            launches.norm(Which::L2, g, ranges, measured, (at::GRADIENT, at::SQUARES))?;
        }
        if magnitudes {
            launches.norm(Which::L1, g, ranges, measured, (at::REST, at::MAGNITUDES))?;
        }
        if slope {
            // SAFETY: the address of `d` was written above, after those of the older rows.
            unsafe { launches.products(g, (table, older, 1), ranges, measured, at::SLOPE)? };
        }
        if let Some(NewPair { y, before, .. }) = &mut pair {
            launches.difference(y.reborrow(), [g, *before])?;
            launches.norm(Which::Inf, d, ranges, measured, (at::PAIR, at::NOWHERE))?;
            launches.norm(Which::L2, y.as_slice(), ranges, measured, (at::PAIR, at::NEW_SQUARES))?;
            // SAFETY: the addresses of the older rows, of `d` and of `y` were written above.
            unsafe {
                launches.products(d, (table, older + 1, 1), ranges, measured, at::CURVATURE)?;
                launches.products(g, (table, 0, older + 2), ranges, measured, at::PRODUCTS)?;
            }
        }
        Ok(())
    }
}

impl Passes for There {
    fn count(&mut self, ranges: Vec<Range<usize>>) {
        self.counted = Ranges::new(ranges);
    }

    fn walk(&mut self, x: SliceMut<'_>, start: Slice<'_>, t: f64, d: Slice<'_>) -> Result<(), Error> {
        self.launches.walk(x, start, t, d)
    }

    fn leave(&mut self, x: SliceMut<'_>, start: SliceMut<'_>, t: f64, d: Slice<'_>) -> Result<(), Error> {
        self.launches.leave(x, start, t, d)
    }

    fn combine(&mut self, mut d: SliceMut<'_>, g: (f64, Slice<'_>), rows: &Rows<'_>) -> Result<(), Error> {
        self.tell(rows.slices(), (0..rows.len()).map(|i| rows.coef(i)))?;
        let whole = self.whole.there(self.dtype, &self.queue, &self.meter)?;
        let There { launches, table, measured, queue, .. } = self;
        // SAFETY: `rows.len()` addresses, followed by the coefficients, were written above.
        unsafe { launches.combine(d.reborrow(), g, rows.len(), table)? };
        queue.zero(measured.as_mut().slice(0..at::MEASURED)?)?;
        launches.norm(Which::Inf, d.as_slice(), whole, measured, (at::DIRECTION, at::NOWHERE))
    }

    fn measure(&mut self, of: Measure<'_>, fold: &mut Fold) -> Result<(), Error> {
        let rows = of.pair.as_ref().map_or(0, |pair| pair.rows.len() + 2);
        let end = at::PRODUCTS + rows * ExactSum::WORDS;
        self.queue.zero(self.measured.as_mut().slice(at::MEASURED..end)?)?;
        self.launch(of)?;
        let words = &mut self.words[..end];
        self.queue.download(self.measured.as_slice().slice(0..end)?, (&mut *words).into())?;
        let [bad, largest] = at::DIRECTION.map(|word| words[word]);
        fold.mine.d_max = if bad > 0 { f64::INFINITY.to_bits() } else { largest };
        [fold.mine.bad_grads, fold.mine.grad_max] = at::GRADIENT.map(|word| words[word]);
        fold.mine.bad_pairs = words[at::PAIR[0]];
        let sum = |first: usize| ExactSum::from_words(&words[first..first + ExactSum::WORDS]);
        for (scalar, at) in [
            (Scalar::Squares, at::SQUARES),
            (Scalar::Magnitudes, at::MAGNITUDES),
            (Scalar::Slope, at::SLOPE),
            (Scalar::Curvature, at::CURVATURE),
            (Scalar::NewSquares, at::NEW_SQUARES),
        ] {
            fold.add(scalar, &sum(at));
        }
        for (i, product) in fold.products_mut(rows).iter_mut().enumerate() {
            *product = sum(at::PRODUCTS + i * ExactSum::WORDS);
        }
        Ok(())
    }
}

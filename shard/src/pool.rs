//! The buffers in which a ZeRO-2 rank collects gradients that are on their way.

use meshstep_tensor::{Buffer, Category, DType, Error, Meter};

/// Spare buffers, all long enough for any bucket of their type.
#[derive(Debug)]
pub(crate) struct Pool {
    shelves: Vec<Shelf>,
    meter: Meter,
    grown: u64,
}

#[derive(Debug)]
struct Shelf {
    dtype: DType,
    len: usize,
    spare: Vec<Buffer>,
}

impl Pool {
    /// `count` buffers of `len` elements for each type.
    pub(crate) fn new(sizes: &[(DType, usize, usize)], meter: &Meter) -> Result<Self, Error> {
        let shelf = |&(dtype, len, count): &(DType, usize, usize)| {
            let spare = (0..count).map(|_| Buffer::zeroed(len, dtype, meter, Category::Buckets));
            Ok(Shelf { dtype, len, spare: spare.collect::<Result<_, Error>>()? })
        };
        let shelves = sizes.iter().map(shelf).collect::<Result<_, Error>>()?;
        Ok(Pool { shelves, meter: meter.clone(), grown: 0 })
    }

    /// A spare buffer, if there is one.
    pub(crate) fn take(&mut self, dtype: DType) -> Option<Buffer> {
        self.shelf(dtype)?.spare.pop()
    }

    /// One buffer more than was planned, because gradients came out of bucket order.
    pub(crate) fn grow(&mut self, dtype: DType) -> Result<(), Error> {
        let meter = self.meter.clone();
        if let Some(shelf) = self.shelf(dtype) {
            let buffer = Buffer::zeroed(shelf.len, dtype, &meter, Category::Buckets)?;
            shelf.spare.push(buffer);
        }
        self.grown += 1;
        if self.grown == 1 {
            tracing::warn!("gradients come out of bucket order: the bucket pool grows (said once)");
        }
        Ok(())
    }

    /// Takes a buffer back.
    pub(crate) fn put(&mut self, buffer: Buffer) {
        if let Some(shelf) = self.shelf(buffer.dtype()) {
            shelf.spare.push(buffer);
        }
    }

    /// How many buffers were added beyond the plan.
    pub(crate) fn grown(&self) -> u64 {
        self.grown
    }

    fn shelf(&mut self, dtype: DType) -> Option<&mut Shelf> {
        self.shelves.iter_mut().find(|s| s.dtype == dtype)
    }
}

//! The buffers in which a rank at stage 2 or 3 collects gradients that are on their way.

use meshstep_tensor::{Buffer, Category, DType, Error, Meter, Queue};

/// Spare buffers, all long enough for any bucket of their type.
#[derive(Debug)]
pub(crate) struct Pool {
    shelves: Vec<Shelf>,
    queue: Queue,
    meter: Meter,
    grown: u64,
}

/// The spare buffers of one type.
#[derive(Debug)]
pub(crate) struct Shelf {
    dtype: DType,
    len: usize,
    planned: usize,
    /// Buffers there are, spare or in use.
    made: usize,
    spare: Vec<Buffer>,
}

impl Pool {
    /// Without a shelf.
    pub(crate) fn new(queue: &Queue, meter: &Meter) -> Self {
        Pool { shelves: Vec::new(), queue: queue.clone(), meter: meter.clone(), grown: 0 }
    }

    /// Shelves of these types, lengths and counts, but for those that the pool has already.
    pub(crate) fn shelves_for(
        &self,
        sizes: &[(DType, usize, usize)],
        meter: &Meter,
    ) -> Result<Vec<Shelf>, Error> {
        let enough = |&&(dtype, len, count): &&(DType, usize, usize)| {
            !self.shelves.iter().any(|s| s.dtype == dtype && s.len >= len && s.planned >= count)
        };
        let shelf = |&(dtype, len, count): &_| Shelf::new(dtype, len, count, &self.queue, meter);
        sizes.iter().filter(enough).map(shelf).collect()
    }

    /// Takes new shelves in the place of those of their types. Only while all buffers are spare.
    pub(crate) fn replace(&mut self, shelves: Vec<Shelf>) {
        for shelf in shelves {
            self.shelves.retain(|s| s.dtype != shelf.dtype);
            self.shelves.push(shelf);
        }
    }

    /// A spare buffer, if there is one.
    pub(crate) fn take(&mut self, dtype: DType) -> Option<Buffer> {
        self.shelf(dtype)?.spare.pop()
    }

    /// One buffer more than was planned, until it comes back.
    pub(crate) fn grow(&mut self, dtype: DType) -> Result<(), Error> {
        let (queue, meter) = (self.queue.clone(), self.meter.clone());
        if let Some(shelf) = self.shelf(dtype) {
            let buffer = Buffer::zeroed_on(&queue, shelf.len, dtype, &meter, Category::Buckets)?;
            shelf.spare.push(buffer);
            shelf.made += 1;
        }
        self.grown += 1;
        if self.grown == 1 {
            tracing::warn!(
                "gradients come out of bucket order: the bucket pool grows for a while (said once)"
            );
        }
        Ok(())
    }

    /// Takes a buffer back; one beyond the plan is freed.
    pub(crate) fn put(&mut self, buffer: Buffer) {
        let Some(shelf) = self.shelf(buffer.dtype()) else { return };
        if shelf.made > shelf.planned {
            shelf.made -= 1;
        } else {
            shelf.spare.push(buffer);
        }
    }

    /// How often a buffer was added beyond the plan.
    pub(crate) fn grown(&self) -> u64 {
        self.grown
    }

    fn shelf(&mut self, dtype: DType) -> Option<&mut Shelf> {
        self.shelves.iter_mut().find(|s| s.dtype == dtype)
    }
}

impl Shelf {
    fn new(dtype: DType, len: usize, planned: usize, queue: &Queue, meter: &Meter) -> Result<Self, Error> {
        let spare = (0..planned).map(|_| Buffer::zeroed_on(queue, len, dtype, meter, Category::Buckets));
        Ok(Shelf { dtype, len, planned, made: planned, spare: spare.collect::<Result<_, Error>>()? })
    }
}

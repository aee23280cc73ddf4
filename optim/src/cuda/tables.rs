//! Rows of updates in device memory, and the launch that prepares the rows of several updates for a step.

use super::kernels::{Kernel, argument};
use super::update::stream;
use super::{Row, StepBlock, THREADS, Update};
use crate::Error;
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Slice};
use std::ops::Range;
use std::sync::Arc;

/// Rows of several updates in one table for each kernel family; one launch prepares a table for a step.
#[derive(Debug)]
pub struct Tables {
    tables: Vec<Table>,
}

/// Rows of one family.
#[derive(Debug)]
struct Table {
    family: &'static str,
    prepare: Kernel,
    rows: Rows,
    /// Number of parameters that a step must have bytes for.
    counted: usize,
}

impl Tables {
    /// Moves the rows of `updates` into new memory, after the queue's work so far, and frees their previous memory, which waits. Captured
    /// graphs must be captured again. After an error no update has changed.
    pub fn join(updates: &mut [&mut Update], queue: &Queue, meter: &Meter) -> Result<Self, Error> {
        let mut families: Vec<&'static str> = Vec::new();
        for update in updates.iter().filter(|update| update.rows.len() > 0) {
            if !families.contains(&update.family) {
                families.push(update.family);
            }
        }
        let tables = families.into_iter().map(|family| Table::of(family, updates, queue, meter));
        let tables = Tables { tables: tables.collect::<Result<_, _>>()? };
        for table in &tables.tables {
            let mut first = 0;
            for update in updates.iter_mut().filter(|update| update.family == table.family) {
                let range = first..first + update.rows.len();
                first = range.end;
                update.rows = Rows { table: Arc::clone(&table.rows.table), range };
            }
        }
        Ok(tables)
    }

    /// Returns true if the rows of `update` are in these tables, or if it has none.
    pub fn has(&self, update: &Update) -> bool {
        let here = |table: &Table| Arc::ptr_eq(&table.rows.table, &update.rows.table);
        update.rows.len() == 0 || self.tables.iter().any(here)
    }

    /// Prepares every row for `step`, which the device reads when the stream reaches the launch. [`Update::sweep`] follows for each
    /// update.
    pub fn prepare(&mut self, step: &StepBlock, queue: &Queue) -> Result<(), Error> {
        self.tables
            .iter()
            .try_for_each(|table| table.rows.prepare(&table.prepare, table.counted, step, queue))
    }
}

impl Table {
    fn of(
        family: &'static str,
        updates: &[&mut Update],
        queue: &Queue,
        meter: &Meter,
    ) -> Result<Self, Error> {
        let own = || updates.iter().filter(|update| update.family == family);
        let count = own().map(|update| update.rows.len()).sum();
        let mut table = Rows::room(count, queue, meter)?;
        let mut first = 0;
        for update in own() {
            update.rows.copy_to(first, &mut table, queue)?;
            first += update.rows.len();
        }
        let counted = own().map(|update| update.counted).max().unwrap_or_default();
        let prepare = Kernel::find(stream(queue)?.device(), &super::prepare(family))?;
        Ok(Table { family, prepare, rows: Rows::whole(table), counted })
    }
}

/// Rows of a table on the device, which may also hold rows of other updates.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    /// Table as u64 words.
    pub(super) table: Arc<Buffer>,
    range: Range<usize>,
}

/// Words of a row.
const WORDS: usize = size_of::<Row>() / size_of::<u64>();

impl Rows {
    /// Allocates zeroed memory for `count` rows.
    pub(super) fn room(count: usize, queue: &Queue, meter: &Meter) -> Result<Buffer, Error> {
        Ok(Buffer::zeroed_on(queue, count * WORDS, DType::U64, meter, Category::State)?)
    }

    pub(super) fn whole(table: Buffer) -> Self {
        Rows { range: 0..table.len() / WORDS, table: Arc::new(table) }
    }

    pub(super) fn slice(&self) -> Result<Slice<'_>, Error> {
        Ok(self.table.as_slice().slice(self.range.start * WORDS..self.range.end * WORDS)?)
    }

    /// Copies the rows into a table, starting at row `first`.
    fn copy_to(&self, first: usize, into: &mut Buffer, queue: &Queue) -> Result<(), Error> {
        let place = first * WORDS..(first + self.range.len()) * WORDS;
        Ok(queue.copy(self.slice()?, into.as_mut().slice(place)?)?)
    }

    pub(super) fn len(&self) -> usize {
        self.range.len()
    }

    /// Returns the address of the first row, and the number of rows.
    pub(super) fn at(&self) -> (u64, u64) {
        let first = self.table.as_slice().address() + self.range.start * size_of::<Row>();
        (first as u64, self.range.len() as u64)
    }

    /// Prepares the rows for `step`.
    pub(super) fn prepare(
        &self,
        kernel: &Kernel,
        counted: usize,
        step: &StepBlock,
        queue: &Queue,
    ) -> Result<(), Error> {
        let stream = stream(queue)?;
        self.table.place().check(queue.place())?;
        step.check(counted, queue)?;
        let ((mut rows, mut count), mut step) = (self.at(), step.address());
        let blocks = count.div_ceil(THREADS.into());
        // SAFETY: there are `count` rows. `step` is one `StepScalars` with a byte for each parameter that the rows name, checked above. Both are
        // on the stream's device, and only work in this stream's order touches the rows.
        unsafe {
            kernel.launch(
                stream,
                blocks,
                &mut [argument(&mut rows), argument(&mut count), argument(&mut step)],
            )
        }
    }
}

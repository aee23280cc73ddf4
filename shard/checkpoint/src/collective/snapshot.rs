//! Copy in host memory of the values that a rank writes: they stay as they were at one moment while training goes on.

use crate::error::CheckpointError;
use crate::format::local_pieces::Part;
use crate::tensors::{ReadSource, SavedTensor, Take, Wanted};
use meshstep_shard::extend::VectorKind as Slot;
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Slice};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Values of one moment.
#[derive(Debug)]
pub(crate) struct Snapshot {
    /// One buffer for each type, with all values of that type end to end.
    memory: Vec<Buffer>,
    /// Buffer and range of each vector of each part.
    places: HashMap<(usize, Slot), (DType, Range<usize>)>,
}

impl Snapshot {
    /// Copies `parts` from `from`. Reuses buffers of `spare` with the right type and length; frees the others before it allocates more.
    pub(crate) fn of(
        from: &mut dyn ReadSource,
        (contents, parts): (&[SavedTensor], &[(usize, Part)]),
        spare: Vec<Buffer>,
        meter: &Meter,
    ) -> Result<Self, CheckpointError> {
        let (mut lens, mut places) = (BTreeMap::new(), HashMap::new());
        for (index, (param, part)) in parts.iter().enumerate() {
            for vector in &contents[*param].vectors {
                let dtype =
                    vector.dtype.dtype().ok_or_else(|| CheckpointError::memory("bytes are no numbers"))?;
                let start = *lens.entry(dtype).or_insert(0);
                let end = start + part.global.len() as usize;
                lens.insert(dtype, end);
                places.insert((index, vector.slot), (dtype, start..end));
            }
        }
        let mut copy = Snapshot { memory: memory(&lens, spare, meter)?, places };
        for (index, (param, part)) in parts.iter().enumerate() {
            let held = contents[*param].held();
            for vector in &contents[*param].vectors {
                copy.take(from, &Wanted { param: *param, slot: vector.slot, index, part, held: &held })?;
            }
        }
        Ok(copy)
    }

    fn take(&mut self, from: &mut dyn ReadSource, wanted: &Wanted<'_>) -> Result<(), CheckpointError> {
        let memory = CheckpointError::memory::<meshstep_tensor::Error>;
        let queue = from.place();
        let (dtype, Range { mut start, .. }) = self.places[&(wanted.index, wanted.slot)].clone();
        let Some(into) = self.memory.iter_mut().find(|buffer| buffer.dtype() == dtype) else { return Ok(()) };
        from.values(wanted, &mut |run| {
            let end = start + run.len();
            let into = into.as_mut().slice(start..end).map_err(memory)?;
            start = end;
            queue.download(run, into).map_err(memory)
        })
    }

    /// Returns the size of the copy in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.memory.iter().map(|buffer| buffer.bytes() as u64).sum()
    }

    /// Returns the memory for reuse by the next snapshot.
    pub(crate) fn into_memory(self) -> Vec<Buffer> {
        self.memory
    }
}

/// Returns one buffer of each type with these lengths.
fn memory(
    lens: &BTreeMap<DType, usize>,
    mut spare: Vec<Buffer>,
    meter: &Meter,
) -> Result<Vec<Buffer>, CheckpointError> {
    spare.retain(|buffer| lens.get(&buffer.dtype()) == Some(&buffer.len()));
    for (&dtype, &len) in lens {
        if spare.iter().all(|buffer| buffer.dtype() != dtype) {
            let more = Buffer::zeroed(len, dtype, meter, Category::Staging);
            spare.push(more.map_err(CheckpointError::memory)?);
        }
    }
    Ok(spare)
}

impl ReadSource for Snapshot {
    fn place(&self) -> Queue {
        Queue::cpu()
    }

    fn values(&mut self, wanted: &Wanted<'_>, take: Take<'_>) -> Result<(), CheckpointError> {
        let Some((dtype, range)) = self.places.get(&(wanted.index, wanted.slot)) else { return Ok(()) };
        let of = self.memory.iter().find(|buffer| buffer.dtype() == *dtype);
        let none = Slice::from(&[] as &[f32]);
        let values = of.map_or(Ok(none), |buffer| buffer.as_slice().slice(range.clone()));
        take(values.map_err(CheckpointError::memory)?)
    }
}

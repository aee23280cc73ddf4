//! Memory of the vectors of many buckets; short vectors of one type and purpose share an allocation.

use crate::config::options::Options;
use crate::plan::bytes::VectorSpec;
use meshstep_comm::Communicator;
use meshstep_tensor::{ALIGN, Buffer, Category, DType, Error, Place};
use std::collections::BTreeMap;

/// Bytes from which a vector has an allocation of its own, and keeps a distance from others ([`Buffer::zeroed_apart`]).
const LONG: usize = 4096;

/// Allocations that short vectors share, less the vectors that were taken.
#[derive(Debug)]
pub(crate) struct VectorMemory<'o> {
    options: &'o Options,
    shared: BTreeMap<(DType, Category), Buffer>,
}

impl<'o> VectorMemory<'o> {
    /// Allocates memory for the short ones of these vectors, if the options' queue works on the CPU.
    pub(crate) fn new(
        vectors: impl Iterator<Item = VectorSpec>,
        options: &'o Options,
    ) -> Result<Self, Error> {
        let on_cpu = options.queue.place() == Place::Cpu;
        let mut lens: BTreeMap<(DType, Category), usize> = BTreeMap::new();
        for spec in vectors.filter(|spec| on_cpu && shares(spec)) {
            *lens.entry((spec.dtype, spec.category)).or_insert(0) += spec.len;
        }
        let allocate = |((dtype, category), len)| {
            Ok(((dtype, category), Buffer::zeroed(len, dtype, &options.meter, category)?))
        };
        Ok(VectorMemory { options, shared: lens.into_iter().map(allocate).collect::<Result<_, Error>>()? })
    }

    /// Returns zeros for a vector; a long one on the CPU `apart` from addresses that are read together with it.
    pub(crate) fn zeroed(
        &mut self,
        spec: VectorSpec,
        apart: impl FnOnce() -> Vec<usize>,
    ) -> Result<Buffer, Error> {
        let VectorSpec { dtype, category, len } = spec;
        let shared = self.shared.get_mut(&(dtype, category)).filter(|_| shares(&spec));
        match shared.filter(|shared| shared.len() >= len) {
            Some(shared) => {
                let rest = shared.split_off(len)?;
                Ok(std::mem::replace(shared, rest))
            }
            None => zeroed(spec, self.options, &apart()),
        }
    }
}

/// Returns true if a vector shares an allocation: it is short, and the next one is aligned as it is.
fn shares(spec: &VectorSpec) -> bool {
    spec.len * spec.dtype.size() < LONG && spec.len.is_multiple_of(ALIGN)
}

/// Allocates zeros where the options' queue works; on the CPU `apart` from addresses that are read together with them.
pub(crate) fn zeroed(
    VectorSpec { dtype, category, len }: VectorSpec,
    options: &Options,
    apart: &[usize],
) -> Result<Buffer, Error> {
    match options.queue.place() {
        Place::Cpu => Buffer::zeroed_apart(len, dtype, &options.meter, category, apart),
        _ => Buffer::zeroed_on(&options.queue, len, dtype, &options.meter, category),
    }
}

/// Allocates zeros for a vector that travels on `comm`, which may have memory of its own for that.
pub(crate) fn zeroed_to_travel(
    comm: &dyn Communicator,
    VectorSpec { dtype, category, len }: VectorSpec,
    options: &Options,
    apart: &[usize],
) -> Result<Buffer, Error> {
    comm.zeroed_on(&options.queue, len, dtype, (&options.meter, category), apart)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_vectors_are_one_allocation_of_the_same_bytes() {
        let options = Options::default();
        let spec = |category, len| VectorSpec { dtype: DType::F32, category, len };
        let grads = [64, 128, 2000, 100, 0].map(|len| spec(Category::Grads, len));
        let all = || grads.into_iter().chain([spec(Category::State, 64)]);
        let mut memory = VectorMemory::new(all(), &options).unwrap();
        let live = |category| options.meter.live(category);
        assert_eq!((live(Category::Grads), live(Category::State)), (4 * 192, 4 * 64));
        let mut taken: Vec<Buffer> = all().map(|spec| memory.zeroed(spec, Vec::new).unwrap()).collect();
        drop(memory);
        assert!(all().zip(&taken).all(|(spec, buffer)| buffer.len() == spec.len));
        assert!(taken.iter().all(|buffer| buffer.as_ptr().addr().get().is_multiple_of(64)));
        assert_eq!((live(Category::Grads), live(Category::State)), (4 * (192 + 2000 + 100), 4 * 64));
        let second = taken.remove(1);
        assert!(taken.remove(0).join(second).is_ok(), "they are neighbours");
        let more = spec(Category::Grads, 64);
        assert_eq!(VectorMemory::new(all(), &options).unwrap().zeroed(more, Vec::new).unwrap().len(), 64);
    }
}

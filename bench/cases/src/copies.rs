//! Reference copy: the memory speed of this machine, measured in the same run as the results that are compared with it.

use std::hint::black_box;

use meshstep_tensor::Threads;

/// Size of a copy that exceeds all caches.
pub const FLOOR_BYTES: usize = 256 << 20;

/// Least number of elements of a part, as in an update.
const PART: usize = 32 << 10;

/// Reads all of `values` and writes them back unchanged: the mask is zero, but the compiler does not know that.
pub fn in_place(values: &mut [u64]) {
    let (mask, threads) = (black_box(0u64), Threads::shared());
    let part = threads.part_len(values.len(), PART);
    threads.for_each(values.chunks_mut(part), |part| part.iter_mut().for_each(|word| *word ^= mask));
}

/// Reads all of `values`.
pub fn read(values: &[u32]) {
    let threads = Threads::shared();
    let part = threads.part_len(values.len(), PART);
    let work = |all: &mut u32, part: &[u32]| *all = part.iter().fold(*all, |all, word| all ^ word);
    black_box(threads.fold(values.chunks(part), || 0, work, |all, other| *all ^= other));
}

/// Returns the bytes that [`in_place`] moves.
pub fn moved(values: &[u64]) -> f64 {
    2.0 * size_of_val(values) as f64
}

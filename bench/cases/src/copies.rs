//! Reference copy: the memory speed of this machine, measured in the same run as the results that are compared with it.

use std::hint::black_box;

use rayon::prelude::*;

/// Size of a copy that exceeds all caches.
pub const FLOOR_BYTES: usize = 256 << 20;

/// Parts per thread, as in an update; memory is slow at the beginning of each part.
const PARTS: usize = 8;

/// Reads all of `values` and writes them back unchanged: the mask is zero, but the compiler does not know that.
pub fn in_place(values: &mut [u64]) {
    let mask = black_box(0u64);
    let part = values.len().div_ceil(PARTS * rayon::current_num_threads()).max(1);
    values.par_chunks_mut(part).for_each(|part| part.iter_mut().for_each(|word| *word ^= mask));
}

/// Reads all of `values`.
pub fn read(values: &[u32]) {
    let part = values.len().div_ceil(PARTS * rayon::current_num_threads()).max(1);
    let all = values.par_chunks(part).map(|part| part.iter().fold(0, |all, word| all ^ word));
    black_box(all.reduce(|| 0, |a, b| a ^ b));
}

/// Returns the bytes that [`in_place`] moves.
pub fn moved(values: &[u64]) -> f64 {
    2.0 * size_of_val(values) as f64
}

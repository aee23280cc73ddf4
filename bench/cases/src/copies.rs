//! The reference copy: how many bytes a second this machine moves, measured in the run that is judged by it.

use std::hint::black_box;

use rayon::prelude::*;

/// Bytes that no cache holds.
pub const FLOOR_BYTES: usize = 256 << 20;

/// Parts that each thread finds, as of an update: memory is slow at the beginning of each.
const PARTS: usize = 8;

/// Reads all of `values` and writes them in place, changing nothing: the mask is zero, which the compiler does not know.
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

/// Bytes that [`in_place`] moves.
pub fn moved(values: &[u64]) -> f64 {
    2.0 * size_of_val(values) as f64
}

//! Shared parts of tests: the number of random cases for each level of effort, a hash that draws test data, seeds, child
//! processes, and jobs of MPI.
//!
//! `cargo xtask check` sets `MESHSTEP_CASES=tenth`; `cargo xtask ci --long` sets `MESHSTEP_CASES=long`. Every test with
//! expensive cases takes its count from here.

#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

#[cfg(target_os = "linux")]
pub mod flood;
pub mod mpirun;
pub mod occupied;
pub mod process;
pub mod seeds;

use std::env;

/// Thoroughness of this test run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// A tenth of the normal counts, for the loop of edit and test.
    Tenth,
    /// The counts of `cargo xtask ci`.
    Normal,
    /// The largest counts, for runs without a time limit.
    Long,
}

/// Returns the effort that `MESHSTEP_CASES` names, or normal effort if the variable is unset or empty.
///
/// # Panics
/// If the variable has any other value: a typo must not run fewer cases and pass.
pub fn effort() -> Effort {
    parse(env::var("MESHSTEP_CASES").ok().as_deref())
}

fn parse(value: Option<&str>) -> Effort {
    match value {
        None | Some("") => Effort::Normal,
        Some("tenth") => Effort::Tenth,
        Some("long") => Effort::Long,
        Some(other) => panic!("MESHSTEP_CASES is {other:?}; set it to \"tenth\" or \"long\", or unset it"),
    }
}

/// Returns true in a long run, in which tests run every case.
pub fn long() -> bool {
    effort() == Effort::Long
}

/// Returns the number of cases to run: `normal`, a tenth of `normal` (at least one, unless `normal` is 0), or `long`.
pub fn cases(normal: u32, long: u32) -> u32 {
    of(effort(), normal, long)
}

fn of(effort: Effort, normal: u32, long: u32) -> u32 {
    match effort {
        Effort::Tenth => normal.div_ceil(10),
        Effort::Normal => normal,
        Effort::Long => long,
    }
}

/// Returns the distance between tested points of a dense range: `normal`, ten times `normal` for `cargo xtask check`, or 1
/// in long runs.
pub fn stride(normal: usize) -> usize {
    match effort() {
        Effort::Tenth => 10 * normal,
        Effort::Normal => normal,
        Effort::Long => 1,
    }
}

/// Returns true if entry `index` of a table of combinations is tested. Long runs test every entry, normal runs about one in
/// `one_in`, and `cargo xtask check` a tenth of the normal selection. A hash of the index selects the entries, so the
/// selection covers every row and column of a large table and is the same in every run.
///
/// Entry 0 is always tested.
pub fn tried(index: usize, one_in: usize) -> bool {
    tried_with(effort(), index, one_in)
}

fn tried_with(effort: Effort, index: usize, one_in: usize) -> bool {
    let one_in = match effort {
        Effort::Tenth => 10 * one_in,
        Effort::Normal => one_in,
        Effort::Long => 1,
    };
    index == 0 || hash(&[index as u64]).is_multiple_of(one_in as u64)
}

/// Hashes `words` into a pseudo-random number with SplitMix64. Optimised in every profile, because tests draw each element
/// of a gradient with it.
pub fn hash(words: &[u64]) -> u64 {
    words.iter().fold(0x9e37_79b9_7f4a_7c15, |h, &w| {
        let mut z = (h ^ w).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_chooses_the_count() {
        let count = |value| of(parse(value), 25, 1000);
        assert_eq!([None, Some(""), Some("tenth"), Some("long")].map(count), [25, 25, 3, 1000]);
        assert_eq!((of(Effort::Tenth, 1, 2), of(Effort::Tenth, 0, 2)), (1, 0));
    }

    #[test]
    fn the_entries_of_a_table_are_drawn_evenly() {
        let count = |effort, one_in| (0..3000).filter(|&i| tried_with(effort, i, one_in)).count();
        assert_eq!([count(Effort::Long, 6), count(Effort::Normal, 1)], [3000, 3000]);
        assert!(
            (400..600).contains(&count(Effort::Normal, 6)) && (30..70).contains(&count(Effort::Tenth, 6))
        );
        assert!([2, 6].iter().all(|&one_in| tried_with(Effort::Tenth, 0, one_in)));
        // A table of 30 by 30 has selected entries in every row and every column.
        let met = |row: usize| (0..30).any(|column| tried_with(Effort::Normal, 30 * row + column, 6));
        let below = |column: usize| (0..30).any(|row| tried_with(Effort::Normal, 30 * row + column, 6));
        assert!((0..30).all(|i| met(i) && below(i)));
    }

    #[test]
    #[should_panic(expected = "set it to \"tenth\" or \"long\"")]
    fn a_misspelled_value_is_refused() {
        parse(Some("1"));
    }
}

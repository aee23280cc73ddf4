//! Shared parts of tests: how many random cases a test runs (the test's own count, a tenth of it, or the long count), the numbers it
//! draws, its seeds, and child processes.
//!
//! `MESHSTEP_CASES=tenth` is what `cargo xtask check` sets, `MESHSTEP_CASES=long` what `cargo xtask ci --long` sets. Every test
//! whose cases take time asks here.

#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

pub mod process;
pub mod seeds;

use std::env;

/// How thorough this run of the tests is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// A tenth of the normal counts, for the loop of edit and test.
    Tenth,
    /// The counts of `cargo xtask ci`.
    Normal,
    /// Every count that was ever asked for.
    Long,
}

/// The effort that `MESHSTEP_CASES` names; normal without it.
///
/// # Panics
/// If it names none: a run with fewer cases than were asked for must not pass.
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

/// Whether every count is run.
pub fn long() -> bool {
    effort() == Effort::Long
}

/// `normal` cases, a tenth of them (at least one), or `long` ones.
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

/// How far apart the points of a dense range are that are tried: `normal`, ten times that for `cargo xtask check`, or every one.
pub fn stride(normal: usize) -> usize {
    match effort() {
        Effort::Tenth => 10 * normal,
        Effort::Normal => normal,
        Effort::Long => 1,
    }
}

/// Whether entry `index` of a table of combinations is tried: all of them in long runs, else about one in `one_in`, and a tenth of
/// those for `cargo xtask check`. The entries are drawn by a hash of their index, so that every row and column of a large table is met,
/// and they are the same in every run.
///
/// Entry 0 is always tried.
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

/// A number drawn from these words: SplitMix64 over them. Optimised in every profile, as tests draw each element of a gradient.
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
        // No row or column of a table of 30 by 30 is left out.
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

//! What the benchmark measures: each case at one size or at several, in order of importance.

use super::cases::{Case, cases, segmented};
use super::lbfgs;
use serde_json::{Value, json};

/// A case at one size.
pub struct Row {
    pub name: String,
    pub work: Work,
    pub params: usize,
    pub rounds: usize,
}

pub enum Work {
    Case(Case),
    Lbfgs,
}

/// Cases that are measured at smaller sizes too, where launches count.
const SIZED: [&str; 3] = ["adamw f32", "adamw bf16 + remainder, bf16 gradients", "exact norm bf16"];

/// Powers of two of the smaller sizes, and the most rounds there.
const SIZES: [u32; 3] = [16, 20, 24];
const ROUNDS: usize = 21;

/// Parameters of the smoke test.
pub const SMOKE: usize = 1 << 16;

/// All rows, for at most `len` parameters.
pub fn rows(len: usize, rounds: usize) -> Vec<Row> {
    let whole = |case: Case| Row { name: case.name.to_owned(), work: Work::Case(case), params: len, rounds };
    let direction =
        Row { name: lbfgs::NAME.to_owned(), work: Work::Lbfgs, params: lbfgs::params(len), rounds };
    let sizes = SIZES.into_iter().filter(|log2| 1 << log2 < len);
    let mut rows: Vec<Row> = cases().into_iter().map(whole).collect();
    rows.push(direction);
    rows.extend(segmented().into_iter().map(whole));
    rows.extend(sizes.flat_map(|log2| sized(log2, rounds.min(ROUNDS))));
    rows
}

/// The cases that are measured with `2^log2` parameters.
fn sized(log2: u32, rounds: usize) -> impl Iterator<Item = Row> {
    let chosen = cases().into_iter().filter(|case| SIZED.contains(&case.name));
    chosen.map(move |case| Row {
        name: format!("{}, 2^{log2}", case.name),
        work: Work::Case(case),
        params: 1 << log2,
        rounds,
    })
}

/// The first case at a small size, for a few rounds.
pub fn smoke() -> Vec<Row> {
    let first = cases().into_iter().take(1);
    let row =
        |case: Case| Row { name: case.name.to_owned(), work: Work::Case(case), params: SMOKE, rounds: 5 };
    first.map(row).collect()
}

impl Row {
    /// What names it in the record.
    pub fn head(&self) -> Value {
        json!({ "name": self.name, "params": self.params })
    }

    /// Bytes that must be read and written for each parameter.
    pub fn bytes_each(&self) -> usize {
        match &self.work {
            Work::Case(case) => case.bytes(),
            Work::Lbfgs => lbfgs::BYTES,
        }
    }

    /// Waits of the host that one step needs.
    pub fn waits(&self) -> f64 {
        match self.work {
            Work::Case(_) => 0.0,
            Work::Lbfgs => 1.0,
        }
    }

    /// Parameters of the copy that the row is measured beside.
    pub fn copied(&self, len: usize) -> usize {
        match self.work {
            Work::Case(_) => self.params,
            Work::Lbfgs => len,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_names_of_their_own_and_sizes_below_the_largest() {
        let rows = rows(1 << 22, 51);
        let mut names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names[0], "adamw f32");
        for name in ["adamw f32, 2^16", "exact norm bf16, 2^20", "adamw f32, 300 segments", lbfgs::NAME] {
            assert!(names.contains(&name), "{name}");
        }
        assert!(!names.iter().any(|name| name.ends_with("2^24")));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), rows.len());
        assert!(rows.iter().all(|row| row.params <= 1 << 22 && row.rounds >= ROUNDS));
        assert_eq!((smoke().len(), smoke()[0].params), (1, 1 << 16));
    }
}

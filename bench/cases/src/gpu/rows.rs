//! Rows of the benchmark: each case at one size or several sizes, in order of importance.

use super::cases::{Case, cases, segmented};
use super::casts::{Cast, casts};
use super::lbfgs;
use super::passes::Pass;
use super::race::{Copy, Measured};
use super::{Result, measure};
use meshstep_tensor::Queue;
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
    Cast(Cast),
    Lbfgs,
    Pass(Pass),
}

/// The norm that is also measured at smaller sizes, as all updates are, because there launches dominate.
const SIZED_NORM: &str = "exact norm bf16";

/// Exponents of the smaller sizes, and the maximum number of rounds at these sizes.
const SIZES: [u32; 3] = [16, 20, 24];
const ROUNDS: usize = 21;

/// Number of parameters of the smoke test.
pub const SMOKE: usize = 1 << 16;

/// Returns all rows for at most `len` parameters, most informative first.
pub fn rows(len: usize, rounds: usize) -> Vec<Row> {
    let row = |name: String, work: Work| Row { params: work.params(len), name, work, rounds };
    let whole = |case: Case| row(case.name.to_owned(), Work::Case(case));
    let mut rows: Vec<Row> = cases().into_iter().map(whole).collect();
    rows.push(row(lbfgs::NAME.to_owned(), Work::Lbfgs));
    rows.extend(Pass::ALL.map(|pass| row(pass.name().to_owned(), Work::Pass(pass))));
    rows.extend(casts().map(|cast| row(cast.name(), Work::Cast(cast))));
    rows.extend(segmented().into_iter().map(whole));
    let sizes = SIZES.into_iter().filter(|log2| 1 << log2 < len);
    rows.extend(sizes.flat_map(|log2| sized(log2, rounds.min(ROUNDS))));
    rows
}

/// Returns the cases that are measured with `2^log2` parameters.
fn sized(log2: u32, rounds: usize) -> impl Iterator<Item = Row> {
    let chosen = cases().into_iter().filter(|case| !case.norm || case.name == SIZED_NORM);
    chosen.map(move |case| Row {
        name: format!("{}, 2^{log2}", case.name),
        work: Work::Case(case),
        params: 1 << log2,
        rounds,
    })
}

/// Returns the first case at a small size, with a few rounds.
pub fn smoke() -> Vec<Row> {
    let first = cases().into_iter().take(1);
    let row =
        |case: Case| Row { name: case.name.to_owned(), work: Work::Case(case), params: SMOKE, rounds: 5 };
    first.map(row).collect()
}

impl Row {
    /// Returns the identification of the row in the record.
    pub fn head(&self) -> Value {
        json!({ "name": self.name, "params": self.params })
    }

    /// Returns the bytes that must be read and written for each parameter.
    pub fn bytes_each(&self) -> usize {
        match &self.work {
            Work::Case(case) => case.bytes(),
            Work::Cast(cast) => cast.bytes(),
            Work::Lbfgs => lbfgs::BYTES,
            Work::Pass(pass) => pass.bytes(),
        }
    }

    /// Measures the row in turns with a copy of its size.
    pub fn measure(&self, copy: &mut Copy, queue: &Queue) -> Result<Measured> {
        let size = (self.params, self.rounds);
        match &self.work {
            Work::Case(case) => measure(case, copy, size, queue),
            Work::Cast(cast) => cast.measure(copy, size, queue),
            Work::Lbfgs => lbfgs::measure(copy, self.params, self.rounds, queue),
            Work::Pass(pass) => pass.measure(copy, size, queue),
        }
    }

    /// Returns the number of host waits that one step needs.
    pub fn waits(&self) -> f64 {
        match self.work {
            Work::Lbfgs => 1.0,
            _ => 0.0,
        }
    }

    /// Returns the number of parameters of the copy in the row's measurement.
    pub fn copied(&self, len: usize) -> usize {
        if self.work.has_history() { len } else { self.params }
    }
}

impl Work {
    /// Returns true if the work needs many vectors.
    fn has_history(&self) -> bool {
        matches!(self, Work::Lbfgs | Work::Pass(_))
    }

    /// Returns the work's number of parameters if other works have `len`.
    fn params(&self, len: usize) -> usize {
        if self.has_history() { lbfgs::params(len) } else { len }
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
        for name in [
            "adamw f32, 2^16",
            "exact norm bf16, 2^20",
            "sgd f32, 2^20",
            "adamw f32, 300 segments",
            lbfgs::NAME,
            "lbfgs products, 20 rows",
            "cast f32 to bf16",
        ] {
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

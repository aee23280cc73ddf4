//! Measures of the tree: a figure per crate, the bound it must keep today, the goal, and the lines that make it up.

use super::complaint::Complaint;
use std::collections::BTreeMap;
use std::fmt;

/// Bound of a figure: `tidy` fails above `now`. A later commit lowers `now` until it equals `goal`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limit {
    pub(super) now: usize,
    pub(super) goal: usize,
}

impl Limit {
    /// The limit of `place`: `now` is its row, and without a row the goal.
    pub(super) fn of(place: &str, rows: &[(&str, usize)], goal: usize) -> Self {
        let row = rows.iter().find(|(name, _)| *name == place);
        Self { now: row.map_or(goal, |(_, now)| *now), goal }
    }
}

/// A figure of a crate or of the whole tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Measure {
    /// The crate's folder, or `tree`.
    pub(super) place: String,
    pub(super) what: &'static str,
    pub(super) figure: Figure,
    pub(super) limit: Limit,
    /// Printed if the figure is above its limit.
    pub(super) offences: Vec<Complaint>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Figure {
    Count(usize),
    /// Limits of a share are in tenths of a percent.
    Share {
        part: usize,
        whole: usize,
    },
}

impl Figure {
    /// The number that limits are compared with; shares round up.
    pub(super) fn value(self) -> usize {
        match self {
            Self::Count(count) => count,
            Self::Share { part, whole } => (1000 * part).div_ceil(whole.max(1)),
        }
    }

    /// `value` in the unit of this figure.
    fn text(self, value: usize) -> String {
        match self {
            Self::Count(_) => value.to_string(),
            Self::Share { .. } => format!("{}.{} %", value / 10, value % 10),
        }
    }
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |value| self.figure.text(value);
        write!(f, "{} {}", self.what, text(self.figure.value()))?;
        if let Figure::Share { part, whole } = self.figure {
            write!(f, " = {part} of {whole}")?;
        }
        write!(f, " (at most {}, goal {})", text(self.limit.now), text(self.limit.goal))
    }
}

/// The offences of every measure above its limit, or with `goals` above its goal, each list after a line with the figure.
pub(super) fn complaints(measures: Vec<Measure>, goals: bool) -> Vec<Complaint> {
    let most = |limit: Limit| if goals { limit.goal } else { limit.now };
    let above = measures.into_iter().filter(|measure| measure.figure.value() > most(measure.limit));
    above
        .flat_map(|measure| {
            let figure = Complaint::file(&measure.place, measure.to_string());
            std::iter::once(figure).chain(measure.offences)
        })
        .collect()
}

/// One line per crate, then one for the tree.
pub(super) fn summary(measures: &[Measure]) -> Vec<String> {
    let mut lines: BTreeMap<(bool, &str), Vec<String>> = BTreeMap::new();
    for measure in measures {
        lines.entry((measure.place == TREE, &measure.place)).or_default().push(measure.to_string());
    }
    lines.into_iter().map(|((_, place), figures)| format!("{place}: {}", figures.join("; "))).collect()
}

/// Place of a measure that sums over all crates.
pub(super) const TREE: &str = "tree";

#[cfg(test)]
mod tests {
    use super::*;

    fn measure(place: &str, figure: Figure, now: usize) -> Measure {
        let limit = Limit { now, goal: 5 };
        let offences = vec![Complaint::line("a/src/lib.rs", 3, "split it")];
        Measure { place: place.to_owned(), what: "things", figure, limit, offences }
    }

    #[test]
    fn a_place_without_a_row_keeps_to_the_goal() {
        let rows = [("a", 9), ("b", 7)];
        assert_eq!(Limit::of("b", &rows, 5), Limit { now: 7, goal: 5 });
        assert_eq!(Limit::of("c", &rows, 5), Limit { now: 5, goal: 5 });
    }

    #[test]
    fn a_figure_fails_above_its_limit_and_prints_the_goal() {
        assert_eq!(complaints(vec![measure("a", Figure::Count(7), 7)], false), []);
        assert_eq!(complaints(vec![measure("a", Figure::Count(6), 7)], true).len(), 2);
        assert_eq!(complaints(vec![measure("a", Figure::Count(5), 7)], true), []);
        let printed = complaints(vec![measure("a", Figure::Count(8), 7)], false);
        assert_eq!(printed[0].to_string(), "a: things 8 (at most 7, goal 5)");
        assert_eq!(printed[1].to_string(), "a/src/lib.rs:3: split it");
    }

    #[test]
    fn shares_round_up_so_that_a_limit_is_exact() {
        let share = |part, whole| Figure::Share { part, whole }.value();
        assert_eq!([share(3, 100), share(31, 1000), share(301, 10_000), share(0, 0)], [30, 31, 31, 0]);
        let printed = measure("a", Figure::Share { part: 3, whole: 100 }, 30).to_string();
        assert_eq!(printed, "things 3.0 % = 3 of 100 (at most 3.0 %, goal 0.5 %)");
    }

    #[test]
    fn the_summary_has_a_line_per_crate_and_the_tree_last() {
        let places = ["tree", "b", "a", "b"];
        let all: Vec<Measure> = places.iter().map(|place| measure(place, Figure::Count(1), 5)).collect();
        let lines = summary(&all);
        assert_eq!(lines.len(), 3);
        assert!(lines[0].starts_with("a: ") && lines[2].starts_with("tree: "), "{lines:?}");
        assert_eq!(lines[1].matches("things 1").count(), 2);
    }
}

//! Rows of the comparisons: times of both systems and of the copy, and their ratios.

use meshstep_bench_cases::ranks::Race;

use crate::measure::record::{Cell, Section, Table, Wanted};

pub(super) fn table(title: impl Into<String>) -> Table {
    Table::new(title, &["ours", "copy", "theirs", "theirs / ours", "theirs / copy", "wanted"])
}

pub(super) fn tell(
    section: &mut Section,
    table: &mut Table,
    what: &str,
    Race { ours, theirs, floor }: &Race,
    wanted: f64,
) {
    let (ratio, reach) = (theirs.over(ours).median(), theirs.over(floor).median());
    let times = [ours, floor, theirs].map(|samples| Cell::Time(samples.median()));
    let ratios = [Cell::Ratio(ratio), Cell::Ratio(reach), Cell::Number(wanted)];
    table.row(what, times.into_iter().chain(ratios));
    section.bar(format!("{what}: theirs / ours"), ratio.median, Wanted::AtLeast(wanted));
}

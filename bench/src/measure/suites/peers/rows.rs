//! Rows of the comparisons: times of both systems and of the references, and their ratios.

use meshstep_bench_cases::copies::{MovedBytes, PASSES};
use meshstep_bench_cases::ranks::Race;

use crate::measure::peers::TorchPair;
use crate::measure::record::{Cell, Section, Table, Wanted};

/// Least ratio of the other system's time to ours.
#[derive(Clone, Copy, Debug)]
pub(super) enum Aim {
    Ratio(f64),
    /// For work that memory limits: a share of the ratio of the other system's time to the reference copy, in the same run.
    OfReference(f64),
}

/// The running programs of both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sides {
    OneProcess,
    ThreadsAgainstProcesses,
}

impl Sides {
    /// Words for every line with a ratio.
    fn words(self) -> &'static str {
        match self {
            Sides::OneProcess => "",
            Sides::ThreadsAgainstProcesses => ", threads of one process against processes",
        }
    }
}

/// A table of comparisons, and one of their references.
pub(super) struct PeerTable {
    sides: Sides,
    table: Table,
    references: Table,
}

impl PeerTable {
    pub(super) fn new(title: impl Into<String>, sides: Sides) -> Self {
        let title = format!("{}{}", title.into(), sides.words());
        let references = format!("references of: {title}");
        let columns = &[
            "ours",
            "reference copy",
            "theirs",
            "theirs / ours",
            "theirs / reference",
            "wanted",
            "torch's malloc",
            "usual malloc",
            "malloc kept",
            "theirs with a closing barrier",
        ];
        let passes = PASSES.map(|pass| pass.name());
        let columns_of_references =
            [&["bytes of a pass"][..], &passes, &["copy", "at these speeds"]].concat();
        PeerTable {
            sides,
            table: Table::new(title, columns),
            references: Table::new(references, &columns_of_references),
        }
    }

    /// Adds a row, and its bar. `moved` is what our side moves.
    pub(super) fn row(
        &mut self,
        section: &mut Section,
        what: &str,
        (race, moved): (&Race, MovedBytes),
        aim: Aim,
    ) {
        self.add(section, what, (race, moved), aim, Vec::new());
    }

    /// Adds the row of a race with PyTorch, whose faster program is the other system.
    pub(super) fn torch_row(
        &mut self,
        section: &mut Section,
        what: &str,
        (race, moved): (Race, MovedBytes),
        (aim, torch): (Aim, &TorchPair),
    ) {
        let times = torch.times();
        let (name, theirs) = times.better();
        let race = Race { theirs: theirs.clone(), ..race };
        let with_barrier = times.with_barrier.as_ref();
        let settings = vec![
            Cell::Text(name.to_owned()),
            Cell::Time(times.usual.median()),
            Cell::Time(times.kept.median()),
            with_barrier.map_or(Cell::None, |samples| Cell::Time(samples.median())),
        ];
        self.add(section, what, (&race, moved), aim, settings);
    }

    fn add(
        &mut self,
        section: &mut Section,
        what: &str,
        (race, moved): (&Race, MovedBytes),
        aim: Aim,
        settings: Vec<Cell>,
    ) {
        let Race { ours, theirs, copy, passes } = race;
        let (ratio, reach) = (theirs.over(ours).median(), theirs.over(copy).median());
        let (wanted, of_reference) = match aim {
            Aim::Ratio(least) => (least, String::new()),
            Aim::OfReference(share) => {
                (share * reach.median, format!(" (wanted: {:.0}% of theirs / reference)", 100.0 * share))
            }
        };
        let times = [ours, copy, theirs].map(|samples| Cell::Time(samples.median()));
        let ratios = [Cell::Ratio(ratio), Cell::Ratio(reach), Cell::Number(wanted)];
        self.table.row(what, times.into_iter().chain(ratios).chain(settings));
        let speeds = PASSES.map(|pass| Cell::Speed(passes.speed(pass)));
        let priced = [copy, &passes.price(moved)].map(|samples| Cell::Time(samples.median()));
        let bytes = Cell::Bytes(passes.bytes as u64);
        self.references.row(what, [bytes].into_iter().chain(speeds).chain(priced));
        let words = self.sides.words();
        section.bar(
            format!("{what}: theirs / ours{words}{of_reference}"),
            ratio.median,
            Wanted::AtLeast(wanted),
        );
    }

    pub(super) fn note(&mut self, note: impl Into<String>) {
        self.table.note(note);
    }

    /// Adds both tables to the section.
    pub(super) fn end(self, section: &mut Section) {
        section.tables.extend([self.table, self.references]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshstep_bench_cases::copies::PassTimes;
    use meshstep_bench_cases::samples::Samples;

    fn race() -> (Race, MovedBytes) {
        let samples = |seconds: f64| [seconds; 3].into_iter().collect::<Samples>();
        let passes = PassTimes { seconds: [1.0, 2.0, 3.0].map(samples), bytes: 3_000_000_000 };
        let race = Race { ours: samples(2.0), theirs: samples(6.0), copy: samples(1.5), passes };
        (race, MovedBytes { read: 3_000_000_000, written: 0, in_place: 6_000_000_000 })
    }

    fn section(sides: Sides, aim: Aim) -> Section {
        let (mut section, mut table) = (Section::new("", ""), PeerTable::new("steps", sides));
        let (race, moved) = race();
        table.row(&mut section, "step", (&race, moved), aim);
        table.end(&mut section);
        section
    }

    #[test]
    fn a_ratio_of_threads_and_processes_says_so_in_its_line() {
        let section = section(Sides::ThreadsAgainstProcesses, Aim::Ratio(4.0));
        assert_eq!(section.bars[0].what, "step: theirs / ours, threads of one process against processes");
        assert!(!section.bars[0].holds());
        assert!(section.tables[0].title.ends_with("threads of one process against processes"));
    }

    #[test]
    fn a_bar_of_memory_is_a_share_of_what_the_reference_reaches() {
        let section = section(Sides::OneProcess, Aim::OfReference(0.75));
        let bar = &section.bars[0];
        assert_eq!(bar.what, "step: theirs / ours (wanted: 75% of theirs / reference)");
        // 6.0 / 2.0, and 0.75 of 6.0 / 1.5.
        assert_eq!((bar.found, bar.wanted, bar.holds()), (3.0, Wanted::AtLeast(3.0), true));
    }

    #[test]
    fn speeds_of_reading_writing_and_both_stand_apart() {
        let section = section(Sides::OneProcess, Aim::Ratio(1.0));
        let cells = &section.tables[1].rows[0].cells;
        assert_eq!(cells[1..4], [3e9, 1.5e9, 2e9].map(Cell::Speed));
        let Cell::Time(priced) = cells[5] else { panic!("no time in {cells:?}") };
        // 3 GB read in 1 s, 6 GB moved in place in 3 s.
        assert_eq!(priced.median, 4.0);
    }
}

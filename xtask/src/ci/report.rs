//! Printed reports of `ci`: the list of steps before a run, the tables of times after it.

use super::steps;
use super::task::Step;
use std::fmt;
use std::time::{Duration, Instant};

/// Number of slowest tasks and tests to print.
const SLOWEST: usize = 20;

/// The steps run so far with their times, and the tasks and tests in them.
#[derive(Debug)]
pub(crate) struct Report {
    start: Instant,
    rows: Vec<(String, &'static str, Duration)>,
    tasks: Vec<(String, Duration)>,
    tests: Vec<(String, Duration)>,
}

impl Report {
    pub(crate) fn start() -> Self {
        Self { start: Instant::now(), rows: Vec::new(), tasks: Vec::new(), tests: Vec::new() }
    }

    pub(crate) fn push(&mut self, name: &str, verdict: &'static str, took: Duration) {
        self.rows.push((name.to_owned(), verdict, took));
    }

    pub(crate) fn push_task(&mut self, shown: String, took: Duration) {
        self.tasks.push((shown, took));
    }

    pub(crate) fn push_tests(&mut self, tests: Vec<(String, Duration)>) {
        self.tests.extend(tests);
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, times) in [("tasks", &self.tasks), ("tests", &self.tests)] {
            let slowest = slowest(times);
            if !slowest.is_empty() {
                writeln!(f, "the slowest of {} {what}", times.len())?;
            }
            for (name, took) in slowest {
                writeln!(f, "  {:>16}   {}", seconds(*took), shortened(name))?;
            }
        }
        for (name, verdict, took) in &self.rows {
            writeln!(f, "{name:<12} {:>16}   {verdict}", seconds(*took))?;
        }
        writeln!(f, "{:<12} {:>16}", "total", seconds(self.start.elapsed()))
    }
}

/// Returns the entries that took at least a tenth of a second, slowest first.
fn slowest(times: &[(String, Duration)]) -> Vec<&(String, Duration)> {
    let mut slow: Vec<_> = times.iter().filter(|(_, took)| took.as_millis() >= 100).collect();
    slow.sort_by_key(|(_, took)| std::cmp::Reverse(*took));
    slow.truncate(SLOWEST);
    slow
}

/// Shortens a long command; the full text was printed when it ran.
fn shortened(shown: &str) -> String {
    const MOST: usize = 110;
    match shown.char_indices().nth(MOST) {
        Some((end, _)) => format!("{} ...", &shown[..end]),
        None => shown.to_owned(),
    }
}

/// Formats a duration as `41.3 s`, with minutes in front from 60 s on.
pub(crate) fn seconds(took: Duration) -> String {
    // Round before splitting, so that 59.96 s becomes 1 min instead of 60.0 s.
    let tenths = (took.as_millis() + 50) / 100;
    let (minutes, tenths) = (tenths / 600, tenths % 600);
    let seconds = format!("{}.{} s", tenths / 10, tenths % 10);
    if minutes == 0 { seconds } else { format!("{minutes} min {seconds:>6}") }
}

/// Lists every step with its commands.
pub(crate) fn list(chosen: &[Step]) -> String {
    let lines = chosen.iter().flat_map(|step| {
        let tasks = step.tasks.iter().map(|task| format!("    {task}\n"));
        std::iter::once(format!("{}\n", steps::id(step.name))).chain(tasks)
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::StepName;
    use crate::cmd::Cmd;

    #[test]
    fn seconds_carry_into_minutes() {
        assert_eq!(seconds(Duration::from_millis(0)), "0.0 s");
        assert_eq!(seconds(Duration::from_millis(41_349)), "41.3 s");
        assert_eq!(seconds(Duration::from_millis(59_949)), "59.9 s");
        assert_eq!(seconds(Duration::from_millis(59_950)), "1 min  0.0 s");
        assert_eq!(seconds(Duration::from_millis(754_000)), "12 min 34.0 s");
    }

    #[test]
    fn the_table_has_a_row_for_each_step_and_a_total() {
        let mut report = Report::start();
        report.push("fmt", "ok", Duration::from_millis(400));
        report.push("tests", "FAILED", Duration::from_secs(61));
        let table = report.to_string();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "fmt                     0.4 s   ok");
        assert_eq!(lines[1], "tests            1 min  1.0 s   FAILED");
        assert!(lines[2].starts_with("total"));
    }

    #[test]
    fn the_slowest_come_first_and_what_is_quick_is_not_shown() {
        let mut report = Report::start();
        report.push_tests((0..30).map(|i| (format!("test {i}"), Duration::from_millis(50 * i))).collect());
        report.push_task("c".repeat(200), Duration::from_secs(2));
        let table = report.to_string();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "the slowest of 1 tasks");
        assert!(lines[1].ends_with("c ..."), "{}", lines[1]);
        assert_eq!((lines[2], lines[3].trim()), ("the slowest of 30 tests", "1.5 s   test 29"));
        assert_eq!(lines.len(), 1 + 1 + 1 + SLOWEST + 1);
        assert!(!table.contains("test 1\n"), "{table}");
    }

    #[test]
    fn the_list_names_each_step_above_its_commands() {
        let step =
            Step { name: StepName::Fmt, tasks: vec![super::super::task::Task::Run(Cmd::cargo("fmt"))] };
        assert_eq!(list(&[step]), "fmt\n    cargo fmt\n");
    }
}

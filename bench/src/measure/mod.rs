//! `cargo xtask bench`: measures the cost and the savings of sharding, compared with copies of the same bytes, in one
//! report.

mod baseline;
pub(crate) mod effort;
mod peers;
pub(crate) mod rank;
pub(crate) mod record;
pub(crate) mod show;
mod suites;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::Device;
use crate::args::bench::Bench;
use effort::Effort;
use meshstep_bench_cases::machine::Machine;
use record::{FORMAT, Report, Section};
use show::{html, markdown, terminal};
use suites::gpu::Gpu;

/// Result of a run: every bar holds, or some are missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Holds,
    Missed,
}

/// Runs the suites, prints each at its end, and writes the report into `folder`. `network` runs the suite of that name.
pub(crate) fn run(
    asked: &Bench,
    folder: &Path,
    network: fn(Effort) -> Result<Section>,
    out: &mut impl Write,
) -> Result<Verdict> {
    // Reject bad arguments before anything is measured.
    writable(folder)?;
    let started = Instant::now();
    let effort = Effort { quick: asked.quick };
    let suites = asked.suites()?;
    let gpu = match asked.device {
        Device::Cpu => None,
        Device::Cuda => Some(Gpu::open()?),
    };
    let machine = Machine { gpu: gpu.as_ref().map(|gpu| gpu.name.clone()), ..Machine::here() };
    let baseline =
        asked.baseline.as_deref().map(|path| baseline::read(path, asked.quick, &machine)).transpose()?;
    writeln!(out, "{machine}")?;
    let bar = progress(suites.len());
    let (mut sections, mut left_out) = (Vec::new(), Vec::new());
    for suite in &suites {
        bar.set_message(suite.name());
        let section = match &gpu {
            None => suites::run(*suite, effort, network),
            Some(gpu) => gpu.run(effort, asked.peers.is_some().then_some(folder), &mut left_out),
        };
        let section = section.with_context(|| format!("{}: no report was written", suite.name()))?;
        bar.suspend(|| out.write_all(terminal::section(&section).as_bytes()))?;
        sections.push(section);
        bar.inc(1);
    }
    if let (Some(parts), None) = (&asked.peers, &gpu) {
        bar.set_message("peers");
        let section = suites::peers::run(effort, folder, parts, &mut left_out);
        let section = section.context("peers: no report was written")?;
        bar.suspend(|| out.write_all(terminal::section(&section).as_bytes()))?;
        sections.push(section);
    }
    bar.finish_and_clear();
    let (version, seconds) = (env!("CARGO_PKG_VERSION").to_owned(), started.elapsed().as_secs_f64());
    let mut report =
        Report { format: FORMAT, version, machine, quick: asked.quick, seconds, sections, left_out };
    if let Some(baseline) = baseline {
        let section = baseline::compare(&report, &baseline);
        out.write_all(terminal::section(&section).as_bytes())?;
        report.sections.push(section);
    }
    write(&report, folder)?;
    writeln!(
        out,
        "\n{}wrote report.html, report.md and report.json to {}",
        terminal::summary(&report),
        folder.display()
    )?;
    let holds = |section: &Section| section.bars.iter().all(record::Bar::holds);
    Ok(if report.sections.iter().all(holds) { Verdict::Holds } else { Verdict::Missed })
}

/// Checks before the measurements that the report can be written into the folder.
fn writable(folder: &Path) -> Result<()> {
    let shown = folder.display();
    fs::create_dir_all(folder).with_context(|| format!("--out {shown}: cannot create the folder"))?;
    let trial = folder.join(".writable");
    fs::write(&trial, [])
        .and_then(|()| fs::remove_file(&trial))
        .with_context(|| format!("--out {shown}: cannot write into the folder"))
}

fn write(report: &Report, folder: &Path) -> Result<()> {
    let put = |name: &str, text: String| {
        let path = folder.join(name);
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
    };
    put("report.html", html::report(report, "Benchmark of Meshstep"))?;
    put("report.md", markdown::report(report))?;
    crate::report::write_json(report, &folder.join("report.json"))
}

fn progress(suites: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg}  [{bar:30}] {pos}/{len}  {elapsed}");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(suites as u64).with_style(style.progress_chars("=> "))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::record::{Cell, Plot, Scale, Shape, Table, Wanted};
    use super::*;
    use crate::args::bench::Suite;
    use meshstep_bench_cases::samples::Median;

    /// A report with one of everything.
    pub(crate) fn sample() -> Report {
        let mut section = Section::new("kernels", "a < b");
        let mut table = Table::new("rule", &["time", "of copy"]);
        let time = Median { median: 1.0, low: 0.9, high: 1.1, rounds: 9 };
        table.row("adamw", [Cell::Time(time), Cell::Share(0.97)]);
        section.tables.push(table);
        section.bar("share of a copy's speed", 0.97, Wanted::AtLeast(0.95));
        section.verdict.push("AdamW has 97% of a copy's speed.".into());
        let (x, y) = (Scale::named("parameters", ["1".into(), "10".into()]), Scale::amount("time, s"));
        let curves =
            vec![("ours".to_owned(), vec![(0.0, 2.0), (1.0, 20.0)]), ("<b>".to_owned(), vec![(0.0, 1.0)])];
        section.plots.push(Plot::new("cost", "Less is better.", Shape::Curves { x, y, curves }));
        let parts = vec![("state".to_owned(), vec![8.0, 2.0]), ("params".to_owned(), vec![4.0, 4.0])];
        let names = vec!["stage 0".to_owned(), "stage 1".to_owned()];
        let shape = Shape::Bars { label: "memory, GB".into(), names, parts };
        section.plots.push(Plot::new("memory", "", shape));
        Report {
            format: FORMAT,
            version: "0.0.0".into(),
            machine: Machine::here(),
            quick: true,
            seconds: 1.0,
            sections: vec![section],
            left_out: vec!["peers: python3 is not installed".into()],
        }
    }

    #[test]
    fn a_report_is_written_whole_and_can_be_read_again() {
        let dir = tempfile::tempdir().unwrap();
        write(&sample(), dir.path()).unwrap();
        let json = fs::read(dir.path().join("report.json")).unwrap();
        assert_eq!(serde_json::from_slice::<Report>(&json).unwrap(), sample());
        let text = fs::read_to_string(dir.path().join("report.md")).unwrap();
        assert!(
            text.contains("| adamw | 1.00 s ±10% | 97.0% |") && text.contains("left out: peers"),
            "{text}"
        );
        assert!(text.contains("1 of 1 bars hold"));
    }

    fn unasked(_: Effort) -> Result<Section> {
        panic!("no test here asks for the suite network")
    }

    #[test]
    fn a_suite_is_measured_printed_written_and_held_against_itself() {
        let dir = tempfile::tempdir().unwrap();
        let asked = Bench {
            suites: vec![Suite::Comm],
            quick: true,
            device: Device::Cpu,
            baseline: None,
            out: None,
            peers: None,
        };
        let mut printed = Vec::new();
        assert_eq!(run(&asked, dir.path(), unasked, &mut printed).unwrap(), Verdict::Holds);
        let text = String::from_utf8(printed).unwrap();
        assert!(
            text.contains("== comm: collectives ==") && text.contains("over the reference copy"),
            "{text}"
        );
        assert!(["html", "md", "json"].iter().all(|end| dir.path().join(format!("report.{end}")).exists()));
        let again = Bench { baseline: Some(dir.path().join("report.json")), ..asked };
        let mut printed = Vec::new();
        run(&again, dir.path(), unasked, &mut printed).unwrap();
        assert!(String::from_utf8(printed).unwrap().contains("== baseline =="));
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_refused_before_anything_is_measured() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "text").unwrap();
        let asked = Bench {
            suites: vec![],
            quick: true,
            device: Device::Cpu,
            baseline: None,
            out: None,
            peers: None,
        };
        let mut printed = Vec::new();
        let error = format!("{:#}", run(&asked, &file, unasked, &mut printed).unwrap_err());
        assert!(error.contains("--out") && printed.is_empty(), "{error}");
        let cuda = Bench { device: Device::Cuda, ..asked };
        let error = run(&cuda, dir.path(), unasked, &mut printed).unwrap_err().to_string();
        assert!(error.contains("--device cuda"), "{error}");
    }
}

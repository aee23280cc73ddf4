//! Losses against seconds: simulated for links of several rates, and as `bench network` measured them behind such links.

use std::fs;
use std::path::{Path, PathBuf};

use super::trained::Trained;
use crate::measure::record::{Cell, FORMAT, NETWORK, Plot, Report, Scale, Section, Shape, Table};

/// Rates of the table in megabits per second, and the one of the chart.
const RATES: [u64; 4] = [10_000, 1000, 100, 10];
const SHOWN: u64 = 100;

/// Returns the section of simulated seconds, and that of measured ones if there are any in a report near `folder`.
pub(super) fn sections(trained: &[Trained], folder: &Path) -> Vec<Section> {
    let runs: Vec<&Trained> = trained.iter().filter(|run| run.seed == trained[0].seed).collect();
    let measured = measured(folder);
    let mut all = vec![simulated(&runs, measured.is_some())];
    all.extend(measured);
    all
}

/// Seconds of a training in which every step computes for `step` seconds and then sends over a link of `rate` megabits per second.
#[derive(Clone, Copy, Debug)]
struct Link {
    step: f64,
    rate: u64,
}

impl Link {
    /// Returns the seconds after `steps` steps.
    fn after(self, run: &Trained, steps: u64) -> f64 {
        let sent =
            steps.checked_sub(1).and_then(|last| run.sent_most.get(last as usize)).copied().unwrap_or(0);
        steps as f64 * self.step + sent as f64 * 8.0 / (self.rate as f64 * 1e6)
    }
}

fn simulated(runs: &[&Trained], is_measured: bool) -> Section {
    let step = median(runs.iter().map(|run| run.seconds_per_step).collect());
    let there = match is_measured {
        true => "The next section has measured seconds.",
        false => {
            "There are no measured seconds: neither the folder of this report nor the folder `bench` beside it has a report of \
             `bench network`."
        }
    };
    let about = format!(
        "Simulated seconds, computed and not measured. Each step computes for {:.1} ms, the median over the trainings of this run on this \
         machine, and then the busiest worker's counted bytes cross its link. The link has no delay, and no transfer overlaps with \
         computation, so a method that hides its transfers, such as Streaming DiLoCo, is faster than shown. {there}",
        1e3 * step
    );
    let mut section = Section::new("seconds, simulated", &about);
    let names: Vec<String> = RATES.iter().map(|rate| name(*rate)).collect();
    let mut table = Table::new(
        "simulated seconds of the whole training",
        &names.iter().map(String::as_str).collect::<Vec<_>>(),
    );
    for run in runs {
        let seconds = RATES.map(|rate| Cell::Seconds(Link { step, rate }.after(run, run.steps as u64)));
        table.row(run.method.to_string(), seconds);
    }
    section.tables.push(table);
    let link = Link { step, rate: SHOWN };
    let curve = |run: &&Trained| {
        let points = run.held_out.iter().map(|&(steps, loss)| (link.after(run, steps), loss));
        (run.method.to_string(), points.collect())
    };
    let (x, y) = (Scale::amount("simulated time, s"), Scale::near("held-out loss, nats per byte"));
    let shape = Shape::Curves { x, y, curves: runs.iter().map(curve).collect() };
    let caption = format!("Lower and further left is better. Simulated, not measured. {there}");
    section.plots.push(Plot::new(
        format!("Held-out loss against simulated seconds at {}", name(SHOWN)),
        caption,
        shape,
    ));
    section.verdict.extend(quickest(runs, link));
    section
}

/// Returns a sentence on the training that takes the least time and the one that takes most, if they differ.
fn quickest(runs: &[&Trained], link: Link) -> Option<String> {
    let seconds = |run: &Trained| link.after(run, run.steps as u64);
    let least = runs.iter().min_by(|a, b| seconds(a).total_cmp(&seconds(b)))?;
    let most = runs.iter().max_by(|a, b| seconds(a).total_cmp(&seconds(b)))?;
    (least.method != most.method).then(|| {
        format!(
            "Simulated behind links of {}: {} takes {:.1} s for all steps, and {} takes {:.1} s.",
            name(link.rate),
            least.method,
            seconds(least),
            most.method,
            seconds(most)
        )
    })
}

/// Returns the section of measured seconds from the report of `bench network` in `folder` or in the folder `bench` beside it.
fn measured(folder: &Path) -> Option<Section> {
    let beside = folder.parent().map(|parent| parent.join("bench"));
    [Some(folder.to_owned()), beside]
        .into_iter()
        .flatten()
        .find_map(|folder| read(folder.join("report.json")))
}

fn read(path: PathBuf) -> Option<Section> {
    let text = fs::read(&path).ok()?;
    let report: Report = serde_json::from_slice(&text)
        .inspect_err(|error| tracing::warn!("{} is left out of the report: {error}", path.display()))
        .ok()?;
    let Report { format: FORMAT, version, machine, quick, mut sections, .. } = report else { return None };
    let network = sections.iter().position(|section| section.name == NETWORK)?;
    let Section { verdict, mut tables, plots, about, .. } = sections.swap_remove(network);
    let quick = if quick { " It was a quick run with small sizes." } else { "" };
    let about = format!(
        "Measured by `bench network` of Meshstep {version} ({}), on {machine}.{quick} The network and the number of steps differ from those \
         of this report. {about}",
        path.display()
    );
    tables.truncate(1);
    let section = Section::new("seconds, measured", &about);
    Some(Section { verdict, tables, plots, ..section })
}

fn name(rate: u64) -> String {
    match rate {
        rate if rate >= 1000 => format!("{} Gbit/s", rate / 1000),
        rate => format!("{rate} Mbit/s"),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::train;
    use crate::measure::tests::sample;

    #[test]
    fn simulated_seconds_are_those_of_the_steps_and_of_the_busiest_workers_bytes() {
        let mut run = train("--local local-adam --kx 2 --workers 2 --steps 4 --batch 1").swap_remove(0);
        assert!(run.seconds_per_step > 0.0 && run.sent_most.len() == 4);
        // Only every second step sends, and both workers send nearly the same.
        let (none, most, half) = (run.sent_most[0], run.sent_most[3], run.sent() / 2);
        assert!(none == 0 && (half..half + half / 100).contains(&most), "{none} {most} {half}");
        run.sent_most = vec![0, 1_000_000, 1_000_000, 3_000_000];
        let seconds = |rate, steps| Link { step: 0.5, rate }.after(&run, steps);
        // A megabyte takes 0.8 s at 10 Mbit/s.
        assert!((seconds(10, 2) - 1.8).abs() < 1e-9 && (seconds(10, 4) - 4.4).abs() < 1e-9);
        assert!((seconds(1000, 4) - 2.024).abs() < 1e-9 && seconds(10, 0) == 0.0);
    }

    #[test]
    fn measured_seconds_are_shown_where_the_bench_wrote_them_and_else_their_lack_is_said() {
        let root = tempfile::tempdir().unwrap();
        let [folder, beside] = ["train", "bench"].map(|name| root.path().join(name));
        let run = train("--local local-adam --kx 1 --workers 2 --steps 2 --batch 1");
        let sections = || sections(&run, &folder);
        let lacks = "There are no measured seconds";
        let shown = sections();
        assert_eq!(shown.len(), 1);
        assert!(shown[0].about.contains(lacks) && shown[0].plots[0].caption.contains(lacks), "{shown:?}");
        // A report without the suite is none, and neither is one of another format.
        for place in [&folder, &beside] {
            fs::create_dir_all(place).unwrap();
            let write = |report: &Report| {
                fs::write(place.join("report.json"), serde_json::to_vec(report).unwrap()).unwrap()
            };
            let mut report = sample();
            write(&report);
            assert_eq!(sections().len(), 1);
            report.sections[0].name = NETWORK.to_owned();
            write(&Report { format: FORMAT + 1, ..report.clone() });
            assert_eq!(sections().len(), 1);
            write(&report);
            let shown = sections();
            assert!(!shown[0].about.contains(lacks) && shown.len() == 2);
            assert_eq!((&shown[1].plots, shown[1].tables.len()), (&report.sections[0].plots, 1));
            assert!(
                shown[1].about.contains("quick run") && shown[1].about.contains(&report.machine.to_string())
            );
            fs::remove_file(place.join("report.json")).unwrap();
        }
    }
}

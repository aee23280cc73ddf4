//! Local Adam whose workers double half way: with moments averaged at exchanges, and with each worker's own.

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

use super::asked::{Asked, Period, Task};
use super::beside::{highest, loss};
use super::method::Method;
use super::schedule::Schedule;
use super::trained::Trained;
use crate::measure::record::{Section, Table, Wanted};

/// How much a held-out loss may rise over the first exchange among twice as many workers, as a part of what it was.
const RISE: f64 = 0.05;

/// How much the held-out loss falls at least from the doubling to the end, as a part of what it was.
const FALL: f64 = 0.05;

/// Held-out losses of one training.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Doubled {
    pub(crate) seed: u64,
    /// Whether moments are averaged.
    pub(crate) averaged: bool,
    /// When as many workers as before come.
    pub(crate) before: f64,
    /// After the first exchange in which they count.
    pub(crate) after: f64,
    /// After the last step.
    pub(crate) end: f64,
}

/// The step from which on there are twice as many workers, and after which they have exchanged parameters once: half way, where an
/// exchange has just ended.
pub(super) fn half(steps: u64, kx: u64) -> Result<[u64; 2]> {
    ensure!(
        steps.is_multiple_of(kx) && steps >= 4 * kx,
        "--local doubling: {steps} steps with --kx {kx} have no exchange half way and one at the end; use --steps {} or another \
         multiple of kx that is 4 kx at least",
        steps.next_multiple_of(kx).max(4 * kx)
    );
    let half = steps / kx / 2 * kx;
    Ok([half, half + kx])
}

/// Local Adam, and the same whose moments no worker ever sends.
pub(super) fn methods(asked: &Asked, steps: u64) -> Result<Vec<Method>> {
    let kept = Asked { ku: vec![Period(None)], kv: Some(Period(None)), ..asked.clone() };
    Ok(vec![Method::of(Task::LocalAdam, asked, steps)?, Method::of(Task::DesLoc, &kept, steps)?])
}

/// Who comes when.
pub(super) fn schedule(workers: usize, steps: u64, kx: u64) -> Result<Schedule> {
    Ok(Schedule::doubling(workers, half(steps, kx)?[0]))
}

/// The losses of trainings by [`methods`].
pub(super) fn losses(trained: &[Trained], kx: u64) -> Result<Vec<Doubled>> {
    let of = |run: &Trained| {
        let [from, once] = half(run.steps as u64, kx)?;
        Ok(Doubled {
            seed: run.seed,
            averaged: run.method == Task::LocalAdam,
            before: run.held_out_after(from),
            after: run.held_out_after(once),
            end: run.held_out(),
        })
    };
    let all = trained.iter().map(of).collect::<Result<Vec<_>>>()?;
    let both = all.chunks(2).all(|pair| pair.len() == 2 && pair[0].averaged && !pair[1].averaged);
    both.then_some(all).context("each seed is trained with moments averaged and with each worker's own")
}

impl Doubled {
    /// How much higher the loss is once the new workers count, as a part of what it was.
    fn rise(&self) -> f64 {
        self.after / self.before - 1.0
    }

    /// How far the loss has come down since, as a part of what it was.
    fn fall(&self) -> f64 {
        1.0 - self.end / self.before
    }
}

/// The table and its bars.
pub(super) fn section(all: &[Doubled], workers: usize, [from, once]: [u64; 2], entropy: f64) -> Section {
    let about = format!(
        "Local Adam with {workers} workers up to step {from} and {} from then on, each on its own part of the text. Those that come \
         begin with the parameters, moments and step of the first member. Averaged: parameters and both moments are averaged at every \
         exchange. Own: parameters alone are, and each worker keeps its own moments. Held-out losses in nats a byte, after an exchange \
         of parameters each: the last before the doubling, the first after it (step {once}), and the last.",
        2 * workers
    );
    let mut section = Section::new("the number of workers doubles", &about);
    let columns =
        ["before", "once exchanged", "at the end", "before", "once exchanged", "at the end", "own moments'"];
    let columns: Vec<String> = columns
        .iter()
        .enumerate()
        .map(|(i, column)| match i {
            0..=2 => format!("averaged: {column}"),
            3..=5 => format!("own: {column}"),
            _ => format!("{column} end, above"),
        })
        .collect();
    let mut table = Table::new("seed", &columns.iter().map(String::as_str).collect::<Vec<_>>());
    for pair in all.chunks(2) {
        let cells = pair.iter().flat_map(|run| [run.before, run.after, run.end].map(loss));
        let above = 100.0 * (pair[pair.len() - 1].end / pair[0].end - 1.0);
        let above = crate::measure::record::Cell::Text(format!("{above:+.2}%"));
        table.row(pair[0].seed.to_string(), cells.chain([above]));
    }
    section.tables.push(table);
    for (averaged, name) in [(true, "averaged"), (false, "own")] {
        let those = || all.iter().filter(move |run| run.averaged == averaged);
        let what = format!("{name} moments: rise of the held-out loss over the doubling, as a part of it");
        section.bar(what, highest(those().map(Doubled::rise)), Wanted::AtMost(RISE));
        let what = format!("{name} moments: least fall of the held-out loss since, as a part of it");
        section.bar(what, -highest(those().map(|run| -run.fall())), Wanted::AtLeast(FALL));
    }
    let what = "the highest held-out loss at the end, which is to be below the byte entropy";
    section.bar(what, highest(all.iter().map(|run| run.end)), Wanted::AtMost(entropy));
    section
}

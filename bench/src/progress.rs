//! Progress display of a stage: a bar on a terminal, else a line at intervals.

use std::io::{IsTerminal as _, Write as _};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

/// Number of lines per stage without a terminal.
const LINES: usize = 10;

/// Time constant of the smoothed loss in steps.
const MEMORY: f64 = 20.0;

/// Progress of one stage, reported by its ranks.
#[derive(Debug)]
pub(crate) struct Progress {
    label: String,
    steps: usize,
    ranks: usize,
    tokens_per_step: usize,
    bar: Option<ProgressBar>,
    started: Instant,
    seen: Mutex<Seen>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// Steps taken by earlier programs.
    first: usize,
    steps: usize,
    ranks: usize,
    loss_sum: f64,
    smooth: f64,
}

impl Seen {
    /// Counts one rank's loss. Returns true if the rank was the last one of a step.
    fn add(&mut self, loss: f64, ranks: usize) -> bool {
        self.ranks += 1;
        self.loss_sum += loss;
        let complete = self.ranks == ranks;
        if complete {
            let mean = self.loss_sum / ranks as f64;
            self.steps += 1;
            // A plain mean over the first steps, then an exponential one.
            self.smooth += (mean - self.smooth) / MEMORY.min((self.steps - self.first) as f64);
            (self.ranks, self.loss_sum) = (0, 0.0);
        }
        complete
    }
}

impl Progress {
    /// Creates the display for `steps` steps of `ranks` ranks, with `tokens_per_step` tokens on all ranks together.
    ///
    /// If RUST_LOG is set, prints lines too, because log lines would break a bar.
    pub(crate) fn new(label: String, steps: usize, ranks: usize, tokens_per_step: usize) -> Self {
        let lines_only = std::env::var_os("RUST_LOG").is_some() || !std::io::stderr().is_terminal();
        let bar = (!lines_only).then(|| bar(&label, steps));
        let (started, seen) = (Instant::now(), Mutex::default());
        Self { label, steps, ranks, tokens_per_step, bar, started, seen }
    }

    /// Sets the number of steps taken before; every rank calls this before its first step.
    pub(crate) fn resume(&self, steps: usize) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        (seen.first, seen.steps) = (steps, steps);
    }

    /// Reports a rank's loss. Every rank reports every step once, and no rank is a step ahead of another.
    pub(crate) fn report(&self, loss: f64) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.add(loss, self.ranks) {
            self.show(*seen);
        }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn show(&self, Seen { first, steps, smooth, .. }: Seen) {
        let tokens = ((steps - first) * self.tokens_per_step) as f64 / self.started.elapsed().as_secs_f64();
        let message = format!("loss {smooth:.3}  {tokens:.0} tokens/s");
        match &self.bar {
            Some(bar) => {
                bar.set_position(steps as u64);
                bar.set_message(message);
            }
            None if is_due(steps, self.steps) => {
                let Self { label, steps: of, .. } = self;
                // A closed stderr must not end the run.
                let _ = writeln!(std::io::stderr(), "{label}  step {steps:>4}/{of}  {message}");
            }
            None => {}
        }
    }
}

/// Returns true if a line is due after `step` of `steps` steps.
fn is_due(step: usize, steps: usize) -> bool {
    step == steps || step.is_multiple_of(steps.div_ceil(LINES))
}

fn bar(label: &str, steps: usize) -> ProgressBar {
    let template = "{prefix}  [{bar:30}] {pos}/{len}  {msg}  {eta} left";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(steps as u64).with_style(style.progress_chars("=> ")).with_prefix(label.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_complete_with_its_last_rank_and_shows_the_mean() {
        let mut seen = Seen::default();
        assert!(!seen.add(2.0, 2) && seen.add(4.0, 2));
        assert_eq!((seen.steps, seen.smooth), (1, 3.0));
        assert!(!seen.add(6.0, 2) && seen.add(6.0, 2));
        assert_eq!((seen.steps, seen.smooth), (2, 4.5));
    }

    #[test]
    fn at_most_ten_lines_and_always_the_last_step() {
        for steps in [1, 3, 10, 11, 99, 100, 440] {
            let due: Vec<usize> = (1..=steps).filter(|&step| is_due(step, steps)).collect();
            assert!((1..=LINES + 1).contains(&due.len()) && due.last() == Some(&steps), "{steps}: {due:?}");
        }
    }

    #[test]
    fn the_bar_has_a_valid_template() {
        assert_eq!(bar("stage 0", 7).length(), Some(7));
        assert!(ProgressStyle::with_template("{prefix}  [{bar:30}] {pos}/{len}  {msg}  {eta} left").is_ok());
    }
}

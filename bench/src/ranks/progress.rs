//! Progress display of a stage: a bar on a terminal, a status line for a launcher that has one, else a line at intervals.

use std::io::{IsTerminal as _, Write as _};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Number of lines per stage without a terminal.
const LINES: usize = 10;

/// Variable of `cargo xtask launch`: if it is `status`, lines that end with a carriage return replace each other on its terminal.
const VARIABLE: &str = "MESHSTEP_PROGRESS";

/// Shortest time between two status lines.
const STATUS_INTERVAL: Duration = Duration::from_millis(100);

/// Characters of the bar of a status line.
const STATUS_WIDTH: usize = 30;

/// Time constant of the smoothed loss in steps.
const MEMORY: f64 = 20.0;

/// Progress of one stage, reported by its ranks.
#[derive(Debug)]
pub(crate) struct Progress {
    label: String,
    steps: usize,
    ranks: usize,
    tokens_per_step: usize,
    display: Display,
    started: Instant,
    seen: Mutex<Seen>,
}

/// Form of the display.
#[derive(Debug)]
enum Display {
    Bar(ProgressBar),
    Status,
    Lines,
    Hidden,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// Steps taken by earlier programs.
    first: usize,
    steps: usize,
    ranks: usize,
    loss_sum: f64,
    smooth: f64,
    /// Time of the last status line.
    shown: Option<Instant>,
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
        let display = match std::env::var_os(VARIABLE) {
            _ if std::env::var_os("RUST_LOG").is_some() => Display::Lines,
            Some(form) if form == "status" => Display::Status,
            _ if std::io::stderr().is_terminal() => Display::Bar(bar(&label, steps)),
            _ => Display::Lines,
        };
        let (started, seen) = (Instant::now(), Mutex::default());
        Self { label, steps, ranks, tokens_per_step, display, started, seen }
    }

    /// Creates a display that shows nothing, for a rank whose progress another one shows.
    pub(crate) fn hidden(steps: usize) -> Self {
        let (started, seen, display) = (Instant::now(), Mutex::default(), Display::Hidden);
        Self { label: String::new(), steps, ranks: 1, tokens_per_step: 0, display, started, seen }
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
            self.show(&mut seen);
        }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        match &self.display {
            Display::Bar(bar) => bar.finish_and_clear(),
            Display::Status => print("\r"),
            Display::Lines | Display::Hidden => {}
        }
    }

    fn show(&self, seen: &mut Seen) {
        let Seen { first, steps, smooth, shown, .. } = *seen;
        let tokens = ((steps - first) * self.tokens_per_step) as f64 / self.started.elapsed().as_secs_f64();
        let message = format!("loss {smooth:.3}  {tokens:.0} tokens/s");
        let Self { label, steps: of, .. } = self;
        match &self.display {
            Display::Bar(bar) => {
                bar.set_position(steps as u64);
                bar.set_message(message);
            }
            Display::Status if shown.is_none_or(|at| at.elapsed() >= STATUS_INTERVAL) => {
                seen.shown = Some(Instant::now());
                print(&format!("{label}  [{}] {steps}/{of}  {message}\r", drawn(steps, *of)));
            }
            Display::Lines if is_due(steps, *of) => {
                print(&format!("{label}  step {steps:>4}/{of}  {message}\n"));
            }
            Display::Status | Display::Lines | Display::Hidden => {}
        }
    }
}

/// Prints to stderr at once. A closed stderr must not end the run.
fn print(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Returns the bar of a status line.
fn drawn(step: usize, steps: usize) -> String {
    let done = (step * STATUS_WIDTH / steps.max(1)).min(STATUS_WIDTH);
    format!("{:<STATUS_WIDTH$}", "=".repeat(done) + ">").chars().take(STATUS_WIDTH).collect()
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
    fn a_status_line_has_a_bar_of_one_width() {
        assert_eq!(drawn(0, 400).trim_end(), ">");
        assert_eq!(drawn(200, 400).trim_end(), "===============>");
        assert_eq!(drawn(400, 400), "=".repeat(STATUS_WIDTH));
        assert!((0..=7).all(|step| drawn(step, 7).len() == STATUS_WIDTH));
    }

    #[test]
    fn the_bar_has_a_valid_template() {
        assert_eq!(bar("stage 0", 7).length(), Some(7));
        assert!(ProgressStyle::with_template("{prefix}  [{bar:30}] {pos}/{len}  {msg}  {eta} left").is_ok());
    }
}

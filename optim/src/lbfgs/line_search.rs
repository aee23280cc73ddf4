//! The strong Wolfe line search: bracket a minimum, then zoom in. Scalars only; what a trial costs is the caller's.
//!
//! Nocedal and Wright, *Numerical Optimization* (2006), algorithms 3.5 and 3.6, with PyTorch's choices of bounds and of what
//! counts as progress.

use super::cubic::{Point, minimum};

/// Sufficient decrease.
const C1: f64 = 1e-4;
/// Curvature.
const C2: f64 = 0.9;
/// A bracket is small once no parameter changes by more than this across it.
const SMALL: f64 = 1e-9;

/// A point that was tried, and whose gradient is kept in a slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Trial {
    pub(super) at: Point,
    pub(super) slot: usize,
}

/// What a search needs to know of the line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    /// Loss and slope where it begins, its gradient in a slot of its own.
    pub(super) start: Trial,
    /// The first step to try.
    pub(super) t: f64,
    /// Trials after the first.
    pub(super) max_trials: u64,
}

/// The best point found.
///
/// `eval(t, slot)` tells loss and slope at `t`, an infinite loss where either is not finite, and leaves the gradient in
/// `slot`; `width` tells the largest magnitude of the direction, asked for after a trial.
pub(super) fn strong_wolfe<S, E>(
    on: &mut S,
    line: Line,
    eval: impl Fn(&mut S, f64, usize) -> Result<Point, E>,
    width: impl Fn(&S) -> f64,
) -> Result<Trial, E> {
    let mut search = Search { on, eval, line, trials: 0 };
    match search.bracket()? {
        Bracket::Done(found) => Ok(found),
        Bracket::Between(ends) if search.trials >= line.max_trials => Ok(ends[low(&ends)]),
        Bracket::Between(ends) => {
            let width = width(search.on);
            search.zoom(ends, width)
        }
    }
}

enum Bracket {
    Done(Trial),
    Between([Trial; 2]),
}

struct Search<'a, S, F> {
    on: &'a mut S,
    eval: F,
    line: Line,
    trials: u64,
}

impl<S, E, F: Fn(&mut S, f64, usize) -> Result<Point, E>> Search<'_, S, F> {
    /// Tries `t`, its gradient in a slot that none of `kept` has.
    fn attempt(&mut self, t: f64, kept: &[Trial]) -> Result<Trial, E> {
        let taken = |slot: usize| slot == self.line.start.slot || kept.iter().any(|k| k.slot == slot);
        let slot = (0..).find(|&slot| !taken(slot)).unwrap_or_default();
        Ok(Trial { at: (self.eval)(self.on, t, slot)?, slot })
    }

    /// Whether `at` is too high for the step it takes.
    fn too_high(&self, at: Point) -> bool {
        let start = self.line.start.at;
        at.f > start.f + C1 * at.t * start.gtd
    }

    fn flat(&self, at: Point) -> bool {
        at.gtd.abs() <= -C2 * self.line.start.at.gtd
    }

    /// Goes on until a minimum lies between two points, or one is good.
    fn bracket(&mut self) -> Result<Bracket, E> {
        let mut before = self.line.start;
        let mut new = self.attempt(self.line.t, &[])?;
        while self.trials < self.line.max_trials {
            if self.too_high(new.at) || self.trials > 1 && new.at.f >= before.at.f {
                return Ok(Bracket::Between([before, new]));
            }
            if self.flat(new.at) {
                return Ok(Bracket::Done(new));
            }
            if new.at.gtd >= 0.0 {
                return Ok(Bracket::Between([before, new]));
            }
            let t = new.at.t;
            let bounds = (t + 0.01 * (t - before.at.t), t * 10.0);
            let t = minimum(before.at, new.at, bounds);
            before = new;
            new = self.attempt(t, &[before])?;
            self.trials += 1;
        }
        Ok(Bracket::Between([self.line.start, new]))
    }

    /// Shrinks the bracket around its lower end.
    fn zoom(&mut self, mut ends: [Trial; 2], width: f64) -> Result<Trial, E> {
        let mut stuck = false;
        let mut lo = low(&ends);
        while self.trials < self.line.max_trials {
            if (ends[1].at.t - ends[0].at.t).abs() * width < SMALL {
                break;
            }
            let t = inside(&ends, &mut stuck);
            let new = self.attempt(t, &ends)?;
            self.trials += 1;
            if self.too_high(new.at) || new.at.f >= ends[lo].at.f {
                ends[1 - lo] = new;
                lo = low(&ends);
                continue;
            }
            let done = self.flat(new.at);
            if !done && new.at.gtd * (ends[1 - lo].at.t - ends[lo].at.t) >= 0.0 {
                ends[1 - lo] = ends[lo];
            }
            ends[lo] = new;
            if done {
                break;
            }
        }
        Ok(ends[lo])
    }
}

/// The next step to try within a bracket: the cubic's minimum, moved off an end that it has come too close to twice.
fn inside(ends: &[Trial; 2], stuck: &mut bool) -> f64 {
    let [a, b] = ends.map(|end| end.at);
    let (least, most) = if a.t <= b.t { (a.t, b.t) } else { (b.t, a.t) };
    let t = minimum(a, b, (least, most));
    let margin = 0.1 * (most - least);
    let close = (most - t).min(t - least) < margin;
    let moved = close && (*stuck || t >= most || t <= least);
    *stuck = close && !moved;
    match moved {
        true if (t - most).abs() < (t - least).abs() => most - margin,
        true => least + margin,
        false => t,
    }
}

/// Which end is lower; the first of equal ones.
fn low(ends: &[Trial; 2]) -> usize {
    usize::from(ends[0].at.f > ends[1].at.f)
}

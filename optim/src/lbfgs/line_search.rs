//! Strong Wolfe line search: bracket a minimum, then zoom in. It sees scalars only; the caller evaluates trials.
//!
//! Nocedal and Wright, *Numerical Optimization* (2006), algorithms 3.5 and 3.6, with PyTorch's choices of bounds and of sufficient
//! progress.

use super::cubic::{Point, minimum};

/// Constant of the sufficient decrease condition.
const C1: f64 = 1e-4;
/// Constant of the curvature condition.
const C2: f64 = 0.9;
/// The search stops once no parameter changes by more than this across the bracket.
const SMALL: f64 = 1e-9;

/// Evaluated point, with its gradient in a slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Trial {
    pub(super) at: Point,
    pub(super) slot: usize,
}

/// Start of a search and its limits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    /// Start of the line: loss and slope, with its gradient in a slot.
    pub(super) start: Trial,
    /// First step to try.
    pub(super) t: f64,
    /// Maximum number of trials after the first.
    pub(super) max_trials: u64,
}

/// Searches along the line and returns the best point found.
///
/// `eval(t, slot)` returns loss and slope at `t`, with an infinite loss if either is not finite, and leaves the gradient in `slot`.
/// `width` returns the largest magnitude of the direction; it is called after a trial.
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
    /// Evaluates `t`, with its gradient in a slot that neither the start nor `kept` uses.
    fn attempt(&mut self, t: f64, kept: &[Trial]) -> Result<Trial, E> {
        let taken = |slot: usize| slot == self.line.start.slot || kept.iter().any(|k| k.slot == slot);
        let slot = (0..).find(|&slot| !taken(slot)).unwrap_or_default();
        Ok(Trial { at: (self.eval)(self.on, t, slot)?, slot })
    }

    /// Returns true if the loss violates the sufficient decrease condition.
    fn too_high(&self, at: Point) -> bool {
        let start = self.line.start.at;
        at.f > start.f + C1 * at.t * start.gtd
    }

    fn flat(&self, at: Point) -> bool {
        at.gtd.abs() <= -C2 * self.line.start.at.gtd
    }

    /// Extends the step until a minimum lies between two points, or a point satisfies both conditions.
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

/// Returns the next step to try within a bracket: the cubic's minimum, or a point 10 % inside if the minimum came close to an end twice
/// in a row or lies at one.
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

/// Returns the index of the lower end, the first one on a tie.
fn low(ends: &[Trial; 2]) -> usize {
    usize::from(ends[0].at.f > ends[1].at.f)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    /// Returns value and slope.
    type Function = fn(f64) -> (f64, f64);

    /// The first two functions are those of Moré and Thuente, *Line search algorithms with guaranteed sufficient decrease* (1994).
    const SLOW: Function = |t| (-t / (t * t + 2.0), (t * t - 2.0) / (t * t + 2.0).powi(2));
    const FIFTH: Function = |t| {
        let u = t + 0.004;
        (u.powi(5) - 2.0 * u.powi(4), 5.0 * u.powi(4) - 8.0 * u.powi(3))
    };
    const TWO_WELLS: Function = |t| {
        let u = t - 3.0;
        (u.powi(4) - 2.0 * u * u + 0.5 * u, 4.0 * u.powi(3) - 4.0 * u + 0.5)
    };
    const WAVES: Function = |t| (libm::cos(t) + 0.05 * t * t - 0.8 * t, -libm::sin(t) + 0.1 * t - 0.8);

    const SINE: Function = |t| (-libm::sin(t), -libm::cos(t));

    /// Returns every step tried, and the best point.
    fn search(function: Function, t: f64, max_trials: u64) -> (Vec<f64>, f64) {
        let point = |t: f64| Point { t, f: function(t).0, gtd: function(t).1 };
        let line = Line { start: Trial { at: point(0.0), slot: 1 }, t, max_trials };
        let mut tried = Vec::new();
        let mut held = [f64::NAN; 4];
        let eval = |on: &mut (&mut Vec<f64>, &mut [f64; 4]), t: f64, slot: usize| {
            assert!(slot != 1, "the start's gradient is kept");
            on.0.push(t);
            on.1[slot] = t;
            Ok::<_, Infallible>(point(t))
        };
        let mut on = (&mut tried, &mut held);
        let found = match strong_wolfe(&mut on, line, eval, |_| 1.0) {
            Ok(found) => found,
            Err(never) => match never {},
        };
        assert!(found.slot == 1 || held[found.slot] == found.at.t, "the best point's gradient is kept");
        (tried, found.at.t)
    }

    /// Steps that `_strong_wolfe` of PyTorch 2.11 tries on the same functions.
    #[test]
    fn trials_are_pytorchs() {
        #[rustfmt::skip]
        let table: [(Function, u64, f64, &[f64]); 13] = [
            (SLOW, 25, 0.823049306085, &[0.001, 0.01, 0.1, 0.823049306085]),
            (SLOW, 25, 1.0, &[1.0]),
            (SLOW, 8, 333.335000003, &[1000.0, 333.335000003, 666.667500001, 500.001250002, 416.668125002, 375.001562503, 354.168281253, 343.751640628, 338.543320315]),
            (FIFTH, 25, 1.596, &[0.001, 0.005505, 0.030300025, 0.166774112625, 0.917939989876, 0.925451648648, 2.69935902412, 1.70904086635, 1.57413724501, 1.59613658992, 1.59599996225, 1.59601362502, 1.596]),
            (FIFTH, 25, 1.596, &[0.1, 0.101, 0.555505, 3.057550025, 1.75973770835, 1.52004698303, 1.59665839295, 1.59599784242, 1.59606389747, 1.596]),
            (FIFTH, 3, 0.0, &[0.1, 0.101, 0.555505, 3.057550025]),
            (FIFTH, 25, 1.596, &[1000.0, 444.591309692, 197.74325171, 88.0335659983, 39.2749832478, 17.607440946, 7.98437807408, 3.72507291097, 1.88498894269, 1.34049994615, 1.59758908047, 1.59594275792, 1.59610739017, 1.596]),
            (TWO_WELLS, 25, 3.38337363852, &[1000.0, 335.328015559, 113.76023544, 39.8742901413, 15.16496938, 6.73107398188, 3.38337363852]),
            (WAVES, 25, 4.59953395056, &[0.1, 1.0, 4.59953395056]),
            (WAVES, 25, 9.33194173608, &[10.0, 8.00773069177, 9.33194173608]),
            (WAVES, 25, 9.45690335195, &[1000.0, 7.8715653735, 107.084408836, 14.9274294042, 9.45690335195]),
            (SINE, 25, 610.886248609, &[603.5, 609.535, 609.59535, 610.886248609]),
            (WAVES, 3, 7.8715653735, &[1000.0, 7.8715653735, 107.084408836, 14.9274294042]),
        ];
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs();
        for (function, max_trials, best, expected) in table {
            let (tried, found) = search(function, expected[0], max_trials);
            let same =
                tried.len() == expected.len() && tried.iter().zip(expected).all(|(a, b)| close(*a, *b));
            assert!(same && close(found, best), "{tried:?}, best {found}; expected {expected:?}, {best}");
        }
    }
}

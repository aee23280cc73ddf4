//! Rate of the links at which two methods take the same time. Arithmetic only.

use super::measured::Rate;

/// Result of a comparison over all rates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Crossover {
    /// The first method is faster below this rate in bits per second, and slower above.
    At(f64),
    /// The first method is faster at all rates.
    Faster,
    /// The first method is slower at all rates.
    Slower,
}

/// Seconds at a rate.
pub(super) type Times = [(Rate, f64)];

/// Compares measured times; between two rates the logarithm of the ratio is interpolated over that of the rate.
pub(super) fn between_measured(first: &Times, second: &Times) -> Option<Crossover> {
    let mut ratios: Vec<(f64, f64)> = Vec::new();
    for ((rate, first), (_, second)) in first.iter().zip(second) {
        ratios.push((libm::log(rate.bits() as f64), libm::log(first / second)));
    }
    ratios.sort_by(|a, b| a.0.total_cmp(&b.0));
    let rises = ratios.windows(2).find(|pair| pair[0].1 < 0.0 && pair[1].1 >= 0.0);
    if let Some(&[(below, gain), (above, loss)]) = rises {
        return Some(Crossover::At(libm::exp(below + (above - below) * gain / (gain - loss))));
    }
    let last = ratios.last()?.1;
    last.is_finite().then_some(if last < 0.0 { Crossover::Faster } else { Crossover::Slower })
}

/// Time model of a training: seconds that do not depend on the rate, and bytes that are waited for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Line {
    pub(super) seconds: f64,
    pub(super) bytes: f64,
    /// Largest relative error at a measured rate.
    pub(super) off: f64,
}

impl Line {
    /// Fits `seconds + bytes / rate` by least squares of the relative errors.
    pub(super) fn fit(times: &Times) -> Self {
        let points: Vec<(f64, f64)> = times.iter().map(|(rate, time)| (1.0 / rate.bytes(), *time)).collect();
        let sum = |of: &dyn Fn(f64, f64) -> f64| points.iter().map(|&(x, y)| of(x, y) / (y * y)).sum::<f64>();
        let (w, x, xx) = (sum(&|_, _| 1.0), sum(&|x, _| x), sum(&|x, _| x * x));
        let (y, xy) = (sum(&|_, y| y), sum(&|x, y| x * y));
        let determinant = w * xx - x * x;
        let (seconds, bytes) = ((y * xx - x * xy) / determinant, (w * xy - x * y) / determinant);
        let off = points.iter().map(|&(x, y)| ((seconds + bytes * x) / y - 1.0).abs()).fold(0.0, f64::max);
        Line { seconds, bytes, off }
    }

    /// Compares two models; the first one has fewer bytes, and more seconds if there is a crossover.
    pub(super) fn against(self, other: Line) -> Crossover {
        let (bytes, seconds) = (other.bytes - self.bytes, self.seconds - other.seconds);
        match (bytes > 0.0, seconds > 0.0) {
            (true, true) => Crossover::At(8.0 * bytes / seconds),
            (true, false) => Crossover::Faster,
            _ => Crossover::Slower,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(of: impl Fn(f64) -> f64) -> Vec<(Rate, f64)> {
        [1000, 100, 10].map(|rate| (Rate(rate), of(Rate(rate).bytes()))).into()
    }

    #[test]
    fn a_model_and_its_crossover_are_found_again() {
        let rare = Line::fit(&times(|rate| 10.0 + 1e7 / rate));
        let often = Line::fit(&times(|rate| 5.0 + 1e8 / rate));
        assert!((rare.seconds - 10.0).abs() < 1e-6 && (often.bytes / 1e8 - 1.0).abs() < 1e-6);
        assert!(rare.off < 1e-9);
        // 10 + 8e7 / r = 5 + 8e8 / r
        let Crossover::At(bits) = rare.against(often) else { panic!("{:?}", rare.against(often)) };
        assert!((bits / 144e6 - 1.0).abs() < 1e-6, "{bits}");
        let faster = Line { seconds: 4.0, ..rare };
        assert_eq!((faster.against(often), often.against(faster)), (Crossover::Faster, Crossover::Slower));
    }

    #[test]
    fn measured_times_cross_between_the_rates_where_the_winner_changes() {
        let (rare, often) = (times(|rate| 10.0 + 1e7 / rate), times(|rate| 5.0 + 1e8 / rate));
        let Some(Crossover::At(bits)) = between_measured(&rare, &often) else { panic!("no crossover") };
        assert!((100e6..200e6).contains(&bits), "{bits}");
        assert_eq!(between_measured(&rare, &times(|_| 100.0)), Some(Crossover::Faster));
        assert_eq!(between_measured(&times(|_| 1000.0), &often), Some(Crossover::Slower));
        assert_eq!(between_measured(&times(|_| f64::NAN), &often), None);
        assert_eq!(between_measured(&[], &[]), None);
    }
}

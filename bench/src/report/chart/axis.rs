//! Linear axes: their range, and ticks at round numbers. Arithmetic only.

use super::Scale;

/// An axis from its first tick to its last, or half a position beyond named ones.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LinearAxis {
    pub(super) low: f64,
    pub(super) high: f64,
    /// Values with their texts, in rising order.
    pub(super) ticks: Vec<(f64, String)>,
}

impl LinearAxis {
    /// Returns the axis of these values with about `ticks` ticks; `None` if no value is finite.
    pub(super) fn of(scale: &Scale, values: impl Iterator<Item = f64>, ticks: usize) -> Option<Self> {
        let wider = |range: Option<(f64, f64)>, value: f64| {
            let (low, high) = range.unwrap_or((value, value));
            Some((low.min(value), high.max(value)))
        };
        let (low, high) = values.filter(|value| value.is_finite()).fold(None, wider)?;
        if !scale.names.is_empty() {
            let ticks = scale.names.iter().enumerate().map(|(i, name)| (i as f64, name.clone())).collect();
            return Some(LinearAxis { low: -0.5, high: scale.names.len() as f64 - 0.5, ticks });
        }
        let (low, high) = if scale.from_zero { (low.min(0.0), high.max(0.0)) } else { (low, high) };
        Some(Self::round(low, high, ticks))
    }

    fn round(low: f64, high: f64, ticks: usize) -> Self {
        // A single value gets room on both sides, and 0 alone reaches up to 1.
        let high = if high > low { high } else { low + if low == 0.0 { 1.0 } else { 0.1 * low.abs() } };
        let step = step((high - low) / ticks.max(1) as f64);
        let (first, last) = ((low / step + 1e-9).floor(), (high / step - 1e-9).ceil());
        let count = (last - first) as usize;
        let tick = |i: usize| {
            let value = (first + i as f64) * step;
            (value, with_decimals(value, decimals(step)))
        };
        let ticks: Vec<(f64, String)> = (0..=count).map(tick).collect();
        LinearAxis { low: first * step, high: last * step, ticks }
    }

    /// Returns the share of the axis below `value`.
    pub(super) fn share(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }
}

/// Returns the smallest of 1, 2 and 5 times a power of ten that is at least `least`.
fn step(least: f64) -> f64 {
    let decade = libm::pow(10.0, libm::log10(least).floor());
    let larger =
        [1.0, 2.0, 5.0].into_iter().map(|factor| factor * decade).find(|step| *step >= 0.999 * least);
    larger.unwrap_or(10.0 * decade)
}

/// Returns the number of decimals in which multiples of `step` differ.
fn decimals(step: f64) -> usize {
    (-libm::log10(step * 1.001).floor()).max(0.0) as usize
}

/// Formats a number with commas before every third digit of its whole part.
fn with_decimals(value: f64, decimals: usize) -> String {
    let text = format!("{:.decimals$}", value.abs());
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let grouped = whole.parse::<u128>().map_or_else(|_| whole.to_owned(), crate::report::bytes);
    let is_zero = text.chars().all(|c| "0.".contains(c));
    format!("{}{grouped}{rest}", if value < 0.0 && !is_zero { "-" } else { "" })
}

/// Formats a number with three digits or more.
pub(super) fn number(value: f64) -> String {
    let whole = if value == 0.0 { 0.0 } else { libm::log10(value.abs()).floor() };
    with_decimals(value, (2.0 - whole).clamp(0.0, 9.0) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(scale: &Scale, values: &[f64]) -> Vec<String> {
        let axis = LinearAxis::of(scale, values.iter().copied(), 5).unwrap();
        let all = values.iter().filter(|value| value.is_finite());
        assert!(all.map(|value| axis.share(*value)).all(|share| (0.0..=1.0).contains(&share)), "{axis:?}");
        axis.ticks.into_iter().map(|(_, text)| text).collect()
    }

    #[test]
    fn amounts_begin_at_zero_and_ticks_are_round() {
        let amount = Scale::amount("");
        for (values, expected) in [
            (&[3.0, 9.7][..], &["0", "2", "4", "6", "8", "10"][..]),
            (&[0.11], &["0.00", "0.05", "0.10", "0.15"]),
            (&[0.0], &["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
            (&[23_000.0, f64::NAN], &["0", "5,000", "10,000", "15,000", "20,000", "25,000"]),
            (&[-3.0, 4.0], &["-4", "-2", "0", "2", "4"]),
        ] {
            assert_eq!(texts(&amount, values), expected);
        }
    }

    #[test]
    fn a_range_away_from_zero_has_ticks_of_its_own() {
        assert_eq!(texts(&Scale::near(""), &[2.41, 2.98]), ["2.4", "2.6", "2.8", "3.0"]);
        assert!(texts(&Scale::near(""), &[7.0]).len() > 2);
        assert_eq!(texts(&Scale::named("", ["a".into(), "b".into()]), &[0.0, 1.0]), ["a", "b"]);
        assert_eq!(LinearAxis::of(&Scale::amount(""), [f64::NAN].into_iter(), 5), None);
    }

    #[test]
    fn numbers_have_three_digits() {
        let shown = [0.0, 0.012_345, 1.0, 12.345, 1234.5].map(number);
        assert_eq!(shown, ["0.00", "0.0123", "1.00", "12.3", "1,234"]);
    }
}

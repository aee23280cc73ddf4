//! Formats of the report: on a terminal, in Markdown, and as an HTML page with charts.

pub(crate) mod html;
pub(crate) mod markdown;
pub(crate) mod terminal;

use crate::measure::record::{Bar, Cell, Wanted};
use meshstep_bench_cases::samples::Median;

/// Formats a figure.
pub(crate) fn cell(cell: &Cell) -> String {
    match cell {
        Cell::None => String::new(),
        Cell::Text(text) => text.clone(),
        Cell::Count(count) => crate::report::bytes(*count),
        Cell::Bytes(bytes) => size(*bytes as f64),
        Cell::Time(time) => format!("{} {}", seconds(time.median), spread(time)),
        Cell::Seconds(time) => seconds(*time),
        Cell::Speed(speed) => format!("{:.1} GB/s", speed / 1e9),
        Cell::Ratio(Median { median, low, high, .. }) => format!("{median:.2}x [{low:.2}, {high:.2}]"),
        Cell::Overhead(Median { median, low, high, .. }) => {
            let [median, low, high] = [median, low, high].map(|part| part * 100.0);
            format!("{median:+.1}% [{low:+.1}, {high:+.1}]")
        }
        Cell::Share(share) => format!("{:.1}%", share * 100.0),
        Cell::Number(number) => short(*number),
    }
}

/// Formats a bar: the figure and its limit.
pub(crate) fn bar(bar: &Bar) -> String {
    format!("{}, {}", found(bar), limit(bar))
}

/// Formats the figure of a bar.
fn found(bar: &Bar) -> String {
    short(bar.found)
}

/// Formats the limit of a bar.
fn limit(bar: &Bar) -> String {
    match bar.wanted {
        Wanted::AtLeast(least) => format!("at least {}", short(least)),
        Wanted::AtMost(most) => format!("at most {}", short(most)),
    }
}

/// Describes a measured ratio of times: less or more time, with the interval, or no difference if the interval contains 1.
pub(crate) fn time_compared(ratio: &Median) -> String {
    let percent = |ratio: f64| format!("{:+.0}%", 100.0 * (ratio - 1.0));
    let (low, high) = (percent(ratio.low), percent(ratio.high));
    let interval = match ratio.rounds {
        rounds if rounds < 6 => format!("{low} to {high} in {rounds} rounds"),
        rounds => format!("95% interval {low} to {high}, {rounds} rounds"),
    };
    let off = 100.0 * (ratio.median - 1.0).abs();
    if ratio.low <= 1.0 && ratio.high >= 1.0 {
        format!("the same time within the noise ({interval})")
    } else if ratio.median < 1.0 {
        format!("{off:.0}% less time ({interval})")
    } else {
        format!("{off:.0}% more time ({interval})")
    }
}

/// Formats the relative half-width of a time's interval.
fn spread(time: &Median) -> String {
    let off = (time.high - time.median).max(time.median - time.low) / time.median;
    format!("±{:.0}%", 100.0 * off)
}

fn seconds(time: f64) -> String {
    match time {
        t if t.is_nan() => "n/a".to_owned(),
        t if t >= 1.0 => format!("{t:.2} s"),
        t if t >= 1e-3 => format!("{:.2} ms", t * 1e3),
        t => format!("{:.2} µs", t * 1e6),
    }
}

/// Formats bytes in powers of 1000.
pub(crate) fn size(bytes: f64) -> String {
    match bytes {
        b if b >= 1e9 => format!("{:.2} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.2} MB", b / 1e6),
        b if b >= 1e3 => format!("{:.2} kB", b / 1e3),
        b => format!("{b:.0} B"),
    }
}

/// Formats a number with four digits.
fn short(number: f64) -> String {
    match number.abs() {
        n if n >= 1000.0 || n == n.trunc() => format!("{number:.0}"),
        n if n >= 10.0 => format!("{number:.1}"),
        n if n >= 0.01 => format!("{number:.3}"),
        _ => format!("{number:.2e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_units_and_few_digits() {
        let median = Median { median: 0.0123, low: 0.0120, high: 0.0130, rounds: 9 };
        for (shown, expected) in [
            (cell(&Cell::Time(median)), "12.30 ms ±6%"),
            (cell(&Cell::Bytes(27_200_000_000)), "27.20 GB"),
            (cell(&Cell::Bytes(999)), "999 B"),
            (cell(&Cell::Count(1_234_567)), "1,234,567"),
            (cell(&Cell::Share(0.9512)), "95.1%"),
            (cell(&Cell::Overhead(median)), "+1.2% [+1.2, +1.3]"),
            (
                cell(&Cell::Ratio(Median { median: 8.0, low: 7.5, high: 8.25, rounds: 3 })),
                "8.00x [7.50, 8.25]",
            ),
            (cell(&Cell::Seconds(2.5e-7)), "0.25 µs"),
            (cell(&Cell::Speed(1.25e10)), "12.5 GB/s"),
            (cell(&Cell::None), ""),
            (short(1.15), "1.150"),
            (short(20.0), "20"),
        ] {
            assert_eq!(shown, expected);
        }
    }

    #[test]
    fn a_difference_of_times_is_said_only_where_the_interval_shows_one() {
        let said = |median, low, high, rounds| time_compared(&Median { median, low, high, rounds });
        assert_eq!(said(0.9, 0.85, 0.95, 9), "10% less time (95% interval -15% to -5%, 9 rounds)");
        assert_eq!(said(1.2, 1.1, 1.3, 3), "20% more time (+10% to +30% in 3 rounds)");
        assert!(
            said(1.01, 0.97, 1.05, 21).starts_with("the same time within the noise (95% interval -3% to +5%")
        );
        assert!(said(f64::NAN, f64::NAN, f64::NAN, 0).contains("NaN"));
    }

    #[test]
    fn bars_say_what_was_wanted() {
        let bar_of = |found, wanted| Bar { what: String::new(), found, wanted };
        assert_eq!(bar(&bar_of(1.36, Wanted::AtLeast(1.15))), "1.360, at least 1.150");
        assert!(bar_of(1.15, Wanted::AtLeast(1.15)).holds() && !bar_of(1.16, Wanted::AtMost(1.15)).holds());
        assert!(
            !bar_of(f64::NAN, Wanted::AtLeast(0.0)).holds() && !bar_of(f64::NAN, Wanted::AtMost(9.0)).holds()
        );
    }
}

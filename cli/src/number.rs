//! Numbers of the command line: their parsers, and bytes as people read them.

/// Parses a finite number of at least 0.
pub(crate) fn at_least_zero(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if (0.0..f64::INFINITY).contains(&number) => Ok(number),
        _ => Err("give a number of at least 0".to_owned()),
    }
}

/// Parses a whole number from `MIN` to `MAX`.
pub(crate) fn within<const MIN: usize, const MAX: usize>(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if (MIN..=MAX).contains(&number) => Ok(number),
        _ => Err(format!("give a whole number from {MIN} to {MAX}")),
    }
}

/// Formats a number with a comma before every third digit from the right.
pub(crate) fn grouped(value: impl Into<u128>) -> String {
    let digits = value.into().to_string();
    let comma = |(i, digit): (usize, char)| {
        let before = i > 0 && (digits.len() - i).is_multiple_of(3);
        before.then_some(',').into_iter().chain([digit])
    };
    digits.chars().enumerate().flat_map(comma).collect()
}

/// Formats bytes in the largest decimal unit that leaves a whole digit: `1.60 GB`.
pub(crate) fn rough_bytes(bytes: u64) -> String {
    let units = [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
    match units.into_iter().find(|(_, unit)| bytes as f64 >= *unit) {
        Some((name, unit)) => format!("{:.2} {name}", bytes as f64 / unit),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_commas_and_bytes_have_units() {
        assert_eq!([0u64, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0, 999, 1000, 16_000_000_000].map(rough_bytes), ["0 B", "999 B", "1.00 kB", "16.00 GB"]);
    }
}

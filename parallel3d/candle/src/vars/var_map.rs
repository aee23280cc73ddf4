//! Variables of a `VarMap` in natural order, because the map has none.

use super::NamedVars;
use candle_core::Var;
use candle_nn::VarMap;
use std::cmp::Ordering;
use std::sync::PoisonError;

/// Sorted by name, with numbers by their value.
impl NamedVars for &VarMap {
    fn named_vars(self) -> Vec<(String, Var)> {
        let map = self.data().lock().unwrap_or_else(PoisonError::into_inner);
        let mut vars: Vec<(String, Var)> =
            map.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
        vars.sort_by(|(a, _), (b, _)| natural(a, b));
        vars
    }
}

/// Compares names; runs of digits compare by value, and equal values by their text.
fn natural(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a, b);
    while !left.is_empty() && !right.is_empty() {
        let (first, second) = (run(&mut left), run(&mut right));
        let order = match (number(first), number(second)) {
            (Some(m), Some(n)) => m.len().cmp(&n.len()).then(m.cmp(n)),
            _ => first.cmp(second),
        };
        if order.is_ne() {
            return order;
        }
    }
    left.len().cmp(&right.len()).then(a.cmp(b))
}

/// Splits off the first run of digits, or of other characters.
fn run<'a>(rest: &mut &'a str) -> &'a str {
    let digits = rest.starts_with(|c: char| c.is_ascii_digit());
    let len = rest.find(|c: char| c.is_ascii_digit() != digits).unwrap_or(rest.len());
    let (run, after) = rest.split_at(len);
    *rest = after;
    run
}

/// Returns the digits of a number without leading zeros.
fn number(run: &str) -> Option<&str> {
    run.starts_with(|c: char| c.is_ascii_digit()).then(|| run.trim_start_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_sort_by_value() {
        let sorted = ["", "a", "a.b", "h.1.w", "h.02", "h.2", "h.2.b", "h.10", "h.10.b", "ha", "wte"];
        for (i, a) in sorted.iter().enumerate() {
            for (j, b) in sorted.iter().enumerate() {
                assert_eq!(natural(a, b), i.cmp(&j), "{a} and {b}");
            }
        }
    }
}

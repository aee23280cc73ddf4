//! Figures of a measured case in the benchmark's file.

use super::race::{Measured, median};
use super::rows::Row;
use serde_json::{Value, json};

/// Returns the figures of a case. If the host waited more often than the case needs, the figures contain an error.
pub fn figures(row: &Row, Measured { compared, first_step, waits, times, issue }: &Measured) -> Value {
    let (took, copy) = (median(&times.case), median(&times.copy));
    let bytes = row.bytes_each() as f64 * row.params as f64;
    let reference = copy * bytes / times.copied as f64;
    let mut figures = json!({
        "bytes_per_element": row.bytes_each(),
        "bytes": bytes,
        "ms": took * 1e3,
        "reference_ms": reference * 1e3,
        "share_of_reference": reference / took,
        "gb_per_s": bytes / took / 1e9,
        "issue_slots_percent": issue.map(|seconds| 100.0 * seconds / took),
        "copy_gb_per_s": times.copied as f64 / copy / 1e9,
        "first_step_ms": first_step.map(|seconds| seconds * 1e3),
        "rounds": times.case.len(),
        "compared_with_cpu": compared,
        "host_waits_per_step": waits.per_step,
        "host_was_ahead": waits.ahead,
    });
    if waits.per_step > row.waits() {
        let error = format!("the host waited {} times per step instead of {}", waits.per_step, row.waits());
        figures["error"] = error.into();
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::super::rows::rows;
    use super::super::{Times, Waits};
    use super::*;

    fn measured(per_step: f64) -> Measured {
        let [copy, case] = [[2e-3, 1e-3, 3e-3], [8e-3, 7e-3, 9e-3]].map(|times| times.to_vec());
        let times = Times { copy, case, copied: 8 << 20 };
        let waits = Waits { per_step, ahead: true };
        Measured { compared: 7, first_step: Some(0.5), waits, times, issue: Some(2e-3) }
    }

    #[test]
    fn figures_are_medians_beside_the_reference() {
        let row = figures(&rows(1 << 20, 3)[0], &measured(0.0));
        // 28 bytes of 2^20 parameters in 8 ms; a copy moves 8 of them in 2 ms.
        assert_eq!(
            (&row["bytes"], &row["ms"], &row["reference_ms"]),
            (&29360128.0.into(), &8.0.into(), &7.0.into())
        );
        assert_eq!((&row["share_of_reference"], &row["first_step_ms"]), (&0.875.into(), &500.0.into()));
        assert_eq!(row["issue_slots_percent"], 25.0);
    }

    #[test]
    fn a_wait_that_is_not_needed_is_an_error_with_figures() {
        let all = rows(1 << 20, 3);
        let direction = all.iter().position(|row| row.waits() > 0.0).unwrap();
        assert_eq!(figures(&all[direction], &measured(1.0)).get("error"), None);
        let row = figures(&all[0], &measured(1.0));
        assert_eq!(row["error"], "the host waited 1 times per step instead of 0");
        assert_eq!(row["ms"], 8.0);
    }

    #[test]
    fn medians() {
        assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0, 2.0, 3.0])), (2.0, 2.5));
        assert!(median(&[]).is_nan());
    }
}

//! Table at the end of a run: a row per quantity, a column per stage, and a reference value.

use super::{Report, StageReport};

/// Width of a stage's column.
const COLUMN: usize = 13;
/// Width of the first column.
const NAME: usize = 26;

/// Name of a quantity, its value for a stage, and its reference.
struct Row<'a> {
    name: &'a str,
    value: &'a dyn Fn(&StageReport) -> String,
    note: String,
}

/// Formats a report as a table.
pub(super) fn table(report: &Report) -> String {
    let params = bytes((report.params * size_of::<f32>()) as u64);
    let (ranks, entropy, uniform) = (report.asked.ranks(), report.byte_entropy, report.uniform);
    let row = |name, value, note: &str| Row { name, value, note: note.to_owned() };
    let rows = [
        row("train loss, nats/byte", &|s| loss(s.train_loss()), "mean of the last twentieth of the steps"),
        row(
            "held-out loss",
            &|s| loss(s.held_out),
            &format!("byte entropy {entropy:.3}, ln 256 {uniform:.3}"),
        ),
        row("steps skipped", &|s| s.skipped.to_string(), "gradients were not finite"),
        row("ms per step", &|s| format!("{:.1}", s.ms_per_step), "all ranks on this machine"),
        row("peak bytes per rank", &|_| String::new(), ""),
        row("  params", &|s| bytes(s.peak.params), &format!("{params} without padding")),
        row("  grads", &|s| bytes(s.peak.grads), &format!("stage 2 keeps 1/{ranks}")),
        row("  grads in buckets", &|s| bytes(s.peak.buckets), "being reduced"),
        row("  state", &|s| bytes(s.peak.state), &format!("stages 1 and 2 keep 1/{ranks}")),
        row("  candle's params", &|s| bytes(s.peak.framework), "the framework's own copy"),
        row(
            "process before",
            &|s| optional_bytes(s.process.before),
            "the text, and memory that earlier stages freed",
        ),
        row("process peak", &|s| optional_bytes(s.process.peak), "all ranks, with activations"),
        row(
            "wire bytes per step, rank",
            &|s| bytes(s.wire_bytes.round() as u64),
            &format!("2(n-1)/n x params = {}, and the exchange", bytes(report.ring_bytes().round() as u64)),
        ),
    ];
    let lines = rows.iter().map(|row| line(row.name, report.stages.iter().map(row.value), &row.note));
    let heads = report.stages.iter().map(|stage| format!("stage {}", stage.stage));
    std::iter::once(line("", heads, "")).chain(lines).collect()
}

fn line(name: &str, values: impl Iterator<Item = String>, note: &str) -> String {
    let values: String = values.map(|value| format!("{value:>COLUMN$}")).collect();
    format!("{}\n", format!("{name:<NAME$}{values}  {note}").trim_end())
}

fn loss(nats: f64) -> String {
    format!("{nats:.4}")
}

fn optional_bytes(value: Option<u64>) -> String {
    value.map_or_else(|| "n/a".to_owned(), bytes)
}

/// Formats a number with a comma before every third digit from the right.
pub(crate) fn bytes(value: impl Into<u128>) -> String {
    let digits = value.into().to_string();
    let comma = |(i, digit): (usize, char)| {
        let before = i > 0 && (digits.len() - i).is_multiple_of(3);
        before.then_some(',').into_iter().chain([digit])
    };
    digits.chars().enumerate().flat_map(comma).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::report;
    use super::*;

    #[test]
    fn numbers_have_commas_where_people_look_for_them() {
        let shown = [0u64, 999, 1000, 12_345, 123_456, 1_234_567].map(bytes);
        assert_eq!(shown, ["0", "999", "1,000", "12,345", "123,456", "1,234,567"]);
    }

    #[test]
    fn every_stage_has_a_column_and_every_quantity_a_row() {
        let text = table(&report());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0].split_whitespace().collect::<Vec<_>>(),
            ["stage", "0", "stage", "1", "stage", "2"]
        );
        assert!(lines[2].starts_with("held-out loss") && lines[2].ends_with("ln 256 5.545"), "{}", lines[2]);
        assert!(lines[12].contains("n/a"), "{}", lines[12]);
        let wire = "x params = 6,000,000, and the exchange";
        assert!(lines[13].contains("6,000,000") && lines[13].ends_with(wire), "{}", lines[13]);
        assert_eq!(lines.len(), 14);
    }
}

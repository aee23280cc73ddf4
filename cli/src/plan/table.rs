//! Output of a plan of all stages: a table for people, and JSON.

use anyhow::Result;
use meshstep_parallel3d::{Plan as MeshPlan, Totals};
use meshstep_shard::Memory;
use serde_json::{Value, json};

use super::Kept;
use crate::number::{grouped, rough_bytes};

const HEAD: [&str; 8] =
    ["stage", "parameters", "gradients", "state", "masters", "in flight", "a rank holds", "a rank sends"];

/// Returns the table: one line for each stage, of the rank that holds most and of the one that sends most.
pub(super) fn text(plans: &[MeshPlan], kept: Kept) -> String {
    let Some(first) = plans.first() else { return String::new() };
    let model = first.model();
    let dtype = model.parameters().first().map(|param| param.dtype);
    let kept = match kept {
        Kept::None => "",
        Kept::F32 => " with f32 masters",
        Kept::Remainder => " with 16-bit remainders",
    };
    let mut text = format!(
        "{} parameters in {} tensors, {}{kept}; {} on {}, {} ranks\n\n",
        grouped(model.len()),
        grouped(model.parameters().len() as u64),
        dtype.map_or_else(|| "no type".to_owned(), |dtype| format!("{dtype:?}")).to_lowercase(),
        first.rules().rule().name(),
        first.mesh(),
        grouped(first.mesh().world_size() as u64),
    );
    let rows = plans.iter().enumerate().map(|(stage, plan)| row(stage, &plan.totals()));
    let rows: Vec<[String; 8]> = std::iter::once(HEAD.map(str::to_owned)).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    for row in &rows {
        let cells = row.iter().enumerate().map(|(column, cell)| format!("{cell:>0$}", width(column)));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text += "\n";
    }
    text += "\nThe model's activations and the framework's own memory come on top. A rank sends these bytes in a step of one\n\
             micro-batch. In flight: buckets, gathered units and the step's exchange.\n";
    text
}

fn row(stage: usize, totals: &Totals) -> [String; 8] {
    let (memory, wire) = (totals.most_held.1, totals.most_sent.1);
    let bytes =
        [memory.params, memory.grads, memory.state, memory.master, in_flight(&memory), memory.total()];
    let [params, grads, state, master, flight, all] = bytes.map(rough_bytes);
    [stage.to_string(), params, grads, state, master, flight, all, rough_bytes(wire.total())]
}

fn in_flight(memory: &Memory) -> u64 {
    memory.buckets + memory.gathered + memory.staging
}

/// Returns the same with exact bytes.
pub(super) fn json(plans: &[MeshPlan]) -> Result<String> {
    let stage = |(stage, plan): (usize, &MeshPlan)| {
        let totals = plan.totals();
        let ((held_by, memory), (sent_by, wire)) = (totals.most_held, totals.most_sent);
        let held: serde_json::Map<String, Value> = memory
            .by_category()
            .into_iter()
            .map(|(category, bytes)| (format!("{category:?}").to_lowercase(), json!(bytes)))
            .collect();
        json!({
            "stage": stage,
            "held": { "rank": held_by, "total": memory.total(), "by_category": held },
            "sent": {
                "rank": sent_by, "total": wire.total(), "reduce": wire.reduce,
                "extra_reductions": wire.extra_reductions, "gather": wire.gather, "exchange": wire.exchange,
            },
        })
    };
    let first = plans.first();
    let report = json!({
        "parameters": first.map(|plan| plan.model().len()),
        "tensors": first.map(|plan| plan.model().parameters().len()),
        "mesh": first.map(|plan| plan.mesh().to_string()),
        "rule": first.map(|plan| plan.rules().rule().name()),
        "stages": plans.iter().enumerate().map(stage).collect::<Vec<_>>(),
    });
    Ok(serde_json::to_string_pretty(&report)? + "\n")
}

//! Output of a plan of all stages: a table for people, and JSON.

use anyhow::Result;
use meshstep_parallel3d::{Model, Plan as MeshPlan, Totals};
use meshstep_shard::Memory;
use meshstep_tensor::DType;
use serde_json::{Value, json};

use super::{Kept, Stages};
use crate::number::{grouped, rough_bytes};

const HEAD: [&str; 8] =
    ["stage", "parameters", "gradients", "state", "masters", "in flight", "a rank holds", "a rank sends"];

/// Types of a plan besides those of the parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Types {
    pub(super) kept: Kept,
    /// Type of the gradients, if not the parameters'.
    pub(super) grads: Option<DType>,
    /// True if neither an option nor a file gave the parameters' type.
    pub(super) assumed: bool,
}

impl Types {
    /// Returns the types in words: `bf16 with f32 masters, bf16 gradients`.
    pub(super) fn of(self, model: &Model) -> String {
        let params = dtypes(model).join(" and ");
        let grads = self.grads.map_or_else(|| params.clone(), name);
        let kept = match self.kept {
            Kept::None => "",
            Kept::F32 => " with f32 masters",
            Kept::Remainder => " with 16-bit remainders",
        };
        let assumed = if self.assumed { " (assumed; see --dtype)" } else { "" };
        format!("{params}{kept}, {grads} gradients{assumed}")
    }
}

/// Returns the names of the parameters' types.
fn dtypes(model: &Model) -> Vec<String> {
    let mut names = Vec::new();
    for name in model.parameters().iter().map(|param| name(param.dtype)) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

fn name(dtype: DType) -> String {
    format!("{dtype:?}").to_lowercase()
}

/// Returns the table: one line for each stage, of the rank that holds most and of the one that sends most.
pub(super) fn text(stages: &Stages, types: Types) -> String {
    let Some((_, first)) = stages.plans.first() else { return String::new() };
    let model = first.model();
    let mut text = format!(
        "{} parameters in {} tensors, {}; {} on {}, {} ranks\n\n",
        grouped(model.len()),
        grouped(model.parameters().len() as u64),
        types.of(model),
        first.rules().rule_names().join(" + "),
        first.mesh(),
        grouped(first.mesh().world_size() as u64),
    );
    let rows = stages.plans.iter().map(|(stage, plan)| row(*stage, &plan.totals()));
    let rows: Vec<[String; 8]> = std::iter::once(HEAD.map(str::to_owned)).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    for row in &rows {
        let cells = row.iter().enumerate().map(|(column, cell)| format!("{cell:>0$}", width(column)));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text += "\n";
    }
    stages.refused.iter().for_each(|(stage, why)| text += &format!("\nStage {stage}: {why}.\n"));
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
pub(super) fn json(stages: &Stages, types: Types) -> Result<String> {
    let stage = |(stage, plan): &(usize, MeshPlan)| {
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
                "extra_reductions": wire.extra_reductions, "gather": wire.gather, "matrices": wire.matrices,
                "exchange": wire.exchange,
            },
        })
    };
    let first = stages.plans.first().map(|(_, plan)| plan);
    let refused = stages.refused.iter().map(|(stage, why)| json!({ "stage": stage, "why": why }));
    let report = json!({
        "parameters": first.map(|plan| plan.model().len()),
        "tensors": first.map(|plan| plan.model().parameters().len()),
        "types": first.map(|plan| types.of(plan.model())),
        "mesh": first.map(|plan| plan.mesh().to_string()),
        "rule": first.map(|plan| plan.rules().rule_names().join(" + ")),
        "stages": stages.plans.iter().map(stage).collect::<Vec<_>>(),
        "refused": refused.collect::<Vec<_>>(),
    });
    Ok(serde_json::to_string_pretty(&report)? + "\n")
}

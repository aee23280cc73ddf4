//! JSON output of plans, for other programs.

use super::{Plan, RankPlan, TotalKind, Totals};
use crate::{Axes, Error, Piece, Sharing};
use meshstep_shard::{BucketPlan, Memory, Part, Wire};
use meshstep_tensor::Layout;
use serde_json::{Map, Value, json};

impl Plan {
    /// Returns the whole plan as JSON: sharing groups, every bucket with its parameters, bytes by kind of rank, and totals. Bytes are
    /// integers, axes lists of names.
    pub fn json(&self) -> String {
        let kinds = self.kinds();
        let of = |(stage, of): (usize, &super::PipelineStage)| {
            let kinds = kinds.iter().filter(|kind| kind.stage == stage).map(kind);
            let order = |family| of.plan.order().iter().enumerate().filter(move |(_, at)| at.0 == family);
            let families = of
                .families()
                .enumerate()
                .map(|(i, (sharing, part))| self.family(sharing, part, order(i).map(|(travels, _)| travels)));
            json!({ "families": families.collect::<Vec<_>>(), "kinds": kinds.collect::<Vec<_>>() })
        };
        let pipeline: Vec<Value> = self.pipeline.iter().enumerate().map(of).collect();
        let mesh: Vec<Value> = self.mesh.axes().iter().map(|(axis, n)| json!([axis.name(), n])).collect();
        let plan = json!({
            "mesh": mesh,
            "model": { "elements": self.model.len(), "tensors": self.model.parameters().len() },
            "rule": self.rules.rule_names().join(" + "),
            "stage": format!("{:?}", self.stage),
            "pipeline": pipeline,
            "totals": totals(&Totals::of(&kinds)),
        });
        format!("{plan:#}\n")
    }

    /// Returns one family as JSON. `travels` holds each bucket's position in the travel order over all families.
    fn family(&self, sharing: Sharing, part: &Part, travels: impl Iterator<Item = usize>) -> Value {
        let extra_reductions: Vec<Value> =
            sharing.extra_reductions(&self.mesh).into_iter().map(axes).collect();
        json!({
            "copies": axes(sharing.replicas),
            "shards": axes(sharing.shards()),
            "further": extra_reductions,
            "rule": self.rules.within(part.layout()).rule().name(),
            "gradient": format!("{:?}", sharing.gradient),
            "buckets": part.buckets().iter().zip(travels).map(|(b, travels)| bucket(b, part.layout(), travels)).collect::<Vec<_>>(),
        })
    }
}

impl RankPlan<'_> {
    /// Returns the rank's plan as JSON: its coordinate, its part of each parameter, its messages with their groups, and its bytes.
    pub fn json(&self) -> Result<String, Error> {
        let holds = self.holds().map(|holds| {
            json!({
                "name": holds.parameter.name,
                "unit": holds.parameter.unit,
                "used": pieces(&holds.used),
                "stored": pieces(&holds.stored),
                "owned": pieces(&holds.owned),
                "counts": holds.counts,
                "bucket": holds.bucket,
                "range": [holds.range.start, holds.range.end],
            })
        });
        let sends = self.sends()?.into_iter().map(|sends| {
            json!({
                "purpose": sends.purpose.to_string(),
                "axes": axes(sends.axes),
                "ranks": sends.group.ranks().collect::<Vec<_>>(),
                "bytes": sends.bytes,
            })
        });
        let rank = json!({
            "rank": self.rank(),
            "coordinate": self.coordinate().to_string(),
            "holds": holds.collect::<Vec<_>>(),
            "sends": sends.collect::<Vec<_>>(),
            "memory": memory(self.memory()),
            "wire": wire(self.wire()),
        });
        Ok(format!("{rank:#}\n"))
    }
}

fn axes(axes: Axes) -> Value {
    axes.iter().map(|axis| axis.name()).collect()
}

/// Returns index ranges per dimension, both in the parameter and in the rank's storage.
fn pieces(pieces: &[Piece]) -> Value {
    let ranges = |ranges: &[std::ops::Range<usize>]| -> Value {
        ranges.iter().map(|range| json!([range.start, range.end])).collect()
    };
    let piece = |piece: &Piece| json!({ "global": ranges(&piece.global), "local": ranges(&piece.local) });
    pieces.iter().map(piece).collect()
}

fn bucket(bucket: &BucketPlan, layout: &Layout, travels: usize) -> Value {
    let params = bucket.params.iter().map(|placed| {
        let param = &layout.params()[placed.param];
        json!({ "name": param.name(), "shape": param.shape(), "start": placed.start, "owner": placed.owner })
    });
    json!({
        "travels": travels,
        "dtype": bucket.dtype.to_string(),
        "grads": bucket.grads.to_string(),
        "master": bucket.master.map(|dtype| dtype.to_string()),
        "state": bucket.state.to_string(),
        "len": bucket.len,
        "params": params.collect::<Vec<_>>(),
    })
}

fn kind(kind: &TotalKind) -> Value {
    let TotalKind { first, ranks, .. } = kind;
    json!({ "first": first, "ranks": ranks, "memory": memory(kind.memory), "wire": wire(kind.wire) })
}

fn totals(totals: &Totals) -> Value {
    json!({
        "ranks": totals.ranks,
        "memory": memory(totals.memory),
        "wire": wire(totals.wire),
        "most_held": { "rank": totals.most_held.0, "memory": memory(totals.most_held.1) },
        "most_sent": { "rank": totals.most_sent.0, "wire": wire(totals.most_sent.1) },
    })
}

fn memory(memory: Memory) -> Value {
    let each = memory.by_category().map(|(category, bytes)| (category.to_string(), bytes.into()));
    let mut all: Map<String, Value> = each.into_iter().collect();
    all.insert("total".to_owned(), memory.total().into());
    all.into()
}

fn wire(wire: Wire) -> Value {
    let Wire { reduce, extra_reductions, gather, matrices, exchange } = wire;
    json!({
        "reduce": reduce,
        "further": extra_reductions,
        "gather": gather,
        "matrices": matrices,
        "exchange": exchange,
        "total": wire.total(),
    })
}

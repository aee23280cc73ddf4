//! Tests with generated and with committed traces.

mod committed;
mod made;
mod plain;
mod problems;
mod ranks;
mod refusals;
mod rules;

use std::collections::BTreeMap;
use std::ops::Range;

use meshstep_tensor::Slice;

use super::compare::Difference;
use super::key::Key;
use super::observed::{Observed, join};
use super::reason::Reason;
use super::setting::Asked;
use super::trace::Trace;
use crate::parity::args::Partition;

/// Replays a file's `bytes`.
fn replay(bytes: &[u8], asked: Asked) -> Result<Difference, Reason> {
    replay_trace(&Trace::parse(bytes)?, asked)
}

fn replay_trace(trace: &Trace, asked: Asked) -> Result<Difference, Reason> {
    let got = super::replay::replay(trace, asked)?;
    Difference::new(trace, &got, trace.spec.tolerance)
}

/// Returns every stage and partition that the command line accepts.
fn settings() -> impl Iterator<Item = Asked> {
    let stages = [
        (Some(0), None),
        (Some(1), Some(Partition::Flat)),
        (Some(2), Some(Partition::Flat)),
        (None, Some(Partition::Whole)),
    ];
    stages.into_iter().map(|(stage, partition)| Asked { stage, partition, ..Asked::default() })
}

#[test]
fn ranks_must_agree_where_they_overlap_and_have_everything_together() {
    let trace = Trace::parse(&made::Made::adamw(safetensors::tensor::Dtype::F32).bytes()).unwrap();
    let key = |slot: &str| Key::State { t: 6, name: "bias".to_owned(), slot: slot.to_owned() };
    let joined = |pieces: &[(Range<usize>, [f32; 7])]| {
        let mut only = Trace { spec: trace.spec.clone(), tensors: trace.tensors.clone() };
        only.tensors.retain(|other, _| !other.is_expected() || *other == key("m"));
        let see = |(range, values): &(Range<usize>, [f32; 7])| {
            let mut observed = Observed::default();
            observed.piece(&only, key("m"), range.clone(), Slice::from(&values[range.clone()])).unwrap();
            observed.piece(&only, key("v"), range.clone(), Slice::from(&values[range.clone()])).unwrap();
            observed
        };
        join(&only, pieces.iter().map(see).collect())
    };
    let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
    let mut other = values;
    other[4] = 5.5;
    let whole = joined(&[(0..3, values), (3..7, values), (2..5, values)]).unwrap();
    assert_eq!(whole, BTreeMap::from([(key("m"), values.map(f64::from).to_vec())]));
    let differ = joined(&[(0..7, values), (2..4, other), (4..5, other)]).unwrap_err();
    assert!(matches!(differ, Reason::RanksDiffer { rank: 2, index: 4, .. }), "{differ}");
    let hole = joined(&[(0..3, values), (4..7, values)]).unwrap_err();
    assert_eq!(hole.to_string(), "expect_state/6/bias/m: no rank has some of its elements");
}

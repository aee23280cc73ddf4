//! Results that ranks observe during a replay, and their combination.

use std::collections::BTreeMap;
use std::ops::Range;

use meshstep_tensor::{Slice, SliceMut, cast};

use super::key::Key;
use super::reason::Reason;
use super::trace::Trace;

/// A range of a tensor on one rank; f64 holds every value of every type exactly.
#[derive(Debug)]
struct Piece {
    range: Range<usize>,
    values: Vec<f64>,
}

/// Expected results as observed by one rank.
#[derive(Debug, Default)]
pub(super) struct Observed {
    pieces: BTreeMap<Key, Piece>,
}

impl Observed {
    /// Stores a number if it is expected.
    pub(super) fn scalar(&mut self, trace: &Trace, key: Key, value: f64) {
        if trace.tensors.contains_key(&key) {
            self.pieces.insert(key, Piece { range: 0..1, values: vec![value] });
        }
    }

    /// Stores elements `range` of a tensor if it is expected.
    pub(super) fn piece(
        &mut self,
        trace: &Trace,
        key: Key,
        range: Range<usize>,
        values: Slice<'_>,
    ) -> Result<(), Reason> {
        if trace.tensors.contains_key(&key) {
            let mut wide = vec![0.0; values.len()];
            cast(values, SliceMut::from(&mut wide[..]))?;
            self.pieces.insert(key, Piece { range, values: wide });
        }
        Ok(())
    }

    /// Stores the parameters that are expected under the key that `of` makes from a name.
    pub(super) fn params<'v>(
        &mut self,
        trace: &Trace,
        of: impl Fn(String) -> Key,
        param: impl Fn(&str) -> Result<Slice<'v>, meshstep_shard::Error>,
    ) -> Result<(), Reason> {
        for (name, tensor) in trace.params() {
            self.piece(trace, of(name.to_owned()), 0..tensor.values.len(), param(name)?)?;
        }
        Ok(())
    }
}

/// Combines all ranks' pieces into the expected tensors: overlapping pieces must have the same bits, and together they must
/// have every element.
pub(super) fn join(trace: &Trace, ranks: Vec<Observed>) -> Result<BTreeMap<Key, Vec<f64>>, Reason> {
    let whole = |(key, tensor): (&Key, &super::trace::Tensor)| {
        let mut values: Vec<Option<f64>> = vec![None; tensor.values.len()];
        let mut seen = false;
        for (rank, observed) in ranks.iter().enumerate() {
            let Some(Piece { range, values: piece }) = observed.pieces.get(key) else { continue };
            seen = true;
            for (index, &value) in range.clone().zip(piece) {
                let there = values[index].get_or_insert(value);
                if there.to_bits() != value.to_bits() {
                    return Err(Reason::RanksDiffer { key: key.clone(), rank, index });
                }
            }
        }
        let why = if seen { "no rank has some of its elements" } else { "this replay does not produce it" };
        let values: Option<Vec<f64>> = values.into_iter().collect();
        let missing = || Reason::NotObserved { key: key.clone(), why };
        Ok((key.clone(), values.filter(|_| seen).ok_or_else(missing)?))
    };
    trace.expected().map(whole).collect()
}

//! State of an optimizer, assembled from the parts of all ranks.

use crate::common::{fetch, param};
use meshstep_shard::Optimizer;
use std::collections::BTreeMap;
use std::ops::Range;

/// Count of a parameter's updates, and its vectors by name, with each element once.
pub(crate) type Tensor = (u64, BTreeMap<String, Bytes>);

/// Bytes of a vector in the `known` ranges, which ascend and do not touch, and zeros elsewhere.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Bytes {
    values: Vec<u8>,
    known: Vec<Range<usize>>,
}

impl Bytes {
    /// Makes a vector of `len` bytes with `bytes` known from `from` on.
    fn new(len: usize, from: usize, bytes: &[u8]) -> Self {
        let mut values = vec![0; len];
        values[from..from + bytes.len()].copy_from_slice(bytes);
        let known = from..from + bytes.len();
        Bytes { values, known: Some(known).filter(|known| !known.is_empty()).into_iter().collect() }
    }

    /// Returns all bytes if all are known.
    pub(crate) fn whole(&self) -> Option<&[u8]> {
        let known: usize = self.known.iter().map(Range::len).sum();
        (known == self.values.len()).then_some(&self.values)
    }

    /// Returns the ranges of known bytes.
    pub(crate) fn known(&self) -> &[Range<usize>] {
        &self.known
    }

    /// Returns the bytes, with zeros for unknown ones.
    pub(crate) fn values(&self) -> &[u8] {
        &self.values
    }

    /// Adds the known bytes of `other`; bytes known to both must be the same.
    fn merge(&mut self, other: &Bytes, what: &str) {
        assert_eq!(self.values.len(), other.values.len(), "{what}");
        for new in &other.known {
            for own in &self.known {
                let both = own.start.max(new.start)..own.end.min(new.end);
                assert!(
                    both.is_empty() || self.values[both.clone()] == other.values[both],
                    "{what} differs among ranks"
                );
            }
            self.values[new.clone()].copy_from_slice(&other.values[new.clone()]);
        }
        self.known.extend(other.known.iter().cloned());
        self.known.sort_by_key(|range| range.start);
        self.known.dedup_by(|next, range| {
            let touch = next.start <= range.end;
            if touch {
                range.end = range.end.max(next.end);
            }
            touch
        });
    }
}

/// State of an optimizer, on one rank or on all.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Whole {
    pub(crate) tensors: BTreeMap<String, Tensor>,
    pub(crate) steps: u64,
    pub(crate) loss_scale: Option<meshstep_optim::LossScaleState>,
}

/// Returns this rank's part.
pub(crate) fn part(opt: &Optimizer) -> Whole {
    let queue = &opt.options().queue;
    let tensor = |p: &meshstep_tensor::Param| {
        let state = opt.state(p.name()).unwrap();
        let of = |values: meshstep_tensor::Slice<'_>| {
            let size = values.dtype().size();
            Bytes::new(p.len() * size, state.range.start * size, &fetch(values, queue))
        };
        let whole = param(opt, p.name());
        let mut vectors = BTreeMap::from([("whole".to_owned(), Bytes::new(whole.len(), 0, &whole))]);
        if !state.range.is_empty() {
            vectors.insert("param".to_owned(), of(state.values));
            vectors.extend(state.master.map(|master| ("master".to_owned(), of(master))));
            vectors.extend(state.slots.into_iter().map(|(name, values)| (name.to_owned(), of(values))));
        }
        (p.name().to_owned(), (state.t, vectors))
    };
    let tensors = opt.params().map(tensor).collect();
    Whole { tensors, steps: opt.steps(), loss_scale: opt.loss_scale_state() }
}

/// Joins the parts of all ranks; copies of the same element must be the same.
pub(crate) fn join(parts: Vec<Whole>) -> Whole {
    let mut parts = parts.into_iter();
    let mut all = parts.next().unwrap();
    for part in parts {
        assert_eq!((part.steps, part.loss_scale), (all.steps, all.loss_scale));
        for (name, (t, vectors)) in part.tensors {
            let into = all.tensors.get_mut(&name).unwrap();
            assert_eq!(t, into.0, "{name}");
            for (slot, own) in vectors {
                match into.1.get_mut(&slot) {
                    Some(whole) => whole.merge(&own, &format!("{name}:{slot}")),
                    None => drop(into.1.insert(slot, own)),
                }
            }
        }
    }
    let whole = |(_, (_, vectors)): (&String, &Tensor)| vectors.values().all(|bytes| bytes.whole().is_some());
    assert!(all.tensors.iter().all(whole), "ranks have everything together");
    all
}

//! What all ranks of an optimizer hold together, put together from each rank's part.

use crate::common::{fetch, param};
use meshstep_shard::Optimizer;
use std::collections::BTreeMap;
use std::ops::Range;

/// A parameter's updates, and its vectors by name, of which each element is there once.
pub(crate) type Tensor = (u64, BTreeMap<String, Bytes>);

/// A vector's bytes: those of the `known` ranges, which are in order and apart, and zeros elsewhere.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Bytes {
    values: Vec<u8>,
    known: Vec<Range<usize>>,
}

impl Bytes {
    /// `len` bytes, of which those from `from` on are known.
    fn new(len: usize, from: usize, bytes: &[u8]) -> Self {
        let mut values = vec![0; len];
        values[from..from + bytes.len()].copy_from_slice(bytes);
        let known = from..from + bytes.len();
        Bytes { values, known: Some(known).filter(|known| !known.is_empty()).into_iter().collect() }
    }

    /// All bytes, where all are known.
    pub(crate) fn whole(&self) -> Option<&[u8]> {
        let known: usize = self.known.iter().map(Range::len).sum();
        (known == self.values.len()).then_some(&self.values)
    }

    /// The ranges of bytes that are known.
    pub(crate) fn known(&self) -> &[Range<usize>] {
        &self.known
    }

    /// The bytes, with zeros where none is known.
    pub(crate) fn values(&self) -> &[u8] {
        &self.values
    }

    /// Adds what `other` knows, which must be alike where both know it.
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

/// What there is of an optimizer, on one rank or on all.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Whole {
    pub(crate) tensors: BTreeMap<String, Tensor>,
    pub(crate) steps: u64,
    pub(crate) loss_scale: Option<meshstep_optim::LossScaleState>,
}

/// This rank's part.
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

/// All ranks' parts as one; where several have the same, they have it alike.
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

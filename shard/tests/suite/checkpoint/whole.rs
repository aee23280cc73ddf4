//! What all ranks of an optimizer hold together, put together from each rank's part.

use crate::common::{fetch, param};
use meshstep_shard::Optimizer;
use std::collections::BTreeMap;

/// A parameter's updates, and its vectors by name, of which each element is there once.
pub(crate) type Tensor = (u64, BTreeMap<String, Vec<Option<u8>>>);

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
            let mut all = vec![None; p.len() * size];
            let own = fetch(values, queue).into_iter().map(Some);
            all.splice(state.range.start * size..state.range.end * size, own);
            all
        };
        let whole = param(opt, p.name()).into_iter().map(Some).collect();
        let mut vectors = BTreeMap::from([("whole".to_owned(), whole)]);
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
                let whole = into.1.entry(slot.clone()).or_insert_with(|| vec![None; own.len()]);
                for (a, b) in whole.iter_mut().zip(own) {
                    assert!(a.is_none() || b.is_none() || *a == b, "{name}:{slot} parts");
                    *a = a.or(b);
                }
            }
        }
    }
    let whole = |(_, (_, vectors)): (&String, &Tensor)| vectors.values().flatten().all(Option::is_some);
    assert!(all.tensors.iter().all(whole), "ranks have everything together");
    all
}

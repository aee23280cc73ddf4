//! Location of a fragment on this rank: ranges of the optimizer's vectors.

use crate::{Chosen, Fragment, LocalError, LocalPlan, ParamSpec, What};
use meshstep_optim::StateSlot;
use meshstep_shard::extend::{OptimizerExchange, Params, VectorKind};
use meshstep_shard::{Error, Optimizer, Options};
use meshstep_tensor::{DType, Param, Slice, SliceMut};
use std::ops::Range;
use std::sync::Arc;

/// The part of one vector of one parameter that this rank owns.
#[derive(Clone, Debug)]
pub(crate) struct Spot {
    /// Index of the parameter in the optimizer.
    pub(crate) entry: usize,
    pub(crate) vector: Vector,
    /// Range of elements in the vector.
    pub(crate) range: Range<usize>,
    /// Index of the first element among those that the fragment has of the parameter.
    pub(crate) first: usize,
    /// Type of the vector, and the type in which it is sent.
    pub(crate) own: DType,
    pub(crate) wire: DType,
}

/// A vector of a bucket, or of an outer optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vector {
    Params {
        bucket: usize,
    },
    Master {
        bucket: usize,
    },
    State {
        bucket: usize,
        slot: usize,
    },
    /// State of an outer optimizer, for the spot `spot` of an outer fragment.
    Outer {
        fragment: usize,
        spot: usize,
        slot: usize,
    },
}

/// Elements of one vector.
pub(crate) type Span = (Vector, Range<usize>);

/// Returns the parameters as plans see them, in the order of a forward pass, and their indices in the optimizer.
pub(crate) fn trained(optimizer: &Optimizer) -> (Vec<ParamSpec>, Vec<usize>) {
    let (params, buckets) = (optimizer.own_params(), optimizer.bucket_plans().collect::<Vec<_>>());
    let trained = |(index, param): (usize, &Param)| {
        let (plan, _) = buckets[params.bucket_of(index)?];
        let (name, len) = (param.name().to_owned(), param.len());
        let (whole, position) = (params.whole_len(index), params.position(index));
        let (values, state, rule) = (plan.update, plan.state, Arc::clone(params.rule(index)));
        Some((ParamSpec { name, len, whole, position, values, state, rule }, index))
    };
    let mut all: Vec<_> = optimizer.params().enumerate().filter_map(trained).collect();
    all.sort_by_key(|(trained, _)| trained.position);
    all.into_iter().unzip()
}

/// Returns the rule's declaration of a spot's state vector; `None` for other vectors.
pub(crate) fn slot_of(params: &Params, spot: &Spot) -> Option<StateSlot> {
    let Vector::State { slot, .. } = spot.vector else { return None };
    Some(params.rule(spot.entry).slot(slot))
}

/// Returns this rank's elements of `vector`; `None` for outer optimizers, which the engine keeps.
pub(crate) fn vector_of(params: &Params, vector: Vector) -> Option<Slice<'_>> {
    let (bucket, kind) = vector.in_bucket()?;
    params.bucket_vector(bucket, kind)
}

/// Returns the same elements for writing.
pub(crate) fn vector_of_mut(params: &mut Params, vector: Vector) -> Option<SliceMut<'_>> {
    let (bucket, kind) = vector.in_bucket()?;
    params.bucket_vector_mut(bucket, kind)
}

/// Borrows spans that have no element in common, in their order.
pub(crate) fn spans_mut<'p>(params: &'p mut Params, spans: &[Span]) -> Result<Vec<SliceMut<'p>>, Error> {
    let mut order: Vec<usize> = (0..spans.len()).collect();
    order.sort_unstable_by_key(|&i| (spans[i].0.key(), spans[i].1.start));
    let mut order = order.into_iter().peekable();
    let mut slices: Vec<Option<SliceMut<'p>>> = spans.iter().map(|_| None).collect();
    for (bucket, vectors) in params.update_vectors_mut().enumerate() {
        for (k, vector) in vectors.enumerate() {
            let (mut rest, mut start) = (vector, 0);
            while let Some(i) = order.next_if(|&i| spans[i].0.key() == (bucket, k)) {
                let range = &spans[i].1;
                let (_, from) = rest.split_at(range.start - start)?;
                let (slice, after) = from.split_at(range.len())?;
                (slices[i], rest, start) = (Some(slice), after, range.end);
            }
        }
    }
    let all: Option<Vec<_>> = slices.into_iter().collect();
    Ok(all.unwrap_or_else(|| unreachable!("a span is of a vector that there is")))
}

impl Vector {
    /// Returns the bucket and the kind of the vector; `None` for an outer optimizer's.
    fn in_bucket(self) -> Option<(usize, VectorKind)> {
        match self {
            Vector::Params { bucket } => Some((bucket, VectorKind::Params)),
            Vector::Master { bucket } => Some((bucket, VectorKind::Master)),
            Vector::State { bucket, slot } => Some((bucket, VectorKind::State(slot))),
            Vector::Outer { .. } => None,
        }
    }

    /// Returns the bucket, and the index among the vectors from which its update starts; no bucket for an outer optimizer's.
    pub(crate) fn key(&self) -> (usize, usize) {
        match *self {
            Vector::Params { bucket } | Vector::Master { bucket } => (bucket, 0),
            Vector::State { bucket, slot } => (bucket, 1 + slot),
            Vector::Outer { .. } => (usize::MAX, 0),
        }
    }
}

impl LocalPlan {
    /// Returns the location of each fragment on this rank.
    pub(crate) fn spots(&self, optimizer: &Optimizer) -> Result<Vec<Vec<Spot>>, LocalError> {
        let (params, entries) = trained(optimizer);
        let mut all: Vec<Vec<Spot>> = Vec::new();
        for (f, fragment) in self.fragments.iter().enumerate() {
            if let What::OuterMomentum(_) = fragment.what {
                all.push(Vec::new());
                continue;
            }
            let mut spots = Vec::new();
            for chosen in self.chosen(f, &params)? {
                let (param, entry) = (&params[chosen.param], entries[chosen.param]);
                spots.extend(of_param(optimizer, fragment, param, entry, &chosen));
            }
            all.push(spots);
        }
        for (f, fragment) in self.fragments.iter().enumerate() {
            if let What::OuterMomentum(of) = fragment.what {
                let of_spot = |(i, spot): (usize, &Spot)| self.outer_spots(f, of, i, spot);
                all[f] = all[of].iter().enumerate().flat_map(of_spot).collect();
            }
        }
        Ok(all)
    }

    /// Returns the outer state of a spot of fragment `of`, as spots of fragment `f`.
    fn outer_spots(&self, f: usize, of: usize, spot: usize, params: &Spot) -> Vec<Spot> {
        let wire = self.fragments[f].wire.unwrap_or(DType::F64);
        let of_slot = |slot| Spot {
            entry: params.entry,
            vector: Vector::Outer { fragment: of, spot, slot },
            range: 0..params.range.len(),
            first: params.first,
            own: DType::F64,
            wire,
        };
        (0..self.outer_state(of).len()).map(of_slot).collect()
    }
}

/// Returns true if parameters, state and gradients are in memory of a GPU.
pub(crate) fn on_gpu(options: &Options) -> bool {
    options.queue.place() != meshstep_tensor::Place::Cpu
}

/// Returns the vectors of a parameter that a fragment has, as far as this rank owns them.
fn of_param(
    optimizer: &Optimizer,
    fragment: &Fragment,
    param: &ParamSpec,
    entry: usize,
    chosen: &Chosen,
) -> Vec<Spot> {
    let own = optimizer.own_params();
    let Some(part) = own.owned_part(entry, &chosen.range) else { return Vec::new() };
    let (bucket, kept, wire) = (part.bucket, part.state, fragment.wire_of(param));
    let spot = |vector, range, own| Spot { entry, vector, range, first: part.within.start, own, wire };
    match &fragment.what {
        What::Params if own.bucket_vector(bucket, VectorKind::Master).is_some() => {
            vec![spot(Vector::Master { bucket }, kept, param.values)]
        }
        What::Params => vec![spot(Vector::Params { bucket }, part.params, param.values)],
        What::State(slots) => {
            let slots = slots.of(&*param.rule).into_iter();
            slots.map(|slot| spot(Vector::State { bucket, slot }, kept.clone(), param.state)).collect()
        }
        What::OuterMomentum(_) => Vec::new(),
    }
}

/// Refuses parameters that cannot be averaged: those with remainders kept elsewhere, and those too narrow to add up small steps
/// without a master. On a GPU also refuses outer optimizers without kernels.
pub(crate) fn check_memory(optimizer: &Optimizer, plan: &LocalPlan) -> Result<(), LocalError> {
    if on_gpu(optimizer.options()) {
        let mut outer = plan.fragments.iter().filter_map(Fragment::outer).map(|outer| &outer.rule);
        if let Some(rule) = outer.find(|rule| rule.on_device().is_none()) {
            let what = format!("an outer optimizer with {}, which has no CUDA kernels,", rule.name());
            return Err(Error::NotOnGpu { what, works: "a rule with kernels, as Sgd or AdamW" }.into());
        }
    }
    for (plan, names) in optimizer.bucket_plans() {
        let narrow = plan.dtype != plan.update;
        match plan.master {
            Some(DType::U16) => return Err(Error::RemaindersOfReplicas.into()),
            None if narrow => {
                let name = names.first().map_or(String::new(), |name| name.to_string());
                let (dtype, works) = (plan.dtype, "`Master::F32`");
                return Err(Error::NeedsMaster { name, dtype, works }.into());
            }
            _ => {}
        }
    }
    Ok(())
}

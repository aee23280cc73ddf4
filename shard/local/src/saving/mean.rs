//! Mean of several workers' vectors, as an exchange of everything would compute it: in f64, rounded once.

use super::record::LocalRecord;
use crate::{LocalPlan, ParamSpec, Weights, What};
use meshstep_shard::extend::overlap;
use meshstep_tensor::{Buffer, Error, Slice, SliceMut, cast};
use std::ops::Range;

/// Number of elements computed at a time.
const BLOCK: usize = 1 << 12;

/// Elements that are weighted by the workers' tokens.
#[derive(Clone, Debug)]
pub(super) struct Weighed {
    fragment: usize,
    entry: usize,
    /// Name of the state vector; `None` for the parameter.
    slot: Option<&'static str>,
    elements: Range<usize>,
    /// Share of each worker.
    shares: Vec<f64>,
}

/// Returns the elements that the plan weights by tokens, with the shares of the `counted` workers. Fragments with equal tokens on all
/// workers, or with none, are left out.
pub(super) fn weighed(
    plan: &LocalPlan,
    (params, places): &(Vec<ParamSpec>, Vec<usize>),
    record: &LocalRecord,
    counted: &[usize],
) -> Vec<Weighed> {
    let mut all = Vec::new();
    for (f, fragment) in plan.fragments.iter().enumerate() {
        let tokens: Vec<u64> = counted.iter().map(|&w| record.workers[w].tokens[f]).collect();
        let total: u128 = tokens.iter().map(|&tokens| u128::from(tokens)).sum();
        if fragment.weights != Weights::Tokens || tokens.iter().all(|&own| own == tokens[0]) {
            continue;
        }
        let shares: Vec<f64> = tokens.iter().map(|&own| own as f64 / total as f64).collect();
        for chosen in plan.chosen(f, params).unwrap_or_default() {
            let slots: Vec<Option<&'static str>> = match &fragment.what {
                What::Params => vec![None],
                What::State(slots) => params[chosen.param].named(slots).map(Some).collect(),
                What::OuterMomentum(_) => Vec::new(),
            };
            let (entry, elements) = (places[chosen.param], chosen.range);
            let of = |slot| Weighed {
                fragment: f,
                entry,
                slot,
                elements: elements.clone(),
                shares: shares.clone(),
            };
            all.extend(slots.into_iter().map(of));
        }
    }
    all
}

/// Returns the parts of `weighed` in vector `slot` of a parameter within elements `range`, counted from the first of these.
pub(super) fn within<'a>(
    weighed: &'a [Weighed],
    (entry, slot): (usize, Option<&'a str>),
    range: &'a Range<usize>,
) -> impl Iterator<Item = (Range<usize>, &'a [f64])> {
    let here = weighed.iter().filter(move |of| of.entry == entry && of.slot == slot);
    here.filter_map(move |of| {
        let both = overlap(&of.elements, range)?;
        Some((both.start - range.start..both.end - range.start, &of.shares[..]))
    })
}

/// Returns the workers' shares in a fragment, if they differ.
pub(super) fn of_fragment(weighed: &[Weighed], fragment: usize) -> Option<&[f64]> {
    weighed.iter().find(|of| of.fragment == fragment).map(|of| &of.shares[..])
}

/// Computes the mean of `values`; all have equal weight, except in ranges with shares.
pub(super) fn mean<'a>(
    values: &[Buffer],
    shares: impl Iterator<Item = (Range<usize>, &'a [f64])>,
    mut into: SliceMut<'_>,
) -> Result<(), Error> {
    let (len, shares) = (into.len(), shares.collect::<Vec<_>>());
    let mut wide = vec![vec![0.0; BLOCK.min(len)]; values.len()];
    for start in (0..len).step_by(BLOCK) {
        let block = start..len.min(start + BLOCK);
        for (wide, values) in wide.iter_mut().zip(values) {
            cast(values.as_slice().slice(block.clone())?, SliceMut::from(&mut wide[..block.len()]))?;
        }
        let alike = |i| wide.iter().skip(1).fold(wide[0][i], |sum, own| sum + own[i]) / wide.len() as f64;
        let mut mean: Vec<f64> = (0..block.len()).map(alike).collect();
        for (range, shares) in &shares {
            for i in overlap(range, &block).into_iter().flatten().map(|i| i - start) {
                // A worker with share zero may have non-finite values.
                let counted = wide.iter().zip(*shares).filter(|(_, share)| **share != 0.0);
                mean[i] = counted.map(|(own, share)| own[i] * share).sum();
            }
        }
        cast(Slice::from(&mean[..]), into.reborrow().slice(block)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshstep_tensor::{Category, DType, Meter};

    #[test]
    fn whoever_counts_for_nothing_may_have_anything() {
        let of = |own: [f64; 3]| {
            let mut values = Buffer::zeroed(3, DType::F64, &Meter::new(), Category::Staging).unwrap();
            values.as_mut().copy_from(Slice::from(&own[..])).unwrap();
            values
        };
        let values = [of([1.0, 2.0, 3.0]), of([7.0, f64::NAN, f64::INFINITY]), of([5.0, 6.0, 7.0])];
        let mut one = of([0.0; 3]);
        mean(&values, [(1..3, &[0.25, 0.0, 0.75][..])].into_iter(), one.as_mut()).unwrap();
        assert_eq!(one.as_slice().typed::<f64>().unwrap(), [13.0 / 3.0, 5.0, 6.0]);
    }
}

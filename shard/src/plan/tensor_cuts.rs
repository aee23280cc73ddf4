//! Tensors that a mesh cuts: the elements of the whole that each rank holds. Arithmetic only.

use crate::plan::overlap::overlap;
use crate::ranks::roles::Parts;
use meshstep_optim::Strided;
use std::ops::Range;

/// Whole tensors of the parameters that a mesh cuts, and the ranks that hold them together: for rules that see whole matrices.
///
/// ```
/// use meshstep_optim::{Muon, Strided};
/// use meshstep_shard::{CutRank, MatrixPiece, Options, Part, Sizes, Stage, TensorCuts};
/// use meshstep_tensor::{DType, Layout};
///
/// // Each of two ranks has three of the six columns of "up"; nothing else is divided.
/// let layout = Layout::builder().param("up", &[4, 3], DType::F32).build()?;
/// let columns = |first| vec![vec![(0..12, Strided { first, run: 3, stride: 6 })]];
/// let ranks = vec![CutRank { shard: 0, cut: 0 }, CutRank { shard: 0, cut: 1 }];
/// let cuts = TensorCuts { shapes: vec![vec![4, 6]], cuts: vec![columns(0), columns(3)], ranks };
/// let options = Options { stage: Stage::Replicated, ..Options::default() };
/// let part = Part::new(layout, Sizes::all(1), [], &options)?.with_cuts(cuts)?;
/// let exchange = part.matrix_exchange(&Muon::default());
/// let up = &exchange.windows()[0].matrices[0];
/// let MatrixPiece { rank, own, places } = &up.pieces[1];
/// assert_eq!((*rank, own, places[0].1.first, up.elements()), (1, &(0..12), 3, 24));
/// // Rank 1 sends its half to rank 0, which returns it.
/// assert_eq!([0, 1].map(|rank| exchange.sent_bytes(rank)), [12 * 4; 2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorCuts {
    /// Shape of each whole tensor, in registration order.
    pub shapes: Vec<Vec<usize>>,
    /// Elements of each tensor by cut: those that a rank with this cut has as its parameter.
    pub cuts: Vec<Vec<Parts>>,
    /// Ranks that hold the tensors together, in the order of their communicator.
    pub ranks: Vec<CutRank>,
}

/// Position of a rank among those that hold whole tensors together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CutRank {
    /// Index among the ranks that divide the state; 0 at stage 0, where ranks of one cut hold the same and one of them is here.
    pub shard: usize,
    /// Index of its cut.
    pub cut: usize,
}

impl TensorCuts {
    /// Returns the rank of each shard and cut, by `cut * shards + shard`, or `None` unless each of them has one rank.
    pub(crate) fn seats(&self, shards: usize) -> Option<Vec<usize>> {
        let mut seats = vec![None; shards.checked_mul(self.cuts.len())?];
        for (rank, &CutRank { shard, cut }) in self.ranks.iter().enumerate() {
            let index =
                if shard < shards { cut.checked_mul(shards)?.checked_add(shard)? } else { return None };
            if seats.get_mut(index)?.replace(rank).is_some() {
                return None;
            }
        }
        seats.into_iter().collect()
    }

    /// Returns true if the cuts of tensor `index` have `len` elements each, and each element of the whole once.
    pub(crate) fn cover(&self, index: usize, len: usize) -> bool {
        let all = self.shapes[index].iter().try_fold(1usize, |all, &n| all.checked_mul(n));
        if all != len.checked_mul(self.cuts.len()) {
            return false;
        }
        let mut runs: Vec<Range<usize>> = Vec::new();
        for cut in &self.cuts {
            let (mut end, parts) = (0, &cut[index]);
            for placed in parts {
                let (part, by) = placed;
                if part.start != end || part.end < end || by.run == 0 {
                    return false;
                }
                end = part.end;
                let of_part = runs_of(placed).map(|(from, at)| Some(at..at.checked_add(from.len())?));
                let Some(mut placed) = of_part.collect::<Option<Vec<_>>>() else { return false };
                runs.append(&mut placed);
            }
            if end != len {
                return false;
            }
        }
        runs.sort_by_key(|run| run.start);
        let ends = runs.iter().try_fold(0, |end, run| (run.start == end).then_some(run.end));
        ends == all
    }

    /// Returns true if an earlier tensor has the same shape and cuts.
    pub(crate) fn is_repeated(&self, index: usize) -> bool {
        let same = |other: usize| {
            self.shapes[other] == self.shapes[index] && self.cuts.iter().all(|cut| cut[other] == cut[index])
        };
        // Layers repeat.
        (index.saturating_sub(64)..index).rev().any(same)
    }
}

/// Returns the runs of a part: elements of the holder, and the index in the tensor of the first of them.
pub(crate) fn runs_of((part, by): &(Range<usize>, Strided)) -> impl Iterator<Item = (Range<usize>, usize)> {
    let (start, len, by) = (part.start, part.len(), *by);
    let run = usize::try_from(by.run).unwrap_or(usize::MAX).clamp(1, len.max(1));
    (0..len).step_by(run).map(move |from| {
        let to = len.min(from.saturating_add(run));
        (start + from..start + to, by.index(from as u64) as usize)
    })
}

/// Returns the places in the tensor of elements `own` of a holder with these parts; the result counts them from 0.
pub(crate) fn places(parts: &Parts, own: &Range<usize>) -> Parts {
    let mut places = Parts::new();
    for (part, by) in parts {
        let Some(both) = overlap(part, own) else { continue };
        let mut add = |from: usize, to: usize, run: u64, stride: u64| {
            let first = by.index((from - part.start) as u64);
            places.push((from - own.start..to - own.start, Strided { first, run, stride }));
        };
        // The rest of a run, and then whole runs.
        let within = (both.start - part.start) as u64 % by.run;
        let left = usize::try_from(by.run - within).unwrap_or(usize::MAX);
        let middle = if within == 0 { both.start } else { both.end.min(both.start.saturating_add(left)) };
        if both.start < middle {
            add(both.start, middle, (middle - both.start) as u64, 0);
        }
        if middle < both.end {
            add(middle, both.end, by.run, by.stride);
        }
    }
    places
}

/// Returns the index in the tensor of the first of these elements, if they are contiguous there.
pub(crate) fn together(places: &Parts) -> Option<usize> {
    match &places[..] {
        [(part, by)] if part.len() as u64 <= by.run => Some(by.first as usize),
        _ => None,
    }
}

#[cfg(test)]
mod tests;

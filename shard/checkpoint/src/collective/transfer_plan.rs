//! Plan of transfers: which elements each rank sends to which, to bring an optimizer from some ranks to others. Arithmetic only.

use super::writer_election::shared_out;
use crate::error::CheckpointError;
use crate::format::coverage;
use crate::format::manifest::{FORMAT, Manifest, SlotEntry, TensorEntry, Type};
use crate::format::piece::{Piece, Run};
use crate::format::settings::{Settings, TiedNames};
use crate::format::tied_names::find;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;

/// State of an optimizer on one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Side {
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) settings: BTreeMap<String, Value>,
}

/// SavedParts of a parameter on one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) t: u64,
    /// Shape of the whole parameter.
    pub(crate) shape: Vec<u64>,
    /// Name, type and local pieces of each vector.
    pub(crate) slots: Vec<(String, Type, Vec<Piece>)>,
    /// Pieces with all vectors on this rank.
    pub(crate) owned: Vec<Piece>,
}

/// Transfers between all ranks, from present holders to future ones.
#[derive(Debug)]
pub(crate) struct Moves {
    from: Vec<Option<Side>>,
    to: Vec<Option<Side>>,
    /// Ranks that send each tensor of `from`, with their pieces.
    owners: Vec<Vec<(usize, Piece)>>,
    /// Index in `from` of each rank's tensors in `to`.
    sources: Vec<Vec<Option<usize>>>,
}

/// Elements that are contiguous in their source and in their target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Move<'a> {
    /// Index of the tensor in the source.
    pub(crate) source: usize,
    /// Index of the tensor in the target.
    pub(crate) target: usize,
    /// Index of the vector in the target.
    pub(crate) vector: usize,
    /// Name of the vector.
    pub(crate) slot: &'a str,
    pub(crate) dtype: Type,
    /// Piece of the sender, and piece of the receiver.
    pub(crate) pieces: [&'a Piece; 2],
    /// Elements of the two pieces.
    pub(crate) run: Run,
}

impl Moves {
    /// Makes the plan from every rank's present and future state; the plan is the same on every rank.
    pub(crate) fn new(sides: Vec<(Option<Side>, Option<Side>)>) -> Result<Self, CheckpointError> {
        let (from, to): (Vec<_>, Vec<_>) = sides.into_iter().unzip();
        let first = check(&from, "from")?;
        check(&to, "to")?;
        let claims = |side: &Option<Side>| {
            let tensors = side.iter().flat_map(|side| side.tensors.iter().enumerate());
            let claims = tensors.flat_map(|(i, tensor)| {
                let size: u64 = tensor.slots.iter().map(|(_, dtype, _)| dtype.size()).sum();
                tensor.owned.iter().map(move |piece| (i, piece.clone(), piece.len() * size))
            });
            claims.collect()
        };
        let mut owners = vec![Vec::new(); first.tensors.len()];
        for (rank, own) in shared_out(from.iter().map(claims).collect()).into_iter().enumerate() {
            own.into_iter().for_each(|(i, piece)| owners[i].push((rank, piece)));
        }
        for (tensor, owners) in first.tensors.iter().zip(&owners) {
            let wrong = |source| {
                let (tensor, slot) = (tensor.name.clone(), "owned".to_owned());
                CheckpointError::Cover { tensor, slot, source }
            };
            coverage::check(&tensor.shape, owners.iter().map(|(_, piece)| piece)).map_err(wrong)?;
        }
        let sources = to.iter().map(|side| sources(first, side.as_ref())).collect::<Result<_, _>>()?;
        Ok(Moves { owners, sources, from, to })
    }

    /// Returns a manifest of the state to move, as if it had been saved, but without pieces.
    pub(crate) fn manifest(&self) -> Manifest {
        let first = self.from.iter().flatten().next();
        let slot = |(name, dtype, _): &(String, Type, Vec<Piece>)| {
            (name.clone(), SlotEntry { dtype: *dtype, pieces: Vec::new() })
        };
        let entry = |tensor: &Tensor| {
            let slots = tensor.slots.iter().map(slot).collect();
            (tensor.name.clone(), TensorEntry { shape: tensor.shape.clone(), t: tensor.t, slots })
        };
        Manifest {
            format: FORMAT,
            step: 0,
            run: None,
            mesh: String::new(),
            files: Vec::new(),
            tensors: first.iter().flat_map(|side| side.tensors.iter().map(entry)).collect(),
            settings: first.map_or_else(BTreeMap::new, |side| side.settings.clone()),
            blobs: BTreeMap::new(),
        }
    }

    /// Calls `then` for every transfer from rank `from` to rank `to`, in the same order on both. A rank sends itself everything it has, and
    /// other ranks only the elements they lack.
    pub(crate) fn each<E>(
        &self,
        from: usize,
        to: usize,
        then: &mut dyn FnMut(Move<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let tensors = self.to[to].iter().flat_map(|side| side.tensors.iter().enumerate());
        for (target, tensor) in tensors {
            let Some(source) = self.sources[to][target] else { continue };
            for (vector, (slot, dtype, pieces)) in tensor.slots.iter().enumerate() {
                let here = self.has(to, source, slot);
                let a = |pieces, run| Move { source, target, vector, slot, dtype: *dtype, pieces, run };
                for piece in pieces {
                    if from == to {
                        let all = here.iter().flat_map(|has| has.runs(piece).map(move |run| (has, run)));
                        all.into_iter().try_for_each(|(has, run)| then(a([has, piece], run)))?;
                        continue;
                    }
                    let taken = taken(here, piece);
                    for (_, sent) in self.owners[source].iter().filter(|(rank, _)| *rank == from) {
                        let rest = sent.runs(piece).flat_map(|run| without(run, &taken));
                        rest.into_iter().try_for_each(|run| then(a([sent, piece], run)))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the number of bytes that [`each`](Self::each) transfers.
    pub(crate) fn bytes(&self, from: usize, to: usize) -> u64 {
        let mut bytes = 0;
        let Ok(()) = self.each(from, to, &mut |part| {
            bytes += part.run.len * part.dtype.size();
            Ok::<(), std::convert::Infallible>(())
        });
        bytes
    }

    /// Returns the pieces of a vector that a rank has already.
    fn has(&self, rank: usize, source: usize, slot: &str) -> &[Piece] {
        let tensor = self.from[rank].as_ref().map(|side| &side.tensors[source]);
        let slot = tensor.and_then(|tensor| tensor.slots.iter().find(|(name, ..)| name == slot));
        slot.map_or(&[], |(_, _, pieces)| pieces)
    }
}

/// Checks that all ranks describe the same optimizer, and returns the first description.
fn check<'s>(sides: &'s [Option<Side>], direction: &str) -> Result<&'s Side, CheckpointError> {
    let mut all = sides.iter().enumerate().filter_map(|(rank, side)| Some((rank, side.as_ref()?)));
    let none = || CheckpointError::NoSide { direction: direction.to_owned() };
    let (first_rank, first) = all.next().ok_or_else(none)?;
    for (rank, side) in all {
        let apart = |what: String| Err(CheckpointError::Apart { what, ranks: [first_rank, rank] });
        if side.tensors.len() != first.tensors.len() {
            return apart("their parameters".to_owned());
        }
        for (a, b) in first.tensors.iter().zip(&side.tensors) {
            let alike = |t: &Tensor| t.slots.iter().map(|(name, dtype, _)| (name.clone(), *dtype)).collect();
            let (x, y): (Vec<_>, Vec<_>) = (alike(a), alike(b));
            if (&a.name, a.t, &a.shape, x) != (&b.name, b.t, &b.shape, y) {
                return apart(format!("parameter {:?}", a.name));
            }
        }
        if side.settings != first.settings {
            return apart("their settings, or how far they are".to_owned());
        }
    }
    Ok(first)
}

/// Returns the index in `first` of each tensor of `side`.
fn sources(first: &Side, side: Option<&Side>) -> Result<Vec<Option<usize>>, CheckpointError> {
    let Some(side) = side else { return Ok(Vec::new()) };
    let names = |side: &Side| Settings::new(side.settings.clone()).section::<TiedNames>();
    let TiedNames { mut tied } = names(first)?;
    tied.extend(names(side)?.tied);
    let numbers: BTreeMap<String, usize> =
        first.tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
    let number = |tensor: &Tensor| find(&tensor.name, |name| numbers.get(name).copied(), &tied);
    Ok(side.tensors.iter().map(number).collect())
}

/// Returns the elements of `piece` that `here` has, in ascending order.
fn taken(here: &[Piece], piece: &Piece) -> Vec<Range<u64>> {
    let mut taken: Vec<Range<u64>> =
        here.iter().flat_map(|has| has.runs(piece)).map(|run| run.to..run.to + run.len).collect();
    taken.sort_unstable_by_key(|range| range.start);
    taken
}

/// Returns the parts of `run` outside of `taken`, the target's elements that are present already.
fn without(run: Run, taken: &[Range<u64>]) -> Vec<Run> {
    let (mut at, end, mut rest) = (run.to, run.to + run.len, Vec::new());
    let first = taken.partition_point(|range| range.end <= at);
    let stop = end..end;
    let inside = taken[first..].iter().take_while(|range| range.start < end);
    for range in inside.chain([&stop]) {
        if at < range.start {
            rest.push(Run { from: run.from + (at - run.to), to: at, len: range.start - at });
        }
        at = at.max(range.end);
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_left_out() {
        let run = Run { from: 100, to: 10, len: 10 };
        for (taken, expected) in [
            (vec![], vec![(100, 10, 10)]),
            (vec![0..10, 20..30], vec![(100, 10, 10)]),
            (vec![0..15, 15..30], vec![]),
            (vec![0..12, 15..16, 19..40], vec![(102, 12, 3), (106, 16, 3)]),
            (vec![10..11, 11..13], vec![(103, 13, 7)]),
        ] {
            let rest: Vec<_> = without(run, &taken).into_iter().map(|r| (r.from, r.to, r.len)).collect();
            assert_eq!(rest, expected, "{taken:?}");
        }
    }
}

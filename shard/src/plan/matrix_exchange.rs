//! Exchange of matrices that chunks or a mesh cut: windows, owners, messages, scratch memory. Arithmetic only.

use crate::plan::bucket::{BucketPlan, Placed};
use crate::plan::owner_swaps;
use crate::plan::tensor_cuts::together;
use crate::ranks::roles::Parts;
use meshstep_optim::Rule;
use meshstep_tensor::{ALIGN, DType};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Range;

/// Exchange of a part's matrices whose elements several ranks hold: the step of each matrix is brought together on one rank, transformed
/// there, and returned in pieces ([`MatrixRule`](meshstep_optim::MatrixRule)).
///
/// ```
/// use meshstep_optim::Muon;
/// use meshstep_shard::{ExchangeWindow, ExchangedMatrix, MatrixExchange, Options, Part, Sizes, Stage};
/// use meshstep_tensor::{DType, Layout};
///
/// let add = |b: meshstep_tensor::LayoutBuilder, i| b.param(format!("w{i}"), &[64, 48], DType::F32);
/// let layout = (0..3).fold(Layout::builder(), add).build()?;
/// let options = Options { stage: Stage::Zero3, ..Options::default() };
/// let exchange: MatrixExchange = Part::new(layout, Sizes::all(2), [], &options)?.matrix_exchange(&Muon::default());
/// // Each rank has one matrix and a half; the middle one visits rank 0, which receives and returns its half.
/// let windows: &[ExchangeWindow] = exchange.windows();
/// let of = |matrix: &ExchangedMatrix| (matrix.owner, matrix.pieces.len());
/// assert_eq!(windows[0].matrices.iter().map(of).collect::<Vec<_>>(), [(0, 1), (0, 2), (1, 1)]);
/// assert_eq!([0, 1].map(|rank| exchange.sent_bytes(rank)), [32 * 48 * 4; 2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MatrixExchange {
    ranks: usize,
    windows: Vec<ExchangeWindow>,
}

/// Matrices of one type that are exchanged at once: consecutive ones in the order of buckets, with at most about as many elements as one of
/// the longest has on each rank. So every rank can have one, and needs memory for two or three. All windows are about equally long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExchangeWindow {
    /// Type that the rule computes in.
    pub dtype: DType,
    /// Matrices. One whose elements are all on one rank does not travel.
    pub matrices: Vec<ExchangedMatrix>,
}

/// A matrix, or a tensor of several blocks, and the ranks that hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExchangedMatrix {
    /// Index of its bucket in the part.
    pub bucket: usize,
    /// Index in registration order.
    pub param: usize,
    /// Rank that transforms it: in each window the rank with the least cost so far, the costliest matrix first; among equals the one that
    /// holds most of the matrix, and then the one with the least cost in all windows. Then ranks with a large cost in all windows give
    /// matrices to others, as far as no window takes longer.
    pub owner: usize,
    /// Relative cost of the transformation.
    pub cost: u64,
    /// Elements of each rank that has some, by ascending rank.
    pub pieces: Vec<MatrixPiece>,
}

/// Elements of a matrix that one rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixPiece {
    /// The rank.
    pub rank: usize,
    /// Elements of its own parameter.
    pub own: Range<usize>,
    /// Their places in the whole tensor, in order.
    pub places: Parts,
}

/// One rank's share of a window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WindowShare {
    /// Matrices that this rank has alone: index in the window.
    pub(crate) alone: Vec<usize>,
    /// Other matrices of which this rank has a piece: index, place of the piece in the scratch memory.
    pub(crate) pieces: Vec<(usize, Range<usize>)>,
    /// Matrices that this rank transforms: index, place in the scratch memory.
    pub(crate) wholes: Vec<(usize, Range<usize>)>,
    /// Pieces of these that are not contiguous in their matrix.
    pub(crate) scattered: Vec<Scattered>,
    /// Pieces that travel, by ascending place.
    pub(crate) messages: Vec<Message>,
    /// Indices of messages in the order in which they start on this rank.
    pub(crate) order: Vec<usize>,
    /// Elements of the scratch memory.
    pub(crate) scratch: usize,
}

/// A piece of a matrix that is transformed here, and its place outside of the matrix: memory where it arrives in one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scattered {
    pub(crate) matrix: usize,
    /// Place of the piece in the scratch memory, behind that of the matrix.
    pub(crate) place: Range<usize>,
    /// Place of the matrix.
    pub(crate) whole: Range<usize>,
    /// Places of the elements in the matrix.
    pub(crate) places: Parts,
}

/// A piece that travels to the owner of its matrix, and back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) matrix: usize,
    pub(crate) peer: usize,
    /// Place in the scratch memory.
    pub(crate) place: Range<usize>,
    /// True on the owner, which receives the piece and then sends it.
    pub(crate) owned: bool,
}

/// Returns the rows and columns of a tensor of two dimensions, or of each matrix of a tensor of three.
pub(crate) fn matrix_of(shape: &[usize]) -> Option<(usize, usize)> {
    match shape {
        &[rows, cols] | &[_, rows, cols] => Some((rows, cols)),
        _ => None,
    }
}

/// Returns the cost of transforming a tensor of this shape, or `None` if the rule cannot update it in pieces.
pub(crate) fn cost(rule: &(impl Rule + ?Sized), shape: &[usize]) -> Option<u64> {
    let len = shape.iter().fold(1usize, |len, &n| len.saturating_mul(n));
    Some(rule.by_matrix()?.cost(len, matrix_of(shape)?))
}

impl MatrixExchange {
    /// Plans the exchange of buckets between `ranks` ranks. `cost` returns the cost of a parameter by index, or `None` for one that is
    /// updated element by element; `pieces` returns the pieces of a parameter of a bucket, by ascending rank.
    pub(crate) fn new(
        buckets: &[BucketPlan],
        ranks: usize,
        cost: impl Fn(usize) -> Option<u64>,
        pieces: impl Fn(usize, &Placed) -> Vec<MatrixPiece>,
    ) -> Self {
        let of_bucket = |(b, bucket)| matrices(b, bucket, &cost, &pieces);
        let all: Vec<(DType, ExchangedMatrix)> = buckets.iter().enumerate().flat_map(of_bucket).collect();
        let cut = || all.iter().map(|(_, matrix)| matrix).filter(|matrix| matrix.travels());
        let limit = cut().map(ExchangedMatrix::padded).max().unwrap_or(1).saturating_mul(ranks);
        let total = cut().map(ExchangedMatrix::padded).sum::<usize>().max(1);
        let (count, mut before, mut last) = (total.div_ceil(limit), 0, 0);
        let mut windows: Vec<ExchangeWindow> = Vec::new();
        for (dtype, matrix) in all {
            let len = if matrix.travels() { matrix.padded() } else { 0 };
            // Windows are equally long, and a matrix belongs to the one with its middle.
            let index = ((before + len / 2) as u128 * count as u128 / total as u128) as usize;
            let index = index.min(count - 1);
            match windows.last_mut() {
                Some(window) if window.dtype == dtype && index == last => window.matrices.push(matrix),
                _ => windows.push(ExchangeWindow { dtype, matrices: vec![matrix] }),
            }
            (before, last) = (before + len, index);
        }
        let mut totals = vec![0; ranks];
        windows.iter_mut().for_each(|window| window.assign(&mut totals));
        owner_swaps::even_out(&mut windows, &mut totals);
        MatrixExchange { ranks, windows }
    }

    /// Returns a rank's share of each window.
    pub(crate) fn shares(&self, rank: usize) -> impl Iterator<Item = (&ExchangeWindow, WindowShare)> {
        self.windows.iter().map(move |window| (window, window.share(rank, self.ranks)))
    }

    /// Returns the windows, in the order in which they are exchanged.
    pub fn windows(&self) -> &[ExchangeWindow] {
        &self.windows
    }

    /// Returns the bytes that a rank sends in a step: its pieces to their owners, and transformed pieces back.
    pub fn sent_bytes(&self, rank: usize) -> u64 {
        let of_matrix = |matrix: &ExchangedMatrix| match matrix.owner == rank {
            true => matrix.elements() - matrix.held_by(rank),
            false => matrix.held_by(rank),
        };
        let of_window = |window: &ExchangeWindow| {
            window.matrices.iter().map(of_matrix).sum::<usize>() * window.dtype.size()
        };
        self.windows.iter().map(of_window).sum::<usize>() as u64
    }

    /// Returns for each rank the first one that sends as many bytes and has as much scratch memory.
    pub(crate) fn alike(&self) -> Vec<usize> {
        let mut first = HashMap::new();
        let of = |rank| *first.entry((self.sent_bytes(rank), self.scratch(rank))).or_insert(rank);
        (0..self.ranks).map(of).collect()
    }

    /// Returns the elements of a rank's scratch memory by type: the matrices that it transforms in a window, and its pieces of others.
    pub fn scratch(&self, rank: usize) -> Vec<(DType, usize)> {
        longest(self.shares(rank).map(|(window, share)| (window.dtype, share.scratch)))
    }
}

/// Returns the largest number of elements of each type.
pub(crate) fn longest(lens: impl Iterator<Item = (DType, usize)>) -> Vec<(DType, usize)> {
    let mut longest: Vec<(DType, usize)> = Vec::new();
    for (dtype, len) in lens.filter(|(_, len)| *len > 0) {
        match longest.iter_mut().find(|(other, _)| *other == dtype) {
            Some((_, most)) => *most = len.max(*most),
            None => longest.push((dtype, len)),
        }
    }
    longest
}

/// Returns the matrices with elements of a bucket, with the type that their rule computes in.
fn matrices<'b>(
    b: usize,
    bucket: &'b BucketPlan,
    cost: &'b impl Fn(usize) -> Option<u64>,
    pieces: &'b impl Fn(usize, &Placed) -> Vec<MatrixPiece>,
) -> impl Iterator<Item = (DType, ExchangedMatrix)> {
    let of = move |placed: &Placed| {
        let (param, cost, pieces) = (placed.param, cost(placed.param)?, pieces(b, placed));
        let owner = pieces.first()?.rank;
        Some((bucket.update, ExchangedMatrix { bucket: b, param, owner, cost, pieces }))
    };
    bucket.params.iter().filter(|placed| placed.len > 0).filter_map(of)
}

impl MatrixPiece {
    /// Returns the index in the tensor of the first element, if the piece is contiguous there.
    fn start(&self) -> Option<usize> {
        together(&self.places)
    }
}

impl ExchangedMatrix {
    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.pieces.iter().map(|piece| piece.own.len()).sum()
    }

    /// Returns the number of elements that a rank holds.
    pub fn held_by(&self, rank: usize) -> usize {
        self.piece_of(rank).map_or(0, |piece| piece.own.len())
    }

    /// Returns true unless one rank has all elements, in their order.
    pub fn travels(&self) -> bool {
        self.pieces.len() != 1 || self.pieces[0].start().is_none()
    }

    fn piece_of(&self, rank: usize) -> Option<&MatrixPiece> {
        let at = self.pieces.binary_search_by_key(&rank, |piece| piece.rank).ok()?;
        Some(&self.pieces[at])
    }

    fn padded(&self) -> usize {
        self.elements().next_multiple_of(ALIGN)
    }
}

impl ExchangeWindow {
    /// Assigns owners, given the costs of each rank in earlier windows, to which the window's are added.
    fn assign(&mut self, totals: &mut [u64]) {
        let mut loads = vec![0u64; totals.len()];
        self.matrices.iter().filter(|m| !m.travels()).for_each(|m| loads[m.owner] += m.cost);
        let mut costliest_first: Vec<usize> =
            (0..self.matrices.len()).filter(|&i| self.matrices[i].travels()).collect();
        costliest_first.sort_by_key(|&i| Reverse(self.matrices[i].cost));
        for i in costliest_first {
            let matrix = &mut self.matrices[i];
            let key = |&rank: &usize| (loads[rank], Reverse(matrix.held_by(rank)), totals[rank], rank);
            if let Some(owner) = (0..totals.len()).min_by_key(key) {
                matrix.owner = owner;
                loads[owner] += matrix.cost;
            }
        }
        totals.iter_mut().zip(loads).for_each(|(total, load)| *total += load);
    }

    /// Returns the share of a rank.
    pub(crate) fn share(&self, rank: usize, ranks: usize) -> WindowShare {
        let mut share = WindowShare::default();
        for (i, matrix) in self.matrices.iter().enumerate() {
            match matrix.travels() {
                false if matrix.owner == rank => share.alone.push(i),
                true => share.add(i, matrix, rank),
                _ => {}
            }
        }
        // Pieces have the order of ranks, and places that of elements.
        share.messages.sort_by_key(|message| message.place.start);
        share.order = (0..share.messages.len()).collect();
        let messages = &share.messages;
        share.order.sort_by_key(|&m| (round(ranks, rank, messages[m].peer), messages[m].matrix));
        share
    }
}

impl WindowShare {
    /// Adds a matrix that travels.
    fn add(&mut self, i: usize, matrix: &ExchangedMatrix, rank: usize) {
        if matrix.owner == rank {
            let whole = self.room(matrix.elements());
            self.wholes.push((i, whole.clone()));
            for piece in &matrix.pieces {
                let place = self.place_of(i, piece, &whole);
                match piece.rank == rank {
                    true => self.pieces.push((i, place)),
                    false => self.messages.push(Message { matrix: i, peer: piece.rank, place, owned: true }),
                }
            }
        } else if let Some(piece) = matrix.piece_of(rank) {
            let place = self.room(piece.own.len());
            self.pieces.push((i, place.clone()));
            self.messages.push(Message { matrix: i, peer: matrix.owner, place, owned: false });
        }
    }

    /// Returns the place of a piece of a matrix that is transformed here: within it if the piece is contiguous there, otherwise one of its
    /// own.
    fn place_of(&mut self, matrix: usize, piece: &MatrixPiece, whole: &Range<usize>) -> Range<usize> {
        if let Some(start) = piece.start() {
            return whole.start + start..whole.start + start + piece.own.len();
        }
        let (place, whole) = (self.room(piece.own.len()), whole.clone());
        self.scattered.push(Scattered { matrix, place: place.clone(), whole, places: piece.places.clone() });
        place
    }

    /// Adds elements to the scratch memory, and returns their place.
    fn room(&mut self, len: usize) -> Range<usize> {
        let at = self.scratch;
        self.scratch += len.next_multiple_of(ALIGN);
        at..at + len
    }
}

/// Returns the round in which two of `ranks` ranks meet in a tournament: in each round a rank meets at most one other. If every rank starts
/// its messages by round, no rank waits for one that waits for it.
fn round(ranks: usize, a: usize, b: usize) -> usize {
    let last = ranks.next_multiple_of(2) - 1;
    let (low, high) = (a.min(b), a.max(b));
    if high == last { 2 * low % last.max(1) } else { (low + high) % last.max(1) }
}

#[cfg(test)]
mod tests;

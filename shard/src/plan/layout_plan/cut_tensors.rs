//! Exchange of a part's matrices, which its chunks or a mesh cut. Arithmetic only.

use crate::plan::bucket::Placed;
use crate::plan::layout_plan::Part;
use crate::plan::matrix_exchange::{self, MatrixExchange, MatrixPiece};
use crate::plan::overlap::overlap;
use crate::plan::tensor_cuts::{TensorCuts, places};
use crate::{Error, Seat, Stage};
use meshstep_optim::{Rule, Strided};
use std::ops::Range;
use std::sync::Arc;

impl Part {
    /// Sets the whole tensors of which a mesh has cut the part's parameters, for rules that see whole matrices. The ranks that hold them
    /// together are those that divide the state of one cut, of all cuts; at stage 0 one rank of each cut.
    pub fn with_cuts(self, cuts: TensorCuts) -> Result<Part, Error> {
        let params = self.layout.params();
        let counts = cuts.cuts.iter().map(Vec::len).chain([cuts.shapes.len()]);
        if cuts.cuts.is_empty() || !counts.into_iter().all(|count| count == params.len()) {
            let what = format!("cuts of other than {} tensors", params.len());
            return Err(Error::Shared {
                what,
                works: "a shape for each parameter, and its elements for each cut",
            });
        }
        if cuts.seats(self.exchanged_shards()).is_none() {
            let what = format!("cut tensors on the ranks {:?}", cuts.ranks);
            return Err(Error::Shared { what, works: "one rank for each shard of each cut" });
        }
        let wrong = |&i: &usize| !cuts.is_repeated(i) && !cuts.cover(i, params[i].len());
        if let Some(i) = (0..params.len()).find(wrong) {
            let what = format!(
                "cuts of {:?} that miss elements of {:?}, or repeat them",
                params[i].name(),
                cuts.shapes[i]
            );
            return Err(Error::Shared {
                what,
                works: "cuts of equal length with each element of the tensor once",
            });
        }
        Ok(Part { cuts: Some(Arc::new(cuts)), ..self })
    }

    /// Returns the cuts that [`with_cuts`](Self::with_cuts) has set.
    pub fn cuts(&self) -> Option<&TensorCuts> {
        self.cuts.as_deref()
    }

    /// Returns the shape of parameter `index` before a mesh cuts it, as far as [`with_cuts`](Self::with_cuts) has set it.
    pub(crate) fn whole_shape(&self, index: usize) -> &[usize] {
        self.cuts.as_ref().map_or(self.layout.params()[index].shape(), |cuts| &cuts.shapes[index])
    }

    /// Returns the name of a parameter that a mesh cuts without [`with_cuts`](Self::with_cuts).
    pub(crate) fn unknown_cut(&self) -> Option<&str> {
        let params = self.layout.params().iter().enumerate();
        let mut cut = params.filter(|(i, param)| self.in_model(*i).1 != param.len());
        cut.next().filter(|_| self.cuts.is_none()).map(|(_, param)| param.name())
    }

    /// Plans the exchange of the matrices that `rule` updates in pieces ([`Rule::by_matrix`]): without windows if neither chunks nor a mesh
    /// cut a parameter. Its ranks are those that divide the state, or those of the part's [cuts](Self::with_cuts).
    pub fn matrix_exchange(&self, rule: &(impl Rule + ?Sized)) -> MatrixExchange {
        if rule.by_matrix().is_none() {
            return MatrixExchange::default();
        }
        self.exchange_by(|param| matrix_exchange::cost(rule, self.whole_shape(param)))
    }

    /// Plans the exchange of the parameters for which `cost` returns the cost of their transformation.
    pub(crate) fn exchange_by(&self, cost: impl Fn(usize) -> Option<u64>) -> MatrixExchange {
        let Some(cuts) = &self.cuts else {
            return match self.is_uncut() {
                true => MatrixExchange::default(),
                false => MatrixExchange::new(&self.buckets, self.sizes.shards, cost, |b, placed| {
                    self.held(b, placed).into_iter().map(chunk).collect()
                }),
            };
        };
        let shards = self.exchanged_shards();
        let seats = cuts.seats(shards).unwrap_or_default();
        MatrixExchange::new(&self.buckets, cuts.ranks.len(), cost, |b, placed| {
            let held = self.held(b, placed);
            let piece = |cut: usize, (shard, own): &(usize, Range<usize>)| MatrixPiece {
                rank: seats[cut * shards + shard],
                own: own.clone(),
                places: places(&cuts.cuts[cut][placed.param], own),
            };
            let of_cut = |cut: usize| held.iter().map(move |held| piece(cut, held));
            let mut pieces: Vec<MatrixPiece> = (0..cuts.cuts.len()).flat_map(of_cut).collect();
            pieces.sort_by_key(|piece| piece.rank);
            pieces
        })
    }

    /// Returns the rank of a seat in the exchange of the part's matrices.
    pub(crate) fn exchange_rank(&self, seat: &Seat) -> usize {
        if self.cuts.is_some() { seat.tensors } else { seat.shard }
    }

    /// Returns the first shard, and the first rank in the exchange, that stores and exchanges as much as `seat`, for equal chunks. `alike`
    /// has the first rank that exchanges as much, by rank; it is empty without an exchange.
    pub(crate) fn first_alike(&self, seat: &Seat, alike: &[usize]) -> (usize, usize) {
        let first = alike.get(self.exchange_rank(seat)).copied().unwrap_or(0);
        match &self.cuts {
            Some(cuts) => (cuts.ranks.get(first).map_or(0, |rank| rank.shard), first),
            None => (first, 0),
        }
    }

    /// Returns the number of ranks of one cut that exchange matrices.
    fn exchanged_shards(&self) -> usize {
        if self.stage == Stage::Replicated { 1 } else { self.sizes.shards }
    }

    /// Returns the shards that update a parameter of bucket `b`, ascending, and their elements of it.
    fn held(&self, b: usize, placed: &Placed) -> Vec<(usize, Range<usize>)> {
        let range = placed.range();
        match self.stage {
            Stage::Replicated => vec![(0, 0..range.len())],
            Stage::WholeParams(_) => vec![(placed.owner, 0..range.len())],
            Stage::Zero1 | Stage::Zero2 | Stage::Zero3 => {
                let chunk = self.buckets[b].partition(self.sizes.shards).chunk_len();
                let held = |shard: usize| {
                    let both = overlap(&(shard * chunk..(shard + 1) * chunk), &range)?;
                    Some((shard, both.start - range.start..both.end - range.start))
                };
                (range.start / chunk..self.sizes.shards).map_while(held).collect()
            }
        }
    }
}

/// Returns the piece of a rank that holds consecutive elements of a whole tensor.
fn chunk((rank, own): (usize, Range<usize>)) -> MatrixPiece {
    let (first, run) = (own.start as u64, own.len().max(1) as u64);
    MatrixPiece { rank, places: vec![(0..own.len(), Strided { first, run, stride: 0 })], own }
}

//! Report of a difference: its first element and each rank's value there, the same report on every rank.

use super::Comparison;
use super::compare::{First, Seen};
use super::difference::{Difference, Held};
use super::hash;
use super::survey::{Item, Survey};
use crate::error::Error;
use crate::ranks::host_words;
use meshstep_comm::{Communicator, Reduction};

/// Number of parts compared at a time in the search for an element.
const PARTS: usize = 64;

impl Comparison<'_> {
    /// Builds the report of the difference `first`. Collective over all ranks.
    pub(super) fn explain(
        &mut self,
        survey: &Survey,
        seen: &Seen,
        kept: &[Option<u64>],
        first: First,
    ) -> Result<Difference, Error> {
        let item = survey.items[first.item];
        let mine = self.reducer.config.comm.rank() == first.rank;
        let hash = seen.hashes[first.item];
        let found = match survey.ranks(&item) {
            // Every such group searches, including the group in question.
            Some(ranks) => self.look_among(&item, &**ranks, hash)?,
            None if mine => self.look_alone(&item, kept.get(first.item).copied().flatten(), hash)?,
            None => Vec::new(),
        };
        let words = self.told_by(if mine { found } else { Vec::new() })?;
        let of_others = |i: &usize| survey.ranks(&survey.items[*i]).is_some_and(|ranks| ranks.rank() > 0);
        let differ = (0..survey.items.len()).filter(|&i| seen.differs[i]);
        let mut more = [differ.filter(|i| !of_others(i)).count() as u64];
        self.reduce_words(&mut more, Reduction::Sum)?;
        let param = self.params.entries[item.param].param.name().to_owned();
        let (slot, dtype) = (self.slot_name(&item), self.dtype(&item)?);
        let difference =
            Difference { param, slot, dtype, element: None, held: Vec::new(), wrote: None, more: 0 };
        Ok(Difference { more: more[0].saturating_sub(1), ..decode(&words, difference) })
    }

    /// Sends the words of the one rank that has any to every rank.
    fn told_by(&self, words: Vec<u64>) -> Result<Vec<u64>, Error> {
        let mut len = [words.len() as u64];
        self.reduce_words(&mut len, Reduction::Max)?;
        let mut all = words;
        all.resize(len[0] as usize, 0);
        self.reduce_words(&mut all, Reduction::Max)?;
        Ok(all)
    }

    fn reduce_words(&self, words: &mut [u64], reduction: Reduction) -> Result<(), Error> {
        Ok(host_words::all_reduce(
            &*self.reducer.config.comm,
            &self.params.options.queue,
            &self.params.options.meter,
            words,
            reduction,
        )?)
    }

    /// Finds the first element in which the ranks of a group differ, and encodes each rank's value; no words if they agree.
    /// Collective over the group.
    fn look_among(&mut self, item: &Item, ranks: &dyn Communicator, hash: u64) -> Result<Vec<u64>, Error> {
        let Some(index) = self.first_element(item, ranks)? else { return Ok(Vec::new()) };
        let (first, bits) = (self.piece(item)?.0, self.bits_at(item, index)?);
        let mut held = self.held_by(ranks, bits, hash)?;
        held.sort_by_key(|held| held.rank);
        Ok(encode(Some((first + index) as u64), None, &held))
    }

    /// Returns the bits and hash of each rank of a group, with its rank among all ranks. Collective over the group.
    pub(super) fn held_by(&self, ranks: &dyn Communicator, bits: u64, hash: u64) -> Result<Vec<Held>, Error> {
        let mut words = vec![0; 3 * ranks.world_size()];
        words[3 * ranks.rank()..][..3].copy_from_slice(&[self.reducer.config.comm.rank() as u64, bits, hash]);
        host_words::all_gather(ranks, &self.params.options.queue, &self.params.options.meter, &mut words)?;
        let held = |w: &[u64]| Held { rank: w[0] as usize, bits: w[1], hash: w[2] };
        Ok(words.chunks_exact(3).map(held).collect())
    }

    /// Finds the first element in which the ranks of a group differ, by comparing hashes of ever smaller parts.
    fn first_element(&mut self, item: &Item, ranks: &dyn Communicator) -> Result<Option<usize>, Error> {
        let mut range = 0..self.piece(item)?.1.len();
        loop {
            let len = range.len().div_ceil(PARTS).max(1);
            let parts: Vec<_> =
                range.clone().step_by(len).map(|start| start..range.end.min(start + len)).collect();
            let hashes: Result<Vec<u64>, Error> =
                parts.iter().map(|part| self.hash(item, Some(part.clone()))).collect();
            let same = self.same_among(ranks, &hashes?)?;
            let Some(k) = same.iter().position(|same| !same) else { return Ok(None) };
            range = parts[k].clone();
            if range.len() == 1 {
                return Ok(Some(range.start));
            }
        }
    }

    /// Finds the element of this rank's vector that changed since its last update.
    fn look_alone(&mut self, item: &Item, kept: Option<u64>, hash: u64) -> Result<Vec<u64>, Error> {
        let (queue, meter) = (self.params.options.queue.clone(), self.params.options.meter.clone());
        let rank = self.reducer.config.comm.rank();
        let (first, values) = self.piece(item)?;
        let was = kept.unwrap_or(hash);
        let change = host_words::read(&queue, &meter, values, |values| {
            hash::change(values, first, was, queue.threads())
        })?;
        let held = |bits| [Held { rank, bits, hash }];
        Ok(match change {
            Some(change) => encode(Some((first + change.index) as u64), Some(change.was), &held(change.is)),
            None => encode(None, None, &held(0)),
        })
    }

    /// Returns the bits of one element on this rank.
    fn bits_at(&mut self, item: &Item, index: usize) -> Result<u64, Error> {
        let (queue, meter) = (self.params.options.queue.clone(), self.params.options.meter.clone());
        let element = self.piece(item)?.1.slice(index..index + 1)?;
        Ok(host_words::read(&queue, &meter, element, |element| Ok(hash::bits(element.bytes()?)))?)
    }

    /// Returns the type of a vector; every rank knows it, even without elements of the vector.
    fn dtype(&mut self, item: &Item) -> Result<meshstep_tensor::DType, Error> {
        Ok(self.piece(item)?.1.dtype())
    }
}

/// Encodes a report as words; no words mean no report.
fn encode(element: Option<u64>, wrote: Option<u64>, held: &[Held]) -> Vec<u64> {
    let option = |value: Option<u64>| [value.is_some().into(), value.unwrap_or(0)];
    let held = held.iter().flat_map(|held| [held.rank as u64, held.bits, held.hash]);
    option(element).into_iter().chain(option(wrote)).chain(held).collect()
}

fn decode(words: &[u64], difference: Difference) -> Difference {
    let [is_element, element, is_wrote, wrote, ref held @ ..] = *words else { return difference };
    let held = held.chunks_exact(3).map(|w| Held { rank: w[0] as usize, bits: w[1], hash: w[2] });
    Difference {
        element: (is_element > 0).then_some(element as usize),
        wrote: (is_wrote > 0).then_some(wrote),
        held: held.collect(),
        ..difference
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshstep_tensor::DType;

    #[test]
    fn an_account_survives_the_wire() {
        let held = vec![Held { rank: 3, bits: 7, hash: 9 }, Held { rank: 5, bits: 8, hash: 1 }];
        let empty = Difference {
            param: "w".to_owned(),
            slot: "m",
            dtype: DType::F32,
            element: None,
            held: Vec::new(),
            wrote: None,
            more: 0,
        };
        for (element, wrote) in [(Some(4), None), (None, None), (Some(0), Some(0))] {
            let told = decode(&encode(element, wrote, &held), empty.clone());
            assert_eq!((told.element, told.wrote, &told.held), (element.map(|e| e as usize), wrote, &held));
        }
        assert_eq!(decode(&[], empty.clone()), empty);
    }
}

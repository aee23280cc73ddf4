//! One comparison: hashes within each group of ranks, then one word over the world, so that the ranks continue or stop together.

use super::Comparison;
use super::survey::{Item, Survey};
use crate::error::Error;
use crate::ranks::{agree, host_words};
use crate::update::params::Params;
use meshstep_comm::{Communicator, Reduction};
use std::fmt::Write;
use std::sync::Arc;
use twox_hash::XxHash3_64;

/// This rank's findings about each vector of a survey.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) hashes: Vec<u64>,
    pub(super) differs: Vec<bool>,
    pub(super) bytes: u64,
}

/// The first vector that differs anywhere, and the lowest rank that found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct First {
    pub(super) item: usize,
    pub(super) rank: usize,
}

impl First {
    /// Encodes earlier vectors as larger words, never 0.
    fn encode(self) -> u64 {
        !((self.item as u64) << 32 | self.rank as u64)
    }

    fn decode(word: u64) -> Option<First> {
        let (item, rank) = ((!word >> 32) as usize, (!word & 0xffff_ffff) as usize);
        (word != 0).then_some(First { item, rank })
    }
}

impl Comparison<'_> {
    /// Hashes every vector, and compares it with the ranks that hold the same, or with the hash kept from its last update.
    pub(super) fn compare(&mut self, survey: &Survey, kept: &[Option<u64>]) -> Result<Seen, Error> {
        let mut seen = Seen::default();
        for (i, item) in survey.items.iter().enumerate() {
            let hash = self.hash(item, None)?;
            seen.bytes += self.piece(item)?.1.size() as u64;
            seen.hashes.push(hash);
            let alone = item.group.is_none();
            seen.differs.push(alone && kept.get(i).copied().flatten().is_some_and(|kept| kept != hash));
        }
        for (g, group) in survey.groups.iter().enumerate() {
            let of_group = |item: &Item| item.group == Some(g);
            let mine: Vec<usize> = (0..survey.items.len()).filter(|&i| of_group(&survey.items[i])).collect();
            let hashes: Vec<u64> = mine.iter().map(|&i| seen.hashes[i]).collect();
            for (i, same) in mine.into_iter().zip(self.same_among(&**group, &hashes)?) {
                seen.differs[i] = !same;
            }
        }
        Ok(seen)
    }

    /// Compares each word over all ranks of a group. Collective: reduces the maximum of each word and of its complement.
    pub(super) fn same_among(&self, group: &dyn Communicator, words: &[u64]) -> Result<Vec<bool>, Error> {
        let (queue, meter) = (&self.params.options.queue, &self.params.options.meter);
        let mut both: Vec<u64> = words.iter().copied().chain(words.iter().map(|word| !word)).collect();
        host_words::all_reduce(group, queue, meter, &mut both, Reduction::Max)?;
        let (largest, not_smallest) = both.split_at(words.len());
        Ok(largest.iter().zip(not_smallest).map(|(largest, other)| *largest == !other).collect())
    }

    /// Returns the first difference on any rank, after comparing counters on all ranks. Collective over all ranks.
    pub(super) fn first_anywhere(&mut self, differs: &[bool]) -> Result<Option<First>, Error> {
        let world = Arc::clone(&self.reducer.config.comm);
        let first = differs.iter().position(|&differs| differs);
        let word = first.map_or(0, |item| First { item, rank: world.rank() }.encode());
        let digest = XxHash3_64::oneshot(self.counters.as_bytes());
        let mut words = [word, digest, !digest];
        let (queue, meter) = (&self.params.options.queue, &self.params.options.meter);
        host_words::all_reduce(&*world, queue, meter, &mut words, Reduction::Max)?;
        if words[1] != !words[2] {
            agree::same_everywhere(&*world, &self.params.options, &self.counters)?;
        }
        Ok(First::decode(words[0]))
    }
}

/// Returns everything besides parameters and state that must agree on all ranks, one `key = value` line per fact: the
/// hyperparameters that updates read, and the counters.
pub(crate) fn describe_counters(params: &Params, steps: u64, skips: u32) -> String {
    let mut text = format!("steps = {steps}\nsteps skipped in a row = {skips}\n");
    for (g, group) in params.groups.iter().enumerate() {
        group.describe(g, &mut text);
    }
    for entry in &params.entries {
        let _ = writeln!(text, "t of {:?} = {}", entry.param.name(), entry.t);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_vector_and_the_lowest_rank_win() {
        let word = |item, rank| First { item, rank }.encode();
        assert!(
            word(0, 0) > word(0, 1) && word(0, 70_000) > word(1, 0) && word(u32::MAX as usize - 1, 9) > 0
        );
        assert_eq!(First::decode(word(3, 5)), Some(First { item: 3, rank: 5 }));
        assert_eq!(First::decode(0), None);
    }
}

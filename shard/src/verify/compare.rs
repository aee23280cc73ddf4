//! One comparison: hashes within each group of ranks, then one word over the world, so that the ranks continue or stop together.

use super::Begun;
use super::survey::{Item, Survey};
use crate::optimizer::layout_state;
use crate::ranks::roles::know;
use crate::ranks::{agree, host_words};
use crate::{Error, Optimizer};
use meshstep_comm::{Communicator, Error as CommError, Op, Reduction};
use std::fmt::Write;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

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

impl Optimizer {
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
        let (queue, meter) = (&self.options.queue, &self.options.meter);
        let mut both: Vec<u64> = words.iter().copied().chain(words.iter().map(|word| !word)).collect();
        host_words::all_reduce(group, queue, meter, &mut both, Reduction::Max)?;
        let (largest, not_smallest) = both.split_at(words.len());
        Ok(largest.iter().zip(not_smallest).map(|(largest, other)| *largest == !other).collect())
    }

    /// Returns the first difference on any rank, after comparing counters on all ranks. Collective over all ranks.
    pub(super) fn first_anywhere(&mut self, differs: &[bool]) -> Result<Option<First>, Error> {
        let world = Arc::clone(self.comm());
        let first = differs.iter().position(|&differs| differs);
        let word = first.map_or(0, |item| First { item, rank: world.rank() }.encode());
        let counters = self.describe_counters()?;
        let digest = xxh3_64(counters.as_bytes());
        let mut words = [word, digest, !digest];
        let (queue, meter) = (&self.options.queue, &self.options.meter);
        host_words::all_reduce(&*world, queue, meter, &mut words, Reduction::Max)?;
        if words[1] != !words[2] {
            agree::same_everywhere(&*world, &self.options, &counters)?;
        }
        Ok(First::decode(words[0]))
    }

    /// Returns everything besides parameters and state that must agree on all ranks, one `key = value` line per fact: the
    /// hyperparameters that updates read, and the counters.
    pub(crate) fn describe_counters(&mut self) -> Result<String, Error> {
        #[cfg(feature = "cuda")]
        self.take_notes(true)?;
        let mut text =
            format!("steps = {}\nsteps skipped in a row = {}\n", self.progress.steps, self.progress.skips);
        for (g, group) in self.groups.iter().enumerate() {
            group.describe(g, &mut text);
        }
        for entry in &self.entries {
            let _ = writeln!(text, "t of {:?} = {}", entry.param.name(), entry.t);
        }
        Ok(text)
    }

    /// Begins a call that all ranks make together. If a rank is in the middle of a step, or makes another call, all ranks that
    /// still communicate get an error.
    pub(crate) fn call_together(&mut self, what: &str, ready: Result<(), Error>) -> Result<Begun, Error> {
        let begun = Begun::now();
        let text = match &ready {
            Ok(()) => format!("this call = {what}\n"),
            Err(error) => layout_state::objection(Some(error)),
        };
        let same = self.apart_from_steps(|all| {
            all.barrier_all()?;
            agree::same_everywhere(&**all.comm(), &all.options, &text)
        });
        ready?;
        let ((), sent) = same?;
        Ok(Begun { sent, ..begun })
    }

    /// Runs a barrier on each communicator that a step or a gather would use before that of all ranks, or instead of it for its
    /// words. A rank that steps or gathers meanwhile then causes a mismatch instead of a deadlock. Calls that may meet begin
    /// with it.
    pub(crate) fn barrier_all(&self) -> Result<(), Error> {
        let mut greeted = vec![Arc::clone(self.comm())];
        self.reducer.config.decision_comm.iter().for_each(|comm| know(&mut greeted, comm));
        for kept in &self.reducer.config.buckets {
            let extra_reductions = kept.among.extra_reductions.iter().map(|(comm, _)| comm);
            for comm in [&kept.among.shards].into_iter().chain(extra_reductions).chain(kept.gathers.iter()) {
                know(&mut greeted, comm);
            }
        }
        if greeted.len() == 1 {
            return Ok(()); // the call's own words use this communicator
        }
        self.greet_on(greeted)
    }

    /// Runs a barrier on each of these, starting all of them before waiting. It allocates nothing, because this rank may be out
    /// of memory, which the call's own words report. Among several errors it returns a mismatch, the cause of the rest.
    pub(crate) fn greet_on(&self, comms: Vec<Arc<dyn Communicator>>) -> Result<(), Error> {
        let (queue, mut started) = (&self.options.queue, Vec::new());
        for comm in comms {
            started.push(comm.start(Op::barrier(), self.reducer.gather_barrier.nothing()?, queue));
        }
        let answered: Vec<_> =
            started.into_iter().map(|started| host_words::land(started, queue).1).collect();
        let failed = answered.into_iter().filter_map(Result::err);
        let told = failed.min_by_key(|error| !matches!(error.cause(), CommError::Mismatch { .. }));
        told.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Aborts the run if communication has failed, or if this rank alone cannot continue, so that the other ranks do not wait.
    pub(crate) fn end_if_alone<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        match &result {
            Ok(_) | Err(Error::Differs(_) | Error::Verify(_) | Error::Disagree { .. }) => {}
            Err(error) => {
                if let Error::Comm(failure) = error {
                    self.reducer.poison(failure.clone());
                }
                self.reducer.abort();
            }
        }
        result
    }
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

//! Repair of a vector by majority vote; and a way to corrupt one bit, to test that verification notices.

use super::compare::Seen;
use super::difference::{Held, majority};
use super::survey::{Item, Slot, Survey, What};
use super::{Comparison, VerifyError};
use crate::error::Error;
use crate::ranks::host_words;
use crate::update::values::VectorKind;
use meshstep_comm::{Communicator, Op};
use meshstep_tensor::{Buffer, Category};
use std::sync::Arc;

/// Elements sent at a time.
const BLOCK: usize = 1 << 20;
/// Minimum number of ranks for a majority vote.
const VOTERS: usize = 3;

/// A repaired vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repaired {
    /// The parameter.
    pub param: String,
    /// `param`, `master`, or the state's name.
    pub slot: &'static str,
    /// Ranks with values that were overwritten.
    pub ranks: Vec<usize>,
    /// Rank that supplied their new values.
    pub from: usize,
}

impl Comparison<'_> {
    /// Overwrites every vector that disagrees with the majority, and returns the repairs. Collective.
    pub(crate) fn repair_all(&mut self) -> Result<Vec<Repaired>, Error> {
        let survey = self.survey(What::Held)?;
        let kept = self.verifier.kept.clone();
        let seen = self.compare(&survey, &kept)?;
        let votes = self.vote(&survey, &seen)?;
        let hopeless: Vec<bool> = (0..survey.items.len())
            .map(|i| seen.differs[i] && votes[i].as_deref().and_then(elect).is_none())
            .collect();
        if let Some(first) = self.first_anywhere(&hopeless)? {
            let difference = self.explain(&survey, &seen, &kept, first)?;
            return Err(VerifyError::NoMajority(Box::new(difference)).into());
        }
        let mut repaired = Vec::new();
        for (i, item) in survey.items.iter().enumerate() {
            let elected = votes[i].as_deref().and_then(elect);
            let (Some(from), Some(ranks), Some(held)) = (elected, survey.ranks(item), &votes[i]) else {
                continue;
            };
            let (hash, ranks) = (held[from].hash, Arc::clone(ranks));
            self.overwrite(item, &*ranks, from, seen.hashes[i] != hash)?;
            let mut odd: Vec<usize> = held.iter().filter(|h| h.hash != hash).map(|h| h.rank).collect();
            odd.sort_unstable();
            let (param, slot) = (self.params.name(item.param), self.slot_name(item));
            repaired.push(Repaired { param, slot, ranks: odd, from: held[from].rank });
        }
        Ok(repaired)
    }

    /// Returns each rank's value of every vector that differs in this rank's groups, by index in the group.
    fn vote(&mut self, survey: &Survey, seen: &Seen) -> Result<Vec<Option<Vec<Held>>>, Error> {
        let vote = |(i, item): (usize, &Item)| match survey.ranks(item).filter(|_| seen.differs[i]) {
            Some(ranks) => self.held_by(&**ranks, 0, seen.hashes[i]).map(Some),
            None => Ok(None),
        };
        survey.items.iter().enumerate().map(vote).collect()
    }

    /// Broadcasts `from`'s values in a group; a rank that is `wrong` stores them. Collective over the group.
    fn overwrite(
        &mut self,
        item: &Item,
        ranks: &dyn Communicator,
        from: usize,
        wrong: bool,
    ) -> Result<(), Error> {
        let (queue, meter) = (self.params.options.queue.clone(), self.params.options.meter.clone());
        let mut mine = self.piece_mut(item)?;
        let len = mine.len();
        for start in (0..len).step_by(BLOCK) {
            let block = start..len.min(start + BLOCK);
            let mut travels =
                Buffer::zeroed_on(&queue, block.len(), mine.dtype(), &meter, Category::Staging)?;
            queue.copy(mine.as_slice().slice(block.clone())?, travels.as_mut())?;
            host_words::run(ranks, &queue, Op::broadcast(from), &mut travels)?;
            if wrong {
                queue.copy(travels.as_slice(), mine.reborrow().slice(block)?)?;
            }
        }
        Ok(())
    }

    /// Flips one bit of a vector's element on this rank.
    pub(crate) fn flip_bit(&mut self, name: &str, slot: &str, element: usize, bit: u32) -> Result<(), Error> {
        let param = self.params.index(name)?;
        let wrong = || {
            let (param, slot) = (name.to_owned(), slot.to_owned());
            Error::from(VerifyError::NoSuchBit { param, slot, element, bit })
        };
        let of = |slot| Item { param, slot, group: None };
        let states = self.params.group_of(param).rule.state();
        let frozen = self.params.entries[param].param.frozen();
        let item = of(match (slot, states.iter().position(|state| *state == slot)) {
            ("param", _) => Slot::Kept(VectorKind::Params),
            ("grad", _) if !frozen => Slot::Grads,
            ("master", _) if !frozen => Slot::Kept(VectorKind::Master),
            (_, Some(i)) if !frozen => Slot::Kept(VectorKind::State(i)),
            _ => return Err(wrong()),
        });
        self.reducer.settle()?;
        let (first, values) = self.piece(&item)?;
        let size = values.dtype().size();
        let index = element.checked_sub(first).filter(|&i| i < values.len()).ok_or_else(wrong)?;
        if bit as usize >= 8 * size {
            return Err(wrong());
        }
        let (queue, meter) = (self.params.options.queue.clone(), self.params.options.meter.clone());
        let place = self.piece_mut(&item)?.slice(index..index + 1)?;
        let mut host = Buffer::zeroed(1, place.dtype(), &meter, Category::Staging)?;
        queue.download(place.as_slice(), host.as_mut())?;
        let byte =
            if cfg!(target_endian = "little") { bit as usize / 8 } else { size - 1 - bit as usize / 8 };
        host.as_mut().bytes_mut()?[byte] ^= 1 << (bit % 8);
        Ok(queue.upload(host.as_slice(), place)?)
    }
}

/// Returns the first rank of a group that holds the majority's values, if the group is large enough to vote.
fn elect(held: &[Held]) -> Option<usize> {
    let most = majority(held).filter(|_| held.len() >= VOTERS)?;
    held.iter().position(|held| held.hash == most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_are_no_majority() {
        let elect = |hashes: &[u64]| {
            let held: Vec<Held> =
                hashes.iter().enumerate().map(|(rank, &hash)| Held { rank, bits: 0, hash }).collect();
            elect(&held)
        };
        assert_eq!(elect(&[5, 5]), None);
        assert_eq!(elect(&[5]), None);
        assert_eq!(elect(&[5, 6, 6]), Some(1));
        assert_eq!(elect(&[5, 6, 6, 5]), None);
        assert_eq!(elect(&[5, 6, 7]), None);
        assert_eq!(elect(&[6, 5, 6, 7, 6]), Some(0));
    }
}

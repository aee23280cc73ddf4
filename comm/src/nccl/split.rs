//! Groups split from a communicator.

use super::core::Core;
use super::id::UniqueId;
use super::launch::{Patience, called};
use super::raw::Raw;
use super::start::joined;
use crate::communicator::nothing;
use crate::group::split_groups::{GroupPlace, places};
use crate::{Action, Error, Op};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Words of a unique id.
const ID: usize = UniqueId::LEN / 8;
/// Color word of a rank that joins no group.
const NOWHERE: u64 = u64::MAX;

impl Core {
    /// Creates the group of the ranks with the same color. A collective; the host waits for all ranks.
    pub(super) fn split(self: &Arc<Self>, color: Option<u32>, key: i64) -> Result<Option<Arc<Core>>, Error> {
        let _turn = self.turn();
        self.ledger().refuse()?;
        let calls = [(Op::of(Action::Split { color, key }), nothing()?)];
        if self.options.check {
            self.compare(&calls)?;
        }
        let number = self.number(calls.iter().map(|call| called(0, call)))?;
        let patience = Patience { called: called(number, &calls[0]), within: self.options.deadline };
        let asked = self.gather(&[color.map_or(NOWHERE, u64::from), key as u64], None, patience)?;
        let asked: Vec<_> = asked.chunks_exact(2).map(choice).collect();
        let places = places(&asked);
        let made =
            match self.raw.split(places[self.rank].map(|place| place.group), rank_in(&places, self.rank)) {
                Some(made) => made.and_then(|child| self.formed(child, &places, patience)),
                None => return self.split_by_id(&places, patience),
            };
        made.map_err(|error| self.broke(error))
    }

    /// Waits until NCCL has created a child communicator.
    fn formed(
        self: &Arc<Self>,
        child: Raw,
        places: &[Option<GroupPlace>],
        patience: Patience,
    ) -> Result<Option<Arc<Core>>, Error> {
        self.wait_until(patience, || Ok(self.raw.state()? && child.state()?))?;
        let child = self.take_in(child, places, patience)?;
        self.ledger().done(patience.called, self.now());
        Ok(child)
    }

    /// Wraps the rank's child communicator; `None` if the rank is in no group.
    fn take_in(
        &self,
        child: Raw,
        places: &[Option<GroupPlace>],
        patience: Patience,
    ) -> Result<Option<Arc<Core>>, Error> {
        let Some(GroupPlace { group, rank, world_size }) = places[self.rank] else {
            child.destroy();
            return Ok(None);
        };
        let mut name = DefaultHasher::new();
        (self.group, patience.called.op_number, group).hash(&mut name);
        let place = (rank, world_size, name.finish());
        Core::new(child, place, self.down(), self.device(), self.options.clone()).map(Some)
    }

    /// Splits with a library that lacks `ncclCommSplit`: the first rank of each group creates an id for it.
    fn split_by_id(
        self: &Arc<Self>,
        places: &[Option<GroupPlace>],
        patience: Patience,
    ) -> Result<Option<Arc<Core>>, Error> {
        let mut mine = [0; ID];
        if places[self.rank].is_some_and(|place| place.rank == 0) {
            let id = UniqueId::new().map_err(|error| self.broke(error))?;
            for (word, bytes) in mine.iter_mut().zip(id.as_bytes().chunks_exact(8)) {
                bytes.iter().for_each(|&byte| *word = *word << 8 | u64::from(byte));
            }
        }
        let ids = self.gather(&mine, None, patience)?;
        let formed = || match places[self.rank] {
            None => Ok(None),
            Some(place) => {
                let leads =
                    |other: &Option<GroupPlace>| other.is_some_and(|o| o.rank == 0 && o.group == place.group);
                let leader = places.iter().position(leads).unwrap_or(self.rank);
                let id = from_words(&ids[leader * ID..][..ID]);
                let child = joined(id, (place.rank, place.world_size), self.device(), &self.options)?;
                self.take_in(child, places, patience)
            }
        };
        let child = formed().map_err(|error| self.broke(error))?;
        self.ledger().done(patience.called, self.now());
        Ok(child)
    }
}

fn choice(words: &[u64]) -> (Option<u32>, i64) {
    (u32::try_from(words[0]).ok(), words[1] as i64)
}

fn rank_in(places: &[Option<GroupPlace>], rank: usize) -> usize {
    places[rank].map_or(0, |place| place.rank)
}

fn from_words(words: &[u64]) -> UniqueId {
    let mut bytes = [0; UniqueId::LEN];
    for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_be_bytes());
    }
    UniqueId::from_bytes(bytes)
}

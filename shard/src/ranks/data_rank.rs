//! Whose micro-batches a rank computes, where several ranks compute the same ones, and whether all ranks say the same of that.

use crate::{Error, Options, gather_words};
use meshstep_comm::Communicator;
use std::collections::BTreeMap;

/// Which micro-batches a rank computes, where several ranks may compute the same ones, each a part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataPlace {
    /// The same number on the ranks that compute the same micro-batches, another one on all others. Ranks that are alone with
    /// theirs may share one.
    pub index: u64,
    /// How many ranks those are, this one included.
    pub ranks: u64,
    /// Whether this one's weights count: those of one of them.
    pub first: bool,
}

/// What is wrong with the data places of ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// A place of no rank.
    #[error("data place {index} is said to be that of 0 ranks; count this one too")]
    NoRanks {
        /// The place.
        index: u64,
    },
    /// Two ranks at one place say different things of it: the lowest that do.
    #[error(
        "ranks {} and {} are at data place {index}, and say that {} and {} ranks are; give ranks with other micro-batches \
         another index, and the others the same number", ranks[0], ranks[1], says[0], says[1]
    )]
    Apart {
        /// The place.
        index: u64,
        /// The ranks.
        ranks: [usize; 2],
        /// How many ranks each says there are.
        says: [u64; 2],
    },
    /// A place of more or fewer ranks than they say.
    #[error(
        "{there} ranks are at data place {index}, and say that {says} are; an index is of the ranks that compute the same \
         micro-batches, all of them and no others"
    )]
    Count {
        /// The place.
        index: u64,
        /// How many ranks they say there are.
        says: u64,
        /// How many there are.
        there: u64,
    },
    /// A place where no rank's weights count, or those of several.
    #[error(
        "at data place {index} {firsts} of {ranks} ranks are the first; weights count on one of those that compute the \
         same micro-batches"
    )]
    Firsts {
        /// The place.
        index: u64,
        /// Ranks there.
        ranks: u64,
        /// Those that say they are the first.
        firsts: u64,
    },
}

impl DataPlace {
    /// That of a rank whose micro-batches no other computes.
    pub const OWN: DataPlace = DataPlace { index: 0, ranks: 1, first: true };

    /// What is wrong with it, whatever other ranks say.
    pub(crate) fn check(self) -> Result<(), PlaceError> {
        match self {
            DataPlace { index, ranks: 0, .. } => Err(PlaceError::NoRanks { index }),
            DataPlace { index, ranks: 1, first: false } => {
                Err(PlaceError::Firsts { index, ranks: 1, firsts: 0 })
            }
            _ => Ok(()),
        }
    }

    /// Refuses places that contradict each other, on every rank alike. Collective; a rank that cannot take part aborts the
    /// communicator.
    pub(crate) fn check_everywhere(self, comm: &dyn Communicator, options: &Options) -> Result<(), Error> {
        let words = [self.index, self.ranks, u64::from(self.first)];
        let all = gather_words(comm, options, &words).inspect_err(|_| comm.abort())?;
        let place = |words: &[u64]| DataPlace { index: words[0], ranks: words[1], first: words[2] == 1 };
        Ok(check_all(all.chunks(words.len()).map(place))?)
    }
}

/// What all ranks say of one index.
struct Said {
    rank: usize,
    ranks: u64,
    there: u64,
    firsts: u64,
}

/// Whether the places of all ranks, in their order, belong together.
fn check_all(places: impl Iterator<Item = DataPlace>) -> Result<(), PlaceError> {
    let mut said: BTreeMap<u64, Said> = BTreeMap::new();
    for (rank, DataPlace { index, ranks, first }) in places.enumerate() {
        let known = said.entry(index).or_insert(Said { rank, ranks, there: 0, firsts: 0 });
        if known.ranks != ranks {
            return Err(PlaceError::Apart { index, ranks: [known.rank, rank], says: [known.ranks, ranks] });
        }
        known.there += 1;
        known.firsts += u64::from(first);
    }
    for (index, Said { ranks, there, firsts, .. }) in said {
        // Ranks that are alone with their micro-batches need no numbers.
        if ranks > 1 && there != ranks {
            return Err(PlaceError::Count { index, says: ranks, there });
        }
        if ranks > 1 && firsts != 1 {
            return Err(PlaceError::Firsts { index, ranks, firsts });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_that_contradict_each_other_are_refused() {
        let all = |places: &[(u64, u64, bool)]| {
            check_all(places.iter().map(|&(index, ranks, first)| DataPlace { index, ranks, first }))
        };
        let own = (0, 1, true);
        assert_eq!(all(&[own; 4]), Ok(()));
        assert_eq!(
            all(&[(7, 2, false), (9, 1, true), (7, 2, true), (8, 3, true)]),
            Err(PlaceError::Count { index: 8, says: 3, there: 1 })
        );
        assert_eq!(all(&[(7, 2, false), (9, 1, true), (7, 2, true)]), Ok(()));
        let apart = PlaceError::Apart { index: 7, ranks: [1, 2], says: [2, 3] };
        assert_eq!(all(&[own, (7, 2, true), (7, 3, false), (7, 2, false)]), Err(apart));
        assert_eq!(
            all(&[own, (0, 2, true), (0, 2, false)]),
            Err(PlaceError::Apart { index: 0, ranks: [0, 1], says: [1, 2] })
        );
        // Twice two ranks of one index.
        let twice = [(3, 2, true), (3, 2, false), (3, 2, true), (3, 2, false)];
        assert_eq!(all(&twice), Err(PlaceError::Count { index: 3, says: 2, there: 4 }));
        let firsts = |firsts| Err(PlaceError::Firsts { index: 3, ranks: 2, firsts });
        assert_eq!(all(&[(3, 2, true), (3, 2, true)]), firsts(2));
        assert_eq!(all(&[(3, 2, false), (3, 2, false)]), firsts(0));
    }
}

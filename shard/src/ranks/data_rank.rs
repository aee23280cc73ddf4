//! Data place of a rank: the micro-batches it computes, if several ranks compute the same ones, and the check that ranks agree.

use crate::config::options::Options;
use crate::error::{DataRankError, Error};
use crate::ranks::agree::gather_words;
use meshstep_comm::Communicator;
use std::collections::BTreeMap;

/// Micro-batches that a rank computes; several ranks may compute the same ones, each for a part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataRank {
    /// Number shared by the ranks that compute the same micro-batches, and different on other ranks. All ranks with micro-batches
    /// of their own may use one number.
    pub index: u64,
    /// Size of the place: ranks that compute these micro-batches, including this rank.
    pub ranks: u64,
    /// True on the one rank of a place with weights that count.
    pub first: bool,
}

impl DataRank {
    /// Data place of a rank with micro-batches that no other rank computes.
    pub const OWN: DataRank = DataRank { index: 0, ranks: 1, first: true };

    /// Returns errors that do not depend on other ranks.
    pub(crate) fn check(self) -> Result<(), DataRankError> {
        match self {
            DataRank { index, ranks: 0, .. } => Err(DataRankError::NoRanks { index }),
            DataRank { index, ranks: 1, first: false } => {
                Err(DataRankError::Firsts { index, ranks: 1, firsts: 0 })
            }
            _ => Ok(()),
        }
    }

    /// Refuses contradictory places, with the same error on every rank. Collective; a rank that fails aborts the communicator.
    pub(crate) fn check_everywhere(self, comm: &dyn Communicator, options: &Options) -> Result<(), Error> {
        let words = [self.index, self.ranks, u64::from(self.first)];
        let all = gather_words(comm, options, &words).inspect_err(|_| comm.abort())?;
        let place = |words: &[u64]| DataRank { index: words[0], ranks: words[1], first: words[2] == 1 };
        Ok(check_all(all.chunks(words.len()).map(place))?)
    }
}

/// Values given for one index, over all ranks.
struct Said {
    rank: usize,
    ranks: u64,
    there: u64,
    firsts: u64,
}

/// Checks that the places of all ranks, in rank order, fit together.
fn check_all(places: impl Iterator<Item = DataRank>) -> Result<(), DataRankError> {
    let mut said: BTreeMap<u64, Said> = BTreeMap::new();
    for (rank, DataRank { index, ranks, first }) in places.enumerate() {
        let known = said.entry(index).or_insert(Said { rank, ranks, there: 0, firsts: 0 });
        if known.ranks != ranks {
            return Err(DataRankError::Apart {
                index,
                ranks: [known.rank, rank],
                says: [known.ranks, ranks],
            });
        }
        known.there += 1;
        known.firsts += u64::from(first);
    }
    for (index, Said { ranks, there, firsts, .. }) in said {
        // Places of one rank may share an index.
        if ranks > 1 && there != ranks {
            return Err(DataRankError::Count { index, says: ranks, there });
        }
        if ranks > 1 && firsts != 1 {
            return Err(DataRankError::Firsts { index, ranks, firsts });
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
            check_all(places.iter().map(|&(index, ranks, first)| DataRank { index, ranks, first }))
        };
        let own = (0, 1, true);
        assert_eq!(all(&[own; 4]), Ok(()));
        assert_eq!(
            all(&[(7, 2, false), (9, 1, true), (7, 2, true), (8, 3, true)]),
            Err(DataRankError::Count { index: 8, says: 3, there: 1 })
        );
        assert_eq!(all(&[(7, 2, false), (9, 1, true), (7, 2, true)]), Ok(()));
        let apart = DataRankError::Apart { index: 7, ranks: [1, 2], says: [2, 3] };
        assert_eq!(all(&[own, (7, 2, true), (7, 3, false), (7, 2, false)]), Err(apart));
        assert_eq!(
            all(&[own, (0, 2, true), (0, 2, false)]),
            Err(DataRankError::Apart { index: 0, ranks: [0, 1], says: [1, 2] })
        );
        // One index for two pairs of ranks.
        let twice = [(3, 2, true), (3, 2, false), (3, 2, true), (3, 2, false)];
        assert_eq!(all(&twice), Err(DataRankError::Count { index: 3, says: 2, there: 4 }));
        let firsts = |firsts| Err(DataRankError::Firsts { index: 3, ranks: 2, firsts });
        assert_eq!(all(&[(3, 2, true), (3, 2, true)]), firsts(2));
        assert_eq!(all(&[(3, 2, false), (3, 2, false)]), firsts(0));
    }
}

//! Identity of a group of ranks, which its members compute without a message.

/// Identity of a group: 128 bits that follow from the channels by which it was split from the world. Groups of one split have the
/// same identity and no common rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GroupId([u64; 2]);

impl GroupId {
    /// The group of all ranks.
    pub(super) const WORLD: GroupId = GroupId([0x9e37_79b9_7f4a_7c15, 0xd1b5_4a32_d192_ed03]);

    /// Returns the identity of a group that this one splits off under `channel`.
    pub(super) fn split(self, channel: u64) -> GroupId {
        let [high, low] = self.0;
        let high = mixed(high ^ mixed(channel.wrapping_add(1)));
        GroupId([high, mixed(low.wrapping_add(mixed(channel ^ high)))])
    }

    /// Returns the identity as words of a message.
    pub(super) fn words(self) -> [u64; 2] {
        self.0
    }

    /// Returns the identity from the words of a message.
    pub(super) fn of_words(words: [u64; 2]) -> Self {
        GroupId(words)
    }
}

/// Mixes the bits of a word so that each depends on all; one to one (the finalizer of SplitMix64).
fn mixed(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn groups_of_different_splits_differ() {
        let mut all = HashSet::from([GroupId::WORLD]);
        let mut parents = vec![GroupId::WORLD];
        for _ in 0..3 {
            let splits = parents.iter().flat_map(|parent| (0..30).map(|channel| parent.split(channel)));
            parents = splits.collect();
            all.extend(&parents);
        }
        assert_eq!(all.len(), 1 + 30 + 900 + 27_000);
        assert_eq!(GroupId::of_words(GroupId::WORLD.words()), GroupId::WORLD);
    }
}

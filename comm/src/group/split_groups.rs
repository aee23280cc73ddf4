//! Groups of a split from the ranks' colors and keys. Arithmetic only.

/// A rank's place after a split: index of its group in order of color, its rank there, and the group's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupPlace {
    pub(crate) group: usize,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
}

/// Returns every rank's place: ranks of equal color form a group, ordered by key and then by rank; `None` for a rank without a
/// color.
pub(crate) fn places(asked: &[(Option<u32>, i64)]) -> Vec<Option<GroupPlace>> {
    let mut colours: Vec<u32> = asked.iter().filter_map(|&(colour, _)| colour).collect();
    colours.sort_unstable();
    colours.dedup();
    let mut places = vec![None; asked.len()];
    for (group, &colour) in colours.iter().enumerate() {
        let mut members: Vec<usize> =
            (0..asked.len()).filter(|&rank| asked[rank].0 == Some(colour)).collect();
        members.sort_by_key(|&rank| (asked[rank].1, rank));
        for (rank, &member) in members.iter().enumerate() {
            places[member] = Some(GroupPlace { group, rank, world_size: members.len() });
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_order_ranks_and_ties_keep_their_order() {
        let asked = [(Some(7), 1), (None, 0), (Some(7), -3), (Some(2), 0), (Some(7), 1)];
        let place = |group, rank, world_size| Some(GroupPlace { group, rank, world_size });
        let expected = [place(1, 1, 3), None, place(1, 0, 3), place(0, 0, 1), place(1, 2, 3)];
        assert_eq!(places(&asked), expected);
    }

    proptest! {
        #[test]
        fn each_group_has_each_of_its_ranks_once(
            asked in prop::collection::vec((prop::option::of(0u32..4), -2i64..3), 1..12)
        ) {
            let places = places(&asked);
            for (a, place) in asked.iter().zip(&places) {
                prop_assert_eq!(a.0.is_some(), place.is_some());
            }
            let mut taken: Vec<_> = places.iter().flatten().map(|p| (p.group, p.rank)).collect();
            taken.sort_unstable();
            let mut expected = Vec::new();
            for place in places.iter().flatten().filter(|p| p.rank == 0) {
                expected.extend((0..place.world_size).map(|rank| (place.group, rank)));
            }
            expected.sort_unstable();
            prop_assert_eq!(taken, expected);
        }
    }
}

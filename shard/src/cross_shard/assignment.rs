//! Assignment of ranks to the groups that reduce together. Arithmetic only.

/// Reason why lists of ranks are not an assignment to groups.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AssignmentError {
    /// The rank does not exist.
    #[error("group {group} has rank {rank}; there are {world_size} ranks, from 0")]
    OutOfRange {
        /// The rank.
        rank: usize,
        /// Its group.
        group: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// The rank would reduce twice.
    #[error("rank {rank} is in group {first} and in group {second}; every rank is in one group, once")]
    Twice {
        /// The rank.
        rank: usize,
        /// The first group that lists the rank.
        first: usize,
        /// The second group that lists the rank.
        second: usize,
    },
    /// A rank is in no group.
    #[error("rank {rank} is in no group; every rank is in one group, once")]
    Uncovered {
        /// The lowest such rank.
        rank: usize,
    },
    /// Groups have different sizes, so their replicas would count differently.
    #[error("group {group} has {len} ranks and group 0 has {expected}; groups are of equal size")]
    Unequal {
        /// The first group that differs.
        group: usize,
        /// Its size.
        len: usize,
        /// The first group's size.
        expected: usize,
    },
}

meshstep_tensor::debug_is_display!(AssignmentError);

/// Returns the group of every rank, if `groups` contain each of `world_size` ranks exactly once and are of equal size.
pub(super) fn group_of(groups: &[Vec<usize>], world_size: usize) -> Result<Vec<usize>, AssignmentError> {
    let mut of = vec![None; world_size];
    for (group, ranks) in groups.iter().enumerate() {
        for &rank in ranks {
            let slot = of.get_mut(rank).ok_or(AssignmentError::OutOfRange { rank, group, world_size })?;
            if let Some(first) = slot.replace(group) {
                return Err(AssignmentError::Twice { rank, first, second: group });
            }
        }
    }
    let expected = groups.first().map_or(0, Vec::len);
    if let Some(rank) = of.iter().position(Option::is_none) {
        return Err(AssignmentError::Uncovered { rank });
    }
    if let Some(group) = groups.iter().position(|ranks| ranks.len() != expected) {
        return Err(AssignmentError::Unequal { group, len: groups[group].len(), expected });
    }
    Ok(of.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn refused(groups: &[&[usize]], world_size: usize) -> String {
        let groups: Vec<Vec<usize>> = groups.iter().map(|g| g.to_vec()).collect();
        group_of(&groups, world_size).unwrap_err().to_string()
    }

    #[test]
    fn what_does_not_cover_every_rank_once_is_refused() {
        assert!(refused(&[&[0, 1], &[1, 2]], 3).starts_with("rank 1 is in group 0 and in group 1;"));
        assert!(refused(&[&[0, 0]], 2).starts_with("rank 0 is in group 0 and in group 0;"));
        assert!(refused(&[&[0, 1], &[3, 4]], 5).starts_with("rank 2 is in no group;"));
        assert!(refused(&[], 1).starts_with("rank 0 is in no group;"));
        assert_eq!(refused(&[&[0], &[1, 7]], 3), "group 1 has rank 7; there are 3 ranks, from 0");
        assert!(refused(&[&[0, 1], &[2]], 3).starts_with("group 1 has 1 ranks and group 0 has 2;"));
        assert!(refused(&[&[0, 1], &[]], 2).starts_with("group 1 has 0 ranks and group 0 has 2;"));
    }

    proptest! {
        /// Any permutation cut into equal parts is an assignment; changing one rank into another makes it invalid.
        #[test]
        fn equal_parts_of_all_ranks_are_an_assignment(
            order in (1usize..5, 1usize..5).prop_flat_map(|(n, size)| {
                (Just(size), Just((0..n * size).collect::<Vec<usize>>()).prop_shuffle())
            }),
            at in 0usize..16,
            other in 0usize..20,
        ) {
            let (size, ranks) = order;
            let mut groups: Vec<Vec<usize>> = ranks.chunks(size).map(<[usize]>::to_vec).collect();
            let of = group_of(&groups, ranks.len()).unwrap();
            for (g, group) in groups.iter().enumerate() {
                prop_assert!(group.iter().all(|&rank| of[rank] == g));
            }
            let at = at % ranks.len();
            prop_assume!(other != ranks[at]);
            groups[at / size][at % size] = other;
            prop_assert!(group_of(&groups, ranks.len()).is_err());
        }
    }
}

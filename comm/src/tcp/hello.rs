//! First message of a connection between ranks: the group and the rank for which it was opened.

use twox_hash::XxHash3_128;

/// Group of ranks: the generation, and a digest of the splits that lead to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GroupId {
    pub(super) generation: u64,
    path: u128,
}

impl GroupId {
    /// The group of all ranks.
    pub(super) fn world(generation: u64) -> Self {
        GroupId { generation, path: 0 }
    }

    /// Group of `members`, split off under `channel`.
    pub(super) fn child(self, members: &[usize], channel: u64) -> Self {
        let members = members.iter().flat_map(|member| (*member as u64).to_le_bytes());
        let path: Vec<u8> =
            self.path.to_le_bytes().into_iter().chain(channel.to_le_bytes()).chain(members).collect();
        GroupId { generation: self.generation, path: XxHash3_128::oneshot(&path) }
    }
}

/// The message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) group: GroupId,
    /// Rank of the caller in the group.
    pub(super) from: usize,
    /// True if the caller seals its records.
    pub(super) sealed: bool,
}

impl Hello {
    pub(super) fn encode(self) -> Vec<u8> {
        let Hello { group, from, sealed } = self;
        let mut bytes = group.generation.to_le_bytes().to_vec();
        bytes.extend(group.path.to_le_bytes());
        bytes.extend((from as u64).to_le_bytes());
        bytes.push(u8::from(sealed));
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (generation, rest) = bytes.split_first_chunk::<8>()?;
        let (path, rest) = rest.split_first_chunk::<16>()?;
        let (from, rest) = rest.split_first_chunk::<8>()?;
        let [sealed @ (0 | 1)] = *rest else { return None };
        let group = GroupId { generation: u64::from_le_bytes(*generation), path: u128::from_le_bytes(*path) };
        let from = usize::try_from(u64::from_le_bytes(*from)).ok()?;
        Some(Hello { group, from, sealed: sealed == 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_survives_the_way_and_its_parts_do_not() {
        let group = GroupId::world(7).child(&[2, 0], 5);
        for sealed in [false, true] {
            let hello = Hello { group, from: 3, sealed };
            let bytes = hello.encode();
            assert_eq!(Hello::decode(&bytes), Some(hello));
            assert!((0..bytes.len()).all(|len| Hello::decode(&bytes[..len]).is_none()));
            assert_eq!(Hello::decode(&[bytes, vec![0]].concat()), None);
        }
    }

    #[test]
    fn groups_differ_by_generation_channel_members_and_path() {
        let world = GroupId::world(0);
        let groups = [
            world,
            GroupId::world(1),
            world.child(&[0, 1], 1),
            world.child(&[0, 1], 2),
            world.child(&[1, 0], 1),
            world.child(&[0, 1], 1).child(&[0, 1], 1),
        ];
        let distinct: std::collections::HashSet<_> = groups.into_iter().collect();
        assert_eq!(distinct.len(), groups.len());
    }
}

//! Hosts of a group's ranks, and the rank that relays bytes within a host. Arithmetic only: no memory, no communication.

use std::collections::HashMap;

/// Hosts of the ranks of a group.
///
/// Bytes for all ranks cross the link to a host once: the writer sends them to one rank of that host, its relay, which passes them on to
/// the others. Writers of one host have different relays as far as ranks last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hosts {
    /// Host of each rank.
    of: Vec<usize>,
    /// Index of each rank among the ranks of its host.
    place: Vec<usize>,
    /// Ranks of each host.
    ranks: Vec<Vec<usize>>,
}

impl Hosts {
    /// Takes a number for each rank; ranks with the same number share a host.
    pub(crate) fn new(numbers: &[usize]) -> Self {
        let (mut known, mut ranks) = (HashMap::new(), Vec::<Vec<usize>>::new());
        let (mut of, mut place) = (Vec::new(), Vec::new());
        for (rank, number) in numbers.iter().enumerate() {
            let host = *known.entry(number).or_insert(ranks.len());
            if host == ranks.len() {
                ranks.push(Vec::new());
            }
            of.push(host);
            place.push(ranks[host].len());
            ranks[host].push(rank);
        }
        Hosts { of, place, ranks }
    }

    /// Returns `ranks` ranks in blocks of `size`, each block on a host.
    pub(crate) fn blocks(ranks: usize, size: usize) -> Self {
        Hosts::new(&(0..ranks).map(|rank| rank / size.max(1)).collect::<Vec<_>>())
    }

    /// Returns true if two ranks share a host.
    pub(crate) fn share(&self, a: usize, b: usize) -> bool {
        self.of[a] == self.of[b]
    }

    /// Returns the rank from which rank `to` gets what `from` writes to all: `from` itself, or a rank of its own host.
    pub(super) fn sender(&self, from: usize, to: usize) -> usize {
        let relay = self.relay(from, to);
        if relay == to { from } else { relay }
    }

    /// Returns true if `rank` passes on to its host what `from` writes to all.
    pub(super) fn passes_on(&self, from: usize, rank: usize) -> bool {
        !self.share(from, rank) && self.relay(from, rank) == rank
    }

    /// Returns the hosts of `members`, in their order.
    pub(super) fn split(&self, members: &[usize]) -> Self {
        Hosts::new(&members.iter().map(|rank| self.of[*rank]).collect::<Vec<_>>())
    }

    /// Returns the rank of `to`'s host that gets what `from` writes to all, from `from` itself: `to` if they share a host.
    fn relay(&self, from: usize, to: usize) -> usize {
        if self.share(from, to) {
            return to;
        }
        let ranks = &self.ranks[self.of[to]];
        ranks[self.place[from] % ranks.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_for_all_reach_each_host_once_and_each_rank() {
        let groups: [&[usize]; 6] =
            [&[0], &[0, 0, 0], &[0, 1, 2], &[0, 0, 1, 1], &[5, 1, 5, 1, 1, 5], &[0, 1, 1, 1, 2, 2, 0, 2]];
        for of in groups {
            let (hosts, n) = (Hosts::new(of), of.len());
            for from in 0..n {
                for host in of {
                    let direct = (0..n).filter(|to| of[*to] == *host && hosts.sender(from, *to) == from);
                    let expected =
                        if *host == of[from] { of.iter().filter(|h| *h == host).count() } else { 1 };
                    assert_eq!(direct.count(), expected, "{of:?}: from {from} to host {host}");
                }
                for to in (0..n).filter(|to| *to != from) {
                    let sender = hosts.sender(from, to);
                    assert!(sender == from || hosts.share(sender, to) && hosts.passes_on(from, sender));
                    assert!(!hosts.passes_on(from, to) || hosts.sender(from, to) == from);
                }
            }
        }
    }

    #[test]
    fn writers_of_a_host_have_different_relays() {
        let hosts = Hosts::blocks(8, 4);
        assert_eq!([0, 1, 2, 3].map(|from| hosts.relay(from, 4)), [4, 5, 6, 7]);
        assert_eq!(hosts.split(&[7, 0, 5]), Hosts::new(&[1, 0, 1]));
        assert_eq!(hosts.split(&[7, 0, 5]).relay(1, 2), 0);
    }
}

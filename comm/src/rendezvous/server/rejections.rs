//! Report of rejected connections.

use super::super::TurnedAway;
use std::collections::VecDeque;

/// The last few rejected connections.
#[derive(Debug, Default)]
pub(super) struct Rejections(VecDeque<TurnedAway>);

impl Rejections {
    /// Number of connections that are remembered.
    const MAX: usize = 4;

    pub(super) fn push(&mut self, turned_away: TurnedAway) {
        if self.0.len() == Self::MAX {
            self.0.pop_front();
        }
        self.0.push_back(turned_away);
    }

    pub(super) fn list(&self) -> Vec<TurnedAway> {
        self.0.iter().cloned().collect()
    }
}

//! A rank's copy of the store's messages, in the store's order, and waits on it.

use super::link::after;
use super::message::Message;
use super::{Broken, Error, Failure, Why};
use crate::sync::{Condvar, Mutex};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Presence of a rank in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Presence {
    Awaited,
    Here,
    Left,
    Lost,
}

/// State derived from the messages applied and from the end of this rank's own connection.
#[derive(Debug)]
pub(super) struct StoreView {
    ranks: Vec<Presence>,
    values: HashMap<(u64, Vec<u8>), Vec<u8>>,
    failures: Vec<Failure>,
    broken: Option<Broken>,
    /// True if no more messages will come.
    pub(super) over: bool,
    /// True if this rank's store was dropped.
    pub(super) closed: bool,
}

impl StoreView {
    pub(super) fn new(world_size: usize) -> Self {
        StoreView {
            ranks: vec![Presence::Awaited; world_size],
            values: HashMap::new(),
            failures: Vec::new(),
            broken: None,
            over: false,
            closed: false,
        }
    }

    /// Applies a message; `None` if stores do not send it to all ranks.
    pub(super) fn apply(&mut self, message: Message) -> Option<()> {
        match message {
            Message::Set { generation, key, value } => {
                self.values.insert((generation, key), value);
            }
            Message::Fail { rank, generation, text } => {
                self.failures.push(Failure::Published { rank, generation, text });
            }
            Message::Joined { rank } => *self.ranks.get_mut(rank)? = Presence::Here,
            Message::Left { rank } => *self.ranks.get_mut(rank)? = Presence::Left,
            Message::Lost { rank, why } => {
                *self.ranks.get_mut(rank)? = Presence::Lost;
                self.failures.push(Failure::Lost { rank, why });
            }
            Message::Broken(broken) => {
                self.broken.get_or_insert(broken);
            }
            _ => return None,
        }
        Some(())
    }

    /// Records the end of the connection to the store, which rank 0 runs.
    pub(super) fn end(&mut self, why: Why) {
        self.over = true;
        if !self.closed && !matches!(self.ranks[0], Presence::Left | Presence::Lost) {
            self.ranks[0] = Presence::Lost;
            self.failures.push(Failure::Lost { rank: 0, why });
        }
    }

    pub(super) fn value(&self, generation: u64, key: &[u8]) -> Option<&Vec<u8>> {
        // The map's key owns its bytes; keys are short.
        self.values.get(&(generation, key.to_vec()))
    }

    /// Returns the ranks that have not joined yet.
    pub(super) fn missing(&self) -> Vec<usize> {
        self.those(&Presence::Awaited)
    }

    fn those(&self, presence: &Presence) -> Vec<usize> {
        (0..self.ranks.len()).filter(|&rank| self.ranks[rank] == *presence).collect()
    }

    /// Returns the first failure that concerns `generation`; a lost rank concerns all generations.
    pub(super) fn failure(&self, generation: u64) -> Option<&Failure> {
        self.failures.iter().find(|failure| match failure {
            Failure::Published { generation: of, .. } => *of == generation,
            Failure::Lost { .. } => true,
        })
    }

    /// Returns the first loss of a rank, if any.
    pub(super) fn lost(&self) -> Option<&Failure> {
        self.failures.iter().find(|failure| matches!(failure, Failure::Lost { .. }))
    }

    /// Returns one of `ranks` that left, or rank 0 if it left, as no wait can succeed without it.
    pub(super) fn left(&self, ranks: &[usize]) -> Option<usize> {
        let mut those = ranks.iter().copied().chain([0]);
        those.find(|&rank| self.ranks[rank] == Presence::Left)
    }

    pub(super) fn broken(&self) -> Option<&Broken> {
        self.broken.as_ref()
    }
}

/// A view that one thread writes and others wait on.
#[derive(Debug)]
pub(super) struct Shared {
    view: Mutex<StoreView>,
    changed: Condvar,
}

impl Shared {
    pub(super) fn new(world_size: usize) -> Self {
        Shared { view: Mutex::new(StoreView::new(world_size)), changed: Condvar::new() }
    }

    pub(super) fn read<T>(&self, look: impl FnOnce(&StoreView) -> T) -> T {
        look(&self.view.lock())
    }

    pub(super) fn write<T>(&self, change: impl FnOnce(&mut StoreView) -> T) -> T {
        let result = change(&mut self.view.lock());
        self.changed.notify_all();
        result
    }

    /// Waits for the first result of `look`; returns `late` of the view at the timeout.
    pub(super) fn wait<T>(
        &self,
        within: Duration,
        mut look: impl FnMut(&StoreView) -> Option<T>,
        late: impl FnOnce(&StoreView) -> T,
    ) -> T {
        let until = after(within);
        let mut view = self.view.lock();
        loop {
            if let Some(found) = look(&view) {
                return found;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return late(&view);
            }
            view = self.changed.wait(view, Some(left));
        }
    }
}

impl From<&Failure> for Error {
    fn from(failure: &Failure) -> Self {
        Error::Failed(failure.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn published(rank: usize, generation: u64) -> Message {
        Message::Fail { rank, generation, text: "x".to_owned() }
    }

    #[test]
    fn a_failure_concerns_its_generation_and_a_lost_rank_all() {
        let mut view = StoreView::new(3);
        view.apply(published(1, 5)).unwrap();
        assert_eq!(view.failure(4), None);
        assert!(matches!(view.failure(5), Some(Failure::Published { rank: 1, .. })));
        assert_eq!(view.failure(6), None);
        assert_eq!(view.lost(), None);
        view.apply(Message::Lost { rank: 2, why: Why::Closed }).unwrap();
        for generation in [0, 4, 6, u64::MAX] {
            assert_eq!(view.failure(generation), view.lost());
        }
        // The first of the two failures counts.
        assert!(matches!(view.failure(5), Some(Failure::Published { .. })));
    }

    #[test]
    fn values_are_of_their_generation_and_the_last_counts() {
        let mut view = StoreView::new(1);
        let set = |generation, value| Message::Set { generation, key: b"k".to_vec(), value: vec![value] };
        [set(0, 1), set(1, 2), set(0, 3)].into_iter().for_each(|message| view.apply(message).unwrap());
        assert_eq!(view.value(0, b"k"), Some(&vec![3]));
        assert_eq!(view.value(1, b"k"), Some(&vec![2]));
        assert_eq!(view.value(2, b"k"), None);
        assert_eq!(view.value(0, b"l"), None);
    }

    #[test]
    fn the_end_of_the_connection_is_the_loss_of_rank_0_unless_it_left() {
        let mut lost = StoreView::new(2);
        lost.end(Why::Forged);
        assert_eq!(lost.failure(0), Some(&Failure::Lost { rank: 0, why: Why::Forged }));
        let mut left = StoreView::new(2);
        left.apply(Message::Left { rank: 0 }).unwrap();
        left.end(Why::Closed);
        assert_eq!((left.failure(0), left.left(&[1])), (None, Some(0)));
    }

    #[test]
    fn a_rank_that_does_not_exist_is_no_message() {
        let mut view = StoreView::new(2);
        for message in
            [Message::Joined { rank: 2 }, Message::Lost { rank: 9, why: Why::Closed }, Message::Bye]
        {
            assert_eq!(view.apply(message), None);
        }
        assert_eq!(view.missing(), [0, 1]);
    }
}

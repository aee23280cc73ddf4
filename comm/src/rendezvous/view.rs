//! A rank's copy of the store's messages, in the store's order, and waits on it.

use super::link::after;
use super::message::Message;
use super::{Broken, Error, Failure, Why};
use crate::sync::{Condvar, Mutex};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Presence of a rank in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Presence {
    Awaited,
    Here,
    Left,
    Lost,
}

/// Values of all ranks, or a rank that left before the gather.
type GatherResult = Result<Vec<Vec<u8>>, usize>;

/// State derived from the messages applied and from the end of this rank's own connection.
#[derive(Debug)]
pub(super) struct StoreView {
    ranks: Vec<Presence>,
    /// Number of ranks that have not joined yet.
    awaited: usize,
    values: BTreeMap<u64, HashMap<Vec<u8>, Vec<u8>>>,
    failures: Vec<Failure>,
    /// Generations below this one are dropped.
    oldest: u64,
    gathers: OwnGathers,
    broken: Option<Broken>,
    /// True if no more messages will come.
    pub(super) over: bool,
    /// True if this rank's store was dropped.
    pub(super) closed: bool,
}

/// Gathers that this rank has entered, by tickets.
#[derive(Debug, Default)]
struct OwnGathers {
    next_ticket: u64,
    /// Tickets without a result, in the order of their entry.
    entered: BTreeMap<(u64, String), VecDeque<u64>>,
    /// Results that nobody has taken; `None` until one arrives, and no entry for a gather that was given up.
    results: HashMap<u64, Option<GatherResult>>,
    /// Answers of the store: the ranks that a gather awaits.
    absent: BTreeMap<(u64, String), Vec<usize>>,
}

impl OwnGathers {
    fn enter(&mut self, key: (u64, String)) -> u64 {
        self.next_ticket += 1;
        self.entered.entry(key).or_default().push_back(self.next_ticket);
        self.results.insert(self.next_ticket, None);
        self.next_ticket
    }

    /// Records the result of the first gather of this name; `None` if this rank has not entered one.
    fn finish(&mut self, key: &(u64, String), result: GatherResult) -> Option<()> {
        let queue = self.entered.get_mut(key)?;
        let ticket = queue.pop_front()?;
        if queue.is_empty() {
            self.entered.remove(key);
        }
        if let Some(waiting) = self.results.get_mut(&ticket) {
            *waiting = Some(result);
        }
        Some(())
    }

    fn take(&mut self, ticket: u64) -> Option<GatherResult> {
        self.results.get_mut(&ticket)?.take()
    }

    /// Drops the gathers of generations below `oldest`; calls that wait for them see that in the view.
    fn retire(&mut self, oldest: u64) {
        self.entered = self.entered.split_off(&(oldest, String::new()));
        self.absent = self.absent.split_off(&(oldest, String::new()));
    }
}

impl StoreView {
    pub(super) fn new(world_size: usize) -> Self {
        StoreView {
            ranks: vec![Presence::Awaited; world_size],
            awaited: world_size,
            values: BTreeMap::new(),
            failures: Vec::new(),
            oldest: 0,
            gathers: OwnGathers::default(),
            broken: None,
            over: false,
            closed: false,
        }
    }

    /// Applies a message; `None` if stores do not send it to ranks.
    pub(super) fn apply(&mut self, message: Message) -> Option<()> {
        match message {
            Message::Set { generation, key, value } => {
                self.values.entry(generation).or_default().insert(key, value);
            }
            Message::Fail { rank, generation, text } => {
                self.failures.push(Failure::Published { rank, generation, text });
            }
            Message::Joined { rank } => {
                let presence = self.ranks.get_mut(rank)?;
                self.awaited -= usize::from(*presence == Presence::Awaited);
                *presence = Presence::Here;
            }
            Message::Left { rank } => *self.ranks.get_mut(rank)? = Presence::Left,
            Message::Lost { rank, why } => {
                *self.ranks.get_mut(rank)? = Presence::Lost;
                self.failures.push(Failure::Lost { rank, why });
            }
            Message::Broken(broken) => {
                self.broken.get_or_insert(broken);
            }
            Message::Retired { below } => self.retire(below),
            gather => return self.apply_gather(gather),
        }
        Some(())
    }

    fn apply_gather(&mut self, message: Message) -> Option<()> {
        match message {
            Message::Gathered { generation, name, values } => {
                self.gathers.finish(&(generation, name), Ok(values))
            }
            Message::Hopeless { generation, name, rank } if rank < self.ranks.len() => {
                self.gathers.finish(&(generation, name), Err(rank))
            }
            Message::Absent { generation, name, ranks } => {
                self.gathers.absent.insert((generation, name), ranks);
                Some(())
            }
            _ => None,
        }
    }

    /// Drops the values and failures of generations below `oldest`.
    fn retire(&mut self, oldest: u64) {
        self.oldest = oldest;
        self.values = self.values.split_off(&oldest);
        self.gathers.retire(oldest);
        self.failures.retain(|failure| match failure {
            Failure::Published { generation, .. } => *generation >= oldest,
            Failure::Lost { .. } => true,
        });
    }

    /// Generations below this one are dropped.
    pub(super) fn oldest(&self) -> u64 {
        self.oldest
    }

    /// Records that this rank enters a gather; returns the ticket for its result.
    pub(super) fn enter(&mut self, generation: u64, name: &str) -> u64 {
        self.gathers.enter((generation, name.to_owned()))
    }

    /// Takes the result of a gather if it has arrived.
    pub(super) fn take_result(&mut self, ticket: u64) -> Option<GatherResult> {
        self.gathers.take(ticket)
    }

    /// Takes the store's answer about a gather, if it has arrived.
    pub(super) fn take_absent(&mut self, generation: u64, name: &str) -> Option<Vec<usize>> {
        self.gathers.absent.remove(&(generation, name.to_owned()))
    }

    /// Forgets a gather of this rank: a result that arrives later is dropped.
    pub(super) fn abandon(&mut self, ticket: u64) {
        self.gathers.results.remove(&ticket);
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
        self.values.get(&generation)?.get(key)
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

    /// Returns true if all ranks have joined.
    pub(super) fn is_complete(&self) -> bool {
        self.awaited == 0
    }

    /// Returns true if rank 0 left: no wait can succeed without its store.
    pub(super) fn store_left(&self) -> bool {
        self.ranks[0] == Presence::Left
    }

    /// Returns a rank that left, if any.
    pub(super) fn any_left(&self) -> Option<usize> {
        self.ranks.iter().position(|presence| *presence == Presence::Left)
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

    /// Changes the view without a wake-up of its waiting threads.
    pub(super) fn edit<T>(&self, change: impl FnOnce(&mut StoreView) -> T) -> T {
        change(&mut self.view.lock())
    }

    /// Waits for the first result of `look`; returns `late` of the view at the timeout.
    pub(super) fn wait<T>(
        &self,
        within: Duration,
        mut look: impl FnMut(&StoreView) -> Option<T>,
        late: impl FnOnce(&StoreView) -> T,
    ) -> T {
        self.wait_edit(within, |view| look(view), |view| late(view))
    }

    /// Like [`wait`](Self::wait), with functions that change the view.
    pub(super) fn wait_edit<T>(
        &self,
        within: Duration,
        mut look: impl FnMut(&mut StoreView) -> Option<T>,
        late: impl FnOnce(&mut StoreView) -> T,
    ) -> T {
        let until = after(within);
        let mut view = self.view.lock();
        loop {
            if let Some(found) = look(&mut view) {
                return found;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return late(&mut view);
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
        assert_eq!((left.failure(0), left.store_left(), left.any_left()), (None, true, Some(0)));
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

    #[test]
    fn results_go_to_their_gathers_in_order_and_those_of_abandoned_ones_are_dropped() {
        let mut view = StoreView::new(2);
        let gathered =
            |value| Message::Gathered { generation: 3, name: "n".to_owned(), values: vec![vec![value]] };
        let tickets = [(); 3].map(|()| view.enter(3, "n"));
        view.abandon(tickets[1]);
        [1, 2].into_iter().for_each(|value| view.apply(gathered(value)).unwrap());
        view.apply(Message::Hopeless { generation: 3, name: "n".to_owned(), rank: 1 }).unwrap();
        let results = tickets.map(|ticket| view.take_result(ticket));
        assert_eq!(results, [Some(Ok(vec![vec![1]])), None, Some(Err(1))]);
        tickets.into_iter().for_each(|ticket| view.abandon(ticket));
        assert!(view.gathers.results.is_empty() && view.gathers.entered.is_empty());
        // A result that nobody awaits is no message.
        assert_eq!(view.apply(gathered(3)), None);
    }

    #[test]
    fn retired_generations_are_dropped_and_losses_stay() {
        let mut view = StoreView::new(2);
        for generation in [4, 5] {
            view.apply(published(1, generation)).unwrap();
            view.apply(Message::Set { generation, key: b"k".to_vec(), value: vec![1] }).unwrap();
        }
        view.apply(Message::Lost { rank: 1, why: Why::Closed }).unwrap();
        view.enter(4, "n");
        view.apply(Message::Retired { below: 5 }).unwrap();
        assert_eq!((view.value(4, b"k"), view.value(5, b"k")), (None, Some(&vec![1])));
        assert_eq!((view.failures.len(), view.oldest(), view.gathers.entered.len()), (2, 5, 0));
    }
}

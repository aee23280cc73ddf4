//! Store state without sockets: the seats of the ranks, the messages for all ranks in one order, and the values that wait.

use super::super::message::{Claim, Message};
use super::super::{Broken, Refusal, Why};
use super::gathers::Gathers;
use super::kept::KeptSizes;
use super::log::MessageLog;
use std::sync::Arc;

/// Limit of the values that are kept, and of the messages that wait for a slow rank, in bytes each.
pub(super) const MAX_BYTES: usize = 64 << 20;
/// Memory of a value beside its bytes.
const OVERHEAD: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LedgerSeat {
    Free,
    Taken,
    Left,
    Lost,
}

/// Seats of the ranks, the log of messages to all of them, and the values of the generations in use.
#[derive(Debug)]
pub(super) struct Ledger {
    run_id: String,
    restart: u64,
    seats: Vec<LedgerSeat>,
    /// True once all ranks have joined.
    complete: bool,
    /// Ranks that left or were lost, in this order.
    departed: Vec<usize>,
    log: MessageLog,
    kept: KeptSizes,
    gathers: Gathers,
    /// Latest generation of each rank's messages.
    newest: Vec<u64>,
    /// Generations below this one are dropped.
    oldest: u64,
    /// Messages to single ranks, sent after the log.
    private: Vec<(usize, Arc<[u8]>)>,
    max: usize,
    broken: bool,
}

impl Ledger {
    pub(super) fn new(run_id: String, restart: u64, world_size: usize, max: usize) -> Self {
        Ledger {
            run_id,
            restart,
            seats: vec![LedgerSeat::Free; world_size],
            complete: false,
            departed: Vec::new(),
            log: MessageLog::default(),
            kept: KeptSizes::default(),
            gathers: Gathers::new(world_size),
            newest: vec![0; world_size],
            oldest: 0,
            private: Vec::new(),
            max,
            broken: false,
        }
    }

    /// Seats a rank that knows the token. While ranks gather, a contradiction is reported to all.
    pub(super) fn seat(&mut self, claim: &Claim) -> Result<(), Refusal> {
        if claim.run_id != self.run_id {
            return Err(Refusal::OtherRun { store: self.run_id.clone() });
        }
        if claim.restart != self.restart {
            return Err(Refusal::OtherRestart { store: self.restart });
        }
        let (rank, world_size) = (claim.rank, claim.world_size);
        let seat = self.seats.get(rank).copied().filter(|_| world_size == self.seats.len());
        match seat {
            None => {
                self.contradiction(Broken::WorldSize { rank, world_size });
                Err(Refusal::OtherWorldSize { store: self.seats.len() })
            }
            Some(LedgerSeat::Taken) => {
                self.contradiction(Broken::SameRank { rank });
                Err(Refusal::RankTaken)
            }
            Some(LedgerSeat::Left) => Err(Refusal::RankLeft),
            Some(LedgerSeat::Lost) => Err(Refusal::RankGone),
            Some(LedgerSeat::Free) => {
                self.seats[rank] = LedgerSeat::Taken;
                self.complete = self.seats.iter().all(|seat| *seat == LedgerSeat::Taken);
                self.announce(&Message::Joined { rank });
                Ok(())
            }
        }
    }

    fn contradiction(&mut self, broken: Broken) {
        if !self.complete {
            self.break_off(broken);
        }
    }

    /// Ends the store for all ranks; only the first reason counts.
    fn break_off(&mut self, broken: Broken) {
        if !self.broken {
            self.broken = true;
            self.announce(&Message::Broken(broken));
        }
    }

    /// Handles a message of `rank`; returns an error for a message that ranks do not send.
    pub(super) fn receive(&mut self, rank: usize, message: Message) -> Result<(), Why> {
        match message {
            Message::Beat => {}
            Message::GiveUp { after } => self.break_off(Broken::GaveUp { rank, after }),
            Message::Ask { generation, name } => self.ask(rank, (generation, name)),
            Message::Gather { generation, name, value } => {
                if self.advance(rank, generation) {
                    self.arrive((generation, name), rank, value);
                }
            }
            Message::Set { generation, ref key, ref value } => {
                if self.advance(rank, generation) {
                    self.kept.set(generation, key.clone(), key.len() + value.len() + OVERHEAD);
                    self.announce(&message);
                }
            }
            Message::Fail { rank: by, generation, ref text } if by == rank => {
                if self.advance(rank, generation) {
                    // No value has such a key.
                    let key = [&b"failure "[..], &self.end().to_le_bytes()].concat();
                    self.kept.set(generation, key, text.len() + OVERHEAD);
                    self.announce(&message);
                }
            }
            _ => return Err(Why::NotUnderstood),
        }
        let max = self.max;
        if self.kept.bytes() + self.gathers.bytes() > max || self.log.bytes() > max {
            self.break_off(Broken::Full { max });
        }
        Ok(())
    }

    /// Adds a value to its gather, and announces the gather once it is complete.
    fn arrive(&mut self, key: (u64, String), rank: usize, value: Vec<u8>) {
        // The first one that left is the reason why others gave this gather up.
        let absent = self.departed.iter().find(|&&other| self.gathers.lacks(&key, other, rank));
        if let Some(&other) = absent {
            return self.report_hopeless(key, other, &[rank]);
        }
        if let Some(values) = self.gathers.arrive(&key, rank, value) {
            let (generation, name) = key;
            self.announce(&Message::Gathered { generation, name, values });
        }
    }

    /// Reports to `waiting` that a gather cannot complete without `rank`. A loss is known to all ranks.
    fn report_hopeless(&mut self, (generation, name): (u64, String), rank: usize, waiting: &[usize]) {
        if self.seats[rank] == LedgerSeat::Left {
            let message: Arc<[u8]> = Message::Hopeless { generation, name, rank }.encode().into();
            self.private.extend(waiting.iter().map(|&to| (to, Arc::clone(&message))));
        }
    }

    fn ask(&mut self, rank: usize, key: (u64, String)) {
        // A gather that is complete has its answer in the log.
        if let Some(ranks) = self.gathers.missing(&key, rank) {
            let (generation, name) = key;
            self.private.push((rank, Message::Absent { generation, name, ranks }.encode().into()));
        }
    }

    /// Records a rank's generation; returns false if that is dropped, or the store is broken. The last two generations that every
    /// rank has reached, and later ones, are kept.
    fn advance(&mut self, rank: usize, generation: u64) -> bool {
        if generation > self.newest[rank] {
            self.newest[rank] = generation;
            let present = |rank: &usize| self.seats[*rank] == LedgerSeat::Taken;
            let reached = (0..self.seats.len()).filter(present).map(|rank| self.newest[rank]).min();
            self.retire(reached.map_or(0, |reached| reached.saturating_sub(1)));
        }
        generation >= self.oldest && !self.broken
    }

    fn retire(&mut self, oldest: u64) {
        if oldest > self.oldest {
            self.oldest = oldest;
            self.kept.retire(oldest);
            self.gathers.retire(oldest);
            self.announce(&Message::Retired { below: oldest });
        }
    }

    /// Records the end of a seated rank's connection: a goodbye or a loss.
    pub(super) fn depart(&mut self, rank: usize, lost: Option<Why>) {
        let (seat, message) = match lost {
            None => (LedgerSeat::Left, Message::Left { rank }),
            Some(why) => (LedgerSeat::Lost, Message::Lost { rank, why }),
        };
        self.seats[rank] = seat;
        self.departed.push(rank);
        self.announce(&message);
        for (key, waiting) in self.gathers.depart(rank) {
            self.report_hopeless(key, rank, &waiting);
        }
    }

    fn announce(&mut self, message: &Message) {
        self.log.push(message.encode().into());
    }

    /// Returns the number after the log's last message.
    pub(super) fn end(&self) -> usize {
        self.log.end()
    }

    /// Returns the messages from number `from`, which has not been sent to all ranks.
    pub(super) fn since(&self, from: usize) -> impl Iterator<Item = &Arc<[u8]>> {
        self.log.since(from)
    }

    /// Drops the messages before number `sent`: every rank has them, and no rank can join any more.
    pub(super) fn trim(&mut self, sent: usize) {
        if self.complete {
            self.log.trim(sent);
        }
    }

    /// Takes the messages to single ranks.
    pub(super) fn private(&mut self) -> Vec<(usize, Arc<[u8]>)> {
        std::mem::take(&mut self.private)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn claim(rank: usize, world_size: usize) -> Claim {
        Claim { run_id: "run".to_owned(), restart: 1, rank, world_size }
    }

    fn ledger() -> Ledger {
        Ledger::new("run".to_owned(), 1, 3, 400)
    }

    fn log(ledger: &Ledger) -> Vec<Message> {
        ledger.since(ledger.log.begin()).map(|payload| Message::decode(payload).unwrap()).collect()
    }

    #[test]
    fn a_contradiction_is_reported_to_all_until_all_have_joined() {
        let broken = |broken| Some(Message::Broken(broken));
        let table = [
            (claim(0, 3), Err(Refusal::RankTaken), broken(Broken::SameRank { rank: 0 })),
            (
                claim(1, 4),
                Err(Refusal::OtherWorldSize { store: 3 }),
                broken(Broken::WorldSize { rank: 1, world_size: 4 }),
            ),
            (
                claim(3, 3),
                Err(Refusal::OtherWorldSize { store: 3 }),
                broken(Broken::WorldSize { rank: 3, world_size: 3 }),
            ),
            (Claim { restart: 0, ..claim(1, 3) }, Err(Refusal::OtherRestart { store: 1 }), None),
            (Claim { restart: 2, ..claim(1, 3) }, Err(Refusal::OtherRestart { store: 1 }), None),
            (
                Claim { run_id: "other".to_owned(), ..claim(1, 3) },
                Err(Refusal::OtherRun { store: "run".to_owned() }),
                None,
            ),
            (claim(1, 3), Ok(()), Some(Message::Joined { rank: 1 })),
        ];
        for (claim, verdict, message) in table {
            let mut ledger = ledger();
            ledger.seat(&super::tests::claim(0, 3)).unwrap();
            assert_eq!(ledger.seat(&claim), verdict, "{claim:?}");
            assert_eq!(log(&ledger)[1..].first(), message.as_ref(), "{claim:?}");
            // Once all ranks have joined, only the newcomer gets the error.
            let mut complete = super::tests::ledger();
            (0..3).for_each(|rank| complete.seat(&super::tests::claim(rank, 3)).unwrap());
            assert!(complete.seat(&claim).is_err());
            assert_eq!(complete.end(), 3, "{claim:?}");
        }
    }

    #[test]
    fn a_departed_rank_cannot_rejoin() {
        let mut ledger = complete();
        ledger.depart(1, Some(Why::Closed));
        ledger.depart(2, None);
        let again = [1, 2].map(|rank| ledger.seat(&claim(rank, 3)).unwrap_err());
        assert_eq!(again, [Refusal::RankGone, Refusal::RankLeft]);
    }

    #[test]
    fn a_rank_speaks_for_itself() {
        let mut ledger = ledger();
        let fail = |rank| Message::Fail { rank, generation: 0, text: "x".to_owned() };
        for message in [
            fail(2),
            Message::Joined { rank: 1 },
            Message::Welcome,
            Message::Lost { rank: 0, why: Why::Closed },
        ] {
            assert_eq!(ledger.receive(1, message), Err(Why::NotUnderstood));
        }
        assert_eq!(log(&ledger), []);
        ledger.receive(1, fail(1)).unwrap();
        ledger.receive(1, Message::Beat).unwrap();
        ledger.receive(1, Message::GiveUp { after: Duration::from_secs(1) }).unwrap();
        ledger.receive(1, Message::GiveUp { after: Duration::from_secs(2) }).unwrap();
        let gave_up = Message::Broken(Broken::GaveUp { rank: 1, after: Duration::from_secs(1) });
        assert_eq!(log(&ledger), [fail(1), gave_up]);
    }

    fn set(generation: u64, key: &str) -> Message {
        Message::Set { generation, key: key.into(), value: vec![0; 50] }
    }

    fn gather(generation: u64) -> Message {
        Message::Gather { generation, name: "n".to_owned(), value: vec![7; 10] }
    }

    fn complete() -> Ledger {
        let mut ledger = ledger();
        (0..3).for_each(|rank| ledger.seat(&claim(rank, 3)).unwrap());
        ledger.trim(3);
        ledger
    }

    #[test]
    fn a_full_log_is_reported_once() {
        let mut ledger = complete();
        for number in 0..9 {
            ledger.receive(0, set(0, &number.to_string())).unwrap();
            ledger.trim(3 + number.min(3));
        }
        let expected = [set(0, "3"), Message::Broken(Broken::Full { max: 400 })];
        assert_eq!(log(&ledger), expected);
        // The same key again needs no more memory, but a rank that does not read does.
        let mut ledger = complete();
        for _ in 0..9 {
            ledger.receive(0, set(0, "k")).unwrap();
            ledger.trim(ledger.end());
        }
        assert_eq!((ledger.end(), log(&ledger)), (12, vec![]));
        (0..9).for_each(|_| ledger.receive(0, set(0, "k")).unwrap());
        assert_eq!(log(&ledger).last(), Some(&Message::Broken(Broken::Full { max: 400 })));
    }

    #[test]
    fn a_gather_is_announced_once_with_all_values() {
        let mut ledger = complete();
        for rank in [2, 0, 1] {
            assert_eq!(log(&ledger), []);
            ledger.receive(rank, gather(0)).unwrap();
        }
        let values = vec![vec![7; 10]; 3];
        assert_eq!(log(&ledger), [Message::Gathered { generation: 0, name: "n".to_owned(), values }]);
        assert_eq!(ledger.gathers.bytes(), 0);
    }

    #[test]
    fn a_rank_that_asks_gets_the_missing_ranks_or_the_one_that_left() {
        let mut ledger = complete();
        let (generation, name) = (0, "n".to_owned());
        let ask = Message::Ask { generation, name: name.clone() };
        ledger.receive(1, ask.clone()).unwrap();
        assert_eq!(ledger.private(), []);
        ledger.receive(1, gather(0)).unwrap();
        ledger.receive(1, ask).unwrap();
        let absent = Message::Absent { generation, name: name.clone(), ranks: vec![0, 2] };
        assert_eq!(ledger.private(), [(1, absent.encode().into())]);
        ledger.depart(2, None);
        ledger.receive(0, gather(0)).unwrap();
        let hopeless: Arc<[u8]> = Message::Hopeless { generation, name, rank: 2 }.encode().into();
        // Rank 1 leaves for this reason, which stays the reason.
        ledger.depart(1, None);
        ledger.receive(0, gather(0)).unwrap();
        let to_0 = (0, hopeless.clone());
        assert_eq!(ledger.private(), [(1, hopeless), to_0.clone(), to_0]);
        assert_eq!(ledger.gathers.bytes(), 0);
    }

    #[test]
    fn generations_that_all_ranks_have_left_behind_are_dropped() {
        let mut ledger = complete();
        ledger.receive(0, set(5, "k")).unwrap();
        [(0, 9), (1, 7), (2, 6)].into_iter().for_each(|(rank, at)| ledger.receive(rank, gather(at)).unwrap());
        assert_eq!(log(&ledger), [set(5, "k"), Message::Retired { below: 5 }]);
        ledger.receive(2, gather(8)).unwrap();
        assert_eq!(log(&ledger)[2..], [Message::Retired { below: 6 }]);
        assert_eq!(ledger.kept.bytes(), 0);
        // A message that was on the way is dropped, too.
        ledger.receive(1, set(5, "k")).unwrap();
        assert_eq!((ledger.kept.bytes(), ledger.end()), (0, 6));
    }
}

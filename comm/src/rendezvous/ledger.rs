//! Store state without sockets: the seats of the ranks, and the messages for all ranks in one order.

use super::message::{Claim, Message};
use super::{Broken, Refusal, TurnedAway, Why};
use std::sync::Arc;

/// Maximum size of the store's log, in bytes.
pub(super) const MAX_LOG: usize = 64 << 20;
/// Number of rejected connections that are remembered.
const REMEMBERED: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LedgerSeat {
    Free,
    Taken,
    Gone,
}

/// Seats of the ranks and the log of messages to all of them.
#[derive(Debug)]
pub(super) struct Ledger {
    run_id: String,
    restart: u64,
    seats: Vec<LedgerSeat>,
    /// True once all ranks have joined.
    complete: bool,
    log: Vec<Arc<[u8]>>,
    log_bytes: usize,
    max_log: usize,
    full: bool,
    turned_away: Vec<TurnedAway>,
}

impl Ledger {
    pub(super) fn new(run_id: String, restart: u64, world_size: usize, max_log: usize) -> Self {
        let seats = vec![LedgerSeat::Free; world_size];
        let (log, turned_away) = (Vec::new(), Vec::new());
        Ledger {
            run_id,
            restart,
            seats,
            complete: false,
            log,
            log_bytes: 0,
            max_log,
            full: false,
            turned_away,
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
            Some(LedgerSeat::Gone) => Err(Refusal::RankGone),
            Some(LedgerSeat::Free) => {
                self.seats[rank] = LedgerSeat::Taken;
                self.complete = self.seats.iter().all(|seat| *seat == LedgerSeat::Taken);
                self.tell(&Message::Joined { rank });
                Ok(())
            }
        }
    }

    fn contradiction(&mut self, broken: Broken) {
        if !self.complete {
            self.tell(&Message::Broken(broken));
        }
    }

    /// Handles a message of `rank`: logs it if it is for all ranks, and returns an error for a message that ranks do not send.
    pub(super) fn receive(&mut self, rank: usize, message: Message, payload: Vec<u8>) -> Result<(), Why> {
        match message {
            Message::Beat => {}
            Message::Set { .. } => self.append(payload.into()),
            Message::Fail { rank: by, .. } if by == rank => self.append(payload.into()),
            Message::GiveUp { after } => self.tell(&Message::Broken(Broken::GaveUp { rank, after })),
            _ => return Err(Why::NotUnderstood),
        }
        Ok(())
    }

    /// Records the end of a seated rank's connection: a goodbye or a loss.
    pub(super) fn depart(&mut self, rank: usize, lost: Option<Why>) {
        self.seats[rank] = LedgerSeat::Gone;
        self.tell(&match lost {
            None => Message::Left { rank },
            Some(why) => Message::Lost { rank, why },
        });
    }

    fn tell(&mut self, message: &Message) {
        self.push(message.encode().into());
    }

    /// Logs a message of a rank. Beyond the size limit all ranks learn once that the store is full.
    fn append(&mut self, payload: Arc<[u8]>) {
        if self.log_bytes + payload.len() <= self.max_log {
            return self.push(payload);
        }
        if !self.full {
            self.full = true;
            self.tell(&Message::Broken(Broken::Full { max: self.max_log }));
        }
    }

    fn push(&mut self, payload: Arc<[u8]>) {
        self.log_bytes += payload.len();
        self.log.push(payload);
    }

    /// Returns the log entries after the first `from`.
    pub(super) fn since(&self, from: usize) -> &[Arc<[u8]>] {
        &self.log[from..]
    }

    pub(super) fn turn_away(&mut self, turned_away: TurnedAway) {
        if self.turned_away.len() == REMEMBERED {
            self.turned_away.remove(0);
        }
        self.turned_away.push(turned_away);
    }

    pub(super) fn turned_away(&self) -> Vec<TurnedAway> {
        self.turned_away.clone()
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
        Ledger::new("run".to_owned(), 1, 3, 100)
    }

    fn told(ledger: &Ledger) -> Vec<Message> {
        ledger.since(0).iter().map(|payload| Message::decode(payload).unwrap()).collect()
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
            assert_eq!(told(&ledger)[1..].first(), message.as_ref(), "{claim:?}");
            // Once all ranks have joined, only the newcomer gets the error.
            let mut complete = super::tests::ledger();
            (0..3).for_each(|rank| complete.seat(&super::tests::claim(rank, 3)).unwrap());
            assert!(complete.seat(&claim).is_err());
            assert_eq!(complete.since(3).len(), 0, "{claim:?}");
        }
    }

    #[test]
    fn a_departed_rank_cannot_rejoin() {
        let mut ledger = ledger();
        ledger.seat(&claim(1, 3)).unwrap();
        ledger.depart(1, Some(Why::Closed));
        assert_eq!(ledger.seat(&claim(1, 3)), Err(Refusal::RankGone));
    }

    #[test]
    fn a_rank_speaks_for_itself() {
        let mut ledger = ledger();
        let fail = |rank| Message::Fail { rank, generation: 0, text: "x".to_owned() };
        let receive = |ledger: &mut Ledger, message: Message| {
            let payload = message.encode();
            ledger.receive(1, message, payload)
        };
        for message in [
            fail(2),
            Message::Joined { rank: 1 },
            Message::Welcome,
            Message::Lost { rank: 0, why: Why::Closed },
        ] {
            assert_eq!(receive(&mut ledger, message), Err(Why::NotUnderstood));
        }
        assert_eq!(told(&ledger), []);
        receive(&mut ledger, fail(1)).unwrap();
        receive(&mut ledger, Message::Beat).unwrap();
        receive(&mut ledger, Message::GiveUp { after: Duration::from_secs(1) }).unwrap();
        let gave_up = Message::Broken(Broken::GaveUp { rank: 1, after: Duration::from_secs(1) });
        assert_eq!(told(&ledger), [fail(1), gave_up]);
    }

    #[test]
    fn a_full_log_is_reported_once() {
        let mut ledger = ledger();
        let set = Message::Set { generation: 0, key: b"k".to_vec(), value: vec![0; 40] };
        (0..5).for_each(|_| ledger.receive(0, set.clone(), set.encode()).unwrap());
        assert_eq!(told(&ledger), [set, Message::Broken(Broken::Full { max: 100 })]);
    }
}

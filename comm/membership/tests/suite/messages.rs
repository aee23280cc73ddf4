//! Messages as bytes: they decode to what was encoded, and garbage decodes to nothing.

use crate::common::{DIGEST, secs};
use meshstep_membership::{
    Ask, Ballot, Decision, Departure, FromArbiter, Gone, Refusal, Round, Seat, State, ToArbiter, Word, Worker,
};
use proptest::collection::vec;
use proptest::prelude::*;

const WORKER: Worker = Worker { id: 7, life: u64::MAX };

/// Returns one request of each kind.
fn asks() -> Vec<Vec<u8>> {
    let asks = [
        Ask::Join { digest: DIGEST, contact: "10.0.0.1:29500 ü".to_owned() },
        Ask::Beat { sent: secs(9) },
        Ask::Arrive { request: 1, step: 3 },
        Ask::Vote { round: 4, ballot: Ballot::Ready },
        Ask::Vote { round: 4, ballot: Ballot::Veto },
        Ask::Vote { round: 4, ballot: Ballot::Failed },
        Ask::Vote { round: 4, ballot: Ballot::Idle },
        Ask::Leave,
    ];
    asks.map(|ask| ToArbiter { worker: WORKER, term: 5, epoch: 6, after: 2, ask }.encode()).to_vec()
}

/// Returns one answer of each kind.
fn words() -> Vec<Vec<u8>> {
    let seat = |id| Seat { id, counts: id == 1, contact: "c".repeat(id as usize) };
    let apart = Departure::OutOfStep { step: 3, others: 4 };
    let why = [Departure::Left, Departure::Silent, Departure::Late, Departure::Vetoed, apart];
    let gone = why.map(|why| Gone { id: 3, why }).to_vec();
    let round = Round { number: 1, epoch: 2, step: 3, rank: 1, members: vec![seat(1), seat(2)], gone };
    let abort = Decision::Abort { vetoed: vec![1], failed: vec![2, 3], lost: vec![] };
    let refusals = [
        Refusal::OtherPlan { mine: 1, run: 2 },
        Refusal::OtherRule { mine: 1, run: 2 },
        Refusal::IdTaken { id: 1 },
        Refusal::Contact { len: 65, max: 64 },
        Refusal::Full { max: 1 },
        Refusal::Fenced { epoch: 1, now: 2, why: Some(Departure::Late) },
        Refusal::Fenced { epoch: 1, now: 2, why: None },
        Refusal::StateLost { step: 4 },
        Refusal::TooFew { have: 1, min: 2 },
        Refusal::Disagree { id: 1, step: 2, other: 3, other_step: 4 },
        Refusal::Passed { asked: 1, step: 2 },
    ];
    let mut words = vec![
        Word::Welcome,
        Word::Heard { sent: secs(1), lease: secs(2) },
        Word::Granted { round },
        Word::Decided { round: 1, decision: Decision::Commit {} },
        Word::Decided { round: 1, decision: abort },
        Word::Decided { round: 1, decision: Decision::Idle {} },
        Word::Farewell,
    ];
    words.extend(refusals.map(|refusal| Word::Refused { request: 8, refusal }));
    words.into_iter().map(|word| FromArbiter { to: WORKER, term: 5, word }.encode()).collect()
}

/// Decodes bytes as `T` and encodes them again.
fn again<T>(
    decode: impl Fn(&[u8]) -> Option<T>,
    encode: impl Fn(&T) -> Vec<u8>,
    bytes: &[u8],
) -> Option<Vec<u8>> {
    decode(bytes).map(|value| encode(&value))
}

fn ask_again(bytes: &[u8]) -> Option<Vec<u8>> {
    again(ToArbiter::decode, ToArbiter::encode, bytes)
}

fn word_again(bytes: &[u8]) -> Option<Vec<u8>> {
    again(FromArbiter::decode, FromArbiter::encode, bytes)
}

#[test]
fn every_message_is_read_as_written_and_no_shorter_or_longer() {
    let both = [(asks(), ask_again as fn(&[u8]) -> _), (words(), word_again)];
    for (all, again) in both {
        for bytes in &all {
            assert_eq!(again(bytes).as_ref(), Some(bytes));
            assert!((0..bytes.len()).all(|len| again(&bytes[..len]).is_none()), "{bytes:?}");
            assert_eq!(again(&[&bytes[..], &[0]].concat()), None);
        }
        // All messages have different bytes.
        assert!((1..all.len()).all(|i| !all[..i].contains(&all[i])));
    }
}

#[test]
fn a_length_that_lies_is_refused_before_it_is_believed() {
    // A state with a list of members that announces more than the bytes hold.
    let zeros = State::decode(&[0; 8 * 4 + 2 + 16]);
    assert!(zeros.is_some_and(|state| state.members.is_empty()));
    let mut bytes = [0; 8 * 4 + 2 + 16];
    bytes[34..42].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_eq!(State::decode(&bytes), None);
    bytes[34..42].copy_from_slice(&9u64.to_le_bytes());
    assert_eq!(State::decode(&bytes), None);
}

proptest! {
    /// Arbitrary bytes decode to a message with the same encoding, or to nothing, and never panic.
    #[test]
    fn any_bytes_are_a_message_or_nothing(bytes in vec(prop_oneof![Just(0), 0..12u8, any::<u8>()], 0..200)) {
        for again in [ask_again, word_again] {
            prop_assert!(again(&bytes).is_none_or(|written| written == bytes));
        }
        prop_assert!(State::decode(&bytes).is_none_or(|state| state.encode() == bytes));
    }

    #[test]
    fn a_changed_message_does_not_panic(which in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let all = [asks(), words()].concat();
        let mut bytes = all[which.index(all.len())].clone();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        for again in [ask_again, word_again] {
            prop_assert!(again(&bytes).is_none_or(|written| written == bytes));
        }
    }
}

//! Handshake in which a rank and the store prove to each other that they know the token; both sides.
//!
//! ```text
//! rank                                      store
//!   hello: nonce, run, restart, rank, world  -->
//!                              <--  challenge: nonce, the store's proof
//!   answer: the rank's proof                 -->
//!                              <--  welcome or refused, sealed as all that follows
//! ```

use super::link::{self, Receiver, Sender, after};
use super::message::{Claim, Message};
use super::proof::{Key, NONCE, Nonce, Proofs};
use super::server::StoreState;
use super::{Refusal, Why};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

/// Store's side, on its connection `id`. Returns the seated rank, or `None` for a rank that knows the token and was refused.
pub(super) fn admit(
    store: &StoreState,
    id: u64,
    stream: &Arc<TcpStream>,
) -> Result<Option<(usize, Receiver, Sender)>, Why> {
    let until = after(store.options.handshake);
    let (mut receiver, mut sender) = link::ends(stream, store.options.handshake)?;
    let (Message::Hello { claim, .. }, hello) = receiver.message(until)? else {
        return Err(Why::NotUnderstood);
    };
    challenge(&store.token, &hello, until, &mut receiver, &mut sender)?;
    match store.seat(id, &claim) {
        Err(refusal) => {
            sender.message(&Message::Refused(refusal))?;
            Ok(None)
        }
        Ok(()) => {
            // From here on the rank is a member: the store reports its loss to all.
            let welcomed = sender.message(&Message::Welcome);
            let welcomed = welcomed.and_then(|()| sender.set_patience(store.options.silence));
            match welcomed {
                Ok(()) => Ok(Some((claim.rank, receiver, sender))),
                Err(why) => {
                    store.state.lock().ledger.depart(claim.rank, Some(why));
                    store.changed.notify_all();
                    Ok(None)
                }
            }
        }
    }
}

/// Result of a rank's attempt.
pub(super) enum Attempt {
    /// Both sides know the token, and the store has seated the rank.
    Welcome(Receiver, Sender),
    /// A later attempt may succeed.
    Again(Why),
    /// Another attempt would not help.
    Refused(Refusal),
    WrongToken,
    NotAStore(Why),
}

/// Rank's side.
pub(super) fn handshake(
    token: &Key,
    claim: &Claim,
    until: Instant,
    mut receiver: Receiver,
    mut sender: Sender,
) -> Attempt {
    match converse(token, claim, until, &mut receiver, &mut sender) {
        Ok(Message::Welcome) => Attempt::Welcome(receiver, sender),
        Ok(Message::Refused(refusal)) => Attempt::Refused(refusal),
        Ok(_) => Attempt::NotAStore(Why::NotUnderstood),
        Err(Why::WrongToken) => {
            // Lets rank 0 report the rejected peer.
            let _ = sender.message(&Message::Stranger);
            Attempt::WrongToken
        }
        Err(why @ (Why::TooLong { .. } | Why::Forged | Why::NotUnderstood)) => Attempt::NotAStore(why),
        Err(why @ (Why::Closed | Why::Silent { .. } | Why::System { .. })) => Attempt::Again(why),
    }
}

fn converse(
    token: &Key,
    claim: &Claim,
    until: Instant,
    receiver: &mut Receiver,
    sender: &mut Sender,
) -> Result<Message, Why> {
    introduce(token, &Message::Hello { nonce: nonce()?, claim: claim.clone() }, until, receiver, sender)?;
    Ok(receiver.message(until)?.0)
}

/// Makes the sender of the payload `first` prove the token; seals later frames.
pub(super) fn challenge(
    token: &Key,
    first: &[u8],
    until: Instant,
    receiver: &mut Receiver,
    sender: &mut Sender,
) -> Result<(), Why> {
    let nonce = nonce()?;
    let proofs = Proofs::new(token, first, &nonce);
    sender.message(&Message::Challenge { nonce, proof: proofs.of_store() })?;
    match receiver.message(until)?.0 {
        Message::Answer { proof } if proofs.is_of_rank(&proof) => {}
        Message::Answer { .. } | Message::Stranger => return Err(Why::WrongToken),
        _ => return Err(Why::NotUnderstood),
    }
    receiver.expect_seals(proofs.key_to_store());
    sender.seal(proofs.key_to_rank());
    Ok(())
}

/// Sends `first`, makes the other side prove the token, then proves it; seals later frames.
pub(super) fn introduce(
    token: &Key,
    first: &Message,
    until: Instant,
    receiver: &mut Receiver,
    sender: &mut Sender,
) -> Result<(), Why> {
    sender.message(first)?;
    let Message::Challenge { nonce, proof } = receiver.message(until)?.0 else {
        return Err(Why::NotUnderstood);
    };
    let proofs = Proofs::new(token, &first.encode(), &nonce);
    if !proofs.is_of_store(&proof) {
        return Err(Why::WrongToken);
    }
    sender.message(&Message::Answer { proof: proofs.of_rank() })?;
    sender.seal(proofs.key_to_store());
    receiver.expect_seals(proofs.key_to_rank());
    Ok(())
}

pub(super) fn nonce() -> Result<Nonce, Why> {
    let mut nonce = [0; NONCE];
    let filled = getrandom::fill(&mut nonce);
    filled.map_err(|error| Why::System { message: format!("no random bytes: {error}") })?;
    Ok(nonce)
}

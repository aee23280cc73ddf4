//! Handshake of both sides, as functions of messages.

use super::super::{Token, Why};
use super::cipher::Cipher;
use super::greeting::{self, CallHeader};
use snow::params::HashChoice;
use snow::resolvers::{CryptoResolver, DefaultResolver};
use snow::{Builder, HandshakeState};
use std::fmt;

/// Cipher suite. ChaCha20 and BLAKE2s take the same time for all keys on every processor, with or without instructions for
/// AES, and ChaCha20-Poly1305 has no limit of records that a long run could reach.
const SUITE: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// Bytes that a handshake message adds to its payload: a public key and a tag.
const OVERHEAD: usize = 32 + 16;

/// Key derived from the job token.
#[derive(Clone)]
pub(in crate::rendezvous) struct Psk([u8; 32]);

impl Psk {
    /// Derives the key; a job without a token has the key of no bytes, which every process of the machine knows.
    pub(in crate::rendezvous) fn new(token: Option<&Token>) -> Result<Self, Why> {
        let hash = DefaultResolver.resolve_hash(&HashChoice::Blake2s);
        let mut hash = hash.ok_or_else(|| not_compiled("BLAKE2s"))?;
        let mut key = [0; 32];
        hash.input(b"meshstep rendezvous 2: token");
        hash.input(token.map_or(&[], Token::bytes));
        hash.result(&mut key);
        Ok(Psk(key))
    }

    fn builder<'a>(&'a self, prologue: &'a [u8]) -> Result<Builder<'a>, snow::Error> {
        Builder::new(SUITE.parse()?).prologue(prologue)?.psk(0, &self.0)
    }
}

impl fmt::Debug for Psk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Psk(..)")
    }
}

/// Ciphers of an established connection.
#[derive(Debug)]
pub(in crate::rendezvous) struct Session {
    pub(in crate::rendezvous) outgoing: Cipher,
    pub(in crate::rendezvous) incoming: Cipher,
}

impl Session {
    fn new(mut state: HandshakeState) -> Result<Self, Why> {
        let is_caller = state.is_initiator();
        let (to_listener, to_caller) = state.dangerously_get_raw_split();
        let cipher = |key| Cipher::new(key).ok_or_else(|| not_compiled("ChaCha20-Poly1305"));
        let (to_listener, to_caller) = (cipher(&to_listener)?, cipher(&to_caller)?);
        Ok(match is_caller {
            true => Session { outgoing: to_listener, incoming: to_caller },
            false => Session { outgoing: to_caller, incoming: to_listener },
        })
    }
}

/// Caller's side, until the reply arrives.
#[derive(Debug)]
pub(in crate::rendezvous) struct Greeted(HandshakeState);

/// Begins a call: returns the greeting with `hello` encrypted.
pub(in crate::rendezvous) fn greet(
    psk: &Psk,
    header: &CallHeader,
    hello: &[u8],
) -> Result<(Greeted, Vec<u8>), Why> {
    let mut bytes = header.encode();
    let mut state = psk.builder(&bytes).and_then(Builder::build_initiator).map_err(system)?;
    let mut message = vec![0; hello.len() + OVERHEAD];
    let len = state.write_message(hello, &mut message).map_err(system)?;
    bytes.extend_from_slice(&message[..len]);
    Ok((Greeted(state), bytes))
}

impl Greeted {
    /// Reads the listener's reply; returns its verdict and the ciphers.
    ///
    /// # Errors
    /// [`Why::WrongToken`] for a listener without the token and for a recorded reply.
    pub(in crate::rendezvous) fn finish(self, reply: &[u8]) -> Result<(Vec<u8>, Session), Why> {
        let Greeted(mut state) = self;
        let message = greeting::message(reply)?;
        let mut verdict = vec![0; message.len()];
        let len = state.read_message(message, &mut verdict).map_err(|_| Why::WrongToken)?;
        verdict.truncate(len);
        Ok((verdict, Session::new(state)?))
    }
}

/// Listener's side, before its reply.
#[derive(Debug)]
pub(in crate::rendezvous) struct ReadGreeting {
    /// The listener that the caller wants.
    pub(in crate::rendezvous) header: CallHeader,
    /// The caller's first message. It may be a recording until the caller confirms.
    pub(in crate::rendezvous) hello: Vec<u8>,
    state: HandshakeState,
}

/// Reads a greeting.
///
/// # Errors
/// [`Why::WrongToken`], [`Why::OtherVersion`], [`Why::NotUnderstood`].
pub(in crate::rendezvous) fn answer(psk: &Psk, bytes: &[u8]) -> Result<ReadGreeting, Why> {
    let (header, prologue, message) = CallHeader::split(bytes)?;
    let mut state = psk.builder(prologue).and_then(Builder::build_responder).map_err(system)?;
    let mut hello = vec![0; message.len()];
    let len = state.read_message(message, &mut hello).map_err(|_| Why::WrongToken)?;
    hello.truncate(len);
    Ok(ReadGreeting { header, hello, state })
}

impl ReadGreeting {
    /// Returns the reply with `verdict` encrypted, and the ciphers.
    pub(in crate::rendezvous) fn reply(mut self, verdict: &[u8]) -> Result<(Vec<u8>, Session), Why> {
        let mut message = vec![0; verdict.len() + OVERHEAD];
        let len = self.state.write_message(verdict, &mut message).map_err(system)?;
        Ok((greeting::reply(&message[..len]), Session::new(self.state)?))
    }
}

fn system(error: snow::Error) -> Why {
    Why::System { message: format!("Noise: {error}") }
}

fn not_compiled(primitive: &str) -> Why {
    Why::System { message: format!("{primitive} is not compiled in") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
    }

    fn psk(token: u8) -> Psk {
        Psk([token; 32])
    }

    fn header() -> CallHeader {
        CallHeader { purpose: "store".to_owned(), endpoint: "host:1".to_owned() }
    }

    /// The vector of this suite in the collection `cacophony`, which another implementation of Noise has computed.
    #[test]
    fn the_suite_computes_the_known_answers() {
        let [prologue, key] =
            ["4a6f686e2047616c74", "54686973206973206d7920417573747269616e20706572737065637469766521"]
                .map(bytes);
        let psk = Psk(key.try_into().unwrap());
        let ephemerals = [
            "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a",
            "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b",
        ]
        .map(bytes);
        let builder = |own: usize| {
            psk.builder(&prologue).unwrap().fixed_ephemeral_key_for_testing_only(&ephemerals[own])
        };
        let mut sides = [builder(0).build_initiator().unwrap(), builder(1).build_responder().unwrap()];
        let handshake = [
            (
                "4c756477696720766f6e204d69736573",
                "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944fda936bec35a8adfdff198386f7d5475880897edaaf7495314c99095a2e4d66a",
            ),
            (
                "4d757272617920526f746862617264",
                "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f1448088434cd2a371993ba41ea11448024fca32766b169183c9e691a7a433279da7e729",
            ),
        ];
        for (turn, (payload, expected)) in handshake.into_iter().enumerate() {
            let (mut message, mut opened) = (vec![0; 200], vec![0; 200]);
            let len = sides[turn].write_message(&bytes(payload), &mut message).unwrap();
            assert_eq!(message[..len], bytes(expected));
            let opened_len = sides[1 - turn].read_message(&message[..len], &mut opened).unwrap();
            assert_eq!(opened[..opened_len], bytes(payload));
        }
        let hash = bytes("b3e9c846d264120a4211e18307da91157a21e92e69b639c50f027f101db3e1a6");
        assert!(sides.iter().all(|side| side.get_handshake_hash() == hash));
        let [mut caller, mut listener] = sides.map(|side| Session::new(side).unwrap());
        let records = [
            ("462e20412e20486179656b", "bc44da303ae0beb08075fc4eb4e58235c67c2d1f53a4f2fff0bca7"),
            ("4361726c204d656e676572", "416d1af83e9fa6966ce4e871156b131aa9bd7e9a1d6f8794f4872a"),
            (
                "4a65616e2d426170746973746520536179",
                "8a7d81b77bcc6c072f2b807da066efba6b5fab9edf71a7faceb2c8454b0cfef608",
            ),
            (
                "457567656e2042f6686d20766f6e2042617765726b",
                "1e2ee010f72894824a25a867664ff298f2548a145dc4e9d27b1cad83f32fa7c54d69dc3279",
            ),
        ];
        for (turn, (payload, expected)) in records.into_iter().enumerate() {
            let (sender, receiver) =
                if turn % 2 == 0 { (&mut caller, &mut listener) } else { (&mut listener, &mut caller) };
            let mut record = Vec::new();
            sender.outgoing.seal(&bytes(payload), &mut record);
            assert_eq!(record, bytes(expected), "{turn}");
            assert_eq!(receiver.incoming.open(&record), Ok(bytes(payload)));
        }
    }

    #[test]
    fn both_sides_agree_and_every_session_has_its_own_keys() {
        let mut records = Vec::new();
        for _ in 0..2 {
            let (caller, greeting) = greet(&psk(1), &header(), b"hello").unwrap();
            let answer = answer(&psk(1), &greeting).unwrap();
            assert_eq!((&answer.header, &answer.hello[..]), (&header(), &b"hello"[..]));
            let (reply, mut listener) = answer.reply(b"verdict").unwrap();
            let (verdict, mut caller) = caller.finish(&reply).unwrap();
            assert_eq!(verdict, b"verdict");
            let mut both = [Vec::new(), Vec::new()];
            caller.outgoing.seal(b"same", &mut both[0]);
            listener.outgoing.seal(b"same", &mut both[1]);
            // A record that comes back to its sender is forged.
            assert!(caller.incoming.open(&both[0]).is_err());
            assert_eq!(caller.incoming.open(&both[1]), Ok(b"same".to_vec()));
            assert_eq!(listener.incoming.open(&both[0]), Ok(b"same".to_vec()));
            records.extend(both);
        }
        assert!((1..records.len()).all(|i| !records[..i].contains(&records[i])));
    }

    #[test]
    fn replies_of_other_sessions_and_reflected_greetings_are_refused() {
        let (first, greeting) = greet(&psk(1), &header(), b"hello").unwrap();
        let (second, _) = greet(&psk(1), &header(), b"hello").unwrap();
        let (reply, _) = answer(&psk(1), &greeting).unwrap().reply(b"").unwrap();
        // The reply of one connection on another.
        assert!(matches!(second.finish(&reply), Err(Why::WrongToken)));
        // The caller's own message as the reply.
        let (_, _, own) = CallHeader::split(&greeting).unwrap();
        assert!(matches!(first.finish(&greeting::reply(own)), Err(Why::WrongToken)));
    }

    #[test]
    fn every_bit_of_a_greeting_and_of_a_reply_counts() {
        let (_, greeting) = greet(&psk(1), &header(), b"hello").unwrap();
        for bit in 0..8 * greeting.len() {
            let mut changed = greeting.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            // The top bit of a public key is ignored by X25519, but hashed.
            assert!(answer(&psk(1), &changed).is_err(), "{bit}");
        }
        for bit in (0..8 * (1 + OVERHEAD)).step_by(7) {
            let (caller, greeting) = greet(&psk(1), &header(), b"hello").unwrap();
            let (mut reply, _) = answer(&psk(1), &greeting).unwrap().reply(b"").unwrap();
            reply[bit / 8] ^= 1 << (bit % 8);
            assert!(caller.finish(&reply).is_err(), "{bit}");
        }
    }

    #[test]
    fn another_token_is_refused_by_either_side() {
        let (caller, greeting) = greet(&psk(1), &header(), b"hello").unwrap();
        assert_eq!(answer(&psk(2), &greeting).map(|answer| answer.hello), Err(Why::WrongToken));
        // A listener that only repeats a greeting to itself has no reply that the caller accepts.
        let (_, own) = greet(&psk(2), &header(), b"hello").unwrap();
        let (reply, _) = answer(&psk(2), &own).unwrap().reply(b"").unwrap();
        assert!(matches!(caller.finish(&reply), Err(Why::WrongToken)));
    }

    #[test]
    fn the_key_depends_on_the_token() {
        let key =
            |hex: Option<&str>| Psk::new(hex.map(|hex| Token::from_hex(hex).unwrap()).as_ref()).unwrap().0;
        let [a, b, none] =
            [Some("000102030405060708090a0b0c0d0e0f"), Some("000102030405060708090a0b0c0d0e0f10"), None]
                .map(key);
        assert!(a != b && a != none && b != none);
    }
}

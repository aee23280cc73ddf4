//! Card of a rank: the bytes with which the other ranks of its group find it.

use std::fmt;

/// Version of cards.
const VERSION: u8 = 1;
const PART: usize = 16;

/// Name of a rank's socket, which every user of the host can list, and a secret, which only ranks with the card have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Card {
    pub(super) name: [u8; PART],
    pub(super) secret: [u8; PART],
}

impl Card {
    /// Draws a card from the system's random numbers.
    pub(super) fn random() -> Result<Self, getrandom::Error> {
        let mut card = Card { name: [0; PART], secret: [0; PART] };
        getrandom::fill(&mut card.name)?;
        getrandom::fill(&mut card.secret)?;
        Ok(card)
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        [&[VERSION], &self.name[..], &self.secret[..]].concat()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (&version, parts) = bytes.split_first()?;
        let (name, secret) = parts.split_at_checked(PART)?;
        let card = Card { name: name.try_into().ok()?, secret: secret.try_into().ok()? };
        (version == VERSION).then_some(card)
    }

    /// Returns the proof of an introduction: it contains the secrets of both ranks.
    pub(super) fn proof(from: &Card, to: &Card) -> [u8; 2 * PART] {
        let mut proof = [0; 2 * PART];
        proof[..PART].copy_from_slice(&from.secret);
        proof[PART..].copy_from_slice(&to.secret);
        proof
    }
}

impl fmt::Debug for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Card({:02x?}, ..)", self.name)
    }
}

//! Hashes of windows as text: 16 lower-case hexadecimal digits each.

use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde::ser::{SerializeSeq, Serializer};
use std::fmt;

const DIGITS: usize = 16;

/// Returns a hash as text.
pub(crate) fn text(hash: u64) -> String {
    format!("{hash:016x}")
}

pub(super) fn serialize<S: Serializer>(hashes: &[u64], to: S) -> Result<S::Ok, S::Error> {
    let mut seq = to.serialize_seq(Some(hashes.len()))?;
    hashes.iter().try_for_each(|&hash| seq.serialize_element(&format_args!("{hash:016x}")))?;
    seq.end()
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u64>, D::Error> {
    from.deserialize_seq(All)
}

struct All;

impl<'de> Visitor<'de> for All {
    type Value = Vec<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of hashes")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
        let mut hashes = Vec::new();
        while let Some(Hash(hash)) = seq.next_element()? {
            hashes.push(hash);
        }
        Ok(hashes)
    }
}

struct Hash(u64);

impl<'de> serde::Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_str(One)
    }
}

struct One;

impl Visitor<'_> for One {
    type Value = Hash;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a hash of {DIGITS} lower-case hexadecimal digits")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Hash, E> {
        // `from_str_radix` alone would accept a sign and capital letters.
        let plain = text.len() == DIGITS && text.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'));
        let hash = plain.then(|| u64::from_str_radix(text, 16).ok()).flatten();
        hash.map(Hash).ok_or_else(|| E::invalid_value(serde::de::Unexpected::Str(text), &self))
    }
}

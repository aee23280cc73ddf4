//! Number of a run.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::hash::{BuildHasher, Hasher};

/// Number of a run: all checkpoints of one training run have it, and those of other runs have another one.
/// 0 is no run: no checkpoint with it can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RunId(pub u64);

impl RunId {
    /// Returns a number that no other run has.
    pub(crate) fn new() -> Self {
        // Ranks use zero for a run that they do not know.
        RunId(random().max(1))
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for RunId {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RunId {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let run = u64::from_str_radix(&text, 16).map(RunId);
        match run {
            Ok(run) if run.0 > 0 && run.to_string() == text => Ok(run),
            _ => Err(de::Error::custom(format_args!("a run is 16 hexadecimal digits, not {text:?}"))),
        }
    }
}

/// Returns a random word that no other call is likely to return.
pub(crate) fn random() -> u64 {
    std::hash::RandomState::new().build_hasher().finish()
}

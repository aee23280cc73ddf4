//! Numbers as their bits in JSON, which has no NaN and no infinity: for `#[serde(with = "bits")]`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A value with floating-point numbers, and its form with whole ones.
pub(crate) trait Bits: Sized {
    /// The form with whole numbers.
    type Whole: Serialize + for<'de> Deserialize<'de>;

    fn to_whole(&self) -> Self::Whole;

    fn from_whole(whole: Self::Whole) -> Self;
}

pub(crate) fn serialize<T: Bits, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    value.to_whole().serialize(serializer)
}

pub(crate) fn deserialize<'de, T: Bits, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    T::Whole::deserialize(deserializer).map(T::from_whole)
}

impl Bits for f64 {
    type Whole = u64;

    fn to_whole(&self) -> u64 {
        self.to_bits()
    }

    fn from_whole(whole: u64) -> Self {
        Self::from_bits(whole)
    }
}

/// A number of steps and a loss.
impl Bits for (u64, f64) {
    type Whole = (u64, u64);

    fn to_whole(&self) -> (u64, u64) {
        (self.0, self.1.to_bits())
    }

    fn from_whole((steps, loss): (u64, u64)) -> Self {
        (steps, f64::from_bits(loss))
    }
}

impl<T: Bits> Bits for Vec<T> {
    type Whole = Vec<T::Whole>;

    fn to_whole(&self) -> Self::Whole {
        self.iter().map(T::to_whole).collect()
    }

    fn from_whole(whole: Self::Whole) -> Self {
        whole.into_iter().map(T::from_whole).collect()
    }
}

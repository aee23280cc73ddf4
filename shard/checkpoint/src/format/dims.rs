//! Lists of dimensions: a shape, the offsets or the extents of a box.

use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use std::fmt;

/// Maximum number of dimensions of a tensor: the limit of programs that read safetensors.
pub const MOST_DIMS: usize = 64;

/// Returns the text about a list of too many dimensions.
pub(super) fn too_many(found: usize) -> String {
    format!("it has {found} dimensions, {MOST_DIMS} are the most")
}

/// The first numbers of a list of dimensions, and how many there are.
pub(super) struct Dims {
    pub(super) dims: Vec<u64>,
    pub(super) found: usize,
}

impl<'de> Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_seq(EachDim)
    }
}

struct EachDim;

impl<'de> Visitor<'de> for EachDim {
    type Value = Dims;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of dimensions")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Dims, A::Error> {
        let (mut dims, mut found) = (Vec::new(), 0);
        while let Some(dim) = seq.next_element()? {
            found += 1;
            if found <= MOST_DIMS {
                dims.push(dim);
            }
        }
        Ok(Dims { dims, found })
    }
}

/// Reads the offsets or extents of a box.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u64>, D::Error> {
    let Dims { dims, found } = Deserialize::deserialize(from)?;
    match found <= MOST_DIMS {
        true => Ok(dims),
        false => Err(D::Error::custom(format_args!("invalid box: {}", too_many(found)))),
    }
}

//! Header of a safetensors file. Loading a checkpoint does not use it; other programs do, so it must agree with the manifest.

use super::catalog::PieceRef;
use super::manifest::Type;
use super::piece::product;
use super::unique_keys;
use crate::error::CheckpointError;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;

/// Maximum length in bytes of a header that other programs read.
const MOST: u64 = 100_000_000;

/// Header key of the caller's texts; every other key is a vector's.
const METADATA: &str = "__metadata__";

/// Header entry of a vector.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Entry {
    /// Type as it is written in the file, which may be one that no tensor has.
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    /// Offsets behind the header of the first byte and of the end.
    pub(crate) data_offsets: [u64; 2],
}

impl Entry {
    /// Returns the element type, if parameters can have it.
    pub(crate) fn dtype(&self) -> Option<Type> {
        [Type::F64, Type::F32, Type::BF16, Type::F16].into_iter().find(|of| self.dtype == format!("{of:?}"))
    }
}

/// Parsed header of a safetensors file.
pub(crate) struct Header {
    /// Offset of the data in the file.
    pub(crate) data: u64,
    pub(crate) text: Vec<u8>,
    /// Vectors by key.
    pub(crate) entries: BTreeMap<String, Entry>,
}

struct Entries(BTreeMap<String, Entry>);

/// Reads the header of a file of `bytes` bytes. `fill` reads bytes from an offset on; `wrong` makes an error from the reason why a header
/// is invalid.
pub(crate) fn read(
    bytes: u64,
    mut fill: impl FnMut(u64, &mut [u8]) -> Result<(), CheckpointError>,
    wrong: impl Fn(String) -> CheckpointError,
) -> Result<Header, CheckpointError> {
    let mut len = [0; 8];
    if bytes < 8 {
        return Err(wrong(format!("it has {bytes} bytes, fewer than a header")));
    }
    fill(0, &mut len)?;
    let len = u64::from_le_bytes(len);
    if len > MOST.min(bytes - 8) {
        return Err(wrong(format!(
            "a header of {len} bytes does not fit in its {bytes} bytes, or exceeds {MOST}"
        )));
    }
    let mut text = vec![0; len as usize];
    fill(8, &mut text)?;
    let entries = unique_keys::check(&text).and_then(|()| serde_json::from_slice(&text));
    let Entries(entries) = entries.map_err(|error| wrong(error.to_string()))?;
    Ok(Header { data: 8 + len, text, entries })
}

/// Returns the difference between the header's entry of a vector and the manifest's; `data` is the offset of the data.
pub(crate) fn agrees(
    said: Option<&Entry>,
    dtype: Type,
    piece: &PieceRef<'_>,
    data: u64,
) -> Result<(), String> {
    let PieceRef { key, stored, .. } = piece;
    let Some(Entry { dtype: said, shape, data_offsets: [from, to] }) = said else {
        return Err(format!("it has no vector called {key:?}"));
    };
    if *said != format!("{dtype:?}") {
        return Err(format!("{key:?} is {said:?}, not {dtype:?}"));
    }
    if from.checked_add(data) != Some(stored.at) || to.checked_sub(*from) != Some(stored.bytes) {
        let [at, end] = [stored.at, stored.at + stored.bytes];
        return Err(format!("{key:?} is at bytes {from} to {to} behind {data}, not at {at} to {end}"));
    }
    match product(shape).and_then(|len| len.checked_mul(dtype.size())) == Some(stored.bytes) {
        true => Ok(()),
        false => Err(format!("{key:?} has shape {shape:?}, which is not {} bytes", stored.bytes)),
    }
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(Keys)
    }
}

struct Keys;

impl<'de> Visitor<'de> for Keys {
    type Value = Entries;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of vectors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            if key == METADATA {
                map.next_value::<IgnoredAny>()?;
            } else {
                entries.insert(key, map.next_value()?);
            }
        }
        Ok(Entries(entries))
    }
}

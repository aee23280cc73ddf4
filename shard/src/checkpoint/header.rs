//! What a safetensors file says of itself. Nothing is loaded by it; other programs read it, so it must agree with the manifest.

use super::error::CheckpointError;
use super::manifest::{PieceEntry, Type, Whose};
use super::once;
use super::piece::product;
use super::saved::SavedFile;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;

/// The longest header that programs read.
const MOST: u64 = 100_000_000;

/// The caller's texts have the place of a vector in the header.
const METADATA: &str = "__metadata__";

/// What the header says of a vector.
#[derive(Debug, Deserialize)]
struct Said {
    /// As it stands there: a file may hold what no tensor is made of.
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// By key.
struct Header(BTreeMap<String, Said>);

/// Hands `report` each of these pieces that `file`, of `bytes` bytes, describes otherwise, or not at all.
pub(super) fn check(
    file: &SavedFile,
    bytes: u64,
    pieces: &[(Whose<'_>, Type, &PieceEntry)],
    report: &mut impl FnMut(CheckpointError),
) {
    let error = |whose: Whose<'_>, reason: String| {
        let (path, what) = (file.path().to_owned(), whose.to_string());
        CheckpointError::Header { path, what, reason }
    };
    let Some((first, ..)) = pieces.first() else { return };
    let (data, Header(header)) = match read(file, bytes) {
        Ok(read) => read,
        Err(reason) => return report(error(*first, reason)),
    };
    for (whose, dtype, piece) in pieces {
        if let Err(reason) = agrees(header.get(&piece.key), *dtype, piece, data) {
            report(error(*whose, reason));
        }
    }
}

/// Where the data begins, and what is said of each key.
fn read(file: &SavedFile, bytes: u64) -> Result<(u64, Header), String> {
    let mut len = [0; 8];
    if bytes < 8 {
        return Err("it is too short to have one".to_owned());
    }
    file.fill(0, &mut len).map_err(|error| error.to_string())?;
    let len = u64::from_le_bytes(len);
    if len > MOST.min(bytes - 8) {
        return Err(format!("{len} bytes of it do not lie in the file's {bytes}, or are more than {MOST}"));
    }
    let mut text = vec![0; len as usize];
    file.fill(8, &mut text).map_err(|error| error.to_string())?;
    let said = once::check(&text).and_then(|()| serde_json::from_slice(&text));
    Ok((8 + len, said.map_err(|error| error.to_string())?))
}

fn agrees(said: Option<&Said>, dtype: Type, piece: &PieceEntry, data: u64) -> Result<(), String> {
    let PieceEntry { key, stored, .. } = piece;
    let Some(Said { dtype: said, shape, data_offsets: [from, to] }) = said else {
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

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(Keys)
    }
}

struct Keys;

impl<'de> Visitor<'de> for Keys {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of vectors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut header = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            if key == METADATA {
                map.next_value::<IgnoredAny>()?;
            } else {
                header.insert(key, map.next_value()?);
            }
        }
        Ok(Header(header))
    }
}

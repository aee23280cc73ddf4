//! A safetensors file of any program: what it has, and ranges of it.

use super::error::PyTorchError;
use super::file::PyTorchFile;
use crate::checkpoint::contents::Content;
use crate::checkpoint::disk::Reader;
use crate::checkpoint::error::{CheckpointError, io};
use crate::checkpoint::holding::Part;
use crate::checkpoint::manifest::{Type, WINDOW};
use crate::checkpoint::piece::{Piece, Region, Run, product};
use crate::checkpoint::read::{Target, join, near};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

/// The longest header that programs read.
const MOST: u64 = 100_000_000;

/// A file whose header agrees with itself and with the file's length.
#[derive(Debug)]
pub(super) struct Plain {
    file: Box<dyn Reader>,
    path: PathBuf,
    /// Where the data begins.
    data: u64,
    entries: BTreeMap<String, Entry>,
    /// Of the header: two files with one digest have the same vectors, of whatever values.
    pub(super) digest: String,
    room: Vec<u8>,
}

/// What is said of a vector.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Entry {
    /// As it stands there: a file may hold what no parameter is made of.
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl Entry {
    /// Its type, where parameters are of that.
    pub(super) fn dtype(&self) -> Option<Type> {
        [Type::F64, Type::F32, Type::BF16, Type::F16].into_iter().find(|of| self.dtype == format!("{of:?}"))
    }
}

impl Plain {
    pub(super) fn open(PyTorchFile { disk, path }: &PyTorchFile) -> Result<Self, CheckpointError> {
        let file = disk.open(path).map_err(io("opening", path))?;
        let bytes = file.len().map_err(io("measuring", path))?;
        let wrong = |reason: String| CheckpointError::from(PyTorchError::File { path: path.clone(), reason });
        let mut len = [0; 8];
        if bytes < 8 {
            return Err(wrong(format!("it has {bytes} bytes, fewer than a header")));
        }
        file.read_at(0, &mut len).map_err(io("reading", path))?;
        let len = u64::from_le_bytes(len);
        if len > MOST.min(bytes - 8) {
            return Err(wrong(format!(
                "a header of {len} bytes does not lie in its {bytes}, or is more than {MOST}"
            )));
        }
        let mut text = vec![0; len as usize];
        file.read_at(8, &mut text).map_err(io("reading", path))?;
        let Header(entries) = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        check(&entries, bytes - 8 - len).map_err(wrong)?;
        let digest = format!("{} of {bytes} bytes", blake3::hash(&text).to_hex());
        let room = vec![0; bytes.min(WINDOW) as usize];
        Ok(Plain { file, path: path.clone(), data: 8 + len, entries, digest, room })
    }

    pub(super) fn get(&self, key: &str) -> Option<&Entry> {
        self.entries.get(key)
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Fills `to` with elements `range` of what this rank holds of a parameter, which is all of `entry`; their size is `size`.
    pub(super) fn vector(
        &mut self,
        entry: &Entry,
        size: u64,
        content: &Content,
        range: Range<usize>,
        to: &mut Target<'_>,
    ) -> Result<(), CheckpointError> {
        let held = content.held();
        let whole = Piece { region: Region::whole(&entry.shape), range: 0..content.len() };
        for Part { global, local } in content.holding.parts(range.start as u64..range.end as u64) {
            let places: Vec<Run> = local.runs(&held).collect();
            let runs = join(whole.runs(&global), &places);
            for runs in runs.chunk_by(near(size)) {
                self.runs(entry, size, runs, to)?;
            }
        }
        Ok(())
    }

    /// Reads from the first of these runs to the last.
    fn runs(
        &mut self,
        entry: &Entry,
        size: u64,
        runs: &[Run],
        to: &mut Target<'_>,
    ) -> Result<(), CheckpointError> {
        let (Some(first), Some(last)) = (runs.first(), runs.last()) else { return Ok(()) };
        let (mut at, end, mut rest) = (first.from * size, (last.from + last.len) * size, runs);
        while at < end {
            let part = &mut self.room[..WINDOW.min(end - at) as usize];
            let place = self.data + entry.data_offsets[0] + at;
            self.file.read_at(place, part).map_err(io("reading", &self.path))?;
            rest = to.scatter(rest, at / size, size, part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// A number that stands alone.
    pub(super) fn scalar(&self, key: &str, entry: &Entry) -> Result<f64, CheckpointError> {
        if product(&entry.shape) != Some(1) {
            let (key, found) = (key.to_owned(), entry.shape.clone());
            return Err(PyTorchError::Shape { key, found, here: Vec::new() }.into());
        }
        let mut bytes = [0; 8];
        let narrow = entry.dtype() == Some(Type::F32);
        if !narrow && entry.dtype() != Some(Type::F64) {
            let (key, found) = (key.to_owned(), entry.dtype.clone());
            return Err(PyTorchError::Type { key, found, here: Type::F32 }.into());
        }
        let part = &mut bytes[..if narrow { 4 } else { 8 }];
        self.file.read_at(self.data + entry.data_offsets[0], part).map_err(io("reading", &self.path))?;
        let [a, b, c, d, ..] = bytes;
        Ok(if narrow { f32::from_le_bytes([a, b, c, d]).into() } else { f64::from_le_bytes(bytes) })
    }
}

/// Whether vectors follow one another from the first byte of the data to the last, each with as many as its shape says.
fn check(entries: &BTreeMap<String, Entry>, data: u64) -> Result<(), String> {
    let mut sorted: Vec<(&String, &Entry)> = entries.iter().collect();
    sorted.sort_by_key(|(_, entry)| entry.data_offsets);
    let mut at = 0;
    for (key, Entry { shape, data_offsets: [from, to], .. }) in &sorted {
        if *from != at || to < from {
            return Err(format!("{key:?} has bytes {from} to {to} of the data, and begins at {at}"));
        }
        let entry = &entries[*key];
        let bytes = entry.dtype().map(|dtype| product(shape).and_then(|len| len.checked_mul(dtype.size())));
        if bytes.is_some_and(|bytes| bytes != Some(to - from)) {
            return Err(format!("{key:?}, {} of shape {shape:?}, has {} bytes", entry.dtype, to - from));
        }
        at = *to;
    }
    match at == data {
        true => Ok(()),
        false => {
            Err(format!("the header speaks of {at} bytes of data, and there are {data}: it was cut short"))
        }
    }
}

/// By key, each once.
struct Header(BTreeMap<String, Entry>);

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
            if key == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
            } else if header.insert(key.clone(), map.next_value()?).is_some() {
                return Err(A::Error::custom(format_args!("{key:?} is there twice")));
            }
        }
        Ok(Header(header))
    }
}

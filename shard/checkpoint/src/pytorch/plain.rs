//! Safetensors file of any program: its entries, and reads of element ranges.

use super::error::PyTorchError;
use super::file::PyTorchFile;
use super::grains::Grains;
use crate::collective::read::{Target, join, near};
use crate::error::{CheckpointError, io};
use crate::format::header::{self, Entry, Header};
use crate::format::local_pieces::Part;
use crate::format::manifest::{Type, WINDOW};
use crate::format::piece::{Piece, Region, Run, product};
use crate::tensors::SavedTensor;
use std::collections::BTreeMap;
use std::ops::Range;

/// File with a header that is consistent and agrees with the file's length.
#[derive(Debug)]
pub(super) struct Plain {
    pub(super) grains: Grains,
    /// Offset of the data in the file.
    data: u64,
    entries: BTreeMap<String, Entry>,
    /// Digest of the header: two files with the same digest have the same vectors, with any values.
    pub(super) digest: String,
}

impl Plain {
    pub(super) fn open(PyTorchFile { disk, path }: &PyTorchFile) -> Result<Self, CheckpointError> {
        let file = disk.open(path).map_err(io("opening", path))?;
        let bytes = file.len().map_err(io("measuring", path))?;
        let wrong = |reason: String| CheckpointError::from(PyTorchError::File { path: path.clone(), reason });
        let fill = |at, room: &mut [u8]| file.read_at(at, room).map_err(io("reading", path));
        let Header { data, text, entries } = header::read(bytes, fill, wrong)?;
        check(&entries, bytes - data).map_err(wrong)?;
        let digest = format!("{} of {bytes} bytes", blake3::hash(&text).to_hex());
        Ok(Plain { grains: Grains::new(file, path.clone(), bytes), data, entries, digest })
    }

    pub(super) fn get(&self, key: &str) -> Option<&Entry> {
        self.entries.get(key)
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Fills `to` with elements `range` of this rank's local part of a parameter. `entry` is the whole parameter, and `size` the size of an
    /// element.
    pub(super) fn vector(
        &mut self,
        entry: &Entry,
        size: u64,
        content: &SavedTensor,
        range: Range<usize>,
        to: &mut Target<'_>,
    ) -> Result<(), CheckpointError> {
        let held = content.held();
        let whole = Piece { region: Region::whole(&entry.shape), range: 0..content.elements() };
        for Part { global, local } in content.holding.parts(range.start as u64..range.end as u64) {
            let places: Vec<Run> = local.runs(&held).collect();
            let runs = join(whole.runs(&global), &places);
            for runs in runs.chunk_by(near(size)) {
                self.runs(entry, size, runs, to)?;
            }
        }
        Ok(())
    }

    /// Reads from the first of these runs to the end of the last.
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
            let part = self.grains.read(self.data + entry.data_offsets[0] + at, WINDOW.min(end - at))?;
            rest = to.scatter(rest, at / size, size, part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Reads a scalar.
    pub(super) fn scalar(&mut self, key: &str, entry: &Entry) -> Result<f64, CheckpointError> {
        if product(&entry.shape) != Some(1) {
            let (key, found) = (key.to_owned(), entry.shape.clone());
            return Err(PyTorchError::Shape { key, found, here: Vec::new() }.into());
        }
        let narrow = entry.dtype() == Some(Type::F32);
        if !narrow && entry.dtype() != Some(Type::F64) {
            let (key, found) = (key.to_owned(), entry.dtype.clone());
            return Err(PyTorchError::Type { key, found, here: Type::F32 }.into());
        }
        let mut bytes = [0; 8];
        let found = self.grains.read(self.data + entry.data_offsets[0], if narrow { 4 } else { 8 })?;
        bytes[..found.len()].copy_from_slice(found);
        let [a, b, c, d, ..] = bytes;
        Ok(if narrow { f32::from_le_bytes([a, b, c, d]).into() } else { f64::from_le_bytes(bytes) })
    }
}

/// Checks that vectors follow one another without gaps from the first byte of the data to the last, each with the bytes of its shape.
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
            Err(format!("the header describes {at} bytes of data, and the file has {data}: it was cut short"))
        }
    }
}

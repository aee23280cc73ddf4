//! One rank's file: safetensors, written from the first byte to the last and hashed on the way.

use super::disk::Writer;
use crate::error::{CheckpointError, io};
use crate::format::manifest::{FileEntry, Stored, Type, WINDOW};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::hash::Hasher as _;
use std::path::{Path, PathBuf};
use std::thread;
use twox_hash::XxHash3_64;

/// Name and form of a vector in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vector {
    /// Safetensors key.
    pub key: String,
    /// Element type.
    pub dtype: Type,
    /// Shape in the file: a box's extents, or the length of a range.
    pub shape: Vec<u64>,
}

/// File that is being written. Vectors are written in the order in which they were announced, each in any number of calls.
pub struct ShardWriter {
    file: Box<dyn Writer>,
    path: PathBuf,
    index: usize,
    at: u64,
    /// Lengths in bytes of the vectors that were not begun, last one first.
    left: Vec<u64>,
    stored: Vec<Stored>,
    hashes: Hashes,
}

/// Hashes of the bytes written: of the whole file, and of each window of the current vector.
#[derive(Default)]
struct Hashes {
    all: blake3::Hasher,
    window: XxHash3_64,
    in_window: u64,
    windows: Vec<u64>,
}

/// Length in bytes from which hashing on another thread pays.
const APART: usize = 1 << 20;

/// Safetensors header in the format's layout.
#[derive(Serialize)]
struct Header<'a> {
    #[serde(rename = "__metadata__", skip_serializing_if = "BTreeMap::is_empty")]
    texts: BTreeMap<&'a str, &'a str>,
    #[serde(flatten)]
    entries: BTreeMap<&'a String, VectorEntry>,
}

/// Header entry of a vector in the format's layout.
#[derive(Serialize)]
struct VectorEntry {
    dtype: Type,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl fmt::Debug for ShardWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardWriter").field("path", &self.path).field("at", &self.at).finish_non_exhaustive()
    }
}

impl ShardWriter {
    /// Begins the file at `path`, which is file `index` of the manifest, with a header for `vectors`.
    ///
    /// # Panics
    /// If two vectors have one key.
    pub fn new(
        file: Box<dyn Writer>,
        path: &Path,
        index: usize,
        vectors: &[Vector],
    ) -> Result<Self, CheckpointError> {
        Self::described(file, path, index, vectors, &[])
    }

    /// Same as [`new`](Self::new), with additional texts by name in the header's metadata.
    ///
    /// # Panics
    /// If two vectors have one key.
    pub fn described(
        mut file: Box<dyn Writer>,
        path: &Path,
        index: usize,
        vectors: &[Vector],
        texts: &[(&str, &str)],
    ) -> Result<Self, CheckpointError> {
        let mut entries = BTreeMap::new();
        let (mut end, mut left) = (0, Vec::new());
        for Vector { key, dtype, shape } in vectors {
            let bytes = shape.iter().product::<u64>() * dtype.size();
            let entry = VectorEntry { dtype: *dtype, shape: shape.clone(), data_offsets: [end, end + bytes] };
            assert!(entries.insert(key, entry).is_none(), "two vectors are called {key:?}");
            end += bytes;
            left.push(bytes);
        }
        left.reverse();
        let mut header = serde_json::to_vec(&Header { texts: texts.iter().copied().collect(), entries })
            .unwrap_or_default();
        // Data begins at a multiple of 64, so that mapped vectors are aligned.
        header.resize((header.len() + 8).next_multiple_of(64) - 8, b' ');
        let mut hashes = Hashes::default();
        let bytes = [&(header.len() as u64).to_le_bytes()[..], &header].concat();
        hashes.all.update(&bytes);
        file.write_at(0, &bytes).map_err(io("writing", path))?;
        let at = bytes.len() as u64;
        let (path, stored) = (path.to_owned(), Vec::new());
        Ok(ShardWriter { file, path, index, at, left, stored, hashes })
    }

    /// Begins the next vector.
    ///
    /// # Panics
    /// If the one before is not complete, or there is none.
    pub fn begin(&mut self) {
        self.check_complete();
        let bytes = self.left.pop();
        assert!(bytes.is_some(), "all vectors that were announced are written");
        let bytes = bytes.unwrap_or_default();
        self.stored.push(Stored { file: self.index, at: self.at, bytes, xxh3: Vec::new() });
    }

    /// Writes the next bytes of the current vector.
    ///
    /// # Panics
    /// If they are more than was announced.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        let (at, end) = (self.at, self.stored.last().map_or(0, |stored| stored.at + stored.bytes));
        self.at += bytes.len() as u64;
        assert!(self.at <= end, "no more than was announced");
        self.hash_and_write(at, bytes).map_err(io("writing", &self.path))?;
        if self.at == end {
            self.hashes.end_window();
            if let Some(stored) = self.stored.last_mut() {
                stored.xxh3 = std::mem::take(&mut self.hashes.windows);
            }
        }
        Ok(())
    }

    /// Writes and hashes at the same time, as the disk and the hashes take about equally long. Hashing has a thread of its own instead of
    /// those that training steps share during a background save.
    fn hash_and_write(&mut self, at: u64, bytes: &[u8]) -> std::io::Result<()> {
        let ShardWriter { file, hashes, .. } = self;
        let mut apart = false;
        let written = thread::scope(|scope| {
            if bytes.len() >= APART {
                let thread = thread::Builder::new().name("meshstep-hash".to_owned());
                apart = thread.spawn_scoped(scope, || hashes.take(bytes)).is_ok();
            }
            file.write_at(at, bytes)
        });
        // The bytes are few, or the thread did not start.
        if !apart {
            hashes.take(bytes);
        }
        written
    }

    /// Syncs the file and returns its entry and the places of its vectors.
    ///
    /// # Panics
    /// If something announced was not written.
    pub fn finish(mut self) -> Result<(FileEntry, Vec<Stored>), CheckpointError> {
        self.check_complete();
        assert!(self.left.is_empty(), "everything that was announced is written");
        self.file.sync().map_err(io("syncing", &self.path))?;
        let name = self.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let blake3 = self.hashes.all.finalize().to_hex().to_string();
        Ok((FileEntry { name, bytes: self.at, blake3 }, self.stored))
    }

    fn check_complete(&self) {
        let end = self.stored.last().map_or(self.at, |stored| stored.at + stored.bytes);
        assert_eq!(self.at, end, "a vector is complete before the next");
    }
}

impl Hashes {
    fn take(&mut self, mut bytes: &[u8]) {
        self.all.update(bytes);
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min((WINDOW - self.in_window) as usize));
            self.window.write(now);
            self.in_window += now.len() as u64;
            bytes = later;
            if self.in_window == WINDOW {
                self.end_window();
            }
        }
    }

    fn end_window(&mut self) {
        if self.in_window > 0 {
            self.windows.push(self.window.finish());
            self.window = XxHash3_64::new();
            self.in_window = 0;
        }
    }
}

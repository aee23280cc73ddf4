//! What a checkpoint holds, as text that any JSON reader understands: `manifest.json`.
//!
//! ```text
//! {"format": 1, "step": .., "files": [..], "tensors": {name: {"shape", "t", "slots": {slot: {"dtype", "pieces": [..]}}}}, ..,
//! "blake3": "<of every byte before the comma that precedes this member>"}
//! ```
//!
//! Reading it checks everything that can be checked without the other files: its own hash, that names are plain file names,
//! that pieces lie in their files without sharing bytes, and that each vector's pieces are the whole tensor. What that takes,
//! in time and memory, grows as its text does, whatever the text says.

use super::cover;
use super::error::CheckpointError;
use super::once;
use super::piece::{Piece, Region};
use meshstep_tensor::DType;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

/// The version this program writes and reads.
pub const FORMAT: u32 = 1;

/// Bytes that share a hash.
pub const WINDOW: u64 = 1 << 20;

/// Dimensions a tensor may have: as many as the programs that read safetensors take.
pub const MOST_DIMS: usize = 64;

/// What a checkpoint holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// Steps that were taken, skipped ones too.
    pub step: u64,
    /// The ranks that saved it, for people: `tp=2,dp=4`.
    pub mesh: String,
    /// What lies beside this file.
    pub files: Vec<FileEntry>,
    /// Parameters and their state, by name.
    pub tensors: BTreeMap<String, TensorEntry>,
    /// What belongs to no tensor: rules, groups, schedule, scaler, seeds.
    pub settings: BTreeMap<String, serde_json::Value>,
    /// The caller's own bytes, by name.
    pub blobs: BTreeMap<String, Stored>,
}

/// A file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// A plain name in the manifest's folder.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
    /// Their BLAKE3 hash, in hexadecimal digits.
    pub blake3: String,
}

/// A parameter and its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Of the whole parameter.
    pub shape: Vec<u64>,
    /// Updates it has seen.
    pub t: u64,
    /// Its vectors, each of the parameter's shape: `param`, `master`, a rule's by their names.
    pub slots: BTreeMap<String, SlotEntry>,
}

/// A vector.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlotEntry {
    /// As safetensors names types.
    pub dtype: Type,
    /// Where its elements are.
    pub pieces: Vec<PieceEntry>,
}

/// Elements and where their bytes are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PieceEntry {
    /// The first index of the box in each dimension.
    pub offsets: Vec<u64>,
    /// The indices of the box in each dimension.
    pub extents: Vec<u64>,
    /// Which elements of the box, in row-major order.
    pub range: [u64; 2],
    /// The safetensors key of the same bytes.
    pub key: String,
    /// The bytes.
    pub stored: Stored,
}

/// Bytes in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stored {
    /// Index of the file.
    pub file: usize,
    /// The first byte's place in it.
    pub at: u64,
    /// How many.
    pub bytes: u64,
    /// The XXH3 hash of each [`WINDOW`] of them, in hexadecimal digits.
    pub xxh3: Vec<String>,
}

/// Whose bytes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose<'m> {
    /// A vector's.
    Slot {
        /// The tensor.
        tensor: &'m str,
        /// Which of its vectors.
        slot: &'m str,
    },
    /// The caller's.
    Blob(&'m str),
}

impl fmt::Display for Whose<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Whose::Slot { tensor, slot } => write!(f, "slot {slot:?} of tensor {tensor:?}"),
            Whose::Blob(name) => write!(f, "blob {name:?}"),
        }
    }
}

/// Element types, by their names in safetensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "names that say it")]
pub enum Type {
    F64,
    F32,
    BF16,
    F16,
    U16,
    U8,
}

impl Type {
    /// What such elements are in a file; bytes of the caller have no other type.
    pub fn of(dtype: DType) -> Option<Self> {
        Type::NUMBERS.into_iter().find(|of| of.dtype() == Some(dtype))
    }

    /// What such elements are in memory; none of [`U8`](Type::U8).
    pub fn dtype(self) -> Option<DType> {
        match self {
            Type::F64 => Some(DType::F64),
            Type::F32 => Some(DType::F32),
            Type::BF16 => Some(DType::BF16),
            Type::F16 => Some(DType::F16),
            Type::U16 => Some(DType::U16),
            Type::U8 => None,
        }
    }

    /// Whether such elements are numbers that others can be rounded to.
    pub(super) fn is_float(self) -> bool {
        self.dtype().is_some_and(DType::is_float)
    }

    const NUMBERS: [Type; 5] = [Type::F64, Type::F32, Type::BF16, Type::F16, Type::U16];

    /// Bytes of an element.
    pub fn size(self) -> u64 {
        match self {
            Type::F64 => 8,
            Type::F32 => 4,
            Type::BF16 | Type::F16 | Type::U16 => 2,
            Type::U8 => 1,
        }
    }
}

impl PieceEntry {
    /// Which elements these are.
    pub fn piece(&self) -> Piece {
        let region = Region { offsets: self.offsets.clone(), extents: self.extents.clone() };
        Piece { region, range: self.range[0]..self.range[1] }
    }
}

/// What precedes the hash, and what follows it.
const BEFORE: &str = ",\n\"blake3\": \"";
const AFTER: &str = "\"}\n";
const DIGITS: usize = 64;

impl Manifest {
    /// Its text, the hash at the end.
    ///
    /// # Panics
    /// Never: its names and numbers are all JSON.
    pub fn to_text(&self) -> String {
        let mut text = serde_json::to_string(self).unwrap_or_default();
        assert_eq!(text.pop(), Some('}'), "a struct is an object");
        let hash = blake3::hash(text.as_bytes());
        text + BEFORE + hash.to_hex().as_str() + AFTER
    }

    /// The manifest at `path` whose text this is, or what is wrong with it.
    pub fn from_text(path: &Path, text: &[u8]) -> Result<Self, CheckpointError> {
        let syntax = |reason: String| CheckpointError::Syntax { path: path.to_owned(), reason };
        let cut = text.len().checked_sub(BEFORE.len() + DIGITS + AFTER.len());
        let (body, tail) =
            cut.map(|cut| text.split_at(cut)).ok_or_else(|| syntax("it is too short".into()))?;
        let digits =
            tail.strip_prefix(BEFORE.as_bytes()).and_then(|rest| rest.strip_suffix(AFTER.as_bytes()));
        let digits = digits.ok_or_else(|| syntax("its last member is not its hash".into()))?;
        let (expected, found) = (String::from_utf8_lossy(digits), blake3::hash(body).to_hex());
        if expected != found.as_str() {
            let what = "the manifest's own bytes".to_owned();
            let (expected, found) = (expected.into_owned(), found.to_string());
            return Err(CheckpointError::Hash { path: path.to_owned(), what, expected, found });
        }
        let mut whole = body.to_vec();
        whole.push(b'}');
        once::check(&whole).map_err(|error| syntax(error.to_string()))?;
        let manifest: Manifest = serde_json::from_slice(&whole).map_err(|error| syntax(error.to_string()))?;
        match manifest.check() {
            Ok(()) => Ok(manifest),
            Err(error) => Err(CheckpointError::Manifest { path: path.to_owned(), source: Box::new(error) }),
        }
    }

    /// Whether it agrees with itself.
    pub fn check(&self) -> Result<(), CheckpointError> {
        if self.format != FORMAT {
            return Err(CheckpointError::Format { found: self.format, known: FORMAT });
        }
        self.check_names()?;
        for (name, tensor) in &self.tensors {
            for (slot, entry) in &tensor.slots {
                self.check_slot(name, slot, &tensor.shape, entry)?;
            }
        }
        for (name, stored) in &self.blobs {
            self.check_stored(stored).map_err(|reason| contradiction(Whose::Blob(name), reason))?;
        }
        check_apart(self.stored().collect())
    }

    /// Everything that is stored, and whose it is: vectors by name, each one's pieces in their order, and blobs.
    pub fn stored(&self) -> impl Iterator<Item = (Whose<'_>, &Stored)> {
        let pieces = self.pieces().map(|(whose, _, piece)| (whose, &piece.stored));
        pieces.chain(self.blobs.iter().map(|(name, stored)| (Whose::Blob(name), stored)))
    }

    /// Every piece, whose it is, and its elements' type.
    pub(super) fn pieces(&self) -> impl Iterator<Item = (Whose<'_>, Type, &PieceEntry)> {
        let slots = self.tensors.iter().flat_map(|(tensor, entry)| {
            entry.slots.iter().map(move |(slot, entry)| (Whose::Slot { tensor, slot }, entry))
        });
        slots.flat_map(|(whose, entry)| entry.pieces.iter().map(move |piece| (whose, entry.dtype, piece)))
    }

    fn check_slot(
        &self,
        tensor: &str,
        slot: &str,
        shape: &[u64],
        entry: &SlotEntry,
    ) -> Result<(), CheckpointError> {
        let whose = Whose::Slot { tensor, slot };
        if shape.len() > MOST_DIMS {
            let reason = format!("it has {} dimensions, {MOST_DIMS} are the most", shape.len());
            return Err(contradiction(whose, reason));
        }
        for piece in &entry.pieces {
            self.check_piece(entry.dtype, piece).map_err(|reason| contradiction(whose, reason))?;
        }
        let pieces: Vec<Piece> = entry.pieces.iter().map(PieceEntry::piece).collect();
        let (tensor, slot) = (tensor.to_owned(), slot.to_owned());
        cover::check(shape, &pieces).map_err(|source| CheckpointError::Cover { tensor, slot, source })
    }

    fn check_names(&self) -> Result<(), CheckpointError> {
        let mut names = BTreeSet::new();
        for FileEntry { name, .. } in &self.files {
            let reason = match plain(name) {
                false => {
                    "a file's name is letters, digits, '.', '-' and '_', and begins with none of the signs"
                }
                true if !names.insert(name) => "it is listed twice",
                true => continue,
            };
            return Err(contradiction(format_args!("file {name:?}"), reason.to_owned()));
        }
        Ok(())
    }

    fn check_piece(&self, dtype: Type, entry: &PieceEntry) -> Result<(), String> {
        let len = entry.range[1].saturating_sub(entry.range[0]);
        let bytes = entry.stored.bytes;
        if len.checked_mul(dtype.size()) != Some(bytes) {
            return Err(format!("{len} elements of {dtype:?} are not {bytes} bytes"));
        }
        self.check_stored(&entry.stored)
    }

    fn check_stored(&self, stored: &Stored) -> Result<(), String> {
        let Stored { file, at, bytes, ref xxh3 } = *stored;
        let Some(entry) = self.files.get(file) else {
            return Err(format!("there are {} files, and none with index {file}", self.files.len()));
        };
        if at.checked_add(bytes).is_none_or(|end| end > entry.bytes) {
            let FileEntry { name, bytes: all, .. } = entry;
            return Err(format!("{bytes} bytes from {at} on do not lie in {name:?}, which has {all}"));
        }
        let windows = bytes.div_ceil(WINDOW);
        match xxh3.len() as u64 == windows {
            true => Ok(()),
            false => Err(format!("{bytes} bytes have {windows} windows, not {}", xxh3.len())),
        }
    }
}

/// Bytes that two share.
fn check_apart(mut taken: Vec<(Whose<'_>, &Stored)>) -> Result<(), CheckpointError> {
    taken.retain(|(_, stored)| stored.bytes > 0);
    taken.sort_by_key(|(_, stored)| (stored.file, stored.at));
    let apart = |a: &Stored, b: &Stored| a.file != b.file || a.at + a.bytes <= b.at;
    match taken.windows(2).find(|pair| !apart(pair[0].1, pair[1].1)) {
        Some(pair) => Err(contradiction(pair[1].0, format!("it shares bytes with {}", pair[0].0))),
        None => Ok(()),
    }
}

/// A name that means a file in the folder it is looked for in, everywhere.
pub(super) fn plain(name: &str) -> bool {
    let first = name.bytes().next().is_some_and(|c| c.is_ascii_alphanumeric());
    first && name.len() <= 200 && name.bytes().all(|c| c.is_ascii_alphanumeric() || b".-_".contains(&c))
}

fn contradiction(what: impl fmt::Display, reason: String) -> CheckpointError {
    CheckpointError::Contradiction { what: what.to_string(), reason }
}

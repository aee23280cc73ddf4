//! `manifest.json`: the contents of a checkpoint, as text that any JSON reader understands.
//!
//! ```text
//! {"format": 1, "step": .., "files": [..], "tensors": {name: {"shape", "t", "slots": {slot: {"dtype", "pieces": [..]}}}}, ..,
//! "blake3": "<of every byte before the comma that precedes this member>"}
//! ```
//!
//! Reading checks everything that can be checked without the other files: the manifest's own hash, that names are plain file names, that
//! pieces lie in their files without sharing bytes, and that each vector's pieces cover the whole tensor. Time grows in proportion to the
//! length of the text, whatever values it holds, and memory to three times that length at most, the text included. Settings are limited to
//! 16 MiB of text, and to values that take about 32 MiB.

use super::catalog::Catalog;
use super::piece::{Piece, Region};
use super::unique_keys::{self, Refused};
use super::{consistency, hashes, parse};
use crate::error::CheckpointError;
use meshstep_tensor::DType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::path::Path;

/// Format version that this program writes and reads.
pub const FORMAT: u32 = 1;

/// Number of bytes that share one hash.
pub const WINDOW: u64 = 1 << 20;

/// Maximum number of dimensions of a tensor: the limit of programs that read safetensors.
pub const MOST_DIMS: usize = 64;

/// Contents of a checkpoint.
///
/// ```
/// use meshstep_checkpoint::{Checked, FileEntry, Manifest, Piece, PieceEntry, Run, Save, Saved, SavedFile, SavedVectors};
/// use meshstep_checkpoint::{SlotEntry, Store, Stored, TensorEntry, Type, Unsharded, Whose, save};
/// use meshstep_shard::prelude::*;
///
/// # let dir = std::env::temp_dir().join(format!("meshstep-manifest-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&dir)?;
/// let store = Store::new(&dir);
/// let saved = loopback::spawn(2, |comm| -> Result<u64, meshstep_checkpoint::Error> {
///     let layout = Layout::builder().param("w", &[8, 16], DType::F32).build()?;
///     let ones = |p: &Param, mut out: SliceMut| out.copy_from((&vec![1f32; p.len()]).into());
///     let options = Options { stage: Stage::Zero1, ..Options::default() };
///     save(&mut Optimizer::new(comm, layout, AdamW::default(), ones, options)?, &store, Save::default())
/// })?;
/// saved.into_iter().collect::<Result<Vec<u64>, _>>()?;
///
/// let saved: Saved = store.latest()?;
/// let Manifest { step, mesh, files, tensors, .. } = saved.manifest();
/// assert_eq!((*step, &**mesh), (0, meshstep_checkpoint::ModelPlacement::mesh(&Unsharded { ranks: 2 }).as_str()));
/// let FileEntry { name, .. } = &files[1];
/// assert!(name.ends_with(".safetensors"));
/// let TensorEntry { shape, slots, .. } = &tensors["w"];
/// let SlotEntry { dtype, pieces } = &slots["param"];
/// assert_eq!((*dtype, pieces.len()), (Type::F32, 2)); // each rank has written a half
/// let PieceEntry { stored: Stored { file, bytes, .. }, .. } = &pieces[1];
/// let opened: SavedFile = saved.file(*file)?;
/// drop(opened);
/// assert_eq!(*bytes, 64 * 4);
/// let Checked { files, slots, .. } = saved.verify()?; // every byte
/// assert_eq!((files, slots), (2, 3));
///
/// // The second row, whatever file it is in.
/// let row = Piece { range: 16..32, ..Piece::whole(shape) };
/// let Run { from, to, len } = Piece::whole(shape).runs(&row).next().ok_or("a row has elements")?;
/// assert_eq!((from, to, len), (16, 0, 16));
/// let (mut reader, mut sum): (SavedVectors<'_>, f32) = (saved.vectors(), 0.0);
/// reader.read("w", "param", &row, |_, bytes| -> Result<(), meshstep_checkpoint::CheckpointError> {
///     sum += bytes.chunks(4).map(|number| f32::from_le_bytes([number[0], number[1], number[2], number[3]])).sum::<f32>();
///     Ok(())
/// })?;
/// assert_eq!((sum, Whose::Slot { tensor: "w", slot: "param" }.to_string()), (16.0, r#"slot "param" of tensor "w""#.to_owned()));
/// # std::fs::remove_dir_all(&dir)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Manifest {
    /// Format version, [`FORMAT`].
    pub format: u32,
    /// Number of steps taken, skipped ones included.
    pub step: u64,
    /// Ranks that saved the checkpoint, for people: `tp=2,dp=4`.
    pub mesh: String,
    /// Files beside the manifest.
    pub files: Vec<FileEntry>,
    /// Parameters and their state, by name.
    pub tensors: BTreeMap<String, TensorEntry>,
    /// Settings that belong to no tensor: rules, groups, schedule, scaler, seeds.
    pub settings: BTreeMap<String, serde_json::Value>,
    /// The caller's own bytes, by name.
    pub blobs: BTreeMap<String, Stored>,
}

/// File of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Plain name in the manifest's folder.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
    /// BLAKE3 hash of the file in hexadecimal digits.
    pub blake3: String,
}

/// Parameter and its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorEntry {
    /// Shape of the whole parameter.
    pub shape: Vec<u64>,
    /// Number of updates of the parameter.
    pub t: u64,
    /// Vectors, each of the parameter's shape: `param`, `master`, and the rule's state by its names.
    pub slots: BTreeMap<String, SlotEntry>,
}

/// Vector of a parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SlotEntry {
    /// Element type, by its name in safetensors.
    pub dtype: Type,
    /// Pieces that together hold its elements.
    pub pieces: Vec<PieceEntry>,
}

/// Elements and the place of their bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PieceEntry {
    /// First index of the box in each dimension.
    #[serde(deserialize_with = "parse::dims")]
    pub offsets: Vec<u64>,
    /// Number of indices of the box in each dimension.
    #[serde(deserialize_with = "parse::dims")]
    pub extents: Vec<u64>,
    /// Elements of the box, in row-major order.
    pub range: [u64; 2],
    /// The safetensors key of the same bytes.
    pub key: String,
    /// Bytes of the elements.
    pub stored: Stored,
}

/// Range of bytes in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stored {
    /// Index of the file.
    pub file: usize,
    /// Offset of the first byte in the file.
    pub at: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// XXH3 hash of each [`WINDOW`] of the bytes; as text, 16 hexadecimal digits.
    #[serde(with = "hashes")]
    pub xxh3: Vec<u64>,
}

/// Owner of stored bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose<'m> {
    /// Vector of a tensor.
    Slot {
        /// The tensor.
        tensor: &'m str,
        /// Name of the vector.
        slot: &'m str,
    },
    /// Blob of the caller.
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
    /// Returns the type of such elements in a file; `None` if they cannot be saved. [`U8`](Type::U8) is for the caller's bytes alone.
    pub fn of(dtype: DType) -> Option<Self> {
        Type::NUMBERS.into_iter().find(|of| of.dtype() == Some(dtype))
    }

    /// Returns the type in memory; `None` for [`U8`](Type::U8).
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

    /// Returns true for floating-point types, to which other numbers can be rounded.
    pub(crate) fn is_float(self) -> bool {
        self.dtype().is_some_and(DType::is_float)
    }

    pub(crate) const ALL: [Type; 6] = [Type::F64, Type::F32, Type::BF16, Type::F16, Type::U16, Type::U8];

    const NUMBERS: [Type; 5] = [Type::F64, Type::F32, Type::BF16, Type::F16, Type::U16];

    /// Returns the size of an element in bytes.
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
    /// Returns the elements of this entry.
    pub fn piece(&self) -> Piece {
        let region = Region { offsets: self.offsets.clone(), extents: self.extents.clone() };
        Piece { region, range: self.range[0]..self.range[1] }
    }
}

/// Text before and after the hash.
const BEFORE: &str = ",\n\"blake3\": \"";
const AFTER: &str = "\"}\n";
const DIGITS: usize = 64;

impl Manifest {
    /// Returns the manifest as text, with its hash at the end.
    ///
    /// # Panics
    /// Never: all names and numbers can be written as JSON.
    pub fn to_text(&self) -> String {
        let mut text = serde_json::to_string(self).unwrap_or_default();
        assert_eq!(text.pop(), Some('}'), "a struct is an object");
        let hash = blake3::hash(text.as_bytes());
        text + BEFORE + hash.to_hex().as_str() + AFTER
    }

    /// Parses and checks the text of the manifest at `path`.
    pub fn from_text(path: &Path, text: &[u8]) -> Result<Self, CheckpointError> {
        let catalog = Catalog::parse(path, text)?;
        catalog.check(path)?;
        Ok(catalog.unpack())
    }

    /// Checks that the manifest is consistent.
    pub fn check(&self) -> Result<(), CheckpointError> {
        let settings = serde_json::to_vec(&self.settings).unwrap_or_default();
        unique_keys::check_settings(&settings)?;
        consistency::check(&Catalog::pack(self)?)
    }

    /// Returns every stored range of bytes with its owner: vectors by name, each with its pieces in order, then blobs.
    pub fn stored(&self) -> impl Iterator<Item = (Whose<'_>, &Stored)> {
        let slots = self.tensors.iter().flat_map(|(tensor, entry)| {
            entry.slots.iter().map(move |(slot, entry)| (Whose::Slot { tensor, slot }, entry))
        });
        let pieces = slots.flat_map(|(whose, entry)| entry.pieces.iter().map(move |of| (whose, &of.stored)));
        pieces.chain(self.blobs.iter().map(|(name, stored)| (Whose::Blob(name), stored)))
    }
}

impl Catalog {
    /// Parses and checks the text of the manifest at `path`, and frees the text in between.
    pub(crate) fn from_text(path: &Path, text: Vec<u8>) -> Result<Self, CheckpointError> {
        let mut catalog = Self::parse(path, &text)?;
        drop(text);
        catalog.shrink();
        catalog.check(path)?;
        Ok(catalog)
    }

    /// Parses the text of the manifest at `path`.
    fn parse(path: &Path, text: &[u8]) -> Result<Self, CheckpointError> {
        let syntax = |reason: String| CheckpointError::Syntax { path: path.to_owned(), reason };
        let cut = text.len().checked_sub(TAIL);
        let (body, tail) =
            cut.map(|cut| text.split_at(cut)).ok_or_else(|| syntax("it is too short".into()))?;
        let digits = own_hash(tail).ok_or_else(|| syntax("its last member is not its hash".into()))?;
        let (expected, found) = (String::from_utf8_lossy(digits), blake3::hash(body).to_hex());
        if expected != found.as_str() {
            let what = "the manifest's own bytes".to_owned();
            let (expected, found) = (expected.into_owned(), found.to_string());
            return Err(CheckpointError::Hash { path: path.to_owned(), what, expected, found });
        }
        unique_keys::check_manifest(text).map_err(|refused| match refused {
            Refused::Syntax(error) => syntax(short(&error)),
            Refused::Settings(error) => of_manifest(path, error),
        })?;
        parse::parse(text).map_err(|error| syntax(short(&error)))
    }

    fn check(&self, path: &Path) -> Result<(), CheckpointError> {
        consistency::check(self).map_err(|error| of_manifest(path, error))
    }
}

/// Length of the end of a manifest, which has its hash.
pub(crate) const TAIL: usize = BEFORE.len() + DIGITS + AFTER.len();

/// Returns the digits of a manifest's hash; `tail` is the manifest's end.
pub(crate) fn own_hash(tail: &[u8]) -> Option<&[u8]> {
    tail.strip_prefix(BEFORE.as_bytes()).and_then(|rest| rest.strip_suffix(AFTER.as_bytes()))
}

fn of_manifest(path: &Path, error: CheckpointError) -> CheckpointError {
    CheckpointError::Manifest { path: path.to_owned(), source: Box::new(error) }
}

/// Returns the text of an error, which may repeat any text of the manifest, cut after about a thousand signs.
fn short(error: &serde_json::Error) -> String {
    struct Short(String);

    impl fmt::Write for Short {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            const MOST: usize = 1000;
            match text.char_indices().nth(MOST.saturating_sub(self.0.len())) {
                Some((end, _)) => {
                    self.0.push_str(&text[..end]);
                    Err(fmt::Error)
                }
                None => {
                    self.0.push_str(text);
                    Ok(())
                }
            }
        }
    }

    let mut text = Short(String::new());
    match write!(text, "{error}") {
        Ok(()) => text.0,
        Err(fmt::Error) => text.0 + "...",
    }
}

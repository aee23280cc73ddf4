//! `manifest.json`: the contents of a checkpoint, as text that any JSON reader understands.
//!
//! ```text
//! {"format": 1, "step": .., "files": [..], "tensors": {name: {"shape", "t", "slots": {slot: {"dtype", "pieces": [..]}}}}, ..,
//! "blake3": "<of every byte before the comma that precedes this member>"}
//! ```
//!
//! Writing and reading: [`text`](super::text).

use super::piece::{Piece, Region};
use super::run_id::RunId;
use super::{dims, hashes};
use meshstep_tensor::DType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Format version that this program writes and reads.
pub const FORMAT: u32 = 1;

/// Number of bytes that share one hash.
pub const WINDOW: u64 = 1 << 20;

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
    /// Run that the checkpoint belongs to; `None` if an earlier version saved it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
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
    #[serde(deserialize_with = "dims::deserialize")]
    pub offsets: Vec<u64>,
    /// Number of indices of the box in each dimension.
    #[serde(deserialize_with = "dims::deserialize")]
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

impl Manifest {
    /// Returns every stored range of bytes with its owner: vectors by name, each with its pieces in order, then blobs.
    pub fn stored(&self) -> impl Iterator<Item = (Whose<'_>, &Stored)> {
        let slots = self.tensors.iter().flat_map(|(tensor, entry)| {
            entry.slots.iter().map(move |(slot, entry)| (Whose::Slot { tensor, slot }, entry))
        });
        let pieces = slots.flat_map(|(whose, entry)| entry.pieces.iter().map(move |of| (whose, &of.stored)));
        pieces.chain(self.blobs.iter().map(|(name, stored)| (Whose::Blob(name), stored)))
    }
}

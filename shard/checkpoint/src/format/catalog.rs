//! Catalog of a saved step: the contents of its manifest in a compact form, for ranks that hold it during a load.
//!
//! Every file, tensor and blob is a record of bytes, and an index has the records' starts; those of tensors and blobs ascend by name. A
//! record takes about 0.4 of its text, and no allocation of its own.

use super::manifest::{FileEntry, Manifest, PieceEntry, SlotEntry, Stored, TensorEntry, Type, Whose};
use super::numbers::{Cursor, numbers, put, put_block, put_list, put_text};
use super::piece::{Piece, Region};
use super::run_id::RunId;
use crate::error::CheckpointError;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Contents of a saved step.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    pub(crate) format: u32,
    pub(crate) step: u64,
    pub(crate) run: Option<RunId>,
    pub(crate) mesh: String,
    pub(crate) settings: Arc<BTreeMap<String, Value>>,
    pub(crate) records: Arc<Records>,
    /// Starts of the chosen tensors.
    pub(crate) tensors: Vec<u32>,
}

/// Records, and the starts of those of files and blobs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Records {
    pub(crate) bytes: Vec<u8>,
    pub(crate) files: Vec<u32>,
    pub(crate) blobs: Vec<u32>,
}

/// Tensor of a catalog.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorRef<'c> {
    pub(crate) name: &'c str,
    pub(crate) t: u64,
    slots: &'c [u8],
    shape: &'c [u8],
}

/// Vector of a tensor of a catalog.
#[derive(Clone, Copy, Debug)]
pub struct SlotRef<'c> {
    pub(crate) dtype: Type,
    pieces: &'c [u8],
    count: u64,
}

/// Piece of a vector of a catalog.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PieceRef<'c> {
    pub(crate) offsets: &'c [u8],
    pub(crate) extents: &'c [u8],
    pub(crate) range: [u64; 2],
    pub(crate) key: &'c str,
    pub(crate) stored: StoredRef<'c>,
}

/// Range of bytes in a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredRef<'c> {
    pub(crate) file: usize,
    pub(crate) at: u64,
    pub(crate) bytes: u64,
    pub(crate) hashes: Hashes<'c>,
}

/// Hashes of windows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Hashes<'c> {
    Words(&'c [u64]),
    Bytes(&'c [u8]),
}

impl Hashes<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Hashes::Words(words) => words.len(),
            Hashes::Bytes(bytes) => bytes.len() / size_of::<u64>(),
        }
    }

    pub(crate) fn get(&self, at: usize) -> Option<u64> {
        match self {
            Hashes::Words(words) => words.get(at).copied(),
            Hashes::Bytes(bytes) => bytes.as_chunks().0.get(at).map(|&word| u64::from_le_bytes(word)),
        }
    }
}

impl Records {
    pub(crate) fn start(&self) -> u32 {
        self.bytes.len() as u32
    }

    /// Returns the name of a tensor or a blob.
    pub(crate) fn name(&self, start: u32) -> &str {
        self.cursor(start).text()
    }

    fn cursor(&self, start: u32) -> Cursor<'_> {
        Cursor(self.bytes.get(start as usize..).unwrap_or_default())
    }

    pub(crate) fn add_file(&mut self, FileEntry { name, bytes, blake3 }: &FileEntry) {
        self.files.push(self.start());
        put_text(&mut self.bytes, name);
        put(&mut self.bytes, *bytes);
        put_text(&mut self.bytes, blake3);
    }

    pub(crate) fn add_blob(&mut self, name: &str, stored: &Stored) {
        self.blobs.push(self.start());
        put_text(&mut self.bytes, name);
        put_stored(&mut self.bytes, stored);
    }

    /// Appends a tensor, whose slots `slots` appends; that returns its shape and the number of its updates.
    pub(crate) fn add_tensor<E>(
        &mut self,
        name: &str,
        slots: impl FnOnce(&mut Vec<u8>) -> Result<(Vec<u64>, u64), E>,
    ) -> Result<u32, E> {
        let start = self.start();
        put_text(&mut self.bytes, name);
        let (shape, t) = put_block(&mut self.bytes, slots)?;
        put_list(&mut self.bytes, &shape);
        put(&mut self.bytes, t);
        Ok(start)
    }
}

/// Appends a slot, whose pieces `pieces` appends; that returns their type and number.
pub(crate) fn put_slot<E>(
    out: &mut Vec<u8>,
    name: &str,
    pieces: impl FnOnce(&mut Vec<u8>) -> Result<(Type, u64), E>,
) -> Result<(), E> {
    put_text(out, name);
    let (dtype, count) = put_block(out, pieces)?;
    put(out, Type::ALL.iter().position(|&of| of == dtype).unwrap_or_default() as u64);
    put(out, count);
    Ok(())
}

pub(crate) fn put_piece(out: &mut Vec<u8>, piece: &PieceEntry) {
    let PieceEntry { offsets, extents, range, key, stored } = piece;
    put_list(out, offsets);
    put_list(out, extents);
    range.iter().for_each(|&end| put(out, end));
    put_text(out, key);
    put_stored(out, stored);
}

fn put_stored(out: &mut Vec<u8>, Stored { file, at, bytes, xxh3 }: &Stored) {
    [*file as u64, *at, *bytes, 8 * xxh3.len() as u64].into_iter().for_each(|number| put(out, number));
    out.extend(xxh3.iter().flat_map(|hash| hash.to_le_bytes()));
}

impl<'c> TensorRef<'c> {
    fn read(cursor: &mut Cursor<'c>) -> Self {
        let (name, slots) = (cursor.text(), cursor.block());
        TensorRef { name, slots, shape: cursor.list(), t: cursor.number() }
    }

    pub(crate) fn shape(&self) -> Vec<u64> {
        numbers(self.shape).collect()
    }

    pub(crate) fn slots(&self) -> impl Iterator<Item = (&'c str, SlotRef<'c>)> + use<'c> {
        let mut cursor = Cursor(self.slots);
        std::iter::from_fn(move || {
            (!cursor.is_at_end()).then(|| {
                let (name, pieces, dtype) = (cursor.text(), cursor.block(), cursor.number());
                let dtype = Type::ALL.get(dtype as usize).copied().unwrap_or(Type::U8);
                (name, SlotRef { dtype, pieces, count: cursor.number() })
            })
        })
    }

    pub(crate) fn slot(&self, name: &str) -> Option<(&'c str, SlotRef<'c>)> {
        self.slots().find(|(slot, _)| *slot == name)
    }
}

impl<'c> SlotRef<'c> {
    pub(crate) fn len(&self) -> usize {
        self.count as usize
    }

    pub(crate) fn pieces(&self) -> impl Iterator<Item = PieceRef<'c>> + use<'c> {
        let mut cursor = Cursor(self.pieces);
        std::iter::from_fn(move || (!cursor.is_at_end()).then(|| PieceRef::read(&mut cursor)))
    }
}

impl<'c> PieceRef<'c> {
    fn read(cursor: &mut Cursor<'c>) -> Self {
        let (offsets, extents) = (cursor.list(), cursor.list());
        let range = [cursor.number(), cursor.number()];
        PieceRef { offsets, extents, range, key: cursor.text(), stored: StoredRef::read(cursor) }
    }

    /// Returns the elements of this piece.
    pub(crate) fn piece(&self) -> Piece {
        let region =
            Region { offsets: numbers(self.offsets).collect(), extents: numbers(self.extents).collect() };
        Piece { region, range: self.range[0]..self.range[1] }
    }

    fn entry(&self) -> PieceEntry {
        let Piece { region: Region { offsets, extents }, .. } = self.piece();
        PieceEntry {
            offsets,
            extents,
            range: self.range,
            key: self.key.to_owned(),
            stored: self.stored.entry(),
        }
    }
}

impl<'c> StoredRef<'c> {
    fn read(cursor: &mut Cursor<'c>) -> Self {
        let [file, at, bytes] = [cursor.number(), cursor.number(), cursor.number()];
        StoredRef { file: file as usize, at, bytes, hashes: Hashes::Bytes(cursor.list()) }
    }

    fn entry(&self) -> Stored {
        let StoredRef { file, at, bytes, hashes } = *self;
        Stored { file, at, bytes, xxh3: (0..hashes.len()).filter_map(|i| hashes.get(i)).collect() }
    }
}

impl<'c> From<&'c Stored> for StoredRef<'c> {
    fn from(stored: &'c Stored) -> Self {
        let Stored { file, at, bytes, ref xxh3 } = *stored;
        StoredRef { file, at, bytes, hashes: Hashes::Words(xxh3) }
    }
}

impl Catalog {
    /// Returns the number of steps taken.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the run.
    pub(crate) fn run(&self) -> Option<RunId> {
        self.run
    }

    /// Returns the settings.
    pub fn settings(&self) -> &BTreeMap<String, Value> {
        &self.settings
    }

    /// Returns the number of tensors.
    pub fn count(&self) -> usize {
        self.tensors.len()
    }

    /// Returns the same step with the tensors for which `keep` returns true.
    pub fn only(&self, mut keep: impl FnMut(&str) -> bool) -> Self {
        let kept = self.tensors().zip(&self.tensors).filter(|(tensor, _)| keep(tensor.name));
        let tensors = kept.map(|(_, &start)| start).collect();
        Catalog { tensors, ..self.clone() }
    }

    /// Frees the memory that a parse has left over.
    pub(crate) fn shrink(&mut self) {
        if let Some(Records { bytes, files, blobs }) = Arc::get_mut(&mut self.records) {
            bytes.shrink_to_fit();
            [files, blobs, &mut self.tensors].into_iter().for_each(Vec::shrink_to_fit);
        }
    }

    fn cursor(&self, start: u32) -> Cursor<'_> {
        self.records.cursor(start)
    }

    /// Returns the name, the length in bytes and the hash of each file.
    pub(crate) fn files(&self) -> impl ExactSizeIterator<Item = (&str, u64, &str)> {
        self.records.files.iter().map(|&start| self.file_at(start))
    }

    fn file_at(&self, start: u32) -> (&str, u64, &str) {
        let mut cursor = self.cursor(start);
        (cursor.text(), cursor.number(), cursor.text())
    }

    pub(crate) fn file(&self, index: usize) -> Option<(&str, u64, &str)> {
        self.records.files.get(index).map(|&start| self.file_at(start))
    }

    pub(crate) fn tensors(&self) -> impl Iterator<Item = TensorRef<'_>> {
        self.tensors.iter().map(|&start| TensorRef::read(&mut self.cursor(start)))
    }

    pub(crate) fn tensor(&self, name: &str) -> Option<TensorRef<'_>> {
        let at = self.tensors.binary_search_by(|&start| self.records.name(start).cmp(name)).ok()?;
        Some(TensorRef::read(&mut self.cursor(self.tensors[at])))
    }

    pub(crate) fn blobs(&self) -> impl Iterator<Item = (&str, StoredRef<'_>)> {
        self.records.blobs.iter().map(|&start| {
            let mut cursor = self.cursor(start);
            (cursor.text(), StoredRef::read(&mut cursor))
        })
    }

    pub(crate) fn blob(&self, name: &str) -> Option<StoredRef<'_>> {
        let blobs = &self.records.blobs;
        let at = blobs.binary_search_by(|&start| self.records.name(start).cmp(name)).ok()?;
        let mut cursor = self.cursor(blobs[at]);
        cursor.text();
        Some(StoredRef::read(&mut cursor))
    }

    /// Returns every piece with its owner and its element type.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (Whose<'_>, Type, PieceRef<'_>)> {
        let slots = self.tensors().flat_map(|tensor| {
            tensor.slots().map(move |(slot, of)| (Whose::Slot { tensor: tensor.name, slot }, of))
        });
        slots.flat_map(|(whose, of)| of.pieces().map(move |piece| (whose, of.dtype, piece)))
    }

    /// Returns every stored range of bytes with its owner: vectors by name, each with its pieces in order, then blobs.
    pub(crate) fn stored(&self) -> impl Iterator<Item = (Whose<'_>, StoredRef<'_>)> {
        let pieces = self.pieces().map(|(whose, _, piece)| (whose, piece.stored));
        pieces.chain(self.blobs().map(|(name, stored)| (Whose::Blob(name), stored)))
    }

    /// Returns the catalog of a manifest.
    pub(crate) fn pack(manifest: &Manifest) -> Result<Self, CheckpointError> {
        let mut records = Records::default();
        manifest.files.iter().for_each(|file| records.add_file(file));
        let mut tensors = Vec::new();
        for (name, TensorEntry { shape, t, slots }) in &manifest.tensors {
            tensors.push(records.add_tensor(name, |out| {
                for (slot, SlotEntry { dtype, pieces }) in slots {
                    put_slot(out, slot, |out| {
                        pieces.iter().for_each(|piece| put_piece(out, piece));
                        Ok::<_, CheckpointError>((*dtype, pieces.len() as u64))
                    })?;
                }
                Ok::<_, CheckpointError>((shape.clone(), *t))
            })?);
        }
        manifest.blobs.iter().for_each(|(name, stored)| records.add_blob(name, stored));
        if u32::try_from(records.bytes.len()).is_err() {
            let (what, reason) = ("the manifest".to_owned(), "it takes more than 4 GiB".to_owned());
            return Err(CheckpointError::Contradiction { what, reason });
        }
        let Manifest { format, step, run, mesh, settings, .. } = manifest;
        let (mesh, settings) = (mesh.clone(), Arc::new(settings.clone()));
        let (format, step, run, records) = (*format, *step, *run, Arc::new(records));
        Ok(Catalog { format, step, run, mesh, settings, records, tensors })
    }

    /// Returns the manifest of this catalog.
    pub(crate) fn unpack(&self) -> Manifest {
        let file = |(name, bytes, blake3): (&str, u64, &str)| FileEntry {
            name: name.to_owned(),
            bytes,
            blake3: blake3.to_owned(),
        };
        let slot = |(name, slot): (&str, SlotRef<'_>)| {
            let pieces = slot.pieces().map(|piece| piece.entry()).collect();
            (name.to_owned(), SlotEntry { dtype: slot.dtype, pieces })
        };
        let tensor = |tensor: TensorRef<'_>| {
            let slots = tensor.slots().map(slot).collect();
            (tensor.name.to_owned(), TensorEntry { shape: tensor.shape(), t: tensor.t, slots })
        };
        Manifest {
            format: self.format,
            step: self.step,
            run: self.run,
            mesh: self.mesh.clone(),
            files: self.files().map(file).collect(),
            tensors: self.tensors().map(tensor).collect(),
            settings: (*self.settings).clone(),
            blobs: self.blobs().map(|(name, stored)| (name.to_owned(), stored.entry())).collect(),
        }
    }
}

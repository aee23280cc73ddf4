//! What the vectors of a saved step hold, from whichever files their pieces are in: a window at a time, checked before it is
//! handed on. Consolidated exports read whole vectors so, and a rank what it owns of them.

use super::error::CheckpointError;
use super::manifest::{PieceEntry, SlotEntry, TensorEntry, WINDOW, Whose};
use super::piece::Piece;
use super::saved::{Saved, SavedFile};
use std::fmt::Display;

/// Windows that are read at once.
const AT_ONCE: u64 = 8;

/// Reads vectors of a saved step, with the memory of [`AT_ONCE`] windows and one file open at a time.
#[derive(Debug)]
pub struct Vectors<'s> {
    saved: &'s Saved,
    file: Option<(usize, SavedFile)>,
    room: Vec<u8>,
}

impl Saved {
    /// To read vectors from.
    pub fn vectors(&self) -> Vectors<'_> {
        Vectors { saved: self, file: None, room: Vec::new() }
    }
}

impl Vectors<'_> {
    /// Hands `take` what slot `slot` of `tensor` has of `wanted`, every element once: the place in `wanted` of those that follow one
    /// another there, and their bytes. Whole windows are read, each once, and those alone that have something of it; places
    /// ascend within a piece, and pieces come in the manifest's order. All of a tensor is [`Piece::whole`].
    ///
    /// An error where nothing is stored by these names, where bytes are damaged or cannot be read, and `take`'s own.
    ///
    /// # Panics
    /// If `wanted` does not lie in the tensor.
    pub fn read<E: From<CheckpointError>>(
        &mut self,
        tensor: &str,
        slot: &str,
        wanted: &Piece,
        mut take: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (TensorEntry { shape, .. }, entry) = self.saved.slot(tensor, slot)?;
        assert!(wanted.region.fits(shape), "{wanted:?} lies in a tensor of shape {shape:?}");
        let whose = Whose::Slot { tensor, slot };
        for piece in &entry.pieces {
            // Most pieces have nothing of what one rank wants.
            if piece.piece().runs(wanted).next().is_some() {
                self.read_piece(whose, piece, entry.dtype.size(), wanted, &mut take)?;
            }
        }
        Ok(())
    }

    fn read_piece<E: From<CheckpointError>>(
        &mut self,
        whose: Whose<'_>,
        entry: &PieceEntry,
        size: u64,
        wanted: &Piece,
        take: &mut impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Piece { region, range } = entry.piece();
        // What of the piece lies in some bytes of it.
        let part = |from: u64, to: u64| Piece {
            region: region.clone(),
            range: range.start + from / size..range.start + to / size,
        };
        let bytes = entry.stored.bytes;
        let window = |at: u64| at..bytes.min(at + WINDOW);
        let has_some = |at: &u64| part(*at, window(*at).end).runs(wanted).next().is_some();
        let mut starts = (0..bytes).step_by(WINDOW as usize).filter(has_some).peekable();
        while let Some(from) = starts.next() {
            let mut to = window(from).end;
            while let Some(next) = starts.next_if_eq(&to) {
                to = window(next).end;
            }
            self.read_windows(whose, entry, (from, to), |at, bytes| {
                part(at, at + bytes.len() as u64).runs(wanted).try_for_each(|run| {
                    take(run.to, &bytes[(run.from * size) as usize..((run.from + run.len) * size) as usize])
                })
            })?;
        }
        Ok(())
    }

    fn read_windows<E: From<CheckpointError>>(
        &mut self,
        whose: Whose<'_>,
        entry: &PieceEntry,
        range: (u64, u64),
        take: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let with_name = |error| unreadable(&whose, error);
        let file = match self.file.take() {
            Some((open, file)) if open == entry.stored.file => file,
            _ => self.saved.file(entry.stored.file).map_err(with_name)?,
        };
        // As much as the longest that was read.
        let len = (range.1 - range.0).next_multiple_of(WINDOW).min(AT_ONCE * WINDOW) as usize;
        if self.room.len() < len {
            self.room.resize(len, 0);
        }
        let (_, file) = self.file.insert((entry.stored.file, file));
        file.read_to(&entry.stored, range, &mut self.room, &whose, take)
    }
}

impl Saved {
    fn slot(&self, tensor: &str, slot: &str) -> Result<(&TensorEntry, &SlotEntry), CheckpointError> {
        let entry = self.manifest().tensors.get(tensor);
        let found = entry.and_then(|entry| Some((entry, entry.slots.get(slot)?)));
        let (tensor, slot) = (tensor.to_owned(), slot.to_owned());
        found.ok_or(CheckpointError::Unknown { tensor, slot })
    }
}

/// The error with whose bytes it is about, which damage says itself.
pub(super) fn unreadable(what: &dyn Display, error: CheckpointError) -> CheckpointError {
    match error {
        CheckpointError::Hash { .. } => error,
        source => CheckpointError::Unreadable { what: what.to_string(), source: Box::new(source) },
    }
}

//! What the vectors of a saved step hold, from whichever files their pieces are in: a window at a time, checked before it is
//! handed on. Consolidated exports read whole vectors so, and a rank what it owns of them.

use super::error::CheckpointError;
use super::manifest::{PieceEntry, SlotEntry, TensorEntry, WINDOW, Whose};
use super::piece::Piece;
use super::saved::{Saved, SavedFile, unreadable};

/// Reads vectors of a saved step, with the memory of one window and one file open at a time.
#[derive(Debug)]
pub struct SavedVectors<'s> {
    saved: &'s Saved,
    file: Option<(usize, SavedFile)>,
    room: Vec<u8>,
}

impl Saved {
    /// To read vectors from.
    pub fn vectors(&self) -> SavedVectors<'_> {
        SavedVectors { saved: self, file: None, room: Vec::new() }
    }
}

impl SavedVectors<'_> {
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
        let what = Whose::Slot { tensor, slot }.to_string();
        for piece in &entry.pieces {
            // Most pieces have nothing of what one rank wants.
            if piece.piece().runs(wanted).next().is_some() {
                self.read_piece(&what, piece, entry.dtype.size(), wanted, &mut take)?;
            }
        }
        Ok(())
    }

    fn read_piece<E: From<CheckpointError>>(
        &mut self,
        what: &str,
        entry: &PieceEntry,
        size: u64,
        wanted: &Piece,
        take: &mut impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Piece { region, range } = entry.piece();
        let mut part = Piece { region, range: range.start..range.start };
        for start in (0..entry.stored.bytes).step_by(WINDOW as usize) {
            part.range = part.range.end..range.end.min(part.range.end + WINDOW / size);
            let mut runs = part.runs(wanted).peekable();
            if runs.peek().is_none() {
                continue;
            }
            let window = self.window(what, entry, start)?;
            for run in runs {
                let bytes = (run.from * size) as usize..((run.from + run.len) * size) as usize;
                take(run.to, &window[bytes])?;
            }
        }
        Ok(())
    }

    fn window(&mut self, what: &str, entry: &PieceEntry, start: u64) -> Result<&[u8], CheckpointError> {
        let stored = &entry.stored;
        let file = match self.file.take() {
            Some((open, file)) if open == stored.file => file,
            _ => self.saved.file(stored.file).map_err(|error| unreadable(what, error))?,
        };
        let (_, file) = self.file.insert((stored.file, file));
        // No longer than a window that is there.
        self.room.resize(WINDOW.min(stored.bytes - start) as usize, 0);
        file.window(stored, start, &mut self.room, what)?;
        Ok(&self.room)
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

//! Vectors of a saved step, assembled from the files that hold their pieces, one checked window at a time. Consolidated exports read whole
//! vectors, and a rank reads its own part.

use super::reader::{Saved, SavedFile, unreadable};
use crate::error::CheckpointError;
use crate::format::catalog::{PieceRef, SlotRef};
use crate::format::manifest::{WINDOW, Whose};
use crate::format::piece::Piece;

/// Reader of a saved step's vectors, with memory for one window and one open file at a time.
#[derive(Debug)]
pub struct SavedVectors<'s> {
    saved: &'s Saved,
    file: Option<(usize, SavedFile)>,
    room: Vec<u8>,
}

impl Saved {
    /// Returns a reader of this step's vectors.
    pub fn vectors(&self) -> SavedVectors<'_> {
        SavedVectors { saved: self, file: None, room: Vec::new() }
    }
}

impl SavedVectors<'_> {
    /// Passes the elements of `wanted` in slot `slot` of `tensor` to `take`, every element once: the index in `wanted` of each contiguous
    /// run, and its bytes. Reads whole windows, each once, and only those with wanted elements. Indices ascend within a piece, and pieces
    /// come in the manifest's order. [`Piece::whole`] is the whole tensor.
    ///
    /// Returns an error if the step has no such vector, if bytes are damaged or cannot be read, and the errors of `take`.
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
        let (shape, entry) = self.saved.slot(tensor, slot)?;
        assert!(wanted.region.fits(&shape), "{wanted:?} lies in a tensor of shape {shape:?}");
        let what = Whose::Slot { tensor, slot }.to_string();
        for piece in entry.pieces() {
            // Most pieces contain no wanted element.
            if piece.piece().runs(wanted).next().is_some() {
                self.read_piece(&what, &piece, entry.dtype.size(), wanted, &mut take)?;
            }
        }
        Ok(())
    }

    fn read_piece<E: From<CheckpointError>>(
        &mut self,
        what: &str,
        entry: &PieceRef<'_>,
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

    fn window(&mut self, what: &str, entry: &PieceRef<'_>, start: u64) -> Result<&[u8], CheckpointError> {
        let stored = &entry.stored;
        let file = match self.file.take() {
            Some((open, file)) if open == stored.file => file,
            _ => self.saved.file(stored.file).map_err(|error| unreadable(what, error))?,
        };
        let (_, file) = self.file.insert((stored.file, file));
        // The last window may be shorter.
        self.room.resize(WINDOW.min(stored.bytes - start) as usize, 0);
        file.window(stored, start, &mut self.room, what)?;
        Ok(&self.room)
    }
}

impl Saved {
    fn slot(&self, tensor: &str, slot: &str) -> Result<(Vec<u64>, SlotRef<'_>), CheckpointError> {
        let entry = self.catalog().tensor(tensor);
        let found = entry.and_then(|entry| Some((entry.shape(), entry.slot(slot)?.1)));
        let (tensor, slot) = (tensor.to_owned(), slot.to_owned());
        found.ok_or(CheckpointError::Unknown { tensor, slot })
    }
}

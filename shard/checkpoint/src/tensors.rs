//! Parameters and vectors of saved state on this rank, and sources of their values.

use crate::error::CheckpointError;
use crate::format::local_pieces::{LocalPieces, Part};
use crate::format::manifest::Type;
use crate::format::piece::{Piece, Region};
use meshstep_shard::extend::VectorKind as Slot;
use meshstep_tensor::{Buffer, Queue, Slice};
use std::ops::Range;

/// Parameter and its state.
#[derive(Clone, Debug)]
pub struct SavedTensor {
    /// Name of the parameter.
    pub name: String,
    /// Number of updates of the parameter.
    pub t: u64,
    /// Local part of the parameter on this rank.
    pub holding: LocalPieces,
    /// Elements of the local part of which this rank has all vectors.
    pub owned: Range<usize>,
    /// True if other ranks have all vectors of the same elements.
    pub shared: bool,
    /// Its vectors.
    pub vectors: Vec<Named>,
}

/// Vector of a parameter.
#[derive(Clone, Debug)]
pub struct Named {
    /// Kind of the vector.
    pub slot: Slot,
    /// `param`, `master`, `remainder`, or the name of the rule's state.
    pub name: String,
    /// Type of the saved elements.
    pub dtype: Type,
}

/// Name of a parameter's values.
pub const PARAM: &str = "param";
/// Name of f32 masters.
pub const MASTER: &str = "master";
/// Name of 16-bit remainders.
pub const REMAINDER: &str = "remainder";

/// Part of a vector.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) param: usize,
    pub(crate) slot: Slot,
    /// Index among the parts that this rank writes.
    pub(crate) index: usize,
    pub(crate) part: &'a Part,
    /// Whole local part of the parameter.
    pub(crate) held: &'a Piece,
}

/// Receiver of values.
pub(crate) type Take<'a> = &'a mut dyn FnMut(Slice<'_>) -> Result<(), CheckpointError>;

/// ReadSource of values to save: live vectors, or a copy of them.
pub(crate) trait ReadSource {
    /// Returns the queue of the memory with the values.
    fn place(&self) -> Queue;

    /// Passes the values of a part to `take` in order, one call for each contiguous run.
    fn values(&mut self, wanted: &Wanted<'_>, take: Take<'_>) -> Result<(), CheckpointError>;
}

/// Vector that was read: parameter, slot, and this rank's values.
pub type Read = (usize, Slot, Buffer);

impl SavedTensor {
    /// Returns the local part as one piece.
    pub fn held(&self) -> Piece {
        let region = Region::whole(&self.holding.local);
        Piece { range: 0..region.elements().unwrap_or(0), region }
    }

    /// Returns the number of elements of the whole parameter.
    pub fn elements(&self) -> u64 {
        self.holding.shape.iter().product()
    }
}

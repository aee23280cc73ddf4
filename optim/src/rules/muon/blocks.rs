//! Blocks of a fused tensor: matrices that Muon orthogonalises apart.

use std::fmt;

/// Matrices of one tensor. Each has an orthogonalisation, a norm and an adjusted learning rate of its own; in memory they follow one
/// another, so parameters and state have the tensor's layout.
///
/// ```
/// use meshstep_optim::Blocks;
///
/// // Queries, keys and values of equal size in one matrix; `Rows(3 * heads)` separates heads too.
/// assert_eq!(Blocks::Rows(3).of(&[384, 128]), Some((128, 128)));
/// assert_eq!(Blocks::Rows(3).of(&[385, 128]), None);
/// // Eight experts.
/// assert_eq!(Blocks::Batch.of(&[8, 64, 32]), Some((64, 32)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Blocks {
    /// The tensor is one matrix.
    #[default]
    Whole,
    /// The tensor is a matrix whose rows are in this many groups of equal size, at least 1.
    Rows(usize),
    /// The tensor has three dimensions: matrices along the first one.
    Batch,
}

impl Blocks {
    /// Returns the rows and columns of each block of a tensor of `shape`, or `None` if the tensor cannot be cut in this way.
    pub fn of(self, shape: &[usize]) -> Option<(usize, usize)> {
        match (self, shape) {
            (Blocks::Whole, &[rows, cols]) | (Blocks::Batch, &[_, rows, cols]) => Some((rows, cols)),
            (Blocks::Rows(n), &[rows, cols]) if n > 0 && rows.is_multiple_of(n) => Some((rows / n, cols)),
            _ => None,
        }
    }

    /// Returns the rows and columns of each block of `len` elements that are matrices of `matrix` rows and columns.
    pub(super) fn of_segment(self, len: usize, matrix: (usize, usize)) -> Option<(usize, usize)> {
        let (rows, cols) = matrix;
        let each = rows.checked_mul(cols)?;
        match self {
            Blocks::Batch if each == 0 => (len == 0).then_some(matrix),
            Blocks::Batch => len.is_multiple_of(each).then_some(matrix),
            _ if len == each => self.of(&[rows, cols]),
            _ => None,
        }
    }

    /// Returns the rows and columns of each block of a tensor of `matrix` rows and columns, or of a batch of these.
    pub(super) fn of_matrix(self, (rows, cols): (usize, usize)) -> Option<(usize, usize)> {
        if self == Blocks::Batch { Some((rows, cols)) } else { self.of(&[rows, cols]) }
    }

    /// Returns the number of groups of rows, or 0 for a batch.
    pub(super) fn number(self) -> f64 {
        match self {
            Blocks::Whole => 1.0,
            Blocks::Rows(n) => n as f64,
            Blocks::Batch => 0.0,
        }
    }
}

impl fmt::Display for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Blocks::Whole => f.write_str("whole matrices"),
            Blocks::Rows(n) => write!(f, "matrices of {n} equal groups of rows"),
            Blocks::Batch => f.write_str("batches of matrices, of three dimensions"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_is_cut_or_refused() {
        for (blocks, shape, block) in [
            (Blocks::Whole, &[6, 4][..], Some((6, 4))),
            (Blocks::Whole, &[6], None),
            (Blocks::Whole, &[2, 3, 4], None),
            (Blocks::Rows(1), &[6, 4], Some((6, 4))),
            (Blocks::Rows(3), &[6, 4], Some((2, 4))),
            (Blocks::Rows(4), &[6, 4], None),
            (Blocks::Rows(0), &[6, 4], None),
            (Blocks::Rows(2), &[2, 3, 4], None),
            (Blocks::Rows(3), &[0, 4], Some((0, 4))),
            (Blocks::Batch, &[2, 3, 4], Some((3, 4))),
            (Blocks::Batch, &[0, 3, 4], Some((3, 4))),
            (Blocks::Batch, &[3, 4], None),
            (Blocks::Batch, &[1, 2, 3, 4], None),
        ] {
            assert_eq!(blocks.of(shape), block, "{blocks:?} of {shape:?}");
        }
    }

    #[test]
    fn a_segment_has_the_elements_of_its_matrices() {
        for (blocks, len, matrix, block) in [
            (Blocks::Whole, 24, (6, 4), Some((6, 4))),
            (Blocks::Whole, 48, (6, 4), None),
            (Blocks::Rows(2), 24, (6, 4), Some((3, 4))),
            (Blocks::Rows(5), 24, (6, 4), None),
            (Blocks::Rows(2), 48, (6, 4), None),
            (Blocks::Batch, 48, (6, 4), Some((6, 4))),
            (Blocks::Batch, 47, (6, 4), None),
            (Blocks::Batch, 0, (0, 4), Some((0, 4))),
            (Blocks::Batch, 1, (0, 4), None),
            (Blocks::Batch, 4, (usize::MAX, 4), None),
        ] {
            assert_eq!(blocks.of_segment(len, matrix), block, "{blocks:?} of {len} as {matrix:?}");
        }
    }
}

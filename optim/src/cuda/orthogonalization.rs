//! Matrices of a tensor that a GPU orthogonalises, and its scratch memory: arithmetic only.

use crate::ExactSum;

/// Phases of a rule of matrices on a GPU, for the matrices of one tensor: [`MatrixRule`](crate::MatrixRule).
///
/// ```
/// use meshstep_optim::cuda::{MatrixSizes, Orthogonalization};
/// use meshstep_optim::{Blocks, MatrixRule, Muon};
///
/// // Queries, keys and values: three matrices of 128 rows.
/// let rule = Muon { blocks: Blocks::Rows(3), ..Muon::default() };
/// let work: Orthogonalization = rule.orthogonalization((384, 100)).unwrap();
/// assert_eq!((work.block, work.matrices(384 * 100)), ((128, 100), Some(3)));
/// let sizes: MatrixSizes = work.sizes(384 * 100);
/// assert_eq!((sizes.tensor, sizes.gram), (384 * 100, 3 * 100 * 100));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Orthogonalization {
    /// Rows and columns of each matrix.
    pub block: (usize, usize),
    /// Factor on the learning rate.
    pub adjustment: f64,
    /// Coefficients of the polynomial.
    pub coefficients: [f64; 3],
    /// Number of its applications.
    pub steps: u32,
    /// Minimum norm, or what is added to it.
    pub eps: f64,
    /// True to add `eps` to the norm.
    pub add_eps: bool,
}

/// Elements of the scratch memory in which tensors are updated one after another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MatrixSizes {
    /// Elements of the longest tensor whose step has no other place.
    pub step: usize,
    /// Elements of the longest tensor.
    pub tensor: usize,
    /// Elements of the Gram matrices of a tensor.
    pub gram: usize,
    /// Number of matrices of a tensor.
    pub matrices: usize,
}

impl Orthogonalization {
    /// Returns the number of matrices of a tensor of `len` elements, or `None` if they are not whole.
    pub fn matrices(&self, len: usize) -> Option<usize> {
        let each = self.block.0.checked_mul(self.block.1)?;
        match each {
            0 => (len == 0).then_some(0),
            _ => len.is_multiple_of(each).then_some(len / each),
        }
    }

    /// Returns the scratch memory for a tensor of `len` elements.
    pub fn sizes(&self, len: usize) -> MatrixSizes {
        let (short, matrices) = (self.block.0.min(self.block.1), self.matrices(len).unwrap_or(0));
        MatrixSizes { step: len, tensor: len, gram: matrices * short * short, matrices }
    }
}

impl MatrixSizes {
    /// Words of the norm of a matrix.
    pub const NORM: usize = ExactSum::WORDS + 2;

    /// Returns memory for tensors with steps in memory of the caller's.
    #[must_use]
    pub fn in_place(self) -> Self {
        MatrixSizes { step: 0, ..self }
    }

    /// Returns true if this is memory for tensors of these sizes.
    pub fn holds(&self, sizes: &MatrixSizes) -> bool {
        self.max(*sizes) == *self
    }

    /// Returns memory for the tensors of both.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        MatrixSizes {
            step: self.step.max(other.step),
            tensor: self.tensor.max(other.tensor),
            gram: self.gram.max(other.gram),
            matrices: self.matrices.max(other.matrices),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_memory_is_for_whole_matrices() {
        let of = |block| Orthogonalization {
            block,
            adjustment: 1.0,
            coefficients: [1.0; 3],
            steps: 5,
            eps: 1e-7,
            add_eps: false,
        };
        assert_eq!(of((3, 4)).sizes(24), MatrixSizes { step: 24, tensor: 24, gram: 18, matrices: 2 });
        assert_eq!(of((4, 3)).sizes(24), of((3, 4)).sizes(24));
        assert_eq!(
            (of((3, 4)).matrices(25), of((0, 4)).matrices(0), of((0, 4)).matrices(1)),
            (None, Some(0), None)
        );
        let (one, other) = (of((3, 4)).sizes(24), of((8, 5)).sizes(40).in_place());
        let both = one.max(other);
        assert_eq!(both, MatrixSizes { step: 24, tensor: 40, gram: 25, matrices: 2 });
        assert!(both.holds(&one) && both.holds(&other) && !one.holds(&other) && !other.holds(&one));
    }
}

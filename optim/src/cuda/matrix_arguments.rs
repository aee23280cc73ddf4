//! Arguments of the kernels of matrices (`muon/muon.cu`), for f32 and f64 each.
//!
//! ```text
//! muon_advance_f32(Streams, const Row*, u64 count, u64 tiles, const Step*)   the step before the orthogonalisation, in the params' place
//! muon_scale_f32  (Scaling)                                                  matrices divided by their norms
//! muon_product_f32(Product)                                                  products of matrices, in the CPU's order
//! muon_apply_f32  (Streams, const Row*, u64 count, u64 tiles, const Step*)   the parameters, with the step in the grads' place
//! ```
//!
//! Norms are those of the kernels of norms: a count, [`ExactSum::WORDS`](crate::ExactSum::WORDS) words, the largest magnitude.

/// Kernels' `Due`: what all launches of an orthogonalisation are told.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Due {
    pub(super) step: u64,
    /// Address of the tensor's row; 0 if it is another rank's.
    pub(super) row: u64,
}

/// Kernels' `Scaling`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scaling {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) norms: u64,
    /// Elements of a matrix.
    pub(super) len: u64,
    pub(super) count: u64,
    pub(super) eps: f64,
    pub(super) add_eps: u64,
    pub(super) due: Due,
}

/// Kernels' `Matrix`: a matrix in memory, or its transpose.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MatrixAt {
    pub(super) address: u64,
    /// Distances between neighbours in a column, and in a row: one of them is 1.
    pub(super) steps: [u64; 2],
}

/// Kernels' `Product`: `c = fma(cy, a b, cx base)`; without a base, `c = a b`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Product {
    pub(super) a: MatrixAt,
    pub(super) b: MatrixAt,
    pub(super) base: u64,
    pub(super) c: u64,
    /// Rows, columns and inner size.
    pub(super) shape: [u64; 3],
    /// Elements of each of `a`, `b` and `c`.
    pub(super) lens: [u64; 3],
    pub(super) count: u64,
    /// `cx` and `cy`.
    pub(super) factors: [f64; 2],
    pub(super) symmetric: u64,
    pub(super) due: Due,
}

/// Side of the squares of a product that a block of threads computes.
const SIDE: u64 = 64;
/// Elements that a block of threads scales at a time.
const SCALED: u64 = super::THREADS as u64 * 8;

impl MatrixAt {
    /// Returns the row-major matrix with rows of `cols` elements.
    pub(super) fn new(address: u64, cols: u64) -> Self {
        MatrixAt { address, steps: [cols, 1] }
    }

    /// Returns the transpose, in the same memory.
    pub(super) fn t(self) -> Self {
        let [down, right] = self.steps;
        MatrixAt { steps: [right, down], ..self }
    }
}

impl Scaling {
    /// Returns the number of blocks with work.
    pub(super) fn blocks(&self) -> u64 {
        self.len.div_ceil(SCALED) * self.count
    }
}

impl Product {
    /// Returns the number of blocks with work.
    pub(super) fn blocks(&self) -> u64 {
        let [down, across] = [self.shape[0], self.shape[1]].map(|side| side.div_ceil(SIDE));
        self.count * if self.symmetric != 0 { down * (down + 1) / 2 } else { down * across }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_the_kernels() {
        assert_eq!((size_of::<Due>(), size_of::<Scaling>(), size_of::<Product>()), (16, 72, 160));
        assert_eq!(std::mem::offset_of!(Product, factors), 120);
    }

    #[test]
    fn squares_on_and_below_the_diagonal_are_counted() {
        let matrix = MatrixAt::new(0, 1);
        let product = |shape, symmetric| Product {
            a: matrix,
            b: matrix.t(),
            base: 0,
            c: 0,
            shape,
            lens: [0; 3],
            count: 2,
            factors: [0.0; 2],
            symmetric,
            due: Due { step: 0, row: 0 },
        };
        for (shape, symmetric, squares) in [
            ([1, 1, 9], 1, 1),
            ([64, 64, 1], 1, 1),
            ([65, 65, 1], 1, 3),
            ([129, 129, 1], 1, 6),
            ([129, 64, 1], 0, 3),
        ] {
            assert_eq!(product(shape, symmetric).blocks(), 2 * squares, "{shape:?}");
        }
    }
}

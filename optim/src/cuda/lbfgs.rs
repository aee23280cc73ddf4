//! Arguments of the kernels of L-BFGS (`lbfgs/lbfgs.cu`), for f32 and f64 each; the grid may have any size.
//!
//! ```text
//! lbfgs_gram_f32      (Products)                         dot products of many rows with a vector
//! lbfgs_dot_f32       (Products)                         dot products of few rows with a vector
//! lbfgs_combine_f32   (Combination)                      the direction
//! lbfgs_leave_f32     (x, start, d, f64 t, u64 len)      start = x, x = t d + start
//! lbfgs_walk_f32      (x, start, d, f64 t, u64 len)      x = t d + start
//! lbfgs_difference_f32(y, g, before, u64 len)            y = g - before
//! ```
//!
//! The kernels of norms compute norms, largest magnitudes and counts of non-finite elements. [`Lbfgs`](crate::Lbfgs) launches these
//! kernels if its state is on a GPU.

/// Dot products of rows with a vector, added to sums as in [`ExactSum::add_dot`](crate::ExactSum::add_dot): the words are the same once
/// carried.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Products {
    /// Address of the vector.
    pub x: u64,
    /// Address of a table of the rows' addresses.
    pub rows: u64,
    /// Number of rows.
    pub count: u64,
    /// Address of the table of ranges to sum over, [`spans`](super::spans).
    pub spans: u64,
    /// Number of ranges.
    pub span_count: u64,
    /// Number of tiles of all ranges.
    pub tiles: u64,
    /// Address of the sums, of [`ExactSum::WORDS`](crate::ExactSum::WORDS) words each.
    pub sums: u64,
}

/// `d = coef g + sum over i of coefs[i] rows[i]`, in f64 by fused multiply-adds in that order, rounded once.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Combination {
    /// Address of the direction, the output.
    pub d: u64,
    /// Address of the gradient.
    pub g: u64,
    /// Address of a table of the rows' addresses.
    pub rows: u64,
    /// Address of the rows' coefficients, f64.
    pub coefs: u64,
    /// Number of rows.
    pub count: u64,
    /// Number of elements.
    pub len: u64,
    /// Coefficient of the gradient.
    pub coef: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_the_kernels() {
        assert_eq!((size_of::<Products>(), size_of::<Combination>()), (56, 56));
    }
}

//! What the kernels of L-BFGS are told (`lbfgs/lbfgs.cu`), each for f32 and f64; the grid may have any size.
//!
//! ```text
//! lbfgs_gram_f32      (Products)                         many rows times a vector
//! lbfgs_dot_f32       (Products)                         few
//! lbfgs_combine_f32   (Combination)                      the direction
//! lbfgs_leave_f32     (x, start, d, f64 t, u64 len)      start = x, x = t d + start
//! lbfgs_walk_f32      (x, start, d, f64 t, u64 len)      x = t d + start
//! lbfgs_difference_f32(y, g, before, u64 len)            y = g - before
//! ```
//!
//! Norms, largest magnitudes and what is not finite are the kernels of norms'. [`Lbfgs`](crate::Lbfgs) launches them where its
//! state is on a GPU.

/// Dot products of rows with a vector, added to sums as [`ExactSum::add_dot`](crate::ExactSum::add_dot) does: the same words
/// once carried.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Products {
    /// Address of the vector.
    pub x: u64,
    /// Address of a table of the rows' addresses.
    pub rows: u64,
    /// Rows.
    pub count: u64,
    /// Address of the table of ranges that are added up, [`spans`](super::spans).
    pub spans: u64,
    /// Ranges.
    pub span_count: u64,
    /// Tiles of all ranges.
    pub tiles: u64,
    /// Address of the sums, of [`ExactSum::WORDS`](crate::ExactSum::WORDS) words each.
    pub sums: u64,
}

/// `d = coef g + sum over i of coefs[i] rows[i]`, in f64 by fused multiply-adds in that order, rounded once.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Combination {
    /// Address of what is written.
    pub d: u64,
    /// Of the gradient.
    pub g: u64,
    /// Of a table of the rows' addresses.
    pub rows: u64,
    /// Of the rows' coefficients, f64.
    pub coefs: u64,
    /// Rows.
    pub count: u64,
    /// Elements.
    pub len: u64,
    /// The gradient's coefficient.
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

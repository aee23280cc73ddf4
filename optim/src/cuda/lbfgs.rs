//! What the kernels of L-BFGS are told (`lbfgs/lbfgs.cu`), each for f32 and f64; the grid may have any size.
//!
//! ```text
//! lbfgs_gram_f32   (Products)                                    rows times two new vectors
//! lbfgs_dot_f32    (Products)                                    rows times one
//! lbfgs_combine_f32(Combination)                                 the direction
//! lbfgs_walk_f32   (x, start, d, f64 t, u64 len)                 x = t d + start
//! lbfgs_pair_f32   (s, y, d, g, before, f64 t, u64 len)          s = t d, y = g - before
//! ```
//!
//! Norms, largest magnitudes and what is not finite are the kernels of norms'. [`Lbfgs`](crate::Lbfgs) launches them where its
//! state is on a GPU.

/// Dot products of rows with new vectors, added to sums as [`ExactSum::add_dot`](crate::ExactSum::add_dot) does: the same words
/// once carried.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Products {
    /// Addresses of the new vectors; `lbfgs_dot` takes the first.
    pub news: [u64; 2],
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
    /// Address of the sums, of [`ExactSum::WORDS`](crate::ExactSum::WORDS) words each: row 0 with each new vector, row 1, ...
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
        assert_eq!((size_of::<Products>(), size_of::<Combination>()), (64, 56));
    }
}

//! Matrix products in an order of their own: the bits of each element depend on the two matrices alone, and not on the instructions, the
//! threads or the machine.
//!
//! With the indices `k` in blocks of [`BLOCK`], both in ascending order:
//!
//! ```text
//! s = 0;  s = fma(a[i,k], b[k,j], s)  for each k of a block;  c[i,j] = c[i,j] + s, from 0
//! ```
//!
//! A block of `b` is copied to panels of columns, and a band of rows of `a` to panels of rows, so that the inner loop reads both in
//! order and keeps a tile of `c` in registers (Goto and van de Geijn, *Anatomy of high-performance matrix multiplication*, 2008). A
//! symmetric product is computed on and below the diagonal alone: `fma(x, y, s)` and `fma(y, x, s)` are the same number.

use crate::Isa;
use crate::precision::number::Real;
use meshstep_tensor::{Threads, simd::Body};
use std::ops::Range;

/// Number of indices whose products are added before they are added to the sum.
pub(super) const BLOCK: usize = 256;

/// Rows of `a` that one thread takes at a time: a multiple of the rows of every tile.
const BAND: usize = 192;

/// Side of the squares that are copied across the diagonal.
const SQUARE: usize = 32;

/// Element type of matrices.
pub(super) trait Product: Real + Into<f64> {
    /// Computes a product in tiles of this type's size for the instructions.
    fn tiled(product: &Multiply<'_, Self>, into: &mut [Self]);
}

impl Product for f32 {
    fn tiled(product: &Multiply<'_, f32>, into: &mut [f32]) {
        match product.isa {
            Isa::Avx512 => product.tiles::<12, 16>(into),
            Isa::Avx2 => product.tiles::<6, 8>(into),
            _ => product.tiles::<4, 4>(into),
        }
    }
}

impl Product for f64 {
    fn tiled(product: &Multiply<'_, f64>, into: &mut [f64]) {
        match product.isa {
            Isa::Avx512 => product.tiles::<12, 8>(into),
            Isa::Avx2 => product.tiles::<6, 4>(into),
            _ => product.tiles::<4, 2>(into),
        }
    }
}

/// Matrix in memory, or its transpose.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    /// Distances between neighbours in a column, and in a row: one of them is 1.
    steps: [usize; 2],
}

impl<'a, T: Copy> Matrix<'a, T> {
    /// Returns the row-major matrix of `(rows, cols)`.
    pub(super) fn new(data: &'a [T], (rows, cols): (usize, usize)) -> Self {
        assert_eq!(data.len(), rows * cols, "a matrix has as many elements as its shape says");
        Matrix { data, rows, cols, steps: [cols, 1] }
    }

    /// Returns the transpose, in the same memory.
    pub(super) fn t(self) -> Self {
        let [down, right] = self.steps;
        Matrix { rows: self.cols, cols: self.rows, steps: [right, down], ..self }
    }

    fn at(&self, row: usize, col: usize) -> T {
        self.data[row * self.steps[0] + col * self.steps[1]]
    }
}

/// Product of two matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Multiply<'a, T> {
    pub(super) a: Matrix<'a, T>,
    pub(super) b: Matrix<'a, T>,
    /// True if the product is known to be symmetric.
    pub(super) symmetric: bool,
    pub(super) isa: Isa,
    pub(super) threads: &'a Threads,
}

impl<T: Product> Multiply<'_, T> {
    /// Writes the product to the row-major matrix `into`.
    pub(super) fn run(&self, into: &mut [T]) {
        assert_eq!(self.a.cols, self.b.rows, "inner sizes are equal");
        assert_eq!(into.len(), self.a.rows * self.b.cols, "the result has the outer sizes");
        into.fill(T::from_f32(0.0));
        match self.isa {
            Isa::Reference => self.reference(into),
            _ => T::tiled(self, into),
        }
        if self.symmetric {
            mirror(into, self.b.cols);
        }
    }

    /// The definition.
    fn reference(&self, into: &mut [T]) {
        let Multiply { a, b, .. } = self;
        for (at, c) in into.iter_mut().enumerate() {
            let (i, j) = (at / b.cols, at % b.cols);
            for first in (0..a.cols).step_by(BLOCK) {
                let block = first..a.cols.min(first + BLOCK);
                let sum = block.fold(T::from_f32(0.0), |sum, k| a.at(i, k).fma(b.at(k, j), sum));
                *c = *c + sum;
            }
        }
    }

    /// Computes tiles of `R` rows and `2 L` columns.
    fn tiles<const R: usize, const L: usize>(&self, into: &mut [T]) {
        let Multiply { a, b, symmetric, isa, threads } = *self;
        let (width, zero) = (2 * L, T::from_f32(0.0));
        let most = a.cols.min(BLOCK);
        let panels = b.cols.div_ceil(width);
        let mut right = vec![zero; panels * width * most];
        let mut left = vec![zero; a.rows.next_multiple_of(R) * most];
        for first in (0..a.cols).step_by(BLOCK) {
            let block = first..a.cols.min(first + BLOCK);
            let len = block.len();
            let packed = right[..panels * width * len].chunks_exact_mut(width * len).enumerate();
            threads.for_each(packed, |(panel, room)| pack(b, &block, panel * width, width, room));
            let right = &right[..panels * width * len];
            let bands = into.chunks_mut(BAND * b.cols).zip(left.chunks_mut(BAND * len)).enumerate();
            threads.for_each(bands, |(band, (into, left))| {
                let row = band * BAND;
                let rows = into.len() / b.cols;
                let used = &mut left[..rows.next_multiple_of(R) * len];
                for (panel, room) in used.chunks_exact_mut(R * len).enumerate() {
                    pack(a.t(), &block, row + panel * R, R, room);
                }
                isa.run(Band::<T, R, L> { left: used, right, len, row, cols: b.cols, symmetric, into });
            });
        }
    }
}

/// Copies columns from `first` on of rows `block` to a panel, row after row, with zeros where the matrix ends.
fn pack<T: Product>(from: Matrix<'_, T>, block: &Range<usize>, first: usize, width: usize, panel: &mut [T]) {
    let there = from.cols.saturating_sub(first).min(width);
    let [down, right] = from.steps;
    if there < width {
        panel.fill(T::from_f32(0.0));
    }
    if right == 1 {
        for (row, to) in block.clone().zip(panel.chunks_exact_mut(width)) {
            to[..there].copy_from_slice(&from.data[row * down + first..][..there]);
        }
        return;
    }
    for col in 0..there {
        let column = &from.data[(first + col) * right + block.start..][..block.len()];
        panel.iter_mut().skip(col).step_by(width).zip(column).for_each(|(to, &x)| *to = x);
    }
}

/// Rows of the result from `row` on, and one block of products to add to them.
struct Band<'a, T, const R: usize, const L: usize> {
    left: &'a [T],
    right: &'a [T],
    /// Number of indices of the block.
    len: usize,
    row: usize,
    cols: usize,
    symmetric: bool,
    into: &'a mut [T],
}

impl<T: Product, const R: usize, const L: usize> Body for Band<'_, T, R, L> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Band { left, right, len, row, cols, symmetric, into } = self;
        for (panel, b) in right.chunks_exact(2 * L * len).enumerate() {
            let col = panel * 2 * L;
            for (a, (at, into)) in left.chunks_exact(R * len).zip(into.chunks_mut(R * cols).enumerate()) {
                // Tiles above the diagonal are copied from below it.
                if !symmetric || col < row + (at + 1) * R {
                    let sums = tile::<T, R, L>(a, b);
                    let there = (cols - col).min(2 * L);
                    for (sums, into) in sums.iter().zip(into.chunks_exact_mut(cols)) {
                        add(sums.as_flattened(), &mut into[col..col + there]);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn add<T: Product>(sums: &[T], into: &mut [T]) {
    for (to, &sum) in into.iter_mut().zip(sums) {
        *to = *to + sum;
    }
}

/// Returns the sums of a block's products: each index multiplies a column of `a` by a row of `b`.
#[inline(always)]
fn tile<T: Product, const R: usize, const L: usize>(a: &[T], b: &[T]) -> [[[T; L]; 2]; R] {
    let mut sums = [[[T::from_f32(0.0); L]; 2]; R];
    let (a, b) = (a.as_chunks::<R>().0, b.as_chunks::<L>().0.as_chunks::<2>().0);
    for (a, b) in a.iter().zip(b) {
        for i in 0..R {
            for half in 0..2 {
                for lane in 0..L {
                    sums[i][half][lane] = a[i].fma(b[half][lane], sums[i][half][lane]);
                }
            }
        }
    }
    sums
}

/// Copies the part below the diagonal to the one above it.
fn mirror<T: Copy>(square: &mut [T], side: usize) {
    for top in (0..side).step_by(SQUARE) {
        for left in (0..=top).step_by(SQUARE) {
            for row in top..side.min(top + SQUARE) {
                for col in left..row.min(left + SQUARE) {
                    square[col * side + row] = square[row * side + col];
                }
            }
        }
    }
}

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

/// Rows of `a` that one thread takes at a time: a multiple of the rows of every tile, and few, so that threads end together.
const BAND: usize = 48;

/// Side of the squares that are copied across the diagonal.
const SQUARE: usize = 32;

/// Element type of matrices.
pub(super) trait Product: Real + Into<f64> {
    /// Computes a product in tiles of this type's size for the instructions.
    fn tiled(product: &Multiply<'_, Self>, into: &mut [Self], panels: &mut Panels<Self>);
}

impl Product for f32 {
    fn tiled(product: &Multiply<'_, f32>, into: &mut [f32], panels: &mut Panels<f32>) {
        match product.isa {
            Isa::Avx512 => product.tiles::<12, 16, 32>(into, panels),
            Isa::Avx2 => product.tiles::<6, 8, 16>(into, panels),
            _ => product.tiles::<4, 4, 8>(into, panels),
        }
    }
}

impl Product for f64 {
    fn tiled(product: &Multiply<'_, f64>, into: &mut [f64], panels: &mut Panels<f64>) {
        match product.isa {
            Isa::Avx512 => product.tiles::<12, 8, 16>(into, panels),
            Isa::Avx2 => product.tiles::<6, 4, 8>(into, panels),
            _ => product.tiles::<4, 2, 4>(into, panels),
        }
    }
}

/// Memory for panels, for products to share.
#[derive(Debug)]
pub(super) struct Panels<T> {
    left: Vec<T>,
    right: Vec<T>,
}

impl<T> Panels<T> {
    /// Creates memory that grows with its products.
    pub(super) fn new() -> Self {
        Panels { left: Vec::new(), right: Vec::new() }
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
    pub(super) fn run(&self, into: &mut [T], panels: &mut Panels<T>) {
        assert_eq!(self.a.cols, self.b.rows, "inner sizes are equal");
        assert_eq!(into.len(), self.a.rows * self.b.cols, "the result has the outer sizes");
        match self.isa {
            Isa::Reference => self.reference(into),
            _ => T::tiled(self, into, panels),
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
            *c = T::from_f32(0.0);
            for first in (0..a.cols).step_by(BLOCK) {
                let block = first..a.cols.min(first + BLOCK);
                let sum = block.fold(T::from_f32(0.0), |sum, k| a.at(i, k).fma(b.at(k, j), sum));
                *c = *c + sum;
            }
        }
    }

    /// Computes tiles of `R` rows and `W = 2 L` columns.
    fn tiles<const R: usize, const L: usize, const W: usize>(&self, into: &mut [T], panels: &mut Panels<T>) {
        const {
            assert!(
                W == 2 * L && BAND.is_multiple_of(R),
                "a tile is two vectors wide, and a band whole tiles"
            )
        }
        let Multiply { a, b, symmetric, isa, threads } = *self;
        let (most, zero) = (a.cols.min(BLOCK), T::from_f32(0.0));
        let count = b.cols.div_ceil(W);
        panels.right.resize(count * W * most, zero);
        panels.left.resize(a.rows.next_multiple_of(R) * most, zero);
        for first in (0..a.cols).step_by(BLOCK) {
            let block = first..a.cols.min(first + BLOCK);
            let len = block.len();
            let right = &mut panels.right[..count * W * len];
            let packed = right.chunks_exact_mut(W * len).enumerate();
            threads.for_each(packed, |(panel, room)| {
                isa.run(Pack::<T, W> { from: b, block: &block, first: panel * W, room })
            });
            let right = &*right;
            let bands = into.chunks_mut(BAND * b.cols).zip(panels.left.chunks_mut(BAND * len)).enumerate();
            threads.for_each(bands, |(band, (into, left))| {
                let row = band * BAND;
                let rows = into.len() / b.cols;
                let used = &mut left[..rows.next_multiple_of(R) * len];
                for (panel, room) in used.chunks_exact_mut(R * len).enumerate() {
                    isa.run(Pack::<T, R> { from: a.t(), block: &block, first: row + panel * R, room });
                }
                let onto_zero = first == 0;
                isa.run(Band::<T, R, L> {
                    left: used,
                    right,
                    len,
                    row,
                    cols: b.cols,
                    symmetric,
                    onto_zero,
                    into,
                });
            });
        }
    }
}

/// Copies columns from `first` on of rows `block` to a panel of `W` columns, row after row, with zeros where the matrix ends.
struct Pack<'a, T, const W: usize> {
    from: Matrix<'a, T>,
    block: &'a Range<usize>,
    first: usize,
    room: &'a mut [T],
}

impl<T: Product, const W: usize> Body for Pack<'_, T, W> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Pack { from, block, first, room } = self;
        let there = from.cols.saturating_sub(first).min(W);
        let [down, right] = from.steps;
        let rows = room.as_chunks_mut::<W>().0;
        if there < W {
            rows.as_flattened_mut().fill(T::from_f32(0.0));
        }
        match (right, there == W) {
            (1, true) => {
                for (row, to) in block.clone().zip(rows) {
                    to.copy_from_slice(&from.data[row * down + first..][..W]);
                }
            }
            (1, false) => {
                for (row, to) in block.clone().zip(rows) {
                    to[..there].copy_from_slice(&from.data[row * down + first..][..there]);
                }
            }
            (_, true) => {
                let column = |col: usize| &from.data[(first + col) * right + block.start..][..block.len()];
                let columns: [&[T]; W] = std::array::from_fn(column);
                // One length for all, so that the loop has no bounds checks.
                let (len, rows) = (block.len(), &mut rows[..block.len()]);
                for k in 0..len {
                    rows[k] = std::array::from_fn(|col| columns[col][k]);
                }
            }
            (_, false) => {
                for col in 0..there {
                    let column = &from.data[(first + col) * right + block.start..][..block.len()];
                    rows.iter_mut().zip(column).for_each(|(to, &x)| to[col] = x);
                }
            }
        }
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
    /// True for the first block: the rows hold nothing yet.
    onto_zero: bool,
    into: &'a mut [T],
}

impl<T: Product, const R: usize, const L: usize> Body for Band<'_, T, R, L> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Band { left, right, len, row, cols, symmetric, onto_zero, into } = self;
        for (panel, b) in right.chunks_exact(2 * L * len).enumerate() {
            let col = panel * 2 * L;
            for (a, (at, into)) in left.chunks_exact(R * len).zip(into.chunks_mut(R * cols).enumerate()) {
                // Tiles above the diagonal are copied from below it.
                if !symmetric || col < row + (at + 1) * R {
                    let sums = tile::<T, R, L>(a, b);
                    add(&sums, into, (col, cols), onto_zero);
                }
            }
        }
    }
}

/// Adds sums to rows of `cols` elements, from column `col` on, as far as both go.
#[inline(always)]
fn add<T: Product, const R: usize, const L: usize>(
    sums: &[[[T; L]; 2]; R],
    into: &mut [T],
    (col, cols): (usize, usize),
    onto_zero: bool,
) {
    let base = |x: T| if onto_zero { T::from_f32(0.0) } else { x };
    if col + 2 * L <= cols && into.len() == R * cols {
        // The usual case, with constant lengths, keeps the sums in registers.
        for (i, sums) in sums.iter().enumerate() {
            let [low, high] = into[i * cols + col..][..2 * L].as_chunks_mut::<L>().0 else { return };
            for lane in 0..L {
                low[lane] = base(low[lane]) + sums[0][lane];
                high[lane] = base(high[lane]) + sums[1][lane];
            }
        }
        return;
    }
    for (sums, into) in sums.iter().zip(into.chunks_exact_mut(cols)) {
        for (to, &sum) in into[col..].iter_mut().zip(sums.as_flattened()) {
            *to = base(*to) + sum;
        }
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

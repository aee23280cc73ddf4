//! Nearest matrix with orthonormal rows or columns, by Newton-Schulz iterations.
//!
//! With `x = u / max(|u|, eps)`, |.| the Frobenius norm, transposed first if rows outnumber columns:
//!
//! ```text
//! a = x xT;  x = c0 x + (c1 a + c2 a a) x        steps times
//! ```
//!
//! Singular values of `x` become `c0 s + c1 s^3 + c2 s^5`: with the published coefficients they end near 1, not at it.

use crate::precision::number::Real;
use crate::{Isa, Norm, NormAccumulator};
use meshstep_tensor::{Slice, Threads};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, LinalgScalar};

/// Element type of matrices.
pub(super) trait Product: Real + LinalgScalar + Into<f64> {}
impl Product for f32 {}
impl Product for f64 {}

/// Parameters of the iteration.
pub(super) struct NewtonSchulz<T> {
    pub(super) coefficients: [T; 3],
    pub(super) steps: u32,
    pub(super) eps: f64,
}

impl<T: Product> NewtonSchulz<T> {
    /// Orthogonalises the row-major matrix of `(rows, cols)` in place; neither is 0.
    pub(super) fn orthogonalize(&self, matrix: &mut [T], (rows, cols): (usize, usize), threads: &Threads) {
        // Computed in f64, in which the inverse of any norm is a normal number.
        let inverse = 1.0 / frobenius(matrix, threads).max(self.eps);
        matrix.iter_mut().for_each(|x| *x = T::from_f64((*x).into() * inverse));
        let Ok(view) = ArrayView2::from_shape((rows, cols), &*matrix) else {
            unreachable!("{rows} x {cols} elements were counted")
        };
        let tall = rows > cols;
        let mut x = if tall { view.t().as_standard_layout().into_owned() } else { view.to_owned() };
        self.iterate(&mut x);
        let rows = if tall { x.t() } else { x.view() };
        matrix.iter_mut().zip(rows).for_each(|(to, &from)| *to = from);
    }

    fn iterate(&self, x: &mut Array2<T>) {
        let [c0, c1, c2] = self.coefficients;
        let (zero, one) = (T::from_f64(0.0), T::from_f64(1.0));
        let side = x.nrows();
        let mut gram = Array2::from_elem((side, side), zero);
        let mut next = x.clone();
        for _ in 0..self.steps {
            general_mat_mul(one, x, &x.t(), zero, &mut gram);
            let mut polynomial = gram.clone();
            general_mat_mul(c2, &gram, &gram, c1, &mut polynomial);
            next.assign(x);
            general_mat_mul(one, &polynomial, x, c0, &mut next);
            std::mem::swap(x, &mut next);
        }
    }
}

/// Returns the root of the exact sum of squares.
fn frobenius<T: Real>(matrix: &[T], threads: &Threads) -> f64 {
    let mut norm = NormAccumulator::new(Norm::L2);
    // Norms support f32 and f64, so this cannot fail.
    let added = norm.add_on(Isa::detect(), threads, Slice::from(matrix));
    assert!(added.is_ok(), "f32 and f64 have norms");
    norm.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    const JORDAN: [f64; 3] = [3.4445, -4.775, 2.0315];
    /// Coefficients of the cubic iteration that converges: (3 x - x^3) / 2.
    const CUBIC: [f64; 3] = [1.5, -0.5, 0.0];

    fn random(len: usize) -> Vec<f64> {
        let mut state = 7u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5
        };
        (0..len).map(|_| next()).collect()
    }

    /// Returns x xT of the shorter side, elementwise.
    fn gram(x: &[f64], (rows, cols): (usize, usize)) -> Vec<Vec<f64>> {
        let at = |i: usize, k: usize| if rows <= cols { x[i * cols + k] } else { x[k * cols + i] };
        let (short, long) = (rows.min(cols), rows.max(cols));
        let dot = |i: usize, j: usize| (0..long).map(|k| at(i, k) * at(j, k)).sum();
        (0..short).map(|i| (0..short).map(|j| dot(i, j)).collect()).collect()
    }

    #[test]
    fn the_cubic_iteration_converges_to_orthonormal_rows_or_columns() {
        for shape in [(4, 9), (9, 4), (5, 5), (1, 7), (7, 1), (1, 1)] {
            let mut x = random(shape.0 * shape.1);
            let start = x.clone();
            NewtonSchulz { coefficients: CUBIC, steps: 60, eps: 1e-7 }.orthogonalize(
                &mut x,
                shape,
                &Threads::caller(),
            );
            for (i, row) in gram(&x, shape).iter().enumerate() {
                for (j, dot) in row.iter().enumerate() {
                    let expected = if i == j { 1.0 } else { 0.0 };
                    assert!((dot - expected).abs() < 1e-9, "{shape:?}: {i},{j} {dot}");
                }
            }
            // The result is the polar factor: its product with the start is symmetric with positive trace.
            let trace: f64 = x.iter().zip(&start).map(|(x, s)| x * s).sum();
            assert!(trace > 0.0);
        }
    }

    #[test]
    fn five_steps_bring_singular_values_near_one_and_zeros_stay() {
        let shape = (6, 10);
        let mut x = random(60);
        NewtonSchulz { coefficients: JORDAN, steps: 5, eps: 1e-7 }.orthogonalize(
            &mut x,
            shape,
            &Threads::caller(),
        );
        for (i, row) in gram(&x, shape).iter().enumerate() {
            assert!((0.4..1.5).contains(&row[i]), "{}", row[i]);
        }
        let mut zeros = vec![0f32; 6];
        NewtonSchulz { coefficients: JORDAN.map(|c| c as f32), steps: 5, eps: 1e-7 }.orthogonalize(
            &mut zeros,
            (2, 3),
            &Threads::caller(),
        );
        assert_eq!(zeros, [0.0; 6]);
    }
}

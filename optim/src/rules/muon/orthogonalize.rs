//! Nearest matrix with orthonormal rows or columns, by Newton-Schulz iterations.
//!
//! With `x = u / max(|u|, eps)`, or `u / (|u| + eps)`, |.| the Frobenius norm, and at most as many rows as columns:
//!
//! ```text
//! a = x xT;  x = c0 x + (c1 a + c2 a a) x        steps times
//! ```
//!
//! A matrix with more rows than columns has the bits of its transpose, and stays as it is: `a = xT x;  x = c0 x + x (c1 a + c2 a a)`.
//!
//! Singular values of `x` become `c0 s + c1 s^3 + c2 s^5`: with the published coefficients they end near 1, not at it.

use super::product::{Matrix, Multiply, Panels, Product};
use crate::{Isa, Norm, NormAccumulator};
use meshstep_tensor::simd::Body;
use meshstep_tensor::{Slice, Threads};

/// Elements that one thread combines at a time.
const PART: usize = 1 << 14;

/// Parameters of the iteration, and how it runs.
pub(super) struct NewtonSchulz<'t, T> {
    pub(super) coefficients: [T; 3],
    pub(super) steps: u32,
    pub(super) eps: f64,
    pub(super) add_eps: bool,
    pub(super) isa: Isa,
    pub(super) threads: &'t Threads,
}

impl<T: Product> NewtonSchulz<'_, T> {
    /// Orthogonalises the row-major matrix of `(rows, cols)` in place; neither is 0.
    pub(super) fn orthogonalize(&self, matrix: &mut [T], (rows, cols): (usize, usize)) {
        // Computed in f64, in which the inverse of any norm is a normal number.
        let norm = self.frobenius(matrix);
        let inverse = 1.0 / if self.add_eps { norm + self.eps } else { norm.max(self.eps) };
        self.threads.for_each(matrix.chunks_mut(PART), |x| self.isa.run(Scale { inverse, x }));
        self.iterate(matrix, (rows, cols));
    }

    fn iterate(&self, x: &mut [T], (rows, cols): (usize, usize)) {
        let [c0, c1, c2] = self.coefficients;
        let (zero, short) = (T::from_f32(0.0), rows.min(cols));
        let (mut gram, mut square) = (vec![zero; short * short], vec![zero; short * short]);
        let (mut product, mut panels) = (vec![zero; rows * cols], Panels::new());
        for _ in 0..self.steps {
            let matrix = Matrix::new(x, (rows, cols));
            let wide = if rows <= cols { matrix } else { matrix.t() };
            self.multiply((wide, wide.t()), true, &mut gram, &mut panels);
            let side = Matrix::new(&gram, (short, short));
            self.multiply((side, side), true, &mut square, &mut panels);
            self.combine([c1, c2], &mut gram, &square);
            let side = Matrix::new(&gram, (short, short));
            let factors = if rows <= cols { (side, matrix) } else { (matrix, side) };
            self.multiply(factors, false, &mut product, &mut panels);
            self.combine([c0, T::from_f32(1.0)], x, &product);
        }
    }

    fn multiply(
        &self,
        (a, b): (Matrix<'_, T>, Matrix<'_, T>),
        symmetric: bool,
        into: &mut [T],
        panels: &mut Panels<T>,
    ) {
        Multiply { a, b, symmetric, isa: self.isa, threads: self.threads }.run(into, panels);
    }

    /// Replaces `x` by `fma(cy, y, cx x)`.
    fn combine(&self, factors: [T; 2], x: &mut [T], y: &[T]) {
        let parts = x.chunks_mut(PART).zip(y.chunks(PART));
        self.threads.for_each(parts, |(x, y)| self.isa.run(Combine { factors, x, y }));
    }

    /// Returns the root of the exact sum of squares.
    fn frobenius(&self, matrix: &[T]) -> f64 {
        let mut norm = NormAccumulator::new(Norm::L2);
        // Norms support f32 and f64, so this cannot fail.
        let added = norm.add_on(self.isa, self.threads, Slice::from(matrix));
        assert!(added.is_ok(), "f32 and f64 have norms");
        norm.finish()
    }
}

struct Scale<'a, T> {
    inverse: f64,
    x: &'a mut [T],
}

impl<T: Product> Body for Scale<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.x.iter_mut().for_each(|x| *x = T::from_f64((*x).into() * self.inverse));
    }
}

struct Combine<'a, T> {
    factors: [T; 2],
    x: &'a mut [T],
    y: &'a [T],
}

impl<T: Product> Body for Combine<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let [cx, cy] = self.factors;
        for (x, &y) in self.x.iter_mut().zip(self.y) {
            *x = cy.fma(y, cx * *x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::LazyLock;

    const JORDAN: [f64; 3] = [3.4445, -4.775, 2.0315];
    /// Coefficients of the cubic iteration that converges: (3 x - x^3) / 2.
    const CUBIC: [f64; 3] = [1.5, -0.5, 0.0];

    fn with<T>(coefficients: [T; 3], steps: u32) -> NewtonSchulz<'static, T> {
        static ALONE: LazyLock<Threads> = LazyLock::new(Threads::caller);
        NewtonSchulz { coefficients, steps, eps: 1e-7, add_eps: false, isa: Isa::detect(), threads: &ALONE }
    }

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
            with(CUBIC, 60).orthogonalize(&mut x, shape);
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
        with(JORDAN, 5).orthogonalize(&mut x, shape);
        for (i, row) in gram(&x, shape).iter().enumerate() {
            assert!((0.4..1.5).contains(&row[i]), "{}", row[i]);
        }
        let mut zeros = vec![0f32; 6];
        with(JORDAN.map(|c| c as f32), 5).orthogonalize(&mut zeros, (2, 3));
        assert_eq!(zeros, [0.0; 6]);
    }

    #[test]
    fn a_tall_matrix_has_the_bits_of_its_transpose() {
        for (rows, cols) in [(7, 3), (40, 33), (300, 13)] {
            let x: Vec<f32> = random(rows * cols).iter().map(|&x| x as f32).collect();
            let turned = |x: &[f32], rows: usize, cols: usize| -> Vec<f32> {
                (0..rows * cols).map(|at| x[at % rows * cols + at / rows]).collect()
            };
            let (mut tall, mut wide) = (x.clone(), turned(&x, rows, cols));
            with(JORDAN.map(|c| c as f32), 5).orthogonalize(&mut tall, (rows, cols));
            with(JORDAN.map(|c| c as f32), 5).orthogonalize(&mut wide, (cols, rows));
            assert_eq!(tall, turned(&wide, cols, rows), "{rows} x {cols}");
        }
    }

    /// Orthogonalises on these instructions and threads.
    fn bits<T: Product + bytemuck::Pod>(
        x: &[f64],
        shape: (usize, usize),
        isa: Isa,
        threads: &Threads,
    ) -> Vec<u8> {
        let mut x: Vec<T> = x.iter().map(|&x| T::from_f64(x)).collect();
        NewtonSchulz {
            coefficients: JORDAN.map(T::from_f64),
            steps: 2,
            eps: 1e-7,
            add_eps: true,
            isa,
            threads,
        }
        .orthogonalize(&mut x, shape);
        bytemuck::cast_slice(&x).to_vec()
    }

    #[test]
    fn the_bits_are_those_of_the_definition_on_all_instructions_and_threads() {
        let sides = [1, 5, 6, 7, 13, 33];
        let mut shapes: Vec<(usize, usize)> =
            sides.iter().flat_map(|&rows| sides.map(|cols| (rows, cols))).collect();
        // Several blocks, bands and panels.
        shapes.extend([(3, 255), (3, 256), (3, 257), (70, 520), (193, 200)]);
        let threads = [Threads::caller(), Threads::new(3).unwrap()];
        for shape in shapes {
            let x = random(shape.0 * shape.1);
            let expected = [
                bits::<f32>(&x, shape, Isa::Reference, &threads[0]),
                bits::<f64>(&x, shape, Isa::Reference, &threads[0]),
            ];
            for isa in Isa::available() {
                for threads in &threads {
                    let found = [bits::<f32>(&x, shape, isa, threads), bits::<f64>(&x, shape, isa, threads)];
                    assert!(found == expected, "{shape:?} on {isa}, {threads:?}");
                }
            }
        }
    }
}

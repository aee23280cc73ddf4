//! Losses over rows of data, which ranks divide, or which one rank computes alone.

use crate::common::hash;

/// The function to minimise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Problem {
    Rosenbrock,
    /// 60 rows, l2 0.01.
    Logistic,
    /// 60 rows.
    LeastSquares,
}

const ROWS: usize = 60;

fn uniform(key: &[u64]) -> f64 {
    (hash(key) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

impl Problem {
    pub(crate) fn start(self, len: usize) -> Vec<f64> {
        match self {
            Problem::Rosenbrock if len > 100 => vec![0.8; len],
            Problem::Rosenbrock => (0..len).map(|i| if i % 2 == 0 { -1.2 } else { 1.0 }).collect(),
            _ => vec![0.0; len],
        }
    }

    /// Returns the terms of `rank`, which sum to the whole loss over all ranks; writes their gradient to `g`.
    pub(crate) fn part(self, x: &[f64], g: &mut [f64], rank: usize, ranks: usize) -> f64 {
        g.fill(0.0);
        match self {
            Problem::Rosenbrock => (rank..x.len() - 1).step_by(ranks).map(|i| rosenbrock(x, g, i)).sum(),
            Problem::Logistic | Problem::LeastSquares => {
                let rows = (rank..ROWS).step_by(ranks);
                let data: f64 = rows.map(|row| self.row(x, g, row)).sum();
                data + if rank == 0 { self.penalty(x, g) } else { 0.0 }
            }
        }
    }

    fn row(self, x: &[f64], g: &mut [f64], row: usize) -> f64 {
        let a: Vec<f64> = (0..x.len()).map(|i| uniform(&[3, row as u64, i as u64])).collect();
        let b = uniform(&[4, row as u64]);
        let product: f64 = a.iter().zip(x).map(|(a, x)| a * x).sum();
        let (loss, slope) = match self {
            Problem::Logistic => {
                let y = b.signum();
                (((-y * product).exp()).ln_1p(), -y / (1.0 + (y * product).exp()))
            }
            _ => ((product - b).powi(2) / 2.0, product - b),
        };
        g.iter_mut().zip(&a).for_each(|(g, a)| *g += slope * a / ROWS as f64);
        loss / ROWS as f64
    }

    fn penalty(self, x: &[f64], g: &mut [f64]) -> f64 {
        if self != Problem::Logistic {
            return 0.0;
        }
        g.iter_mut().zip(x).for_each(|(g, x)| *g += 0.01 * x);
        0.005 * x.iter().map(|x| x * x).sum::<f64>()
    }
}

fn rosenbrock(x: &[f64], g: &mut [f64], i: usize) -> f64 {
    let (a, b) = (x[i + 1] - x[i] * x[i], 1.0 - x[i]);
    g[i] += -400.0 * x[i] * a - 2.0 * b;
    g[i + 1] += 200.0 * a;
    100.0 * a * a + b * b
}

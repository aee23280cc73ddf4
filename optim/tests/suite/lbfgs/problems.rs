//! Losses with known minima, as closures over whole vectors of f64.

use crate::common::Random;

/// Loss on whole vectors.
pub(crate) type Problem = Box<dyn Fn(&[f64], &mut [f64]) -> f64 + Sync>;

/// sum of 100 (x[i+1] - x[i]^2)^2 + (1 - x[i])^2.
pub(crate) fn rosenbrock() -> Problem {
    Box::new(|x, g| {
        g.fill(0.0);
        let mut f = 0.0;
        for i in 0..x.len() - 1 {
            let (a, b) = (x[i + 1] - x[i] * x[i], 1.0 - x[i]);
            f += 100.0 * a * a + b * b;
            g[i] += -400.0 * x[i] * a - 2.0 * b;
            g[i + 1] += 200.0 * a;
        }
        f
    })
}

/// Mean over rows of log(1 + exp(-y a.x)), plus l2/2 |x|^2.
pub(crate) fn logistic(rows: usize, len: usize, l2: f64) -> Problem {
    let mut random = Random::new(5);
    let a: Vec<f64> = (0..rows * len).map(|_| random.unit()).collect();
    let y: Vec<f64> = (0..rows).map(|_| if random.unit() > 0.0 { 1.0 } else { -1.0 }).collect();
    Box::new(move |x, g| {
        let mut f = 0.0;
        g.iter_mut().zip(x).for_each(|(g, x)| *g = l2 * x);
        for (a, y) in a.chunks(len).zip(&y) {
            let margin = y * a.iter().zip(x).map(|(a, x)| a * x).sum::<f64>();
            f += libm::log1p(libm::exp(-margin)) / rows as f64;
            let slope = -y / (1.0 + libm::exp(margin)) / rows as f64;
            g.iter_mut().zip(a).for_each(|(g, a)| *g += slope * a);
        }
        f + l2 / 2.0 * x.iter().map(|x| x * x).sum::<f64>()
    })
}

/// |A x - b|^2 / (2 rows).
pub(crate) fn least_squares(rows: usize, len: usize) -> Problem {
    let mut random = Random::new(9);
    let a: Vec<f64> = (0..rows * len).map(|_| random.unit()).collect();
    let b: Vec<f64> = (0..rows).map(|_| random.unit()).collect();
    Box::new(move |x, g| {
        g.fill(0.0);
        let mut f = 0.0;
        for (a, b) in a.chunks(len).zip(&b) {
            let r = a.iter().zip(x).map(|(a, x)| a * x).sum::<f64>() - b;
            f += r * r / (2.0 * rows as f64);
            g.iter_mut().zip(a).for_each(|(g, a)| *g += r * a / rows as f64);
        }
        f
    })
}

/// (-1.2, 1, -1.2, 1, ...).
pub(crate) fn classic_start(len: usize) -> Vec<f64> {
    (0..len).map(|i| if i % 2 == 0 { -1.2 } else { 1.0 }).collect()
}

/// Waves in a bowl: the curvature along a step has either sign.
pub(crate) fn waves() -> Problem {
    Box::new(|x, g| {
        let mut f = 0.0;
        for (i, (g, x)) in g.iter_mut().zip(x).enumerate() {
            let steep = 1.0 + 0.3 * i as f64;
            *g = 0.1 * x - steep * libm::sin(steep * x);
            f += 0.05 * x * x + libm::cos(steep * x);
        }
        f
    })
}

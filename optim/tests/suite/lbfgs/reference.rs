//! L-BFGS with a fixed step on whole vectors of f64, written as plainly as possible: the two-loop recursion.

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Returns the first `count` iterates after `x0`.
pub(crate) fn fixed_step(
    problem: &crate::lbfgs::problems::Problem,
    x0: &[f64],
    (lr, history_len, count): (f64, usize, usize),
) -> Vec<Vec<f64>> {
    let (mut x, mut g) = (x0.to_vec(), vec![0.0; x0.len()]);
    let mut pairs: Vec<(Vec<f64>, Vec<f64>)> = Vec::new();
    let mut iterates = Vec::new();
    let mut h_diag = 1.0;
    problem(&x, &mut g);
    for iteration in 1..=count {
        let mut q: Vec<f64> = g.iter().map(|g| -g).collect();
        let mut alphas = Vec::new();
        for (s, y) in pairs.iter().rev() {
            let alpha = dot(s, &q) / dot(s, y);
            q.iter_mut().zip(y).for_each(|(q, y)| *q -= alpha * y);
            alphas.push(alpha);
        }
        q.iter_mut().for_each(|q| *q *= h_diag);
        for ((s, y), alpha) in pairs.iter().zip(alphas.iter().rev()) {
            let beta = dot(y, &q) / dot(s, y);
            q.iter_mut().zip(s).for_each(|(q, s)| *q += (alpha - beta) * s);
        }
        let magnitudes: f64 = g.iter().map(|g| g.abs()).sum();
        let t = if iteration == 1 { lr * (1.0 / magnitudes).min(1.0) } else { lr };
        let s: Vec<f64> = q.iter().map(|d| t * d).collect();
        x.iter_mut().zip(&s).for_each(|(x, s)| *x += s);
        let before = g.clone();
        problem(&x, &mut g);
        let y: Vec<f64> = g.iter().zip(&before).map(|(a, b)| a - b).collect();
        if dot(&s, &y) > 1e-10 {
            h_diag = dot(&s, &y) / dot(&y, &y);
            pairs.push((s, y));
            pairs.drain(..pairs.len().saturating_sub(history_len));
        }
        iterates.push(x.clone());
    }
    iterates
}

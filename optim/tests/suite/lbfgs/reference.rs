//! L-BFGS with a fixed step on whole vectors of f64, written as plainly as possible: the two-loop recursion.

use crate::lbfgs::problems::Problem;
use meshstep_tensor::{bf16, f16};
use std::cell::RefCell;

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Returns the first `count` iterates after `x0`.
pub(crate) fn fixed_step(
    problem: &Problem,
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

/// Rounding of the pairs of a reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rounding {
    None,
    Bf16,
    F16,
}

impl Rounding {
    /// Rounds a row; f16 at the power of two that moves its largest magnitude into 2^14 .. 2^15.
    fn row(self, row: &[f32]) -> Vec<f64> {
        let largest = row.iter().fold(0.0, |largest: f64, &x| largest.max(f64::from(x).abs()));
        let mut scale = 1.0;
        while largest > 0.0 && largest * scale >= 32768.0 {
            scale /= 2.0;
        }
        while largest > 0.0 && largest * scale < 16384.0 {
            scale *= 2.0;
        }
        let one = |&x: &f32| match self {
            Rounding::None => f64::from(x),
            Rounding::Bf16 => bf16::from_f32(x).to_f64(),
            Rounding::F16 => f16::from_f64(f64::from(x) * scale).to_f64() / scale,
        };
        row.iter().map(one).collect()
    }
}

/// Pairs `s`, `y`, oldest first.
type Pairs = Vec<(Vec<f64>, Vec<f64>)>;

/// Returns `-H g`.
fn two_loops(pairs: &Pairs, g: &[f64]) -> Vec<f64> {
    let mut q: Vec<f64> = g.iter().map(|g| -g).collect();
    let mut alphas = Vec::new();
    for (s, y) in pairs.iter().rev() {
        let alpha = dot(s, &q) / dot(s, y);
        q.iter_mut().zip(y).for_each(|(q, y)| *q -= alpha * y);
        alphas.push(alpha);
    }
    let h_diag = pairs.last().map_or(1.0, |(s, y)| dot(s, y) / dot(y, y));
    q.iter_mut().for_each(|q| *q *= h_diag);
    for ((s, y), alpha) in pairs.iter().zip(alphas.iter().rev()) {
        let beta = dot(y, &q) / dot(s, y);
        q.iter_mut().zip(s).for_each(|(q, s)| *q += (alpha - beta) * s);
    }
    q
}

fn push(pairs: &mut Pairs, (s, y): (Vec<f64>, Vec<f64>), history_len: usize) {
    if dot(&s, &y) > 1e-10 {
        pairs.push((s, y));
        pairs.drain(..pairs.len().saturating_sub(history_len));
    }
}

/// Takes fixed steps on vectors of f32. Calls `each` with the iterate, the step length `t`, and `d` and `y` of the pair.
fn walk_f32(
    problem: &Problem,
    x0: &[f64],
    (lr, count): (f64, usize),
    mut each: impl FnMut(&[f64], f64, [&[f32]; 2]),
    mut direction: impl FnMut(&[f64]) -> Vec<f64>,
) {
    let evaluate = |x: &[f32]| {
        let mut g = vec![0.0; x.len()];
        problem(&x.iter().map(|&x| x.into()).collect::<Vec<_>>(), &mut g);
        g.iter().map(|&g| g as f32).collect::<Vec<_>>()
    };
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let mut x: Vec<f32> = x0.iter().map(|&x| x as f32).collect();
    let mut g = evaluate(&x);
    for iteration in 1..=count {
        let d: Vec<f32> = direction(&wide(&g)).iter().map(|&d| d as f32).collect();
        let magnitudes: f64 = wide(&g).iter().map(|g| g.abs()).sum();
        let t = if iteration == 1 { lr * (1.0 / magnitudes).min(1.0) } else { lr };
        x.iter_mut().zip(&d).for_each(|(x, d)| *x = (t as f32).mul_add(*d, *x));
        let before = std::mem::replace(&mut g, evaluate(&x));
        let y: Vec<f32> = g.iter().zip(&before).map(|(a, b)| a - b).collect();
        each(&wide(&x), t, [&d, &y]);
    }
}

/// Returns the first `count` iterates after `x0`, on vectors of f32 with rounded pairs.
pub(crate) fn fixed_step_of_f32(
    problem: &Problem,
    x0: &[f64],
    (lr, history_len, count): (f64, usize, usize),
    rounding: Rounding,
) -> Vec<Vec<f64>> {
    let pairs = RefCell::new(Pairs::new());
    let mut iterates = Vec::new();
    let each = |x: &[f64], t: f64, [d, y]: [&[f32]; 2]| {
        let s = rounding.row(d).iter().map(|d| t * d).collect();
        push(&mut pairs.borrow_mut(), (s, rounding.row(y)), history_len);
        iterates.push(x.to_vec());
    };
    walk_f32(problem, x0, (lr, count), each, |g| two_loops(&pairs.borrow(), g));
    iterates
}

/// Returns the largest difference of directions with rounded pairs from those with exact pairs, along the iterates of the latter.
pub(crate) fn directions_apart(
    problem: &Problem,
    x0: &[f64],
    (lr, history_len, count): (f64, usize, usize),
    rounding: Rounding,
) -> f64 {
    let [exact, rounded] = [(); 2].map(|()| RefCell::new(Pairs::new()));
    let each = |_: &[f64], t: f64, rows: [&[f32]; 2]| {
        for (pairs, rounding) in [(&exact, Rounding::None), (&rounded, rounding)] {
            let [d, y] = rows.map(|row| rounding.row(row));
            push(&mut pairs.borrow_mut(), (d.iter().map(|d| t * d).collect(), y), history_len);
        }
    };
    let mut worst = 0.0;
    walk_f32(problem, x0, (lr, count), each, |g| {
        let direction = two_loops(&exact.borrow(), g);
        worst = super::relative(&two_loops(&rounded.borrow(), g), &direction).max(worst);
        direction
    });
    worst
}

//! Two-loop recursion on dot products alone: computes the next direction's coefficients without touching a vector.
//!
//! The direction is `-H g`, a linear combination of the gradient and the history's `s` and `y`, so its coefficients follow from the
//! vectors' dot products: Chen, Wang and Zhou, *Large-scale L-BFGS using MapReduce* (2014). The recursion needs no product of two `s`.
//! The product of a row with the change of the gradient is the difference of its products with the new and the old gradient, so an
//! iteration measures the history with the gradient alone: Byrd, Nocedal and Schnabel, *Representations of quasi-Newton matrices and
//! their use in limited memory methods* (1994). Both products are exact sums here, and so is their difference: nothing cancels, even for
//! almost equal gradients.

use crate::ExactSum;
use std::ops::Range;

/// A pair is accepted if `y . s` exceeds this: PyTorch's rule.
const CURVATURE: f64 = 1e-10;

/// Dot products of the history, of at most `m` pairs in `m + 1` slots: the extra slot is for measuring a pair before it is accepted.
///
/// For `s = t d` only the vector `d` is stored.
#[derive(Debug)]
pub(super) struct Gram {
    slots: usize,
    /// Slots in use, oldest first.
    used: Vec<usize>,
    /// Slot of the next pair.
    spare: usize,
    /// Multiple of each slot's `d` that is its `s`: the step length, by the row's scale if it has one.
    t: Vec<f64>,
    /// Multiple of each slot's row of `y` that is its `y`, if the history is rounded; empty if all are 1.
    u: Vec<f64>,
    /// `s . y` of each used slot's `s` with each `y` that is not older. With a newer `y`, the product uses the difference of gradients
    /// before its rounding to `y`.
    s_y: Vec<f64>,
    /// `y . y`, with the same convention.
    y_y: Vec<f64>,
    /// Products of each used slot's `d` and `y` with the gradient of the latest direction.
    with_g: Vec<[ExactSum; 2]>,
    h_diag: f64,
    alpha: Vec<f64>,
    /// Coefficients of each slot's `s` and `y` in the direction.
    coefs: Vec<[f64; 2]>,
}

impl Gram {
    /// Creates an empty history with room for `history_len` pairs.
    pub(super) fn new(history_len: usize) -> Self {
        let slots = history_len + 1;
        Gram {
            slots,
            used: Vec::with_capacity(slots),
            spare: 0,
            t: vec![0.0; slots],
            u: Vec::new(),
            s_y: vec![0.0; slots * slots],
            y_y: vec![0.0; slots * slots],
            with_g: vec![[ExactSum::new(), ExactSum::new()]; slots],
            h_diag: 1.0,
            alpha: vec![0.0; slots],
            coefs: vec![[0.0; 2]; slots],
        }
    }

    /// Creates an empty history of rounded rows with room for `history_len` pairs.
    pub(super) fn rounded(history_len: usize) -> Self {
        let gram = Gram::new(history_len);
        Gram { u: vec![1.0; gram.slots], ..gram }
    }

    /// Creates an empty history like this one.
    pub(super) fn like(&self) -> Self {
        let new = if self.u.is_empty() { Gram::new } else { Gram::rounded };
        new(self.slots - 1)
    }

    /// Returns the number of pairs held.
    pub(super) fn len(&self) -> usize {
        self.used.len()
    }

    /// Returns the slot of the `i`th pair, oldest first.
    pub(super) fn slot(&self, i: usize) -> usize {
        self.used[i]
    }

    /// Returns the slot in which a new pair is measured.
    pub(super) fn spare(&self) -> usize {
        self.spare
    }

    /// Returns the number of oldest pairs that a new one pushes out: 1 if the history is full, else 0.
    pub(super) fn leaving(&self) -> usize {
        usize::from(self.used.len() + 1 == self.slots)
    }

    /// Records the products of a new pair with `s = t d`: `d . y`, `y . y`, and the products with the gradient of the `d` and `y` of the
    /// newest pairs held, then of the new pair.
    pub(super) fn measured(&mut self, t: f64, [d_y, y_y]: [f64; 2], with_g: &[ExactSum]) {
        let new = self.spare;
        let (of_slots, _) = with_g.as_chunks::<2>();
        let older = (self.used.len() + 1).saturating_sub(of_slots.len());
        for (i, now) in of_slots.iter().enumerate() {
            let slot = self.used.get(older + i).copied().unwrap_or(new);
            let before = &self.with_g[slot];
            let [d, y] = [0, 1].map(|of| now[of].minus(&before[of]).to_f64());
            self.s_y[slot * self.slots + new] = self.t[slot] * d;
            self.y_y[slot * self.slots + new] = y;
            self.y_y[new * self.slots + slot] = y;
            self.with_g[slot].clone_from(now);
        }
        self.t[new] = t;
        self.s_y[new * self.slots + new] = t * d_y;
        self.y_y[new * self.slots + new] = y_y;
    }

    /// Same as [`measured`](Self::measured) for rounded rows, with `s = t d` and `y = u row`. The products with the gradient, `with_g`, are
    /// followed by those with the new pair's row of `y`, `with_y`: a rounded `y` is not the change of the gradient, so its products are not
    /// differences.
    pub(super) fn measured_rounded(&mut self, [t, u]: [f64; 2], with_g: &[ExactSum], with_y: &[ExactSum]) {
        let new = self.spare;
        (self.t[new], self.u[new]) = (t, u);
        let ((of_slots, _), (products, _)) = (with_g.as_chunks::<2>(), with_y.as_chunks::<2>());
        let older = (self.used.len() + 1).saturating_sub(of_slots.len());
        for (i, (now, [d_y, y_y])) in of_slots.iter().zip(products).enumerate() {
            let slot = self.used.get(older + i).copied().unwrap_or(new);
            let y = self.u[slot] * u * y_y.to_f64();
            self.s_y[slot * self.slots + new] = self.t[slot] * u * d_y.to_f64();
            self.y_y[slot * self.slots + new] = y;
            self.y_y[new * self.slots + slot] = y;
            self.with_g[slot].clone_from(now);
        }
    }

    /// Accepts the new pair if its curvature is sufficient.
    pub(super) fn accept(&mut self) -> bool {
        let k = self.spare;
        let (s_y, y_y) = (self.s_y(k, k), self.y_y(k, k));
        if !(s_y > CURVATURE && s_y.is_finite()) {
            return false;
        }
        self.h_diag = s_y / y_y;
        self.used.push(k);
        self.spare = if self.used.len() == self.slots { self.used.remove(0) } else { self.used.len() };
        true
    }

    /// Computes the direction's coefficients; `g_g` is `g . g`. Returns `g . d`.
    pub(super) fn solve(&mut self, g_g: f64) -> f64 {
        for i in (0..self.used.len()).rev() {
            let s = self.used[i];
            let later = self.used[i + 1..].iter().zip(&self.alpha[i + 1..]);
            let s_q = later.fold(-self.s_g(s), |sum, (&j, a)| sum - a * self.s_y(s, j));
            self.alpha[i] = s_q / self.s_y(s, s);
        }
        for i in 0..self.used.len() {
            let k = self.used[i];
            let all = self.used.iter().zip(&self.alpha);
            let y_q = all.fold(-self.y_g(k), |sum, (&j, a)| sum - a * self.y_y(k, j));
            let before = self.used[..i].iter();
            let y_r = before.fold(self.h_diag * y_q, |sum, &j| sum + self.coefs[j][0] * self.s_y(j, k));
            self.coefs[k] = [self.alpha[i] - y_r / self.s_y(k, k), -self.h_diag * self.alpha[i]];
        }
        self.used.iter().fold(-self.h_diag * g_g, |sum, &k| {
            let [s, y] = self.coefs[k];
            sum + s * self.s_g(k) + y * self.y_g(k)
        })
    }

    /// Returns the gradient's coefficient in the direction.
    pub(super) fn coef_of_g(&self) -> f64 {
        -self.h_diag
    }

    /// Returns the coefficients of the `i`th pair's `d` and `y` in the direction.
    pub(super) fn coefs(&self, i: usize) -> [f64; 2] {
        let k = self.used[i];
        let [s, y] = self.coefs[k];
        [s * self.t[k], y * self.u(k)]
    }

    /// Appends the state that continues between iterations; exact sums are reduced to the words of `window`.
    pub(super) fn save(&self, window: &Range<usize>, words: &mut Vec<u64>) {
        words.extend([self.slots, self.spare, self.used.len()].map(|word| word as u64));
        words.extend(self.used.iter().map(|&slot| slot as u64));
        words.push(self.h_diag.to_bits());
        let numbers = [&self.t, &self.s_y, &self.y_y, &self.u].into_iter().flatten();
        words.extend(numbers.map(|number| number.to_bits()));
        for sum in self.with_g.iter().flatten() {
            let first = words.len();
            words.resize(first + window.len(), 0);
            sum.write_window(window, &mut words[first..]);
        }
    }

    /// Restores a history with the same number of slots from these words, or returns `None` if they do not fit.
    pub(super) fn restored(&self, window: &Range<usize>, words: &[u64]) -> Option<Gram> {
        let mut gram = self.like();
        let [slots, spare, used, rest @ ..] = words else { return None };
        let (used, rest) = rest.split_at_checked(usize::try_from(*used).ok()?)?;
        let (&h_diag, rest) = rest.split_first()?;
        let numbers = self.t.len() + self.s_y.len() + self.y_y.len() + self.u.len();
        let (numbers, sums) = rest.split_at_checked(numbers)?;
        let mut all: Vec<u64> = used.iter().chain([spare]).copied().collect();
        gram.used.extend(used.iter().map(|&slot| slot as usize));
        gram.spare = *spare as usize;
        all.sort_unstable();
        let within = all.iter().all(|&slot| slot < self.slots as u64) && all.windows(2).all(|w| w[0] < w[1]);
        if *slots != self.slots as u64 || !within || sums.len() != 2 * self.slots * window.len() {
            return None;
        }
        gram.h_diag = f64::from_bits(h_diag);
        let into = [&mut gram.t, &mut gram.s_y, &mut gram.y_y, &mut gram.u].into_iter().flatten();
        into.zip(numbers).for_each(|(number, &bits)| *number = f64::from_bits(bits));
        let into = gram.with_g.iter_mut().flatten();
        let sums = sums.chunks_exact(window.len());
        into.zip(sums).for_each(|(sum, words)| *sum = ExactSum::from_window(window, words));
        Some(gram)
    }

    /// Returns `s . y` of two slots; the pair of `y` is not older.
    fn s_y(&self, s: usize, y: usize) -> f64 {
        self.s_y[s * self.slots + y]
    }

    fn u(&self, slot: usize) -> f64 {
        self.u.get(slot).copied().unwrap_or(1.0)
    }

    fn y_y(&self, slot: usize, with: usize) -> f64 {
        self.y_y[slot * self.slots + with]
    }

    /// Returns `s . g`.
    fn s_g(&self, slot: usize) -> f64 {
        self.t[slot] * self.with_g[slot][0].to_f64()
    }

    /// Returns `y . g`.
    fn y_g(&self, slot: usize) -> f64 {
        self.u(slot) * self.with_g[slot][1].to_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dot(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(x, y)| x * y).sum()
    }

    /// Two loops on whole vectors: returns `-H g` for pairs `(s, y)`, oldest first.
    fn two_loops(pairs: &[(Vec<f64>, Vec<f64>)], g: &[f64]) -> Vec<f64> {
        let mut q: Vec<f64> = g.iter().map(|x| -x).collect();
        let mut alpha = vec![0.0; pairs.len()];
        for (i, (s, y)) in pairs.iter().enumerate().rev() {
            alpha[i] = dot(s, &q) / dot(s, y);
            q.iter_mut().zip(y).for_each(|(q, y)| *q -= alpha[i] * y);
        }
        let h_diag = pairs.last().map_or(1.0, |(s, y)| dot(s, y) / dot(y, y));
        q.iter_mut().for_each(|q| *q *= h_diag);
        for (i, (s, y)) in pairs.iter().enumerate() {
            let beta = dot(y, &q) / dot(s, y);
            q.iter_mut().zip(s).for_each(|(q, s)| *q += (alpha[i] - beta) * s);
        }
        q
    }

    fn random(seed: &mut u64, len: usize) -> Vec<f64> {
        let mut next = || {
            *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (*seed >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    fn exactly(a: &[f64], b: &[f64]) -> ExactSum {
        let mut sum = ExactSum::new();
        a.iter().zip(b).for_each(|(&x, &y)| sum.add_product(x, y));
        sum
    }

    /// The gradients' difference is below the rounding error of their products.
    #[test]
    fn products_with_a_small_change_of_the_gradient_are_exact() {
        let mut gram = Gram::new(2);
        let (before, now) = ([1e20, 3.0, -1e20], [1e20, 3.0 + 1.0 / 1024.0, -1e20]);
        let (older, newer) =
            ([[5.0, 7.0, 5.5], [9.0, 11.0, 8.0]], [[1.0, 2.0, 3.0], [0.0, 1.0 / 1024.0, 0.0]]);
        let with = |pair: &[[f64; 3]; 2], g: &[f64]| pair.each_ref().map(|v| exactly(v, g));
        gram.measured(1.0, [2.0, 4.0], &with(&older, &before));
        assert!(gram.accept());
        gram.measured(0.5, [2.0, 4.0], &[with(&older, &now), with(&newer, &now)].concat());
        let [old, new] = [0, gram.spare()];
        assert_eq!([gram.s_y(old, new), gram.y_y(old, new)], [7.0, 11.0].map(|of_row| of_row / 1024.0));
        assert_eq!(gram.y_y(new, old), gram.y_y(old, new));
    }

    #[test]
    fn coefficients_give_the_recursions_direction() {
        const LEN: usize = 40;
        let mut seed = 7;
        for history_len in [1, 2, 5] {
            let mut gram = Gram::new(history_len);
            // `d` and `y` of every slot.
            let mut vectors = vec![[vec![0.0; LEN], vec![0.0; LEN]]; history_len + 1];
            let mut pairs: Vec<(Vec<f64>, Vec<f64>)> = Vec::new();
            let mut before = random(&mut seed, LEN);
            gram.solve(dot(&before, &before));
            for round in 0..12 {
                let (mut d, g) = (random(&mut seed, LEN), random(&mut seed, LEN));
                let y: Vec<f64> = g.iter().zip(&before).map(|(now, then)| now - then).collect();
                // Mostly convex; every fourth pair is refused.
                let sign = if round % 4 == 3 { -1.0 } else { 1.0 };
                d.iter_mut().zip(&y).for_each(|(d, y)| *d = 0.3 * *d + sign * y);
                let t = 0.25 + round as f64;
                vectors[gram.spare()] = [d.clone(), y.clone()];
                let with_g = |gram: &Gram, without: usize| -> Vec<ExactSum> {
                    let slots = (without..gram.len()).map(|i| gram.slot(i)).chain([gram.spare()]);
                    slots.flat_map(|slot| vectors[slot].each_ref().map(|v| exactly(v, &g))).collect()
                };
                assert_eq!(gram.leaving(), usize::from(pairs.len() == history_len));
                let newest = with_g(&gram, gram.leaving());
                gram.measured(t, [dot(&d, &y), dot(&y, &y)], &newest);
                assert_eq!(gram.accept(), sign > 0.0);
                if sign < 0.0 && gram.leaving() > 0 {
                    let all = with_g(&gram, 0);
                    gram.measured(0.0, [0.0; 2], &all);
                    assert!(!gram.accept());
                }
                if sign > 0.0 {
                    pairs.push((d.iter().map(|d| t * d).collect(), y));
                    pairs.drain(..pairs.len().saturating_sub(history_len));
                }
                assert_eq!(gram.len(), pairs.len());
                let slope = gram.solve(dot(&g, &g));
                let expected = two_loops(&pairs, &g);
                let value = |e: usize| {
                    let terms = (0..gram.len()).map(|i| {
                        let ([d, y], [of_d, of_y]) = (&vectors[gram.slot(i)], gram.coefs(i));
                        of_d * d[e] + of_y * y[e]
                    });
                    gram.coef_of_g() * g[e] + terms.sum::<f64>()
                };
                let scale = expected.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
                for (i, x) in expected.iter().enumerate() {
                    assert!(
                        (value(i) - x).abs() <= 1e-11 * scale,
                        "{history_len} {round} {i}: {} {x}",
                        value(i)
                    );
                }
                assert!((slope - dot(&g, &expected)).abs() <= 1e-11 * dot(&g, &g) * scale);
                before = g;
            }
        }
    }
}

//! The two-loop recursion on dot products alone: coefficients of the next direction without touching a vector.
//!
//! The direction is `-H g`, a combination of the gradient and the history's `s` and `y`, so its coefficients follow from the
//! vectors' dot products: Chen, Wang and Zhou, *Large-scale L-BFGS using MapReduce* (2014). No `s` meets another in the recursion,
//! nor an older `y`, so an iteration measures the history with `g` and the new `y` alone, as Byrd, Nocedal and Schnabel do,
//! *Representations of quasi-Newton matrices and their use in limited memory methods* (1994).

/// A pair is accepted where `y . s` is above this: PyTorch's rule.
const CURVATURE: f64 = 1e-10;

/// Dot products of the history, of at most `m` pairs in `m + 1` slots: a pair is measured before it is accepted.
///
/// Row `k` is slot `k`'s `s`, row `m + 1 + k` its `y`.
#[derive(Debug)]
pub(super) struct Gram {
    slots: usize,
    /// Slots in use, the oldest first.
    used: Vec<usize>,
    /// Where the next pair goes.
    spare: usize,
    /// Of each row with the `y` of each slot; of an `s`, only with those that are no older.
    table: Vec<f64>,
    with_g: Vec<f64>,
    h_diag: f64,
    alpha: Vec<f64>,
    /// Of each row in the direction.
    coefs: Vec<f64>,
}

impl Gram {
    /// Room for `history_len` pairs.
    pub(super) fn new(history_len: usize) -> Self {
        let slots = history_len + 1;
        let rows = 2 * slots;
        Gram {
            slots,
            used: Vec::with_capacity(slots),
            spare: 0,
            table: vec![0.0; rows * slots],
            with_g: vec![0.0; rows],
            h_diag: 1.0,
            alpha: vec![0.0; slots],
            coefs: vec![0.0; rows],
        }
    }

    /// Pairs held.
    pub(super) fn len(&self) -> usize {
        self.used.len()
    }

    /// The slot that a new pair is measured in.
    pub(super) fn spare(&self) -> usize {
        self.spare
    }

    /// The row of slot `k`'s `y`.
    pub(super) fn y(&self, k: usize) -> usize {
        self.slots + k
    }

    /// Rows that are measured with a new pair: `s` and `y` of the pairs held and of the new one.
    pub(super) fn rows(&self) -> usize {
        2 * (self.used.len() + 1)
    }

    /// The `i`th of these.
    pub(super) fn row(&self, i: usize) -> usize {
        let slot = self.used.get(i / 2).copied().unwrap_or(self.spare);
        if i.is_multiple_of(2) { slot } else { self.y(slot) }
    }

    /// Takes in the measured products of row `i` with the gradient and the new `y`.
    pub(super) fn measured(&mut self, i: usize, [g, y]: [f64; 2]) {
        let row = self.row(i);
        self.with_g[row] = g;
        self.set(row, self.spare, y);
        if let Some(older) = row.checked_sub(self.slots) {
            self.set(self.y(self.spare), older, y);
        }
    }

    /// Accepts the new pair, if its curvature allows.
    pub(super) fn accept(&mut self) -> bool {
        let k = self.spare;
        let (y_s, y_y) = (self.with_y(k, k), self.with_y(self.y(k), k));
        if !(y_s > CURVATURE && y_s.is_finite()) {
            return false;
        }
        self.h_diag = y_s / y_y;
        self.used.push(k);
        self.spare = if self.used.len() == self.slots { self.used.remove(0) } else { self.used.len() };
        true
    }

    /// Solves for the direction; `g_g` is the gradient's own product. Returns `g . d`.
    pub(super) fn solve(&mut self, g_g: f64) -> f64 {
        self.coefs.fill(0.0);
        for i in (0..self.used.len()).rev() {
            let s = self.used[i];
            let later = self.used[i + 1..].iter().zip(&self.alpha[i + 1..]);
            let s_q = later.fold(-self.with_g[s], |sum, (&j, a)| sum - a * self.with_y(s, j));
            self.alpha[i] = s_q / self.with_y(s, s);
        }
        for i in 0..self.used.len() {
            let (s, y) = (self.used[i], self.y(self.used[i]));
            let all = self.used.iter().zip(&self.alpha);
            let y_q = all.fold(-self.with_g[y], |sum, (&j, a)| sum - a * self.with_y(y, j));
            let before = self.used[..i].iter();
            let y_r = before.fold(self.h_diag * y_q, |sum, &j| sum + self.coefs[j] * self.with_y(j, s));
            self.coefs[s] = self.alpha[i] - y_r / self.with_y(s, s);
            self.coefs[y] = -self.h_diag * self.alpha[i];
        }
        let rows = (0..2 * self.used.len()).map(|i| self.row(i));
        rows.fold(-self.h_diag * g_g, |sum, row| sum + self.coefs[row] * self.with_g[row])
    }

    /// The gradient's coefficient in the direction.
    pub(super) fn coef_of_g(&self) -> f64 {
        -self.h_diag
    }

    /// A row's coefficient in the direction.
    pub(super) fn coef(&self, row: usize) -> f64 {
        self.coefs[row]
    }

    /// Adds what it is from one iteration to the next.
    pub(super) fn save(&self, words: &mut Vec<u64>) {
        words.extend([self.slots, self.spare, self.used.len()].map(|word| word as u64));
        words.extend(self.used.iter().map(|&slot| slot as u64));
        words.push(self.h_diag.to_bits());
        words.extend(self.table.iter().map(|product| product.to_bits()));
    }

    /// One of as many slots from these words, if they are of one.
    pub(super) fn restored(&self, words: &[u64]) -> Option<Gram> {
        let mut gram = Gram::new(self.slots - 1);
        let [slots, spare, used, rest @ ..] = words else { return None };
        let (used, rest) = rest.split_at_checked(usize::try_from(*used).ok()?)?;
        let (&h_diag, table) = rest.split_first()?;
        let mut all: Vec<u64> = used.iter().chain([spare]).copied().collect();
        gram.used.extend(used.iter().map(|&slot| slot as usize));
        gram.spare = *spare as usize;
        all.sort_unstable();
        let within = all.iter().all(|&slot| slot < self.slots as u64) && all.windows(2).all(|w| w[0] < w[1]);
        if *slots != self.slots as u64 || !within || table.len() != self.table.len() {
            return None;
        }
        gram.h_diag = f64::from_bits(h_diag);
        gram.table = table.iter().map(|&product| f64::from_bits(product)).collect();
        Some(gram)
    }

    /// The product of a row with a slot's `y`.
    fn with_y(&self, row: usize, slot: usize) -> f64 {
        self.table[row * self.slots + slot]
    }

    fn set(&mut self, row: usize, slot: usize, product: f64) {
        self.table[row * self.slots + slot] = product;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dot(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(x, y)| x * y).sum()
    }

    /// The two loops on whole vectors: `-H g` for pairs `(s, y)`, the oldest first.
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

    #[test]
    fn coefficients_give_the_recursions_direction() {
        const LEN: usize = 40;
        let mut seed = 7;
        for history_len in [1, 2, 5] {
            let mut gram = Gram::new(history_len);
            let mut vectors = vec![vec![0.0; LEN]; 2 * (history_len + 1)];
            let mut pairs: Vec<(Vec<f64>, Vec<f64>)> = Vec::new();
            for round in 0..12 {
                let (s, mut y, g) = (random(&mut seed, LEN), random(&mut seed, LEN), random(&mut seed, LEN));
                // Mostly convex; every fourth pair is refused.
                let sign = if round % 4 == 3 { -1.0 } else { 1.0 };
                y.iter_mut().zip(&s).for_each(|(y, s)| *y = 0.3 * *y + sign * s);
                let spare = gram.spare();
                (vectors[spare], vectors[gram.y(spare)]) = (s.clone(), y.clone());
                for i in 0..gram.rows() {
                    let row = &vectors[gram.row(i)];
                    let products = [dot(row, &g), dot(row, &y)];
                    gram.measured(i, products);
                }
                assert_eq!(gram.accept(), sign > 0.0);
                if sign > 0.0 {
                    pairs.push((s, y));
                    pairs.drain(..pairs.len().saturating_sub(history_len));
                }
                assert_eq!(gram.len(), pairs.len());
                let slope = gram.solve(dot(&g, &g));
                let expected = two_loops(&pairs, &g);
                let value = |i: usize| {
                    let terms = vectors.iter().enumerate().map(|(row, v)| gram.coef(row) * v[i]);
                    gram.coef_of_g() * g[i] + terms.sum::<f64>()
                };
                let scale = expected.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
                for (i, x) in expected.iter().enumerate() {
                    assert!(
                        (value(i) - x).abs() <= 1e-12 * scale,
                        "{history_len} {round} {i}: {} {x}",
                        value(i)
                    );
                }
                assert!((slope - dot(&g, &expected)).abs() <= 1e-12 * dot(&g, &g) * scale);
            }
        }
    }
}

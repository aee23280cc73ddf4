//! Muon: Jordan et al., *Muon: an optimizer for hidden layers in neural networks* (2024), with PyTorch's meaning and
//! defaults; [`Adjust::MatchRmsAdamW`] is of Liu et al., *Muon is scalable for LLM training* (2025).
//!
//! For a whole matrix of `rows x cols`, in the type of the parameters:
//!
//! ```text
//! g1 = g * scale                           grad_scale, negated to maximise
//! b  = fma(w, g1 - b, b)                   w = 1 - momentum
//! u  = fma(mu, b - g1, g1)                 with nesterov, mu = momentum; else u = b
//! o  = orthogonalised u                    see orthogonalize.rs
//! p  = p - fma(lw, p, step * o)            lw = lr * weight_decay; step = lr * adjustment(rows, cols)
//! ```
//!
//! The matrix products have an order of their own (`product.rs`), so the bits are the same on all machines. PyTorch orthogonalises in
//! bf16, this rule in the type of the parameters.

mod orthogonalize;
mod product;

use crate::engine::check::Check;
use crate::engine::pass;
use crate::engine::streams::{Stream, Streams};
use crate::{Error, Flat, Isa, Rule, Scalars, Sees, Segment, StateSlot};
use meshstep_tensor::{DType, Queue, Threads};
use orthogonalize::NewtonSchulz;
use product::Product;

const NAME: &str = "muon";
const STATE: &[&str] = &["momentum"];

/// Muon: momentum with each step replaced by the nearest matrix with orthonormal rows or columns. For the matrices of hidden layers; use
/// another rule for embeddings, heads, biases and norms.
#[derive(Clone, Debug, PartialEq)]
pub struct Muon {
    /// Decay of the buffer, in `[0, 1)`.
    pub momentum: f64,
    /// Uses Nesterov momentum.
    pub nesterov: bool,
    /// Decay of the parameters relative to the learning rate; at least 0.
    pub weight_decay: f64,
    /// Coefficients of the odd polynomial `a x + b x^3 + c x^5` that is applied repeatedly to the singular values.
    pub ns_coefficients: [f64; 3],
    /// Number of applications of the polynomial: 1 to 99.
    pub ns_steps: u32,
    /// Minimum Frobenius norm to divide by; 1e-300 to 1e300.
    pub eps: f64,
    /// Adjustment of the learning rate to the shape.
    pub adjust: Adjust,
    /// Maximises instead of minimising.
    pub maximize: bool,
}

/// Adjustment of Muon's learning rate to a matrix's shape.
///
/// ```
/// use meshstep_optim::{Adjust, Muon, Rule, Sees};
///
/// let rule = Muon { adjust: Adjust::MatchRmsAdamW, ..Muon::default() };
/// assert_eq!(rule.sees(), Sees::Matrix);
/// assert!(rule.reach(1e-3, Some((400, 100))) > 1e-3); // 0.2 sqrt(400) times the rate
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Adjust {
    /// `sqrt(max(1, rows / cols))`.
    #[default]
    Original,
    /// `0.2 sqrt(max(rows, cols))`: steps as long as AdamW's, so that its learning rate and decay can be used.
    MatchRmsAdamW,
}

impl Default for Muon {
    fn default() -> Self {
        Muon {
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.1,
            ns_coefficients: [3.4445, -4.775, 2.0315],
            ns_steps: 5,
            eps: 1e-7,
            adjust: Adjust::Original,
            maximize: false,
        }
    }
}

impl Rule for Muon {
    fn name(&self) -> &'static str {
        NAME
    }

    fn state(&self) -> &'static [&'static str] {
        STATE
    }

    fn check(&self) -> Result<(), Error> {
        let check = Check { rule: NAME };
        check.range("momentum", self.momentum, (0.0..1.0).contains(&self.momentum), "0 <= momentum < 1")?;
        check.at_least_zero("weight_decay", self.weight_decay)?;
        check.range("eps", self.eps, (1e-300..1e300).contains(&self.eps), "1e-300 to 1e300")?;
        let steps = (1..100).contains(&self.ns_steps);
        check.range("ns_steps", self.ns_steps.into(), steps, "1 to 99")?;
        self.ns_coefficients.iter().try_for_each(|&c| check.finite("ns_coefficients", c))
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        let [a, b, c] = self.ns_coefficients;
        let all = [
            ("momentum", self.momentum),
            ("nesterov", self.nesterov.into()),
            ("weight_decay", self.weight_decay),
            ("ns_a", a),
            ("ns_b", b),
            ("ns_c", c),
            ("ns_steps", self.ns_steps.into()),
            ("eps", self.eps),
            ("match_rms_adamw", (self.adjust == Adjust::MatchRmsAdamW).into()),
            ("maximize", self.maximize.into()),
        ];
        all.into_iter().for_each(|(name, value)| each(name, value));
    }

    fn sees(&self) -> Sees {
        Sees::Matrix
    }

    fn slot(&self, _: usize) -> StateSlot {
        StateSlot::average(self.momentum)
    }

    fn reach(&self, lr: f64, matrix: Option<(usize, usize)>) -> f64 {
        // A matrix without elements has no valid adjustment, and nothing uses it.
        let matrix = matrix.filter(|&(rows, cols)| rows > 0 && cols > 0);
        (lr * self.weight_decay).max(matrix.map_or(lr, |shape| lr * self.adjustment(shape)))
    }

    fn update_on(
        &self,
        isa: Isa,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), Error> {
        self.check()?;
        pass::check(self, isa, &flat, segments, scalars)?;
        segments.iter().enumerate().try_for_each(check_matrix)?;
        let threads = queue.threads();
        match flat.params.dtype() {
            DType::F64 => self.matrices::<f64>(pass::streams(flat)?, segments, scalars, (isa, threads)),
            _ => self.matrices::<f32>(pass::streams(flat)?, segments, scalars, (isa, threads)),
        }
        Ok(())
    }
}

impl Muon {
    fn matrices<T: Product>(
        &self,
        mut streams: Streams<'_, T, 1>,
        segments: &[Segment],
        scalars: &Scalars,
        on: (Isa, &Threads),
    ) {
        for segment in segments.iter().filter(|s| !s.range.is_empty()) {
            self.matrix(streams.part(segment.range.clone()), segment, scalars, on);
        }
    }

    fn matrix<T: Product>(
        &self,
        streams: Streams<'_, T, 1>,
        segment: &Segment,
        scalars: &Scalars,
        (isa, threads): (Isa, &Threads),
    ) {
        let Some(shape) = segment.matrix else { return };
        let Streams { mut params, mut grads, state: [mut buffer], mut copy } = streams;
        let mut step = self.ahead(&grads, &mut buffer, segment, scalars);
        let newton_schulz = NewtonSchulz {
            coefficients: self.ns_coefficients.map(T::from_f64),
            steps: self.ns_steps,
            eps: self.eps,
            isa,
            threads,
        };
        newton_schulz.orthogonalize(&mut step, shape);
        let length = T::from_f64(scalars.lr * self.adjustment(shape));
        let lw = T::from_f64(scalars.lr * self.weight_decay);
        for (i, &o) in step.iter().enumerate() {
            let p = params.view().get_plainly(i);
            let p = p - lw.fma(p, length * o);
            params.set_plainly(i, p, segment.draw(scalars.rounding, 0));
            if let Some(copy) = &mut copy {
                copy.set_plainly(i, p, None);
            }
        }
        if scalars.zero_grads {
            grads.zero();
        }
    }

    /// Updates the buffer; returns the matrix to orthogonalise.
    fn ahead<T: Product>(
        &self,
        grads: &Stream<'_, T>,
        buffer: &mut Stream<'_, T>,
        segment: &Segment,
        scalars: &Scalars,
    ) -> Vec<T> {
        let sign = if self.maximize { -1.0 } else { 1.0 };
        let scale = T::from_f64(sign * scalars.grad_scale);
        let (w, mu) = (T::from_f64(1.0 - self.momentum), T::from_f64(self.momentum));
        let one = |i: usize| {
            let g1 = grads.view().get_plainly(i) * scale;
            let before = buffer.view().get_plainly(i);
            let b = w.fma(g1 - before, before);
            buffer.set_plainly(i, b, segment.draw(scalars.rounding, 1));
            if self.nesterov { mu.fma(b - g1, g1) } else { b }
        };
        (0..segment.range.len()).map(one).collect()
    }

    fn adjustment(&self, (rows, cols): (usize, usize)) -> f64 {
        match self.adjust {
            Adjust::Original => (rows as f64 / cols as f64).max(1.0).sqrt(),
            Adjust::MatchRmsAdamW => 0.2 * (rows.max(cols) as f64).sqrt(),
        }
    }
}

/// Checks that a segment is a matrix with as many elements as its shape says.
fn check_matrix((index, segment): (usize, &Segment)) -> Result<(), Error> {
    let elements = segment.matrix.map(|(rows, cols)| rows.saturating_mul(cols));
    if elements == Some(segment.range.len()) {
        return Ok(());
    }
    Err(Error::NotAMatrix { rule: NAME, index, len: segment.range.len(), shape: segment.matrix })
}

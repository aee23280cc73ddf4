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
//! The matrix products are those of a library that chooses its kernels by the machine: unlike all else here, their last
//! bits may differ between machines. PyTorch orthogonalises in bf16, this in the type of the parameters.

mod orthogonalize;

use crate::check::{Check, check_isa};
use crate::number::{Real, Stored};
use crate::pass;
use crate::{Error, Flat, Isa, Rule, Scalars, Sees, Segment};
use meshstep_tensor::{DType, Queue, bf16, f16};
use orthogonalize::{NewtonSchulz, Product};

const NAME: &str = "muon";
const STATE: &[&str] = &["momentum"];

/// Momentum whose step is replaced by the nearest matrix with orthonormal rows or columns. For the hidden layers' matrices;
/// embeddings, heads, biases and norms belong to another rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Muon {
    /// Decay of the buffer, in `[0, 1)`.
    pub momentum: f64,
    /// Looks one step of momentum ahead.
    pub nesterov: bool,
    /// Decay of the parameters relative to the learning rate; at least 0.
    pub weight_decay: f64,
    /// The odd polynomial `a x + b x^3 + c x^5` that is applied to the singular values again and again.
    pub ns_coefficients: [f64; 3],
    /// How often it is applied: 1 to 99.
    pub ns_steps: u32,
    /// A smaller Frobenius norm counts as this; above 0.
    pub eps: f64,
    /// How the learning rate depends on the shape.
    pub adjust: Adjust,
    /// Climbs instead of descending.
    pub maximize: bool,
}

/// How Muon's learning rate depends on a matrix's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Adjust {
    /// `sqrt(max(1, rows / cols))`.
    #[default]
    Original,
    /// `0.2 sqrt(max(rows, cols))`: steps as long as AdamW's, so that its learning rate and decay serve.
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
        check.range("eps", self.eps, self.eps > 0.0 && self.eps.is_finite(), "a finite number > 0")?;
        let steps = (1..100).contains(&self.ns_steps);
        check.range("ns_steps", self.ns_steps.into(), steps, "1 to 99")?;
        self.ns_coefficients.iter().try_for_each(|&c| check.finite("ns_coefficients", c))
    }

    fn hyperparameters(&self) -> Vec<(&'static str, f64)> {
        let [a, b, c] = self.ns_coefficients;
        vec![
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
        ]
    }

    fn sees(&self) -> Sees {
        Sees::Matrix
    }

    fn retention(&self) -> f64 {
        self.momentum
    }

    fn update_on(
        &self,
        isa: Isa,
        mut flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        _queue: &Queue,
    ) -> Result<(), Error> {
        self.check()?;
        check_isa(isa)?;
        pass::check((NAME, STATE), isa, &flat, segments)?;
        segments.iter().enumerate().try_for_each(check_matrix)?;
        for segment in segments.iter().filter(|s| !s.range.is_empty()) {
            match (flat.params.dtype(), flat.grads.dtype()) {
                (DType::F32, DType::F32) => self.matrix::<f32, f32>(&mut flat, segment, scalars)?,
                (DType::F32, DType::BF16) => self.matrix::<f32, bf16>(&mut flat, segment, scalars)?,
                (DType::F32, _) => self.matrix::<f32, f16>(&mut flat, segment, scalars)?,
                _ => self.matrix::<f64, f64>(&mut flat, segment, scalars)?,
            }
        }
        Ok(())
    }
}

impl Muon {
    fn matrix<T: Real + Product, G: Stored<T>>(
        &self,
        flat: &mut Flat<'_, '_>,
        segment: &Segment,
        scalars: &Scalars,
    ) -> Result<(), Error> {
        let Some(shape) = segment.matrix else { return Ok(()) };
        let range = segment.range.clone();
        let grads = &mut flat.grads.typed_mut::<G>()?[range.clone()];
        let buffer = &mut flat.state[0].typed_mut::<T>()?[range.clone()];
        let mut step = self.ahead(grads, buffer, scalars);
        let newton_schulz = NewtonSchulz {
            coefficients: self.ns_coefficients.map(T::from_f64),
            steps: self.ns_steps,
            eps: self.eps,
        };
        newton_schulz.orthogonalize(&mut step, shape);
        let length = T::from_f64(scalars.lr * self.adjustment(shape));
        let lw = T::from_f64(scalars.lr * self.weight_decay);
        let params = &mut flat.params.typed_mut::<T>()?[range.clone()];
        for (p, o) in params.iter_mut().zip(&step) {
            *p = *p - lw.fma(*p, length * *o);
        }
        if scalars.zero_grads {
            grads.fill(G::ZERO);
        }
        if let Some(copy) = &mut flat.copy {
            copy.reborrow().slice(range)?.cast_from((&*params).into())?;
        }
        Ok(())
    }

    /// Brings the buffer forward; what is to be orthogonalised.
    fn ahead<T: Real, G: Stored<T>>(&self, grads: &[G], buffer: &mut [T], scalars: &Scalars) -> Vec<T> {
        let sign = if self.maximize { -1.0 } else { 1.0 };
        let scale = T::from_f64(sign * scalars.grad_scale);
        let (w, mu) = (T::from_f64(1.0 - self.momentum), T::from_f64(self.momentum));
        let one = |(g, b): (&G, &mut T)| {
            let g1 = g.widen_plainly() * scale;
            *b = w.fma(g1 - *b, *b);
            if self.nesterov { mu.fma(*b - g1, g1) } else { *b }
        };
        grads.iter().zip(buffer).map(one).collect()
    }

    fn adjustment(&self, (rows, cols): (usize, usize)) -> f64 {
        match self.adjust {
            Adjust::Original => (rows as f64 / cols as f64).max(1.0).sqrt(),
            Adjust::MatchRmsAdamW => 0.2 * (rows.max(cols) as f64).sqrt(),
        }
    }
}

/// A segment of Muon's is a matrix, with as many elements as its shape says.
fn check_matrix((index, segment): (usize, &Segment)) -> Result<(), Error> {
    let elements = segment.matrix.map(|(rows, cols)| rows.saturating_mul(cols));
    if elements == Some(segment.range.len()) {
        return Ok(());
    }
    Err(Error::NotAMatrix { rule: NAME, index, len: segment.range.len(), shape: segment.matrix })
}

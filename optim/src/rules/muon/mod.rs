//! Muon: Jordan et al., *Muon: an optimizer for hidden layers in neural networks* (2024), with PyTorch's meaning and
//! defaults, and the variants of its authors and of Liu et al., *Muon is scalable for LLM training* (2025).
//!
//! For each matrix of `rows x cols`, in the type of the parameters, with mu = momentum:
//!
//! ```text
//! g1 = g * scale                           grad_scale, negated to maximise
//! b  = fma(w, g1 - b, b)                   w = 1 - mu; with decaying_sum b = fma(mu, b, g1)
//! u  = fma(mu, b - g1, g1)                 with nesterov; with decaying_sum u = fma(mu, b, g1); without nesterov u = b
//! o  = orthogonalised u                    see orthogonalize.rs
//! p  = p - fma(lw, p, step * o)            lw = lr * weight_decay; step = lr * adjustment(rows, cols)
//! ```
//!
//! The matrix products have an order of their own (`product.rs`), so the bits are the same on all machines. PyTorch orthogonalises in
//! bf16, this rule in the type of the parameters.

mod blocks;
mod orthogonalize;
mod phases;
mod product;
mod steps;
mod variants;

pub use blocks::Blocks;

use crate::engine::check::Check;
use crate::engine::cpu::Cpu;
use crate::engine::frame::Common;
use crate::engine::pass;
use crate::engine::streams::{Stream, Streams};
use crate::{Decay, Error, Flat, Isa, MatrixRule, Rule, Scalars, Sees, Segment, StateSlot, cuda};
use meshstep_tensor::{DType, Queue};
use product::Product;

const NAME: &str = "muon";
const STATE: &[&str] = &["momentum"];

/// Muon: momentum with each step replaced by the nearest matrix with orthonormal rows or columns. For the matrices of hidden layers; use
/// another rule for embeddings, heads, biases and norms.
///
/// For each matrix of `rows x cols`, with the gradient `g` times the step's scale, and `mu` the momentum:
///
/// ```text
/// b = b + (1 - mu) (g - b)                          with decaying_sum: b = mu b + g
/// u = g + mu (b - g)                                with decaying_sum: u = g + mu b; without nesterov: u = b
/// x = u / max(|u|, eps)                             |u| the Frobenius norm; with add_eps: u / (|u| + eps)
/// x = a x + (b' A + c A A) x, with A = x xT         ns_steps times, coefficients a, b', c; x is transposed if rows > cols
/// p = p - lr (weight_decay p + adjustment x)        adjustment: see Adjust
/// ```
///
/// The default is `torch.optim.Muon` of PyTorch 2.11; [`keller_jordan`](Self::keller_jordan) and [`moonshot`](Self::moonshot) are the
/// published programs of its authors and of Moonshot AI.
///
/// Momentum and descent work on each element on its own, so that a caller may hold a matrix in pieces ([`MatrixRule`]).
///
/// On a GPU kernels of its own have the CPU's bits ([`cuda::Update`](crate::cuda), feature `cuda`).
#[derive(Clone, Debug, PartialEq)]
pub struct Muon {
    /// Decay of the buffer, in `[0, 1)`.
    pub momentum: f64,
    /// Uses Nesterov momentum.
    pub nesterov: bool,
    /// True for a buffer that sums gradients, `b = momentum b + g`; else it averages them, `b = momentum b + (1 - momentum) g`. Steps are
    /// the same but for `eps`; the buffer is `1 / (1 - momentum)` times as large.
    pub decaying_sum: bool,
    /// Decay of the parameters relative to the learning rate; at least 0.
    pub weight_decay: f64,
    /// Coefficients of the odd polynomial `a x + b x^3 + c x^5` that is applied repeatedly to the singular values.
    pub ns_coefficients: [f64; 3],
    /// Number of applications of the polynomial: 1 to 99.
    pub ns_steps: u32,
    /// Minimum Frobenius norm to divide by; 1e-300 to 1e300.
    pub eps: f64,
    /// True to add `eps` to the norm; else it is the minimum.
    pub add_eps: bool,
    /// Adjustment of the learning rate to the shape of each block.
    pub adjust: Adjust,
    /// Matrices of a tensor.
    pub blocks: Blocks,
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
        check.range(
            "blocks",
            self.blocks.number(),
            self.blocks != Blocks::Rows(0),
            "at least one group of rows",
        )?;
        let steps = (1..100).contains(&self.ns_steps);
        check.range("ns_steps", self.ns_steps.into(), steps, "1 to 99")?;
        self.ns_coefficients.iter().try_for_each(|&c| check.finite("ns_coefficients", c))
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        let [a, b, c] = self.ns_coefficients;
        let all = [
            ("momentum", self.momentum),
            ("nesterov", self.nesterov.into()),
            ("decaying_sum", self.decaying_sum.into()),
            ("weight_decay", self.weight_decay),
            ("ns_a", a),
            ("ns_b", b),
            ("ns_c", c),
            ("ns_steps", self.ns_steps.into()),
            ("eps", self.eps),
            ("add_eps", self.add_eps.into()),
            ("blocks", self.blocks.number()),
            ("match_rms_adamw", (self.adjust == Adjust::MatchRmsAdamW).into()),
            ("maximize", self.maximize.into()),
        ];
        all.into_iter().for_each(|(name, value)| each(name, value));
    }

    fn sees(&self) -> Sees {
        Sees::Matrix
    }

    fn blocks(&self) -> Blocks {
        self.blocks
    }

    fn by_matrix(&self) -> Option<&dyn MatrixRule> {
        Some(self)
    }

    fn slot(&self, _: usize) -> StateSlot {
        StateSlot::average(self.momentum)
    }

    fn reach(&self, lr: f64, matrix: Option<(usize, usize)>) -> f64 {
        let block = matrix.and_then(|matrix| self.blocks.of_matrix(matrix));
        // A matrix without elements has no valid adjustment, and nothing uses it.
        let block = block.filter(|&(rows, cols)| rows > 0 && cols > 0);
        (lr * self.weight_decay).max(block.map_or(lr, |block| lr * self.adjustment(block)))
    }

    fn on_device(&self) -> Option<cuda::Hyper> {
        let common =
            Common { weight_decay: self.weight_decay, decay: Decay::Decoupled, maximize: self.maximize };
        Some(cuda::Hyper::new(NAME, &common, &[self.momentum]).with(&[self.nesterov, self.decaying_sum]))
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
        segments.iter().enumerate().try_for_each(|(index, segment)| self.block(index, segment).map(drop))?;
        let on = Cpu { isa, threads: queue.threads() };
        match flat.params.dtype() {
            DType::F64 => self.matrices::<f64>(pass::streams(flat)?, segments, scalars, on),
            _ => self.matrices::<f32>(pass::streams(flat)?, segments, scalars, on),
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
        on: Cpu<'_>,
    ) {
        for (index, segment) in segments.iter().enumerate().filter(|(_, s)| !s.range.is_empty()) {
            if let Ok(block) = self.block(index, segment) {
                self.tensor(streams.part(segment.range.clone()), (segment, block), scalars, on);
            }
        }
    }

    /// Returns the rows and columns of a segment's blocks, or an error if it is not the matrices that its shape says.
    fn block(&self, index: usize, segment: &Segment) -> Result<(usize, usize), Error> {
        let len = segment.range.len();
        segment.matrix.and_then(|matrix| self.blocks.of_segment(len, matrix)).ok_or(Error::NotAMatrix {
            rule: NAME,
            index,
            len,
            shape: segment.matrix,
            blocks: self.blocks,
        })
    }

    /// Updates a tensor that consists of blocks of these rows and columns.
    fn tensor<T: Product>(
        &self,
        streams: Streams<'_, T, 1>,
        (segment, block): (&Segment, (usize, usize)),
        scalars: &Scalars,
        on: Cpu<'_>,
    ) {
        let Streams { params, grads, state, copy } = streams;
        let len = segment.range.len();
        let segments = [Segment { range: 0..len, ..segment.clone() }];
        let mut step = vec![T::from_f32(0.0); len];
        let before = Streams { params: Stream::Same(&mut step), grads, state, copy: None };
        self.momentum(before, &segments, scalars, on);
        self.orthogonalize(&mut step, block, on);
        let after = Streams { params, grads: Stream::Same(&mut step), state: [], copy };
        self.descend(after, &segments, scalars, on);
    }

    fn adjustment(&self, (rows, cols): (usize, usize)) -> f64 {
        match self.adjust {
            Adjust::Original => (rows as f64 / cols as f64).max(1.0).sqrt(),
            Adjust::MatchRmsAdamW => 0.2 * (rows.max(cols) as f64).sqrt(),
        }
    }
}

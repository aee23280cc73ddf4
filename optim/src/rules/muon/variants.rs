//! Published variants of Muon, by name.

use super::{Adjust, Blocks, Muon};

/// Coefficients of all three: they raise small singular values as fast as possible.
const COEFFICIENTS: [f64; 3] = [3.4445, -4.775, 2.0315];

impl Default for Muon {
    /// `torch.optim.Muon` of PyTorch 2.11 with its defaults: the buffer averages, the norm is at least 1e-7, weight decay 0.1.
    fn default() -> Self {
        Muon {
            momentum: 0.95,
            nesterov: true,
            decaying_sum: false,
            weight_decay: 0.1,
            ns_coefficients: COEFFICIENTS,
            ns_steps: 5,
            eps: 1e-7,
            add_eps: false,
            adjust: Adjust::Original,
            blocks: Blocks::Whole,
            maximize: false,
        }
    }
}

impl Muon {
    /// Creates the rule of Keller Jordan's repository `Muon` (2025), whose learning rate is 0.02 by default:
    ///
    /// ```text
    /// b = 0.95 b + 0.05 g;  u = 0.05 g + 0.95 b
    /// p = p - lr sqrt(max(1, rows / cols)) NS5(u / (|u| + 1e-7))         no weight decay
    /// ```
    ///
    /// The article of 2024 sums gradients in its buffer: set [`decaying_sum`](Self::decaying_sum).
    ///
    /// ```
    /// use meshstep_optim::Muon;
    ///
    /// let article = Muon { decaying_sum: true, ..Muon::keller_jordan() };
    /// assert_eq!(article.weight_decay, 0.0);
    /// ```
    pub fn keller_jordan() -> Self {
        Muon { weight_decay: 0.0, add_eps: true, ..Muon::default() }
    }

    /// Creates the rule of Moonshot AI's repository `Moonlight` and of Liu et al., *Muon is scalable for LLM training* (2025), for AdamW's
    /// learning rates:
    ///
    /// ```text
    /// b = 0.95 b + g;  u = g + 0.95 b
    /// p = p - lr (0.1 p + 0.2 sqrt(max(rows, cols)) NS5(u / (|u| + 1e-7)))
    /// ```
    ///
    /// ```
    /// use meshstep_optim::{Adjust, Muon};
    ///
    /// let rule = Muon { weight_decay: 0.05, ..Muon::moonshot() };
    /// assert_eq!(rule.adjust, Adjust::MatchRmsAdamW);
    /// ```
    pub fn moonshot() -> Self {
        Muon { decaying_sum: true, add_eps: true, adjust: Adjust::MatchRmsAdamW, ..Muon::default() }
    }
}

//! Normalisation of tokens, each by itself.

use candle_core::{D, Result, Tensor};

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich, *Root mean square layer normalization*, 2019),
/// made of operations that have gradients.
///
/// The weight's gradient is that of the tokens it is given: on a residual stream cut along `tp` a part of it,
/// [`Gradient::PartialSum`](crate::Gradient::PartialSum).
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?.recip()?;
    x.broadcast_mul(&scale)?.broadcast_mul(weight)
}

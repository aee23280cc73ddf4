//! Root mean square normalisation of tokens.

use candle_core::{D, Result, Tensor};

/// Returns `x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich, *Root mean square layer normalization*,
/// 2019), composed of operations that have gradients.
///
/// The weight's gradient covers the tokens in `x` only. On a residual stream cut along `tp` it is therefore partial:
/// [`Gradient::PartialSum`](meshstep_parallel3d::Gradient::PartialSum).
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?.recip()?;
    x.broadcast_mul(&scale)?.broadcast_mul(weight)
}

//! Building blocks of the network, from candle's primitive operations.
//!
//! candle's fused layer_norm has no backward pass, so it is built from primitives. candle's sum over rows divides twice per
//! element, so trained vectors are not broadcast over rows: [`Constants::affine`] uses a matrix product instead, and its
//! backward pass is also one.

use anyhow::Result;
use candle_core::{D, DType, Device, Tensor};

/// Constants that all blocks share, for one number of rows.
#[derive(Debug)]
pub(super) struct Constants {
    /// Ones, `[rows * context, 1]`.
    ones: Tensor,
    /// Causal mask, `[context, context]`: zero at past positions, minus infinity at future ones.
    mask: Tensor,
}

impl Constants {
    /// Creates the constants for `rows` sequences of `context` tokens.
    pub(super) fn new(rows: usize, context: usize) -> Result<Self> {
        let hidden = |(i, j): (usize, usize)| if j > i { f32::NEG_INFINITY } else { 0.0 };
        let places = (0..context).flat_map(|i| (0..context).map(move |j| (i, j)));
        let mask = Tensor::from_iter(places.map(hidden), &Device::Cpu)?.reshape((context, context))?;
        Ok(Self { ones: Tensor::ones((rows * context, 1), DType::F32, &Device::Cpu)?, mask })
    }

    /// Repeats `[n]` in every row: `[rows * context, n]`.
    fn down(&self, vector: &Tensor) -> Result<Tensor> {
        Ok(self.ones.matmul(&vector.unsqueeze(0)?)?)
    }

    /// Returns `x w + b`.
    pub(super) fn affine(&self, x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
        Ok((x.matmul(weight)? + self.down(bias)?)?)
    }

    /// Returns `(x - mean) / sqrt(variance + 1e-5) * weight + bias`, per row (Ba, Kiros and Hinton 2016).
    pub(super) fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
        let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
        let normal = centred.broadcast_mul(&(variance + 1e-5)?.sqrt()?.recip()?)?;
        Ok(((normal * self.down(weight)?)? + self.down(bias)?)?)
    }

    /// Causal attention of `heads` heads over queries, keys and values side by side, `[tokens, 3 width]`.
    ///
    /// `softmax(q k' / sqrt(d)) v`, with the division by the softmax's sum after the product with `v`, because there are
    /// fewer channels than tokens to divide.
    pub(super) fn attention(&self, qkv: &Tensor, heads: usize) -> Result<Tensor> {
        let (tokens, width3) = qkv.dims2()?;
        let (context, size) = (self.mask.dim(0)?, width3 / 3 / heads);
        let shape = (tokens / context, context, 3, heads, size);
        let qkv = qkv.reshape(shape)?.permute((2, 0, 3, 1, 4))?.contiguous()?;
        let (q, k, v) = (qkv.get(0)?, qkv.get(1)?, qkv.get(2)?);
        let scores = (q * (size as f64).sqrt().recip())?.matmul(&k.t()?)?.broadcast_add(&self.mask)?;
        let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
        let mixed = weights.matmul(&v)?.broadcast_mul(&weights.sum_keepdim(D::Minus1)?.recip()?)?;
        Ok(mixed.transpose(1, 2)?.reshape((tokens, width3 / 3))?)
    }
}

/// Returns the mean of `-log softmax(logits)[target]` over all rows, in nats.
pub(super) fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let shifted = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?.detach())?;
    let log_sum = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    let chosen = shifted.gather(&targets.unsqueeze(1)?, 1)?;
    Ok((log_sum - chosen)?.mean_all()?)
}

/// Returns `max(x, 0)^2`.
pub(crate) fn relu_squared(x: &Tensor) -> Result<Tensor> {
    Ok(x.relu()?.sqr()?)
}

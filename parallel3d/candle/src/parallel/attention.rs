//! Attention over a sequence that is cut among ranks.

use super::Collectives;
use candle_core::{D, Device, Result, Tensor};

/// Returns causal attention `softmax(q k' / sqrt(d) + mask) v` for queries, keys and values `[rows, heads, tokens, d]` of this rank's
/// part of the sequence, in the same shape.
///
/// One all-gather brings keys and values of all ranks along `cp`; one reduce-scatter sums their gradients and returns them to their
/// ranks. The parts are contiguous, in rank order, and of equal length: token i of rank r sees tokens up to `r * tokens + i` of the whole
/// sequence.
pub fn causal_attention(q: &Tensor, k: &Tensor, v: &Tensor, cp: &Collectives) -> Result<Tensor> {
    let (_, _, tokens, size) = q.dims4()?;
    let keys_and_values = cp.all_gather(&Tensor::stack(&[k, v], 0)?, 3)?;
    let (k, v) = (keys_and_values.get(0)?, keys_and_values.get(1)?);
    let mask = mask(tokens, cp, q.device())?.to_dtype(q.dtype())?;
    let scaled = (q.contiguous()? * (size as f64).sqrt().recip())?;
    let scores = scaled.matmul(&k.t()?)?.broadcast_add(&mask)?;
    let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
    // Division after the product is cheaper: there are fewer channels than tokens.
    weights.matmul(&v)?.broadcast_mul(&weights.sum_keepdim(D::Minus1)?.recip()?)
}

/// Returns the mask `[tokens, ranks * tokens]`: 0 for visible tokens, minus infinity for later ones.
fn mask(tokens: usize, cp: &Collectives, device: &Device) -> Result<Tensor> {
    let (first, all) = (cp.rank() * tokens, cp.world_size() * tokens);
    let hidden = |(i, j): (usize, usize)| if j > first + i { f32::NEG_INFINITY } else { 0.0 };
    let places = (0..tokens).flat_map(|i| (0..all).map(move |j| (i, j)));
    Tensor::from_iter(places.map(hidden), device)?.reshape((tokens, all))
}

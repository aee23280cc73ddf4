//! Attention over a sequence of which each rank has a part.

use super::Collectives;
use candle_core::{D, Device, Result, Tensor};

/// Causal attention `softmax(q k' / sqrt(d) + mask) v` for queries, keys and values `[rows, heads, tokens, d]` of this rank's part of
/// the sequence; the result is of the same shape.
///
/// Keys and values of all ranks along `cp` are gathered, together; their gradients are summed and go back to whom they belong.
/// The parts are contiguous, in the order of the ranks, and all as long as this one: token i of rank r sees tokens up to
/// `r * tokens + i` of the whole sequence.
pub fn causal_attention(q: &Tensor, k: &Tensor, v: &Tensor, cp: &Collectives) -> Result<Tensor> {
    let (_, _, tokens, size) = q.dims4()?;
    let keys_and_values = cp.all_gather(&Tensor::stack(&[k, v], 0)?, 3)?;
    let (k, v) = (keys_and_values.get(0)?, keys_and_values.get(1)?);
    let mask = mask(tokens, cp, q.device())?.to_dtype(q.dtype())?;
    let scaled = (q.contiguous()? * (size as f64).sqrt().recip())?;
    let scores = scaled.matmul(&k.t()?)?.broadcast_add(&mask)?;
    let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
    // Divided after the product: there are fewer channels than tokens.
    weights.matmul(&v)?.broadcast_mul(&weights.sum_keepdim(D::Minus1)?.recip()?)
}

/// `[tokens, ranks * tokens]`: 0 where a token of this rank may look, minus infinity where it would see the future.
fn mask(tokens: usize, cp: &Collectives, device: &Device) -> Result<Tensor> {
    let (first, all) = (cp.rank() * tokens, cp.world_size() * tokens);
    let hidden = |(i, j): (usize, usize)| if j > first + i { f32::NEG_INFINITY } else { 0.0 };
    let places = (0..tokens).flat_map(|i| (0..all).map(move |j| (i, j)));
    Tensor::from_iter(places.map(hidden), device)?.reshape((tokens, all))
}

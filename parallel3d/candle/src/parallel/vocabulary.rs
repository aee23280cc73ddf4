//! Vocabulary-parallel layers along `tp`: token embedding and cross-entropy.

use super::{Collectives, LayerError, Residual};
use candle_core::{D, Module, Result, Tensor};
use meshstep_parallel3d::{Axis, Placement};

/// Embedding `[vocab, width]` cut by rows: each rank looks up the tokens in its part of the vocabulary.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use meshstep_candle::parallel::{Collectives, LayerError, Residual, VocabEmbedding, cause};
///
/// // Four tokens, two of them on each rank.
/// let ranks = meshstep_comm::loopback::spawn(2, |tp| -> candle_core::Result<Vec<f32>> {
///     let (rank, stream) = (tp.rank() as f32, Residual::whole(Collectives::new(tp)));
///     let rows = Tensor::new(&[[20.0 * rank], [20.0 * rank + 10.0]], &Device::Cpu)?;
///     let embedding = VocabEmbedding::new(rows, stream);
///     let unknown = embedding.forward(&Tensor::new(&[4u32], &Device::Cpu)?).unwrap_err();
///     assert!(matches!(cause(&unknown), Some(LayerError::NoSuchToken { token: 4, vocab: 4 })));
///     embedding.forward(&Tensor::new(&[3u32, 0, 1], &Device::Cpu)?)?.flatten_all()?.to_vec1()
/// })?;
/// for embedded in ranks {
///     assert_eq!(embedded?, [30.0, 0.0, 10.0]);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct VocabEmbedding {
    weight: Tensor,
    residual: Residual,
}

impl VocabEmbedding {
    /// Creates the layer from this rank's rows, `[vocab / tp, width]`.
    pub fn new(weight: Tensor, residual: Residual) -> Self {
        VocabEmbedding { weight, residual }
    }

    /// Returns the placement of the weight.
    pub fn placement() -> Placement {
        Placement::whole().cut(Axis::Tp, 0)
    }
}

impl Module for VocabEmbedding {
    /// Maps tokens (u32) of the whole sequence, the same on every rank, to `[.., width]`, in the layout of the residual stream.
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let Own { index, has } = Own::of(tokens, self.weight.dim(0)?, self.residual.tp())?;
        let rows = self.weight.index_select(&index, 0)?;
        let own = rows.broadcast_mul(&has.to_dtype(rows.dtype())?.unsqueeze(1)?)?;
        let shape = [tokens.dims(), &[self.weight.dim(1)?]].concat();
        self.residual.leave(&own.reshape(shape)?)
    }
}

/// Returns `-log softmax(logits)[target]` of each token, in nats, the same on every rank. `logits` is `[.., vocab / tp]`: each rank along
/// `tp` holds the part that [`ColumnLinear::placement`](super::ColumnLinear::placement) gives it. `targets` (u32) is `[..]`.
///
/// Two collectives: one of the maximum per token, and one of two numbers per token, the sum of exponentials and the target's logit, which
/// is nonzero only on the rank that holds it.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor, tp: &Collectives) -> Result<Tensor> {
    let Own { index, has } = Own::of(targets, logits.dim(D::Minus1)?, tp)?;
    let logits = logits.reshape(((), logits.dim(D::Minus1)?))?;
    let shifted = logits.broadcast_sub(&tp.max(&logits.max_keepdim(D::Minus1)?)?)?;
    let chosen = shifted.gather(&index.unsqueeze(1)?, 1)?;
    // A product with 0 would be wrong: another token's logit may be minus infinity.
    let chosen = has.unsqueeze(1)?.where_cond(&chosen, &chosen.zeros_like()?)?;
    let terms = Tensor::cat(&[&shifted.exp()?.sum_keepdim(D::Minus1)?, &chosen], 1)?;
    let sums = tp.all_reduce(&terms)?;
    (sums.narrow(1, 0, 1)?.log()? - sums.narrow(1, 1, 1)?)?.reshape(targets.shape())
}

/// Lookup of tokens in this rank's part of the vocabulary.
struct Own {
    /// Entry of each token; 0 for a token of another rank.
    index: Tensor,
    /// 1 for a token of this rank, else 0.
    has: Tensor,
}

impl Own {
    fn of(tokens: &Tensor, entries: usize, tp: &Collectives) -> Result<Own> {
        let (first, vocab) = (tp.rank() * entries, tp.world_size() * entries);
        let tokens = tokens.flatten_all()?.to_vec1::<u32>()?;
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocab) {
            return Err(LayerError::NoSuchToken { token, vocab }.into());
        }
        let place = |&token: &u32| (token as usize).checked_sub(first).filter(|&place| place < entries);
        let places: Vec<Option<usize>> = tokens.iter().map(place).collect();
        let device = &candle_core::Device::Cpu;
        let index = Tensor::from_iter(places.iter().map(|place| place.unwrap_or(0) as u32), device)?;
        let has = Tensor::from_iter(places.iter().map(|place| u8::from(place.is_some())), device)?;
        Ok(Own { index, has })
    }
}

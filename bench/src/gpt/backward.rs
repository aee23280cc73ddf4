//! Forward and backward with the graph cut at every segment's input.
//!
//! candle's `backward()` hands out all gradients when it has ended. Here every segment is a graph of its own whose
//! input is a fresh variable, and backward walks the segments from the loss down: the gradient g of a segment's
//! output y becomes that of the scalar sum(y g), candle differentiates it within the segment, the parameters'
//! gradients leave, the input's becomes the next g, and the segment's activations are dropped. The numbers are, bit
//! for bit, those of one whole graph.
//!
//! The graphs are kept from forward to backward. Running each segment's forward pass again instead was tried, with two
//! sequences of 64 tokens and the default network: it took a third longer, for 22 instead of 35 MB in the process.

use anyhow::{Context as _, Result};
use candle_core::{Tensor, Var};

use super::layers::{Scope, Tokens};
use super::params::Segment;

/// One segment's graph, between its input and its output.
struct Piece {
    segment: Segment,
    input: Option<Var>,
    output: Tensor,
}

/// Runs the network and returns the loss and its parts, first segment first.
fn forward(scope: &Scope<'_>, tokens: &Tokens) -> Result<Vec<Piece>> {
    let mut pieces: Vec<Piece> = Vec::new();
    for segment in Segment::all(scope.config) {
        let input = pieces.last().map(|piece| Var::from_tensor(&piece.output.detach())).transpose()?;
        let output = scope.forward(segment, input.as_deref(), tokens)?;
        pieces.push(Piece { segment, input, output });
    }
    Ok(pieces)
}

/// The loss of a batch; every parameter's gradient goes to `on_grad` as soon as its segment is done, last segment
/// first and within a segment last parameter first.
pub(super) fn loss_and_grads(
    scope: &Scope<'_>,
    tokens: &Tokens,
    on_grad: &mut dyn FnMut(&str, &Tensor) -> Result<()>,
) -> Result<f32> {
    let pieces = forward(scope, tokens)?;
    let loss = pieces.last().context("the network has no segments")?.output.to_scalar::<f32>()?;
    let mut upstream = None;
    for piece in pieces.into_iter().rev() {
        upstream = piece.backward(scope, upstream, on_grad)?;
    }
    Ok(loss)
}

impl Piece {
    /// Differentiates this piece, given the gradient of its output (none: it is the loss itself), and returns the
    /// gradient of its input.
    fn backward(
        self,
        scope: &Scope<'_>,
        upstream: Option<Tensor>,
        on_grad: &mut dyn FnMut(&str, &Tensor) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        let scalar = match upstream {
            Some(grad) => (self.output * grad)?.sum_all()?,
            None => self.output,
        };
        let mut grads = scalar.backward()?;
        for param in self.segment.params(scope.config).iter().rev() {
            let grad = grads.remove(scope.weights.get(&param.name)?);
            on_grad(&param.name, &grad.with_context(|| format!("{} got no gradient", param.name))?)?;
        }
        Ok(self.input.and_then(|input| grads.remove(&input)).map(|grad| grad.detach()))
    }
}

/// The loss of a batch alone; each segment's activations go as soon as the next has read them.
pub(super) fn loss(scope: &Scope<'_>, tokens: &Tokens) -> Result<f32> {
    let mut x: Option<Tensor> = None;
    for segment in Segment::all(scope.config) {
        x = Some(scope.forward(segment, x.as_ref(), tokens)?.detach());
    }
    Ok(x.context("the network has no segments")?.to_scalar::<f32>()?)
}

//! Forward and backward pass with the graph cut at the input of every segment.
//!
//! candle's `backward()` returns all gradients at its end. Here every segment is a separate graph with a fresh variable as
//! input, and the backward pass processes the segments from the loss down: given the gradient g of a segment's output y,
//! candle differentiates the scalar sum(y g) within the segment; the parameters' gradients are handed over, the gradient of
//! the input is the next g, and the segment's activations are dropped. The results are bit for bit those of one whole
//! graph.
//!
//! The graphs are kept from forward to backward. The alternative, running each segment's forward pass again, was a third
//! slower for 22 instead of 35 MB in the process, with two sequences of 64 tokens and the default network.

use anyhow::{Context as _, Result};
use candle_core::{Tensor, Var};

/// One pass through a network that is cut into segments, counted from 0.
pub(crate) trait Segments {
    /// Returns the number of segments.
    fn count(&self) -> usize;

    /// Runs a segment on the output of the previous segment; the first has no input, the last returns the loss.
    fn forward(&self, segment: usize, input: Option<&Tensor>) -> Result<Tensor>;

    /// Returns a segment's parameters in the order in which its forward pass needs them.
    fn params(&self, segment: usize) -> Result<Vec<(String, Var)>>;

    /// Called before a segment's parameters are read; `again` is true in a backward pass.
    fn bring(&self, _segment: usize, _again: bool) -> Result<()> {
        Ok(())
    }

    /// Called after the segment's parameters have been read.
    fn release(&self, _segment: usize) -> Result<()> {
        Ok(())
    }
}

/// Graph of one segment, from its input to its output.
struct Piece {
    segment: usize,
    input: Option<Var>,
    output: Tensor,
}

/// Runs the network and returns the graphs of its segments in forward order.
fn forward(pass: &impl Segments) -> Result<Vec<Piece>> {
    let mut pieces: Vec<Piece> = Vec::new();
    for segment in 0..pass.count() {
        let input = pieces.last().map(|piece| Var::from_tensor(&piece.output.detach())).transpose()?;
        pass.bring(segment, false)?;
        let output = pass.forward(segment, input.as_deref())?;
        pass.release(segment)?;
        pieces.push(Piece { segment, input, output });
    }
    Ok(pieces)
}

/// Computes the loss of a batch. Passes every parameter's gradient to `on_grad` as soon as its segment is done, from the
/// last segment to the first, and within a segment from the last parameter to the first.
pub(crate) fn loss_and_grads(
    pass: &impl Segments,
    on_grad: &mut dyn FnMut(&str, &Tensor) -> Result<()>,
) -> Result<f32> {
    let pieces = forward(pass)?;
    let loss = pieces.last().context("the network has no segments")?.output.to_scalar::<f32>()?;
    let mut upstream = None;
    for piece in pieces.into_iter().rev() {
        upstream = piece.backward(pass, upstream, on_grad)?;
    }
    Ok(loss)
}

impl Piece {
    /// Differentiates this segment, given the gradient of its output (`None` if the output is the loss), and returns the
    /// gradient of its input.
    fn backward(
        self,
        pass: &impl Segments,
        upstream: Option<Tensor>,
        on_grad: &mut dyn FnMut(&str, &Tensor) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        let scalar = match upstream {
            Some(grad) => (self.output * grad)?.sum_all()?,
            None => self.output,
        };
        pass.bring(self.segment, true)?;
        let mut grads = scalar.backward()?;
        pass.release(self.segment)?;
        for (name, var) in pass.params(self.segment)?.iter().rev() {
            let grad = grads.remove(var).with_context(|| format!("{name} has no gradient"))?;
            on_grad(name, &grad)?;
        }
        Ok(self.input.and_then(|input| grads.remove(&input)).map(|grad| grad.detach()))
    }
}

/// Computes only the loss of a batch; drops each segment's activations as soon as the next segment has read them.
pub(super) fn loss(pass: &impl Segments) -> Result<f32> {
    let mut x: Option<Tensor> = None;
    for segment in 0..pass.count() {
        x = Some(pass.forward(segment, x.as_ref())?.detach());
    }
    Ok(x.context("the network has no segments")?.to_scalar::<f32>()?)
}

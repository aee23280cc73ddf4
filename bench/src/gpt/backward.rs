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

/// One pass through a network that is cut into segments, counted from 0.
pub(crate) trait Segments {
    /// How many there are.
    fn count(&self) -> usize;

    /// Runs a segment on the output of the one before, the first on nothing; the last gives the loss.
    fn forward(&self, segment: usize, input: Option<&Tensor>) -> Result<Tensor>;

    /// A segment's parameters, in the order its forward pass needs them.
    fn params(&self, segment: usize) -> Result<Vec<(String, Var)>>;

    /// Called before a segment's parameters are read: forward, and in a backward pass `again`.
    fn bring(&self, _segment: usize, _again: bool) -> Result<()> {
        Ok(())
    }

    /// Called when they have been read.
    fn release(&self, _segment: usize) -> Result<()> {
        Ok(())
    }
}

/// One segment's graph, between its input and its output.
struct Piece {
    segment: usize,
    input: Option<Var>,
    output: Tensor,
}

/// Runs the network and returns its segments' graphs, the first one first.
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

/// The loss of a batch; every parameter's gradient goes to `on_grad` as soon as its segment is done, last segment
/// first and within a segment last parameter first.
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
    /// Differentiates this piece, given the gradient of its output (none: it is the loss itself), and returns the
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
            let grad = grads.remove(var).with_context(|| format!("{name} got no gradient"))?;
            on_grad(name, &grad)?;
        }
        Ok(self.input.and_then(|input| grads.remove(&input)).map(|grad| grad.detach()))
    }
}

/// The loss of a batch alone; each segment's activations go as soon as the next has read them.
pub(super) fn loss(pass: &impl Segments) -> Result<f32> {
    let mut x: Option<Tensor> = None;
    for segment in 0..pass.count() {
        x = Some(pass.forward(segment, x.as_ref())?.detach());
    }
    Ok(x.context("the network has no segments")?.to_scalar::<f32>()?)
}

//! Cuts of a graph: the backward pass differentiates segment by segment, and hands over gradients in between.

use candle_core::{Result, Tensor, Var};

/// Cuts in the graph of one forward pass.
///
/// `Tensor::backward` of candle returns all gradients at its end. A forward pass that is cut into segments is differentiated from
/// the loss to the first segment: the gradients of a segment are handed over, and travel to the other ranks while the next segment is
/// differentiated.
///
/// A variable's gradient is handed over after the segment that uses it first. If several segments use it (tied weights), the sum is.
/// Bits equal those of the whole graph if each segment uses a variable once, and if each tensor that [`cut`](Self::cut) returns is
/// used in one segment; other sums of more than two terms may round differently.
///
/// Later segments read the tensor that `cut` returns, not the one that was cut: a segment that reads the latter differentiates the
/// earlier segments again. Gradients are right nevertheless.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use meshstep_candle::{BackwardPass, Sharded, Tape};
/// use meshstep_optim::AdamW;
/// use meshstep_shard::{Options, StepArgs};
///
/// let ranks = meshstep_comm::loopback::spawn(2, |comm| -> Result<(), meshstep_candle::Error> {
///     let first = Var::new(&[[0.5f32, -0.5], [0.25, 1.0]], &Device::Cpu)?;
///     let second = Var::new(&[[1f32], [2.0]], &Device::Cpu)?;
///     let vars = [("first", first.clone()), ("second", second.clone())];
///     let mut opt = Sharded::new(comm, vars, AdamW::default(), Options::default())?;
///     let mut tape = Tape::new();
///     let x = Tensor::new(&[[1f32, 2.0]], &Device::Cpu)?.matmul(&first)?.relu()?;
///     let x = tape.cut(&x)?; // the gradient of `second` is on its way before that of `first` is computed
///     let loss = x.matmul(&second)?.sqr()?.sum_all()?;
///     opt.backward_step(BackwardPass::new(&loss).cut(tape), StepArgs::default())?;
///     Ok(())
/// })?;
/// ranks.into_iter().collect::<Result<(), _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct Tape {
    pub(crate) cuts: Vec<GraphCut>,
}

/// Output of a segment, and the variable in its place in later segments.
#[derive(Debug)]
pub(crate) struct GraphCut {
    pub(crate) output: Tensor,
    pub(crate) input: Tensor,
}

impl Tape {
    /// Returns a tape without cuts.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends a segment at `x`, and returns the input of later segments: the same values in the same shape, without the graph before.
    pub fn cut(&mut self, x: &Tensor) -> Result<Tensor> {
        let input = Var::from_tensor(&x.detach())?.into_inner();
        self.cuts.push(GraphCut { output: x.clone(), input: input.clone() });
        Ok(input)
    }
}

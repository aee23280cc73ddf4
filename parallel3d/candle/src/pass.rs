//! Backward pass: segments from the loss down, each gradient handed over as soon as no segment can add to it.

use crate::tape::{GraphCut, Tape};
use crate::vars::Vars;
use crate::{Error, hand_over};
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use meshstep_shard::MicroBatch;

/// One backward pass: a loss, the cuts of its graph, and the weight of its micro-batch.
///
/// `&loss` alone is a pass without cuts, of weight 1.
#[derive(Debug)]
#[must_use = "a pass does nothing before it is given to a Sharded"]
pub struct BackwardPass<'a> {
    loss: &'a Tensor,
    tape: Tape,
    pub(crate) weight: u64,
}

impl<'a> BackwardPass<'a> {
    /// Describes the backward pass from `loss`, a tensor of one element.
    pub fn new(loss: &'a Tensor) -> Self {
        BackwardPass { loss, tape: Tape::new(), weight: 1 }
    }

    /// Sets the cuts of the forward pass.
    pub fn cut(self, tape: Tape) -> Self {
        BackwardPass { tape, ..self }
    }

    /// Sets the number of samples or tokens, by which [`Combine::Weighted`](meshstep_shard::Combine::Weighted) multiplies.
    pub fn weight(self, weight: u64) -> Self {
        BackwardPass { weight, ..self }
    }

    /// Differentiates the loss, and hands over the gradient of each variable of `vars` for which `trains` is true. The loss is scaled
    /// as the micro-batch says.
    pub(crate) fn run(self, vars: &Vars, trains: &[bool], mb: &MicroBatch<'_>) -> Result<(), Error> {
        if self.loss.elem_count() != 1 {
            return Err(Error::LossShape { shape: self.loss.dims().to_vec() });
        }
        let Tape { mut cuts } = self.tape;
        let mut sums = Sums::new(self.loss, &cuts, vars, trains);
        sums.hand_over_unused(mb)?;
        let mut upstream: Vec<Option<Tensor>> = vec![None; cuts.len()];
        let mut scalar = Some(scaled(self.loss, mb.loss_scale())?);
        loop {
            let mut grads = scalar.map(|scalar| scalar.backward()).transpose()?;
            sums.collect(cuts.len(), grads.as_mut(), mb)?;
            for (cut, sum) in cuts.iter().zip(&mut upstream) {
                add(sum, grads.as_mut().and_then(|grads| grads.remove(&cut.input)))?;
            }
            drop(grads);
            // The segment's activations are dropped with its output.
            let Some(GraphCut { output, .. }) = cuts.pop() else { return Ok(()) };
            scalar = upstream.pop().flatten().map(|grad| (output * grad)?.sum_all()).transpose()?;
        }
    }
}

impl<'a> From<&'a Tensor> for BackwardPass<'a> {
    fn from(loss: &'a Tensor) -> Self {
        BackwardPass::new(loss)
    }
}

/// Gradients of variables, summed over segments.
struct Sums<'a> {
    vars: &'a Vars,
    /// Variables of each segment, in reverse order.
    uses: Vec<Vec<usize>>,
    /// First segment that uses a variable, which is differentiated last.
    first: Vec<Option<usize>>,
    trains: &'a [bool],
    sums: Vec<Option<Tensor>>,
}

impl<'a> Sums<'a> {
    /// Finds the variables of each segment: segment i ends with cut i, the last one with the loss.
    fn new(loss: &Tensor, cuts: &[GraphCut], vars: &'a Vars, trains: &'a [bool]) -> Self {
        let ends = cuts.iter().map(|cut| &cut.output).chain([loss]);
        let used = |end: &Tensor| {
            let nodes = end.sorted_nodes().into_iter().filter_map(|node| vars.index(node.id()));
            let mut used: Vec<usize> = nodes.filter(|&var| trains[var]).collect();
            used.sort_unstable_by(|a, b| b.cmp(a));
            used
        };
        let uses: Vec<Vec<usize>> = ends.map(used).collect();
        let mut first = vec![None; vars.list.len()];
        for (segment, used) in uses.iter().enumerate().rev() {
            used.iter().for_each(|&var| first[var] = Some(segment));
        }
        Sums { vars, uses, first, trains, sums: vec![None; vars.list.len()] }
    }

    /// Declares that variables outside the graph have no gradient.
    fn hand_over_unused(&mut self, mb: &MicroBatch<'_>) -> Result<(), Error> {
        let mut unused =
            (0..self.first.len()).rev().filter(|&var| self.trains[var] && self.first[var].is_none());
        unused.try_for_each(|var| Ok(mb.none(&self.vars.list[var].0)?))
    }

    /// Takes a segment's gradients, and hands over those that no earlier segment adds to.
    fn collect(
        &mut self,
        segment: usize,
        mut grads: Option<&mut GradStore>,
        mb: &MicroBatch<'_>,
    ) -> Result<(), Error> {
        for &var in &self.uses[segment] {
            let (name, var_tensor) = &self.vars.list[var];
            add(&mut self.sums[var], grads.as_mut().and_then(|grads| grads.remove(var_tensor)))?;
            if self.first[var] == Some(segment) {
                match self.sums[var].take() {
                    Some(grad) => hand_over(mb, name, &grad)?,
                    None => mb.none(name)?,
                }
            }
        }
        Ok(())
    }
}

/// Adds a gradient to a sum, without its graph.
fn add(sum: &mut Option<Tensor>, grad: Option<Tensor>) -> candle_core::Result<()> {
    if let Some(grad) = grad {
        let total = match sum.take() {
            Some(sum) => sum.add(&grad)?,
            None => grad,
        };
        *sum = Some(total.detach());
    }
    Ok(())
}

/// Returns the loss times the loss scale.
fn scaled(loss: &Tensor, factor: f64) -> candle_core::Result<Tensor> {
    if factor == 1.0 { Ok(loss.clone()) } else { loss * factor }
}

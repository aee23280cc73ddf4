//! Backward pass: gradients of all parameters, handed over one by one.

#[cfg(feature = "cuda")]
use crate::cuda::GpuGrads;
use crate::walk::{self, ReadParam};
use crate::{Error, hand_over};
use burn::module::{Module, Param, ParamId, list_param_ids};
use burn::tensor::container::TensorContainer;
use burn::tensor::{Gradients, Tensor};
use meshstep_shard::MicroBatch;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// One backward pass: a loss, and the weight of its micro-batch.
///
/// A loss alone is a pass of weight 1.
#[derive(Debug)]
#[must_use = "a pass does nothing before it is given to a Sharded"]
pub struct BackwardPass {
    /// The loss, or its shape if it is not one element.
    loss: Result<Tensor<1>, Vec<usize>>,
    pub(crate) weight: u64,
}

impl BackwardPass {
    /// Describes the backward pass from `loss`, a tensor of one element.
    pub fn new<const D: usize>(loss: Tensor<D>) -> Self {
        let shape = loss.shape().to_vec();
        let loss = if shape.iter().product::<usize>() == 1 { Ok(loss.reshape([1])) } else { Err(shape) };
        BackwardPass { loss, weight: 1 }
    }

    /// Sets the number of samples or tokens, by which [`Combine::Weighted`](meshstep_shard::Combine::Weighted) multiplies.
    pub fn weight(self, weight: u64) -> Self {
        BackwardPass { weight, ..self }
    }

    /// Differentiates the loss, scaled as the micro-batch says, and hands over the gradients of the parameters `names`.
    pub(crate) fn run(
        self,
        model: &impl Module,
        names: &HashSet<Arc<str>>,
        mb: &MicroBatch<'_>,
    ) -> Result<(), Error> {
        let loss = self.loss.map_err(|shape| Error::LossShape { shape })?;
        if !loss.is_tracked() {
            return Err(Error::NoGraph);
        }
        let grads = scaled(loss, mb.loss_scale()).backward();
        let mut places = HashMap::new();
        list_param_ids(model).into_iter().for_each(|id| *places.entry(id).or_insert(0) += 1);
        let mut handing = Handing {
            grads,
            names,
            places,
            sums: TensorContainer::new(),
            mb,
            #[cfg(feature = "cuda")]
            on_gpu: GpuGrads::new(mb.queue()),
        };
        walk::read(model, &mut handing)?;
        #[cfg(feature = "cuda")]
        handing.on_gpu.map_or(Ok(()), |grads| grads.hand_over(mb))?;
        Ok(())
    }
}

impl<const D: usize> From<Tensor<D>> for BackwardPass {
    fn from(loss: Tensor<D>) -> Self {
        BackwardPass::new(loss)
    }
}

/// Returns the loss times the loss scale.
fn scaled(loss: Tensor<1>, factor: f64) -> Tensor<1> {
    if factor == 1.0 { loss } else { loss.mul_scalar(factor) }
}

/// Hands over each gradient at the last place of its parameter.
struct Handing<'a> {
    grads: Gradients,
    names: &'a HashSet<Arc<str>>,
    /// Places of each id that are still to come.
    places: HashMap<ParamId, usize>,
    /// Sums of gradients over the places so far.
    sums: TensorContainer<ParamId>,
    mb: &'a MicroBatch<'a>,
    /// Gradients on the optimizer's GPU, which are handed over at the end.
    #[cfg(feature = "cuda")]
    on_gpu: Option<GpuGrads>,
}

impl Handing<'_> {
    fn give<const D: usize>(&mut self, name: &str, grad: Tensor<D>) -> Result<(), Error> {
        #[cfg(feature = "cuda")]
        if let Some(on_gpu) = &mut self.on_gpu {
            return on_gpu.add(self.mb, name, grad);
        }
        hand_over(self.mb, name, grad)
    }
}

impl ReadParam for Handing<'_> {
    fn read<const D: usize>(&mut self, name: &str, _: bool, param: &Param<Tensor<D>>) -> Result<(), Error> {
        if !self.names.contains(name) {
            return Ok(());
        }
        let sum = self.sums.remove::<Tensor<D>>(&param.id);
        let sum = match (sum, param.base().grad_remove(&mut self.grads)) {
            (Some(sum), Some(grad)) => Some(sum + grad),
            (sum, grad) => sum.or(grad),
        };
        let left = self.places.entry(param.id).and_modify(|left| *left -= 1).or_default();
        match (*left, sum) {
            (0, Some(grad)) => self.give(name, grad),
            (0, None) => Ok(self.mb.none(name)?),
            (_, Some(sum)) => {
                self.sums.register(param.id, sum);
                Ok(())
            }
            (_, None) => Ok(()),
        }
    }
}

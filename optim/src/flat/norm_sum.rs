//! Sum of a norm at the place of its vectors: on the CPU, or on a GPU in the order of a stream.

#[cfg(feature = "cuda")]
use crate::cuda::NormThere;
use crate::{Error, Isa, Norm, NormAccumulator};
#[cfg(feature = "cuda")]
use meshstep_tensor::SliceMut;
use meshstep_tensor::{Meter, Queue, Slice};

/// Norm in progress of vectors at one place. [`read`](Self::read) returns the same [`NormAccumulator`] at any place.
///
/// ```
/// use meshstep_optim::{Norm, NormSum};
/// use meshstep_tensor::{Meter, Queue};
///
/// let queue = Queue::cpu();
/// let mut norm = NormSum::new(Norm::L2, &queue, &Meter::new())?;
/// norm.add((&[3f32]).into(), &queue)?;
/// norm.add((&[4f32, f32::NAN]).into(), &queue)?;
/// let sum = norm.read(&queue)?;
/// assert_eq!((sum.finish(), sum.non_finite()), (5.0, 1));
/// # Ok::<(), meshstep_optim::Error>(())
/// ```
#[derive(Debug)]
pub struct NormSum(Sum);

#[derive(Debug)]
enum Sum {
    Here(Box<NormAccumulator>),
    #[cfg(feature = "cuda")]
    There(NormThere),
}

impl NormSum {
    /// Creates the norm of no elements, for vectors at the queue's place. A GPU supports [`Norm::L1`], [`Norm::L2`] and [`Norm::Inf`].
    pub fn new(norm: Norm, queue: &Queue, meter: &Meter) -> Result<Self, Error> {
        norm.check()?;
        #[cfg(feature = "cuda")]
        if queue.stream().is_some() {
            return Ok(NormSum(Sum::There(NormThere::new(norm, queue, meter)?)));
        }
        let _ = (queue, meter);
        Ok(NormSum(Sum::Here(Box::new(NormAccumulator::new(norm)))))
    }

    /// Adds every element of `values`, after all work of the queue so far: f32, f64, bf16 or f16.
    pub fn add(&mut self, values: Slice<'_>, queue: &Queue) -> Result<(), Error> {
        match &mut self.0 {
            Sum::Here(sum) => sum.add_on(Isa::detect(), queue.threads(), values),
            #[cfg(feature = "cuda")]
            Sum::There(sum) => sum.add(values, queue),
        }
    }

    /// Counts the non-finite elements of `values` and adds nothing: for elements that another rank counts in the norm.
    pub fn watch(&mut self, values: Slice<'_>, queue: &Queue) -> Result<(), Error> {
        match &mut self.0 {
            Sum::Here(sum) => sum.watch_on(queue.threads(), values),
            #[cfg(feature = "cuda")]
            Sum::There(sum) => sum.watch(values, queue),
        }
    }

    /// Adds elements that were counted separately, on the CPU.
    pub fn merge(&mut self, part: &NormAccumulator) -> Result<(), Error> {
        match &mut self.0 {
            Sum::Here(sum) => sum.merge(part),
            #[cfg(feature = "cuda")]
            Sum::There(sum) => return Err(sum.not_here()),
        }
        Ok(())
    }

    /// Resets the sum.
    pub fn reset(&mut self, queue: &Queue) -> Result<(), Error> {
        let _ = queue;
        match &mut self.0 {
            Sum::Here(sum) => sum.reset(),
            #[cfg(feature = "cuda")]
            Sum::There(sum) => sum.reset(queue)?,
        }
        Ok(())
    }

    /// Writes the sum into the vectors that ranks exchange on a GPU: the count of non-finite elements and, from the third word on, the
    /// sum into `sum`, and the largest magnitude into `max`. The host does not wait.
    #[cfg(feature = "cuda")]
    pub fn write(&self, sum: SliceMut<'_>, max: SliceMut<'_>, queue: &Queue) -> Result<(), Error> {
        match &self.0 {
            Sum::Here(_) => {
                let (given, expected) = (meshstep_tensor::Place::Cpu, queue.place());
                Err(meshstep_tensor::Error::Place { given, expected }.into())
            }
            Sum::There(norm) => norm.write(sum, max, queue),
        }
    }

    /// Waits for the queue and returns the sum.
    pub fn read(&self, queue: &Queue) -> Result<NormAccumulator, Error> {
        let _ = queue;
        match &self.0 {
            Sum::Here(sum) => Ok(NormAccumulator::clone(sum)),
            #[cfg(feature = "cuda")]
            Sum::There(sum) => sum.read(queue),
        }
    }
}

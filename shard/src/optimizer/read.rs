//! Whole values of one parameter, copied into memory of the caller at any stage.

use crate::{Error, Optimizer};
use meshstep_comm::name_calls;
use meshstep_tensor::{DType, Place, Slice, SliceMut};

/// Error in the memory that a parameter was to be read into.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The memory has the wrong length.
    #[error("{name:?} was to be read into {given} elements; its shape {shape:?} has {expected}")]
    Len {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Elements of the shape.
        expected: usize,
        /// Elements given.
        given: usize,
    },
    /// The memory has the wrong type.
    #[error("{name:?} was to be read into {given}; it is {expected}, so read it into that and cast it")]
    DType {
        /// The parameter.
        name: String,
        /// Its type.
        expected: DType,
        /// The type given.
        given: DType,
    },
    /// The memory is on another GPU.
    #[error("{name:?} was to be read into memory of {given:?}; use memory of the CPU or of {own:?}")]
    Place {
        /// The parameter.
        name: String,
        /// Place of the memory given.
        given: Place,
        /// Place of the optimizer.
        own: Place,
    },
}

impl Optimizer {
    /// Writes the values of a whole parameter into `out`, which has its length and type and is on the CPU or at the place of
    /// [`Options::queue`](crate::Options::queue). On a GPU the queue orders the copy, and the host waits for a copy to the CPU.
    ///
    /// At [`Stage::Zero3`](crate::Stage::Zero3) collective, between two steps, over all ranks that step together: they read the
    /// same parameter. An argument that is wrong on one rank is an error on every rank, and changes nothing. The parameter's unit
    /// is [gathered](Self::gather) and dropped again. At other stages a rank copies its own values, and no other rank takes part.
    ///
    /// ```
    /// use meshstep_shard::prelude::*;
    ///
    /// let read = loopback::spawn(4, |comm| -> Result<Vec<f32>, meshstep_shard::Error> {
    ///     let layout = Layout::builder().param("w", &[3], DType::F32).build()?;
    ///     let options = Options { stage: Stage::Zero3, ..Options::default() };
    ///     let ones = |_: &Param, mut w: SliceMut| w.copy_from((&[1f32, 2.0, 3.0]).into());
    ///     let mut opt = Optimizer::new(comm, layout, AdamW::default(), ones, options)?;
    ///     let mut w = vec![0f32; 3];
    ///     opt.read("w", &mut w)?;
    ///     Ok(w)
    /// })?;
    /// assert!(read.into_iter().all(|w| w.is_ok_and(|w| w == [1.0, 2.0, 3.0])));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn read<'o>(&mut self, name: &str, out: impl Into<SliceMut<'o>>) -> Result<(), Error> {
        let _name = name_calls("Optimizer::read");
        let out = out.into();
        let param = self.readable(name, &out);
        if !self.options.stage.cuts_params() {
            return self.copy_out(self.values(param?)?, out);
        }
        self.reducer.healthy()?;
        let ready = self.finish_dropped().and_then(|()| self.check_heard()).and_then(|()| self.check_idle());
        let param = ready.and(param);
        let call =
            param.as_ref().map_or(String::new(), |&p| format!("read {:?}", self.entries[p].param.name()));
        self.call_together(&call, param.as_ref().map(drop).map_err(Error::clone))?;
        let param = param?;
        let read = self.apart_from_steps(|all| {
            match all.units.of(param).filter(|_| !all.entries[param].param.frozen()) {
                Some(unit) => {
                    let gathered = all.gather(all.units.name(unit))?;
                    all.copy_out(gathered.param(name)?, out)
                }
                None => all.copy_out(all.values(param)?, out),
            }
        });
        read.map(drop)
    }

    /// Returns the parameter, if `out` can take its values.
    fn readable(&self, name: &str, out: &SliceMut<'_>) -> Result<usize, Error> {
        let index = self.index(name)?;
        let (param, name, own) = (&self.entries[index].param, name.to_owned(), self.options.queue.place());
        let (expected, given) = (param.len(), out.len());
        if expected != given {
            return Err(ReadError::Len { name, shape: param.shape().to_vec(), expected, given }.into());
        }
        let (expected, given) = (param.dtype(), out.dtype());
        if expected != given {
            return Err(ReadError::DType { name, expected, given }.into());
        }
        match out.place() {
            Place::Cpu => Ok(index),
            given if given == own => Ok(index),
            given => Err(ReadError::Place { name, given, own }.into()),
        }
    }

    fn copy_out(&self, values: Slice<'_>, out: SliceMut<'_>) -> Result<(), Error> {
        let queue = &self.options.queue;
        match out.place() {
            Place::Cpu => queue.download(values, out)?,
            _ => queue.copy(values, out)?,
        }
        Ok(())
    }
}

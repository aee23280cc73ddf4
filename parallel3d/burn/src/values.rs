//! Parameters of a module beside those of an optimizer: their description, first values and new values.

#[cfg(feature = "cuda")]
use crate::cuda::GpuTensors;
use crate::memory::{self, with_values};
use crate::walk::{ReadParam, ReplaceParam};
use crate::{Error, walk};
use burn::module::{Module, Param};
use burn::tensor::{DType as BurnType, Tensor, TensorData};
use meshstep_comm::Communicator;
use meshstep_shard::{Optimizer, Options};
use meshstep_tensor::{Buffer, Category, Layout};
use std::collections::HashMap;
use std::fmt::Write as _;

/// Description of a float parameter of the module.
#[derive(Debug)]
struct Listed {
    name: String,
    shape: Vec<usize>,
    dtype: BurnType,
    trains: bool,
}

/// Float parameters of a module, each once, in its order.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    list: Vec<Listed>,
    by_name: HashMap<String, usize>,
}

impl Listing {
    /// Lists the parameters of `model`.
    pub(crate) fn new(model: &impl Module) -> Result<Self, Error> {
        let mut listing = Listing::default();
        walk::read(model, &mut listing)?;
        Ok(listing)
    }

    /// Returns the layout of the parameters that train.
    pub(crate) fn layout(&self) -> Result<Layout, Error> {
        let mut builder = Layout::builder();
        for Listed { name, shape, dtype, .. } in self.trained() {
            let known = memory::dtype(*dtype);
            let unknown = || Error::DType { name: name.clone(), dtype: *dtype };
            builder = builder.param(name, shape, known.ok_or_else(unknown)?);
        }
        if self.trained().next().is_none() {
            return Err(Error::NothingTrains);
        }
        Ok(builder.build()?)
    }

    /// Returns a line for each parameter that does not train, for comparison between ranks.
    pub(crate) fn frozen_lines(&self) -> String {
        let mut lines = String::new();
        for Listed { name, shape, dtype, .. } in self.list.iter().filter(|listed| !listed.trains) {
            let _infallible = writeln!(lines, "frozen {name:?} = {dtype:?} {shape:?}");
        }
        lines
    }

    /// Checks that the module has the optimizer's parameters, and no other that requires a gradient.
    pub(crate) fn check(&self, optimizer: &Optimizer) -> Result<(), Error> {
        let mut known = 0;
        for param in optimizer.params() {
            let name = param.name().to_owned();
            let Some(own) = self.by_name.get(&name) else { return Err(Error::NoParameter { name }) };
            let Listed { shape, dtype, trains, .. } = &self.list[*own];
            if (memory::dtype(*dtype), &**shape) != (Some(param.dtype()), param.shape()) {
                let (expected, expected_shape) = (param.dtype(), param.shape().to_vec());
                return Err(Error::Differs {
                    name,
                    dtype: *dtype,
                    shape: shape.clone(),
                    expected,
                    expected_shape,
                });
            }
            known += usize::from(*trains);
        }
        if known == self.trained().count() {
            return Ok(());
        }
        let other = self.trained().find(|listed| optimizer.is_frozen(&listed.name).is_err());
        other.map_or(Ok(()), |listed| Err(Error::NotListed { name: listed.name.clone() }))
    }

    /// Returns the bytes of the listed parameters.
    pub(crate) fn bytes(&self) -> u64 {
        let known = self.list.iter().filter(|listed| memory::dtype(listed.dtype).is_some());
        known.map(|listed| listed.shape.iter().product::<usize>() * listed.dtype.size()).sum::<usize>() as u64
    }

    fn trained(&self) -> impl Iterator<Item = &Listed> {
        self.list.iter().filter(|listed| listed.trains)
    }
}

impl ReadParam for Listing {
    fn read<const D: usize>(
        &mut self,
        name: &str,
        again: bool,
        param: &Param<Tensor<D>>,
    ) -> Result<(), Error> {
        let tensor = param.base();
        let listed = Listed {
            name: name.to_owned(),
            shape: tensor.shape().to_vec(),
            dtype: tensor.dtype(),
            trains: tensor.is_require_grad(),
        };
        if !again {
            self.by_name.insert(name.to_owned(), self.list.len());
            self.list.push(listed);
            return Ok(());
        }
        let first = &self.list[self.by_name[name]];
        let like = |listed: &Listed| (listed.shape.clone(), listed.dtype, listed.trains);
        if like(first) == like(&listed) { Ok(()) } else { Err(Error::SameId { name: name.to_owned() }) }
    }
}

/// Values of a module's parameters before the first step.
#[derive(Debug, Default)]
pub(crate) struct FirstValues(HashMap<String, TensorData>);

impl FirstValues {
    /// Copies the values of the float parameters of `model`, whose types flat memory has.
    pub(crate) fn new(model: &impl Module) -> Result<Self, Error> {
        let mut values = FirstValues::default();
        walk::read(model, &mut values)?;
        Ok(values)
    }

    /// Returns the values of a parameter.
    pub(crate) fn get(&self, name: &str) -> Option<&TensorData> {
        self.0.get(name)
    }
}

impl ReadParam for FirstValues {
    fn read<const D: usize>(
        &mut self,
        name: &str,
        again: bool,
        param: &Param<Tensor<D>>,
    ) -> Result<(), Error> {
        if again || memory::dtype(param.base().dtype()).is_none() {
            return Ok(());
        }
        let values = param.base().inner().try_into_data().map_err(|error| memory::unread(name, error))?;
        with_values(name, &values, |_| ())?;
        self.0.insert(name.to_owned(), values);
        Ok(())
    }
}

/// Gives parameters the optimizer's values.
pub(crate) struct Refreshing<'a> {
    optimizer: &'a Optimizer,
    /// Tensors on the optimizer's GPU that wait for their values.
    #[cfg(feature = "cuda")]
    on_gpu: Option<GpuTensors<'a>>,
}

impl<'a> Refreshing<'a> {
    /// Returns the module with the optimizer's values.
    pub(crate) fn replace<M: Module>(optimizer: &'a Optimizer, model: M) -> Result<M, Error> {
        let mut refreshing = Refreshing {
            optimizer,
            #[cfg(feature = "cuda")]
            on_gpu: GpuTensors::new(&optimizer.options().queue),
        };
        let replaced = walk::replace(model, &mut refreshing)?;
        #[cfg(feature = "cuda")]
        refreshing.on_gpu.map_or(Ok(()), GpuTensors::fill)?;
        Ok(replaced)
    }
}

impl ReplaceParam for Refreshing<'_> {
    fn replace<const D: usize>(
        &mut self,
        name: &str,
        param: &Param<Tensor<D>>,
    ) -> Result<Option<Tensor<D>>, Error> {
        if self.optimizer.is_frozen(name).is_err() {
            return Ok(None); // not the optimizer's
        }
        let (values, like) = (self.optimizer.param(name)?, param.base());
        #[cfg(feature = "cuda")]
        if let Some(on_gpu) = &mut self.on_gpu {
            return on_gpu.add(name, values, &like).map(Some);
        }
        memory::tensor(name, values, &like, &self.optimizer.options().queue).map(Some)
    }
}

/// Gives parameters outside of the optimizer rank 0's values. Collective.
pub(crate) struct FromRank0<'a> {
    pub(crate) comm: &'a dyn Communicator,
    pub(crate) layout: &'a Layout,
    pub(crate) options: &'a Options,
    pub(crate) own: &'a FirstValues,
}

impl ReplaceParam for FromRank0<'_> {
    fn replace<const D: usize>(
        &mut self,
        name: &str,
        param: &Param<Tensor<D>>,
    ) -> Result<Option<Tensor<D>>, Error> {
        let (None, Some(own)) = (self.layout.get(name), self.own.get(name)) else { return Ok(None) };
        let Options { meter, queue, .. } = self.options;
        with_values(name, own, |values| {
            let mut values_of_0 =
                Buffer::zeroed_on(queue, values.len(), values.dtype(), meter, Category::Framework)?;
            queue.upload(values, values_of_0.as_mut())?;
            queue.synchronize()?;
            self.comm.broadcast(&mut values_of_0, 0).map_err(meshstep_shard::Error::from)?;
            memory::tensor(name, values_of_0.as_slice(), &param.base(), queue).map(Some)
        })?
    }
}

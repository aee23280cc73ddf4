//! Float parameters of a module by name, in the module's order.

use crate::Error;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use std::any::Any;
use std::collections::HashMap;

/// Reads parameters.
pub(crate) trait ReadParam {
    /// Reads the parameter at one place. Places with the same id have the same name; `again` is true from the second on.
    fn read<const D: usize>(
        &mut self,
        name: &str,
        again: bool,
        param: &Param<Tensor<D>>,
    ) -> Result<(), Error>;
}

/// Replaces values of parameters.
pub(crate) trait ReplaceParam {
    /// Returns the new value of a parameter, or `None` to keep it. Called once for places with the same id.
    fn replace<const D: usize>(
        &mut self,
        name: &str,
        param: &Param<Tensor<D>>,
    ) -> Result<Option<Tensor<D>>, Error>;
}

/// Calls `reader` for every place of a float parameter, until the first error.
pub(crate) fn read(model: &impl Module, reader: &mut impl ReadParam) -> Result<(), Error> {
    let mut reading = Reading { reader, paths: Paths::default(), result: Ok(()) };
    model.visit(&mut reading);
    reading.result
}

/// Returns the module with the values of `with`. Places with the same id share the new tensor.
pub(crate) fn replace<M: Module>(model: M, with: &mut impl ReplaceParam) -> Result<M, Error> {
    let mut replacing = Replacing { with, paths: Paths::default(), made: HashMap::new(), result: Ok(()) };
    let replaced = model.map(&mut replacing);
    replacing.result.map(|()| replaced)
}

/// Path of the current place, and the name of each id.
#[derive(Default)]
struct Paths {
    parts: Vec<String>,
    names: HashMap<ParamId, String>,
}

impl Paths {
    /// Returns the name of the parameter here, and true if its id was seen before.
    fn name(&mut self, id: ParamId) -> Result<(String, bool), Error> {
        if let Some(name) = self.names.get(&id) {
            return Ok((name.clone(), true));
        }
        let path = self.parts.join(".");
        if path.is_empty() {
            return Err(Error::NoPath);
        }
        self.names.insert(id, path.clone());
        Ok((path, false))
    }
}

struct Reading<'a, R> {
    reader: &'a mut R,
    paths: Paths,
    result: Result<(), Error>,
}

impl<R: ReadParam> ModuleVisitor for Reading<'_, R> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.paths.parts.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.paths.parts.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.result.is_ok() {
            self.result =
                (self.paths.name(param.id)).and_then(|(name, again)| self.reader.read(&name, again, param));
        }
    }
}

struct Replacing<'a, R> {
    with: &'a mut R,
    paths: Paths,
    /// New tensors by id.
    made: HashMap<ParamId, Box<dyn Any>>,
    result: Result<(), Error>,
}

impl<R: ReplaceParam> Replacing<'_, R> {
    fn value<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Result<Option<Tensor<D>>, Error> {
        let (name, again) = self.paths.name(param.id)?;
        if again {
            let Some(made) = self.made.get(&param.id) else { return Ok(None) };
            let same = made.downcast_ref::<Tensor<D>>().filter(|made| made.shape() == param.lazy_shape());
            let same = same.ok_or_else(|| Error::SameId { name })?;
            return Ok(Some(same.clone()));
        }
        let made = self.with.replace(&name, param)?;
        if let Some(made) = &made {
            self.made.insert(param.id, Box::new(made.clone()));
        }
        Ok(made)
    }
}

impl<R: ReplaceParam> ModuleMapper for Replacing<'_, R> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.paths.parts.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.paths.parts.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.result.is_err() {
            return param;
        }
        match self.value(&param) {
            Ok(Some(value)) => {
                let (id, _, mapper) = param.consume();
                Param::from_mapped_value(id, value, mapper)
            }
            Ok(None) => param,
            Err(error) => {
                self.result = Err(error);
                param
            }
        }
    }
}

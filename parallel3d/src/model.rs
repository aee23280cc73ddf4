//! The parameters of a model and where they lie, and what of it one rank holds. Arithmetic only.

use crate::{Axis, Coordinate, Mesh, MeshError, Placement, Sharing};
use meshstep_tensor::{DType, Layout, LayoutBuilder};
use std::collections::HashMap;

/// A parameter of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// The name gradients and checkpoints find it by.
    pub name: String,
    /// Its dimensions on a single device.
    pub shape: Vec<usize>,
    /// Its element type.
    pub dtype: DType,
    /// Where it lies.
    pub placement: Placement,
    /// Its pipeline stage.
    pub stage: usize,
    /// What it is gathered with, where parameters are sharded.
    pub unit: Option<String>,
}

/// Parameters in the order a forward pass uses them, each once whatever it is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    parameters: Vec<Parameter>,
    names: HashMap<String, usize>,
}

/// Collects parameters for a [`Model`]; what is wrong is said by [`build`](Self::build).
#[derive(Clone, Debug, Default)]
pub struct ModelBuilder {
    parameters: Vec<Parameter>,
    tied: Vec<(String, String, Vec<usize>)>,
    stage: usize,
    unit: Option<String>,
}

/// Parameters that the same ranks share in the same way, and so travel together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Family {
    /// Which ranks share them.
    pub sharing: Sharing,
    /// What each rank holds.
    pub layout: Layout,
    /// Where these parameters stand among the model's.
    pub positions: Vec<usize>,
}

impl Model {
    /// A model without parameters, to add to.
    pub fn builder() -> ModelBuilder {
        ModelBuilder::default()
    }

    /// Its parameters, in the order they were given.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The parameter of this name, or tied to it.
    pub fn get(&self, name: &str) -> Option<&Parameter> {
        self.names.get(name).map(|&i| &self.parameters[i])
    }

    /// The other names of tied parameters, each with the first, in the order of the alphabet.
    pub fn tied(&self) -> Vec<(&str, &str)> {
        let names = self.names.iter().map(|(name, &i)| (name.as_str(), self.parameters[i].name.as_str()));
        let mut tied: Vec<_> = names.filter(|(name, first)| name != first).collect();
        tied.sort_unstable();
        tied
    }

    /// Another name of a parameter before the first unit that is also a unit's: where parameters are sharded, it would be that
    /// of two.
    pub(crate) fn gathered_twice(&self) -> Option<&str> {
        let mut tied = self.tied().into_iter().filter_map(|(alias, name)| Some((alias, self.get(name)?)));
        let unit = |alias: &str, stage| {
            self.parameters.iter().any(|p| p.stage == stage && p.unit.as_deref() == Some(alias))
        };
        tied.find(|(alias, p)| p.unit.is_none() && unit(alias, p.stage)).map(|(alias, _)| alias)
    }

    /// Elements of all parameters together, as far as 64 bits count; what is tied counts once.
    pub fn len(&self) -> u64 {
        let elements = |p: &Parameter| p.shape.iter().fold(1u64, |all, &n| all.saturating_mul(n as u64));
        self.parameters.iter().fold(0, |all: u64, p| all.saturating_add(elements(p)))
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What the rank at `coordinate` holds, by the ways ranks share it. It depends on the pipeline stage alone.
    pub fn families(&self, mesh: &Mesh, coordinate: &Coordinate) -> Result<Vec<Family>, MeshError> {
        let stages = mesh.degree(Axis::Pp);
        let mut families: Vec<(Sharing, LayoutBuilder, Vec<usize>)> = Vec::new();
        let mut units: Vec<&String> = Vec::new();
        for (position, parameter) in self.parameters.iter().enumerate() {
            let Parameter { name, shape, dtype, placement, stage, unit } = parameter;
            if *stage >= stages {
                return Err(MeshError::NoSuchStage { name: name.clone(), stage: *stage, stages });
            }
            let local = placement.local_shape(name, shape, mesh)?;
            if *stage != coordinate.along(Axis::Pp) {
                continue;
            }
            let sharing = placement.sharing(mesh);
            if let Some(unit) = unit.as_ref().filter(|unit| units.last() != Some(unit)) {
                units.push(unit);
                // So that all layouts have the units in the model's order.
                families.iter_mut().for_each(|(_, layout, _)| *layout = std::mem::take(layout).unit(unit));
            }
            let known = families.iter().position(|(other, ..)| *other == sharing);
            let index = known.unwrap_or(families.len());
            if known.is_none() {
                let begun = units.iter().fold(Layout::builder(), |layout, unit| layout.unit(*unit));
                families.push((sharing, begun, Vec::new()));
            }
            let layout = std::mem::take(&mut families[index].1);
            families[index].1 = layout.param(name, &local, *dtype);
            families[index].2.push(position);
        }
        let family = |(sharing, layout, positions): (_, LayoutBuilder, _)| {
            Ok(Family { sharing, layout: layout.build()?, positions })
        };
        families.into_iter().map(family).collect()
    }
}

impl ModelBuilder {
    /// Adds a parameter, to the pipeline stage of the one before it.
    pub fn param(
        mut self,
        name: impl Into<String>,
        shape: &[usize],
        dtype: DType,
        placement: Placement,
    ) -> Self {
        let (name, shape, stage, unit) = (name.into(), shape.to_vec(), self.stage, self.unit.clone());
        self.parameters.push(Parameter { name, shape, dtype, placement, stage, unit });
        self
    }

    /// What follows is on pipeline stage `stage`.
    pub fn stage(self, stage: usize) -> Self {
        ModelBuilder { stage, ..self }
    }

    /// What follows is gathered together where parameters are sharded, up to the next unit: a block of the model.
    pub fn unit(self, name: impl Into<String>) -> Self {
        ModelBuilder { unit: Some(name.into()), ..self }
    }

    /// Another name for a parameter that was added: it is held, counted, decayed, updated and saved once, under its first name.
    /// Rules, gradients and whatever asks an optimizer for a parameter may use either; a micro-batch takes one gradient of both.
    pub fn tied(mut self, name: impl Into<String>, to: impl Into<String>, shape: &[usize]) -> Self {
        self.tied.push((name.into(), to.into(), shape.to_vec()));
        self
    }

    /// The model, or the first thing wrong with it.
    pub fn build(self) -> Result<Model, MeshError> {
        let mut names = HashMap::new();
        for (i, parameter) in self.parameters.iter().enumerate() {
            if names.insert(parameter.name.clone(), i).is_some() {
                return Err(MeshError::NameTwice { name: parameter.name.clone() });
            }
        }
        for (name, to, shape) in self.tied {
            let Some(&i) = names.get(&to) else { return Err(MeshError::TiedToNothing { name, to }) };
            if self.parameters[i].shape != shape {
                return Err(MeshError::TiedShapes { name, shape, to, of: self.parameters[i].shape.clone() });
            }
            if names.insert(name.clone(), i).is_some() {
                return Err(MeshError::NameTwice { name });
            }
        }
        Ok(Model { parameters: self.parameters, names })
    }
}

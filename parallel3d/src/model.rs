//! Parameters of a model with their placements, and the part held by one rank. Arithmetic only.

use crate::{Axis, Coordinate, Mesh, MeshError, Placement, Sharing};
use meshstep_tensor::{DType, Layout, LayoutBuilder};
use std::collections::{HashMap, HashSet};

/// Parameter of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Name in gradients and checkpoints.
    pub name: String,
    /// Shape on a single device.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// Placement on the mesh.
    pub placement: Placement,
    /// Pipeline stage.
    pub stage: usize,
    /// Unit in which the parameter is gathered if parameters are sharded.
    pub unit: Option<String>,
}

/// Parameters in the order of the forward pass. A tied parameter appears once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    parameters: Vec<Parameter>,
    names: HashMap<String, usize>,
}

/// Builder of a [`Model`]; [`build`](Self::build) reports errors.
///
/// ```
/// use meshstep_parallel3d::{Axis, Family, Mesh, Model, ModelBuilder, Parameter, Piece, Placement, Sharing};
/// use meshstep_tensor::DType::F32;
///
/// let builder: ModelBuilder = Model::builder().unit("h.0").param("h.0.up", &[8, 4], F32, Placement::whole().cut(Axis::Tp, 0));
/// let model = builder.param("h.0.b", &[4], F32, Placement::whole()).tied("b", "h.0.b", &[4]).build()?;
/// let Parameter { name, shape, placement, .. } = model.get("h.0.up").ok_or("no such parameter")?;
/// let mesh: Mesh = "tp=2,dp=2".parse()?;
/// let coordinate = mesh.coordinate(3)?;
/// let pieces: Vec<Piece> = placement.pieces(name, shape, &mesh, &coordinate)?;
/// assert_eq!((pieces[0].global.clone(), pieces[0].local.clone()), (vec![4..8, 0..4], vec![0..4, 0..4]));
/// let sharing: Sharing = placement.sharing(&mesh);
/// assert!(sharing.reduced.contains(Axis::Dp) && !sharing.replicas.contains(Axis::Tp));
/// let families: Vec<Family> = model.families(&mesh, &coordinate)?; // of equal sharing
/// assert_eq!(families.iter().map(|family| family.layout.params()[0].name()).collect::<Vec<_>>(), ["h.0.up", "h.0.b"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct ModelBuilder {
    parameters: Vec<Parameter>,
    tied: Vec<(String, String, Vec<usize>)>,
    stage: usize,
    unit: Option<String>,
}

/// Parameters with the same sharing, which therefore travel together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Family {
    /// Sharing of the parameters.
    pub sharing: Sharing,
    /// Layout of the parts that each rank holds.
    pub layout: Layout,
    /// Positions of these parameters in the model.
    pub positions: Vec<usize>,
}

impl Model {
    /// Returns the builder of an empty model.
    pub fn builder() -> ModelBuilder {
        ModelBuilder::default()
    }

    /// Returns the parameters in the order they were added.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Returns the parameter with this name, or with a name tied to it.
    pub fn get(&self, name: &str) -> Option<&Parameter> {
        self.names.get(name).map(|&i| &self.parameters[i])
    }

    /// Returns the other names of tied parameters, each with the first name, in alphabetical order.
    pub fn tied(&self) -> Vec<(&str, &str)> {
        let names = self.names.iter().map(|(name, &i)| (name.as_str(), self.parameters[i].name.as_str()));
        let mut tied: Vec<_> = names.filter(|(name, first)| name != first).collect();
        tied.sort_unstable();
        tied
    }

    /// Returns an alias of a parameter outside all units that is also the name of a unit. With sharded parameters such a name would
    /// denote two things to gather.
    pub(crate) fn gathered_twice(&self) -> Option<&str> {
        let mut tied = self.tied().into_iter().filter_map(|(alias, name)| Some((alias, self.get(name)?)));
        let units: HashSet<(&str, usize)> =
            self.parameters.iter().filter_map(|p| Some((p.unit.as_deref()?, p.stage))).collect();
        let twice = |(alias, p): &(&str, &Parameter)| p.unit.is_none() && units.contains(&(alias, p.stage));
        tied.find(twice).map(|(alias, _)| alias)
    }

    /// Returns the number of elements of all parameters together, saturating at 64 bits. Tied parameters count once.
    pub fn len(&self) -> u64 {
        let elements = |p: &Parameter| p.shape.iter().fold(1u64, |all, &n| all.saturating_mul(n as u64));
        self.parameters.iter().fold(0, |all: u64, p| all.saturating_add(elements(p)))
    }

    /// Returns true if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the part held by the rank at `coordinate`, grouped by sharing. It depends only on the pipeline stage.
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
                // All layouts list the units in the model's order.
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
    /// Adds a parameter to the current pipeline stage.
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

    /// Sets the pipeline stage of the parameters that follow.
    pub fn stage(self, stage: usize) -> Self {
        ModelBuilder { stage, ..self }
    }

    /// Begins a unit: the parameters up to the next unit, typically a block of the model, are gathered together if parameters are
    /// sharded.
    pub fn unit(self, name: impl Into<String>) -> Self {
        ModelBuilder { unit: Some(name.into()), ..self }
    }

    /// Adds another name for a parameter added before. The parameter is held, counted, decayed, updated and saved once, under its first
    /// name. Rules, gradients and lookups may use either name; a micro-batch takes one gradient for both.
    pub fn tied(mut self, name: impl Into<String>, to: impl Into<String>, shape: &[usize]) -> Self {
        self.tied.push((name.into(), to.into(), shape.to_vec()));
        self
    }

    /// Returns the model, or the first error.
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

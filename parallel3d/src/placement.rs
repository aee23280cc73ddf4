//! Placement of one parameter on a mesh: the part held by each rank, and the reduction of the gradient. Arithmetic only.

use crate::{Axes, Axis, Coordinate, Mesh, MeshError};
use meshstep_optim::Strided;
use meshstep_shard::{Parts, Stage};
use std::ops::Range;

/// Relation between the gradients that ranks along `tp` compute for a parameter that all of them hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Gradient {
    /// Every rank computes the same gradient.
    #[default]
    Same,
    /// Every rank computes a part; the gradient is their sum. Examples: norms under sequence parallelism, norms of each head's queries.
    PartialSum,
    /// Every rank computes a part; the gradient is their mean.
    PartialMean,
}

/// Placement of a parameter: whole on every rank or cut into equal parts, along each axis of the mesh.
///
/// ```
/// use meshstep_parallel3d::{Axis, Mesh, Placement};
///
/// // Gate and up in one matrix: each rank has its half of both.
/// let gate_up = Placement::whole().cut_in_blocks(Axis::Tp, 0, [8, 8]);
/// let mesh: Mesh = "tp=2,dp=2".parse()?;
/// assert_eq!(gate_up.local_shape("gate_up", &[16, 4], &mesh)?, [8, 4]);
/// let pieces = gate_up.pieces("gate_up", &[16, 4], &mesh, &mesh.coordinate(0)?)?;
/// assert_eq!([&pieces[0].global, &pieces[1].global], [&[0..4, 0..4], &[8..12, 0..4]]);
/// # Ok::<(), meshstep_parallel3d::MeshError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Placement {
    cuts: Vec<Cut>,
    gradient: Gradient,
    reduced: Axes,
}

/// Sharing of a parameter and its gradient among the ranks of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sharing {
    /// Axes along which all ranks hold the same values. Excludes `pp`: pipeline stages have different parameters.
    pub replicas: Axes,
    /// Axes along which gradients of different data are reduced.
    pub reduced: Axes,
    /// Axes along which each rank has a partial gradient.
    pub partial: Axes,
    /// Reduction of the partial gradients.
    pub gradient: Gradient,
}

impl Sharing {
    /// Returns the axes along which ranks have the same reduced gradient: the first of them counts in a norm.
    pub fn repeated(self) -> Axes {
        self.replicas.without(self.reduced)
    }

    /// Returns the axes along which ranks divide the state: gradients are reduced and updated parameters gathered over them.
    pub fn shards(self) -> Axes {
        self.reduced.without(self.replicas())
    }

    /// Returns the axes of `mesh` along which a reduced gradient is reduced further, in this order: over replicas of the state, then over
    /// partial gradients. Axes with one rank are left out.
    pub fn extra_reductions(self, mesh: &Mesh) -> Vec<Axes> {
        [self.replicas(), self.partial].into_iter().filter(|&axes| mesh.degree(axes) > 1).collect()
    }

    /// Returns the axes of `mesh` along which ranks have different parts of a tensor.
    pub fn cut(self, mesh: &Mesh) -> Axes {
        mesh.all().without(self.replicas | Axis::Pp)
    }

    /// Returns the axes along which ranks hold whole tensors together, each element once: those that [cut](Self::cut) them, and those that
    /// divide the state at this stage.
    pub fn tensors(self, mesh: &Mesh, stage: Stage) -> Axes {
        let shards = if stage == Stage::Replicated { Axes::NONE } else { self.shards() };
        self.cut(mesh) | shards
    }

    fn replicas(self) -> Axes {
        if self.reduced.contains(Axis::DpReplicate) { Axis::DpReplicate.into() } else { Axes::NONE }
    }
}

/// Cut of one dimension along an axis.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Cut {
    axis: Axis,
    dim: usize,
    /// Extents of blocks that are each cut into equal parts. Empty: the dimension is a single block.
    blocks: Vec<usize>,
}

/// Box of elements that are contiguous in the parameter and in the rank's part: an index range for each dimension.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// Index ranges in the parameter.
    pub global: Vec<Range<usize>>,
    /// Index ranges in the rank's part.
    pub local: Vec<Range<usize>>,
}

impl Placement {
    /// Returns the placement of a parameter that is whole on every rank. Its gradient is the same along `tp` and reduced over `dp` and
    /// `cp`.
    pub fn whole() -> Self {
        Placement { cuts: Vec::new(), gradient: Gradient::Same, reduced: Axis::Dp | Axis::Cp }
    }

    /// Cuts dimension `dim` into equal parts along `axis`, one for each rank.
    pub fn cut(self, axis: Axis, dim: usize) -> Self {
        self.cut_in_blocks(axis, dim, [])
    }

    /// Cuts dimension `dim` that stacks several matrices with extents `blocks`, such as queries, keys and values, or gate and up: each
    /// rank gets its part of every block.
    pub fn cut_in_blocks(mut self, axis: Axis, dim: usize, blocks: impl IntoIterator<Item = usize>) -> Self {
        self.cuts.push(Cut { axis, dim, blocks: blocks.into_iter().collect() });
        self
    }

    /// Sets the relation of gradients along `tp`. It applies only if the parameter is not cut along `tp`: a cut part has its own
    /// gradient.
    pub fn gradient(self, gradient: Gradient) -> Self {
        Placement { gradient, ..self }
    }

    /// Sets the axes along which ranks have gradients of different data, which are reduced.
    pub fn reduced_over(self, axes: impl Into<Axes>) -> Self {
        Placement { reduced: axes.into(), ..self }
    }

    /// Returns the sharing of the parameter among the ranks of `mesh`.
    pub fn sharing(&self, mesh: &Mesh) -> Sharing {
        let cut = self.cut_along(mesh);
        let all: Axes = mesh.axes().iter().map(|&(axis, _)| axis).collect();
        let tp =
            if self.gradient == Gradient::Same { Axes::NONE } else { mesh.resolve(Axis::Tp).without(cut) };
        let gradient = if tp.is_empty() { Gradient::Same } else { self.gradient };
        let replicas = all.without(cut | Axis::Pp);
        Sharing { replicas, reduced: mesh.resolve(self.reduced), partial: tp, gradient }
    }

    /// Returns the shape of the part that each rank of `mesh` holds of a parameter with shape `shape`.
    pub fn local_shape(&self, name: &str, shape: &[usize], mesh: &Mesh) -> Result<Vec<usize>, MeshError> {
        let mut local = shape.to_vec();
        for (i, cut) in self.cuts.iter().enumerate() {
            cut.check(name, shape, mesh)?;
            let along = mesh.resolve(cut.axis) | cut.axis;
            let meets = |axis: Axis| (mesh.resolve(axis) | axis).iter().any(|part| along.contains(part));
            let taken = |other: &Cut| meets(other.axis) || other.dim == cut.dim;
            if self.cuts[..i].iter().any(taken) {
                return Err(MeshError::CutTwice { name: name.into(), axis: cut.axis, dim: cut.dim });
            }
            local[cut.dim] /= mesh.degree(cut.axis);
        }
        if self.reduced.contains(Axis::Pp) || self.cuts.iter().any(|cut| cut.axis == Axis::Pp) {
            return Err(MeshError::AlongStages { name: name.into() });
        }
        let reduced = mesh.resolve(self.reduced);
        if self.gradient != Gradient::Same && reduced.contains(Axis::Tp) {
            return Err(MeshError::PartialAndReduced { name: name.into() });
        }
        match self.cuts.iter().find(|cut| mesh.resolve(cut.axis).iter().any(|axis| reduced.contains(axis))) {
            Some(cut) => Err(MeshError::CutAndReduced { name: name.into(), axis: cut.axis }),
            None => Ok(local),
        }
    }

    /// Returns the pieces that the rank at `coordinate` holds of a parameter with shape `shape`, in storage order.
    pub fn pieces(
        &self,
        name: &str,
        shape: &[usize],
        mesh: &Mesh,
        coordinate: &Coordinate,
    ) -> Result<Vec<Piece>, MeshError> {
        let local = self.local_shape(name, shape, mesh)?;
        let whole: Vec<Range<usize>> = local.iter().map(|&extent| 0..extent).collect();
        let mut pieces = vec![Piece { global: whole.clone(), local: whole }];
        for cut in &self.cuts {
            let (at, of) = (mesh.place(coordinate, cut.axis), mesh.degree(cut.axis));
            pieces = pieces.iter().flat_map(|piece| cut.apply(piece, shape, at, of)).collect();
        }
        Ok(pieces)
    }

    /// Returns the elements that the rank at `coordinate` holds of a parameter with shape `shape`, by row-major index: consecutive parts
    /// of its storage, each made of runs at an equal distance. There is one part unless blocks of different lengths are cut.
    pub fn parts(
        &self,
        name: &str,
        shape: &[usize],
        mesh: &Mesh,
        coordinate: &Coordinate,
    ) -> Result<Parts, MeshError> {
        self.local_shape(name, shape, mesh)?;
        let mut runs: Vec<Range<usize>> = std::iter::once(0..1).collect();
        for (dim, &extent) in shape.iter().enumerate() {
            let held = self.held(dim, shape, mesh, coordinate);
            runs = if held.len() == 1 && held[0] == (0..extent) {
                runs.into_iter().map(|run| run.start * extent..run.end * extent).collect()
            } else {
                let of_each = |i: usize| held.iter().map(move |r| i * extent + r.start..i * extent + r.end);
                joined(runs.into_iter().flatten().flat_map(of_each))
            };
        }
        Ok(strided(runs))
    }

    /// Returns the index ranges in dimension `dim` that the rank at `coordinate` holds.
    fn held(&self, dim: usize, shape: &[usize], mesh: &Mesh, coordinate: &Coordinate) -> Vec<Range<usize>> {
        let Some(cut) = self.cuts.iter().find(|cut| cut.dim == dim && mesh.degree(cut.axis) > 1) else {
            return std::iter::once(0..shape[dim]).collect();
        };
        let (at, of) = (mesh.place(coordinate, cut.axis), mesh.degree(cut.axis));
        let mut start = 0;
        let part = |block: usize| {
            let len = block / of;
            start += block;
            start - block + at * len..start - block + (at + 1) * len
        };
        cut.blocks(shape).into_iter().map(part).collect()
    }

    fn cut_along(&self, mesh: &Mesh) -> Axes {
        mesh.resolve(self.cuts.iter().map(|cut| cut.axis).collect::<Axes>())
    }
}

/// Merges adjacent ranges; the input ascends.
fn joined(ranges: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in ranges.filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}

/// Groups runs into as few parts as possible, each with runs of equal length at equal distances.
fn strided(runs: Vec<Range<usize>>) -> Parts {
    let (mut parts, mut end, mut last) = (Parts::new(), 0, 0);
    for run in runs {
        let (first, len) = (run.start as u64, run.len() as u64);
        match parts.last_mut() {
            Some((part, by)) if by.run == len && (by.stride == 0 || first - last == by.stride) => {
                (by.stride, part.end) = (first - last, part.end + run.len());
            }
            _ => parts.push((end..end + run.len(), Strided { first, run: len.max(1), stride: 0 })),
        }
        (end, last) = (end + run.len(), first);
    }
    parts
}

impl Cut {
    /// Returns the extents of the blocks.
    fn blocks(&self, shape: &[usize]) -> Vec<usize> {
        if self.blocks.is_empty() { vec![shape[self.dim]] } else { self.blocks.clone() }
    }

    fn check(&self, name: &str, shape: &[usize], mesh: &Mesh) -> Result<(), MeshError> {
        let Cut { axis, dim, .. } = *self;
        let name = || name.to_owned();
        let Some(&extent) = shape.get(dim) else {
            return Err(MeshError::NoSuchDim { name: name(), axis, dim, shape: shape.to_vec() });
        };
        let blocks = self.blocks(shape);
        if blocks.iter().try_fold(0usize, |sum, &block| sum.checked_add(block)) != Some(extent) {
            return Err(MeshError::Blocks { name: name(), dim, extent, blocks });
        }
        let degree = mesh.degree(axis);
        match blocks.into_iter().find(|block| block % degree != 0) {
            Some(extent) => Err(MeshError::Uneven { name: name(), axis, degree, dim, extent }),
            None => Ok(()),
        }
    }

    /// Cuts a piece that is whole in this dimension: returns part `at` of `of` of each block.
    fn apply(&self, piece: &Piece, shape: &[usize], at: usize, of: usize) -> Vec<Piece> {
        let (mut global, mut local) = (0, 0);
        let part = |block: usize| {
            let len = block / of;
            let mut piece = piece.clone();
            piece.global[self.dim] = global + at * len..global + (at + 1) * len;
            piece.local[self.dim] = local..local + len;
            (global, local) = (global + block, local + len);
            piece
        };
        self.blocks(shape).into_iter().map(part).collect()
    }
}

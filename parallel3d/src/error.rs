//! What can be wrong with a mesh, and with what is placed on it.

use crate::axis::UnknownAxis;
use crate::{Axes, Axis, Coordinate, Mesh};

/// What is wrong with a mesh, or with what is placed on it: the values, and what would work.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// A name that no axis has.
    #[error(transparent)]
    UnknownAxis(#[from] UnknownAxis),
    /// An axis without ranks.
    #[error("axis {axis} has 0 ranks; leave it out, or give it 1")]
    NoRanks {
        /// The axis.
        axis: Axis,
    },
    /// An axis is given twice.
    #[error("axis {axis} is given twice")]
    AxisTwice {
        /// The axis.
        axis: Axis,
    },
    /// `dp` is given beside a part of it.
    #[error("axis dp is given beside {part}, which is a part of it; give dp, or dp_replicate and dp_shard")]
    DpTwice {
        /// The part.
        part: Axis,
    },
    /// A degree for an axis that the order does not name.
    #[error(
        "axis {axis} has {degree} ranks and is not in the order {order:?}; add it, as in \"tp-cp-dp-pp\""
    )]
    NotInOrder {
        /// The axis.
        axis: Axis,
        /// Its ranks.
        degree: usize,
        /// The order.
        order: String,
    },
    /// Not an axis with a degree.
    #[error("{part:?} is no axis with its degree, such as tp=2")]
    Unreadable {
        /// What stands there.
        part: String,
    },
    /// The degrees multiply to more than can be counted.
    #[error("the degrees multiply to more ranks than can be counted")]
    TooManyRanks,
    /// The degrees do not multiply to the world.
    #[error(
        "mesh {mesh} has {ranks} ranks, the world {world_size}; the degrees must multiply to {world_size}"
    )]
    WorldSize {
        /// The mesh.
        mesh: Mesh,
        /// Its ranks.
        ranks: usize,
        /// The world's.
        world_size: usize,
    },
    /// A rank outside the mesh.
    #[error("rank {rank} of a mesh of {world_size}")]
    NoSuchRank {
        /// The rank.
        rank: usize,
        /// The mesh's ranks.
        world_size: usize,
    },
    /// A parameter is cut in a dimension it does not have.
    #[error("{name:?} is cut along {axis} in dimension {dim}, but its shape is {shape:?}")]
    NoSuchDim {
        /// The parameter.
        name: String,
        /// Along which axis.
        axis: Axis,
        /// In which dimension.
        dim: usize,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Blocks that do not fill their dimension.
    #[error("the blocks {blocks:?} of {name:?} do not add up to dimension {dim}, which has {extent}")]
    Blocks {
        /// The parameter.
        name: String,
        /// In which dimension.
        dim: usize,
        /// Its extent.
        extent: usize,
        /// The blocks.
        blocks: Vec<usize>,
    },
    /// A dimension that does not divide.
    #[error("{extent} indices of {name:?}, dimension {dim}, do not divide among {degree} ranks along {axis}; pad to {}", extent.next_multiple_of(*degree))]
    Uneven {
        /// The parameter.
        name: String,
        /// Along which axis.
        axis: Axis,
        /// Its ranks.
        degree: usize,
        /// In which dimension.
        dim: usize,
        /// Its extent, or that of the block that does not divide.
        extent: usize,
    },
    /// An axis or a dimension that is cut twice.
    #[error(
        "{name:?} is cut along {axis} in dimension {dim}, and one of these is cut already; an axis cuts one dimension, a dimension is cut once"
    )]
    CutTwice {
        /// The parameter.
        name: String,
        /// Along which axis.
        axis: Axis,
        /// In which dimension.
        dim: usize,
    },
    /// A gradient that is reduced along an axis on which each rank has another part of the parameter.
    #[error(
        "{name:?} is cut along {axis} and its gradient reduced along it; leave {axis} out of `reduced_over`"
    )]
    CutAndReduced {
        /// The parameter.
        name: String,
        /// The axis.
        axis: Axis,
    },
    /// A gradient of which each rank along `tp` has a part, and that is reduced along it as if each had other data.
    #[error(
        "{name:?} has a part of its gradient on each rank along tp and is reduced along it; leave tp out of `reduced_over`"
    )]
    PartialAndReduced {
        /// The parameter.
        name: String,
    },
    /// A parameter cut or reduced along `pp`.
    #[error(
        "{name:?} is cut or reduced along pp, along which ranks have other parameters; name its stage instead"
    )]
    AlongStages {
        /// The parameter.
        name: String,
    },
    /// A pipeline stage that the mesh does not have.
    #[error("{name:?} is on pipeline stage {stage}, of {stages} along pp")]
    NoSuchStage {
        /// The parameter.
        name: String,
        /// The stage.
        stage: usize,
        /// The mesh's.
        stages: usize,
    },
    /// Two parameters of one name.
    #[error("two parameters are called {name:?}")]
    NameTwice {
        /// The name.
        name: String,
    },
    /// A parameter tied to one that there is not.
    #[error("{name:?} is tied to {to:?}, which is no parameter; add that one first")]
    TiedToNothing {
        /// The name.
        name: String,
        /// What it is tied to.
        to: String,
    },
    /// A parameter tied to one of another shape.
    #[error("{name:?} with shape {shape:?} is tied to {to:?} with shape {of:?}; tied parameters are one")]
    TiedShapes {
        /// The name.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// What it is tied to.
        to: String,
        /// The shape of that.
        of: Vec<usize>,
    },
    /// What a rank holds cannot be laid out.
    #[error(transparent)]
    Layout(#[from] meshstep_tensor::Error),
}

/// What went wrong on a mesh.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A mesh, or what is placed on it.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// No communicator was asked for along these axes.
    #[error("there is no communicator along {axes}; name them when the communicators are made")]
    NotAlong {
        /// The axes.
        axes: Axes,
    },
    /// Ranks could not be split into groups.
    #[error("splitting the ranks along {axes}")]
    Split {
        /// The axes.
        axes: Axes,
        /// Why.
        source: meshstep_comm::Error,
    },
    /// A rule for a parameter that the model does not have.
    #[error("a rule names {name:?}, which is no parameter of the model")]
    UnknownParam {
        /// The name.
        name: String,
    },
    /// A step over several pipeline stages.
    #[error(
        "the mesh has {stages} ranks along pp; a step spans one pipeline stage: make the optimizer on the ranks of each"
    )]
    Stages {
        /// Ranks along `pp`.
        stages: usize,
    },
    /// Ranks that do not divide among a model's pipeline stages.
    #[error(
        "{ranks} ranks do not divide among the {stages} pipeline stages of the model; a multiple of {stages} does"
    )]
    NoStages {
        /// The ranks.
        ranks: usize,
        /// The stages.
        stages: usize,
    },
    /// Means or weights over different ranks.
    #[error(
        "some gradients are reduced over {axes} ({ranks} ranks), others over dp x cp ({data}): neither their means nor their weights go together; use Combine::Sum"
    )]
    Unequal {
        /// The axes.
        axes: Axes,
        /// Ranks along these.
        ranks: usize,
        /// Ranks along `dp` and `cp`.
        data: usize,
    },
    /// Ranks were given different models.
    #[error(
        "ranks disagree on {what} along {axes}: rank 0 has {rank0}, rank {rank} ({at}) has {theirs}; give every rank the same model"
    )]
    Models {
        /// Which parameter, by its place in the model.
        what: String,
        /// Rank 0's: name, shape, type and placement.
        rank0: String,
        /// The first rank with another one.
        rank: usize,
        /// Where it sits.
        at: Coordinate,
        /// Along which axes it is away from rank 0.
        axes: Axes,
        /// What it has.
        theirs: String,
    },
    /// Ranks that share a micro-batch have given it different weights; no rank has taken the step.
    #[error(
        "ranks {} and {} compute the same micro-batches, as they differ along {axes} alone, and have weighed them \
         differently, {} and {} in all; give the same weight along every axis but dp and cp", ranks[0], ranks[1], weights[0], weights[1]
    )]
    Weights {
        /// The two lowest that differ.
        ranks: [usize; 2],
        /// Along which axes.
        axes: Axes,
        /// The sums of their weights.
        weights: [u64; 2],
    },
    /// Ranks that should hold the same do not, or a rank no longer holds what it wrote.
    #[error(transparent)]
    Differs(Box<crate::Differs>),
    /// A difference that cannot be repaired: no majority of at least three ranks holds one thing.
    #[error(
        "{0}; what three ranks or more hold, and more than half of them alike, can be repaired; nothing was changed"
    )]
    NoMajority(Box<crate::Differs>),
    /// Memory could not be had or viewed.
    #[error(transparent)]
    Tensor(#[from] meshstep_tensor::Error),
    /// The optimizer on one group.
    #[error(transparent)]
    Shard(#[from] meshstep_shard::Error),
}

//! Errors of meshes and of models placed on them.

use crate::mesh::axis::UnknownAxis;
use crate::{Axes, Axis, Coordinate, Mesh};

/// Error of a mesh or of a placement on it.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// Name that no axis has.
    #[error(transparent)]
    UnknownAxis(#[from] UnknownAxis),
    /// Axis with zero ranks.
    #[error("axis {axis} has 0 ranks; leave it out, or give it 1")]
    NoRanks {
        /// The axis.
        axis: Axis,
    },
    /// Axis that is given twice.
    #[error("axis {axis} is given twice")]
    AxisTwice {
        /// The axis.
        axis: Axis,
    },
    /// `dp` given together with one of its parts.
    #[error("axis dp is given beside {part}, which is a part of it; give dp, or dp_replicate and dp_shard")]
    DpTwice {
        /// The part.
        part: Axis,
    },
    /// Degree for an axis that the order does not name.
    #[error(
        "axis {axis} has {degree} ranks and is not in the order {order:?}; add it, as in \"tp-cp-dp-pp\""
    )]
    NotInOrder {
        /// The axis.
        axis: Axis,
        /// Degree of the axis.
        degree: usize,
        /// The order.
        order: String,
    },
    /// Text that is not an axis with a degree.
    #[error("{part:?} is no axis with its degree, such as tp=2")]
    Unreadable {
        /// Text that could not be parsed.
        part: String,
    },
    /// Product of the degrees that overflows.
    #[error("the degrees multiply to more ranks than can be counted")]
    TooManyRanks,
    /// Product of the degrees that differs from the world size.
    #[error(
        "mesh {mesh} has {ranks} ranks, the world {world_size}; the degrees must multiply to {world_size}"
    )]
    WorldSize {
        /// The mesh.
        mesh: Mesh,
        /// Ranks of the mesh.
        ranks: usize,
        /// Ranks of the world.
        world_size: usize,
    },
    /// Rank outside the mesh.
    #[error("rank {rank} of a mesh of {world_size}")]
    NoSuchRank {
        /// The rank.
        rank: usize,
        /// Ranks of the mesh.
        world_size: usize,
    },
    /// Cut in a dimension that the parameter does not have.
    #[error("{name:?} is cut along {axis} in dimension {dim}, but its shape is {shape:?}")]
    NoSuchDim {
        /// The parameter.
        name: String,
        /// Axis of the cut.
        axis: Axis,
        /// Dimension of the cut.
        dim: usize,
        /// Shape of the parameter.
        shape: Vec<usize>,
    },
    /// Blocks that do not add up to their dimension.
    #[error("the blocks {blocks:?} of {name:?} do not add up to dimension {dim}, which has {extent}")]
    Blocks {
        /// The parameter.
        name: String,
        /// Dimension of the blocks.
        dim: usize,
        /// Extent of the dimension.
        extent: usize,
        /// The blocks.
        blocks: Vec<usize>,
    },
    /// Dimension that does not divide among the ranks.
    #[error("{extent} indices of {name:?}, dimension {dim}, do not divide among {degree} ranks along {axis}; pad to {}", extent.next_multiple_of(*degree))]
    Uneven {
        /// The parameter.
        name: String,
        /// Axis of the cut.
        axis: Axis,
        /// Ranks along the axis.
        degree: usize,
        /// Dimension of the cut.
        dim: usize,
        /// Extent of the dimension, or of the block that does not divide.
        extent: usize,
    },
    /// Axis or dimension that is cut twice.
    #[error(
        "{name:?} is cut along {axis} in dimension {dim}, and one of these is cut already; an axis cuts one dimension, a dimension is cut once"
    )]
    CutTwice {
        /// The parameter.
        name: String,
        /// Axis of the second cut.
        axis: Axis,
        /// Dimension of the second cut.
        dim: usize,
    },
    /// Gradient that is reduced along an axis on which each rank holds a different part of the parameter.
    #[error(
        "{name:?} is cut along {axis} and its gradient reduced along it; leave {axis} out of `reduced_over`"
    )]
    CutAndReduced {
        /// The parameter.
        name: String,
        /// The axis.
        axis: Axis,
    },
    /// Partial gradient along `tp` that is also reduced along `tp`, as if its ranks had different data.
    #[error(
        "{name:?} has a part of its gradient on each rank along tp and is reduced along it; leave tp out of `reduced_over`"
    )]
    PartialAndReduced {
        /// The parameter.
        name: String,
    },
    /// Parameter that is cut or reduced along `pp`.
    #[error(
        "{name:?} is cut or reduced along pp, along which ranks have other parameters; name its stage instead"
    )]
    AlongStages {
        /// The parameter.
        name: String,
    },
    /// Pipeline stage that the mesh does not have.
    #[error("{name:?} is on pipeline stage {stage}, of {stages} along pp")]
    NoSuchStage {
        /// The parameter.
        name: String,
        /// The stage.
        stage: usize,
        /// Number of stages of the mesh.
        stages: usize,
    },
    /// Two parameters with the same name.
    #[error("two parameters are called {name:?}")]
    NameTwice {
        /// The name.
        name: String,
    },
    /// Parameter tied to an unknown name.
    #[error("{name:?} is tied to {to:?}, which is no parameter; add that one first")]
    TiedToNothing {
        /// The parameter.
        name: String,
        /// Name it is tied to.
        to: String,
    },
    /// Parameter tied to one of a different shape.
    #[error("{name:?} with shape {shape:?} is tied to {to:?} with shape {of:?}; tied parameters are one")]
    TiedShapes {
        /// The parameter.
        name: String,
        /// Shape of the parameter.
        shape: Vec<usize>,
        /// Name it is tied to.
        to: String,
        /// Shape of the parameter with that name.
        of: Vec<usize>,
    },
    /// Layout error of the parameters that a rank holds.
    #[error(transparent)]
    Layout(#[from] meshstep_tensor::Error),
}

meshstep_tensor::debug_is_display!(MeshError);

/// Error of an optimizer or a plan on a mesh.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Error of the mesh, or of a placement on it.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// Axes without a communicator.
    #[error("there is no communicator along {axes}; name them when the communicators are made")]
    NotAlong {
        /// The axes.
        axes: Axes,
    },
    /// Failed split of the ranks into groups.
    #[error("cannot split the ranks along {axes}")]
    Split {
        /// The axes.
        axes: Axes,
        /// Cause of the failure.
        source: meshstep_comm::Error,
    },
    /// Rule for a parameter that the model does not have.
    #[error("a rule names {name:?}, which is no parameter of the model")]
    UnknownParam {
        /// The name.
        name: String,
    },
    /// Step over several pipeline stages.
    #[error(
        "the mesh has {stages} ranks along pp; a step spans one pipeline stage: make the optimizer on the ranks of each"
    )]
    Stages {
        /// Ranks along `pp`.
        stages: usize,
    },
    /// Ranks that do not divide among the model's pipeline stages.
    #[error(
        "{ranks} ranks do not divide among the {stages} pipeline stages of the model; a multiple of {stages} does"
    )]
    NoStages {
        /// The ranks.
        ranks: usize,
        /// The stages.
        stages: usize,
    },
    /// Means or weights over different sets of ranks.
    #[error(
        "some gradients are reduced over {axes} ({ranks} ranks), others over dp x cp ({data} ranks): their means or weights cannot be combined; use Combine::Sum"
    )]
    Unequal {
        /// The axes.
        axes: Axes,
        /// Ranks along `axes`.
        ranks: usize,
        /// Ranks along `dp` and `cp`.
        data: usize,
    },
    /// Different models on different ranks.
    #[error(
        "ranks disagree on {what} along {axes}: rank 0 has {rank0}, rank {rank} ({at}) has {theirs}; give every rank the same model"
    )]
    Models {
        /// The parameter, by its position in the model.
        what: String,
        /// Value on rank 0: name, shape, type and placement.
        rank0: String,
        /// First rank with a different value.
        rank: usize,
        /// Coordinate of that rank.
        at: Coordinate,
        /// Axes along which that rank differs from rank 0.
        axes: Axes,
        /// Value on that rank.
        theirs: String,
    },
    /// Different weights for one micro-batch on the ranks that share it; no rank has taken the step.
    #[error(
        "ranks {} and {} compute the same micro-batches, as they differ along {axes} alone, but weighed them \
         differently, {} and {} in all; give the same weight along every axis but dp and cp", ranks[0], ranks[1], weights[0], weights[1]
    )]
    Weights {
        /// The two lowest ranks that differ.
        ranks: [usize; 2],
        /// Axes along which the two ranks differ.
        axes: Axes,
        /// Sums of their weights.
        weights: [u64; 2],
    },
    /// Different bits on ranks that should hold the same, or a rank with bits that changed since it wrote them.
    #[error(transparent)]
    Differs(Box<crate::Differs>),
    /// Difference that cannot be repaired: no majority of at least three ranks holds the same bits.
    #[error(
        "{0}; repair needs at least three ranks, more than half of them with the same bits; nothing was changed"
    )]
    NoMajority(Box<crate::Differs>),
    /// Failed allocation or view of memory.
    #[error(transparent)]
    Tensor(#[from] meshstep_tensor::Error),
    /// Error of the optimizer on one group.
    #[error(transparent)]
    Shard(#[from] meshstep_shard::Error),
}

meshstep_tensor::debug_is_display!(Error);

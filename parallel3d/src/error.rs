//! What can be wrong with a mesh, and with what is placed on it.

use crate::axis::UnknownAxis;
use crate::{Axes, Axis, Mesh};

/// What is wrong, with the values, and what would work.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
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
}

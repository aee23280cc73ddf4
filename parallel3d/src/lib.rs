//! Meshes of tensor-, context- and data-parallel ranks, and what of a model and its optimizer lives where on them.
//!
//! | type | what it is |
//! |---|---|
//! | [`Mesh`] | ranks along named axes: coordinates, groups of any set of axes |
//! | [`Communicators`] | one communicator for each set of axes that is needed |

mod axis;
mod communicators;
mod error;
mod mesh;

pub use axis::{Axes, Axis, UnknownAxis};
pub use communicators::Communicators;
pub use error::Error;
pub use mesh::{Coordinate, Group, Mesh};

//! Difference between ranks, with its location on the mesh.

use crate::{Axes, Coordinate};
use meshstep_shard::Difference;
use std::fmt;

/// Difference and its location on the mesh, the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Differs {
    /// Vector that differs, and the values held by each rank.
    pub difference: Difference,
    /// Axes along which the held values change; empty if a single rank no longer matches its own hash.
    pub axes: Axes,
    /// Coordinates of the ranks that differ from the majority, or of all ranks if there is no majority.
    pub at: Vec<Coordinate>,
    /// Indices of the first differing element in the whole parameter.
    pub index: Option<Vec<usize>>,
    /// Row-major index of that element in the whole parameter.
    pub element: Option<usize>,
}

impl std::error::Error for Differs {}

impl fmt::Display for Differs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at: Vec<String> = self.at.iter().map(|at| format!("({at})")).collect();
        write!(f, "{}: at {}", self.difference, at.join(" and "))?;
        if !self.axes.is_empty() {
            write!(f, ", among ranks along {}", self.axes)?;
        }
        match &self.index {
            Some(index) => write!(f, "; the element is {index:?} of the whole parameter"),
            None => Ok(()),
        }
    }
}

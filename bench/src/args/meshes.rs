//! Meshes that `train --compare` compares.

use meshstep_parallel3d::{Axis, Mesh};

/// Returns the meshes of `--compare`, the reference first.
pub(crate) fn compared() -> Vec<Mesh> {
    let degrees = [[1, 1, 1], [2, 2, 2], [2, 1, 4], [1, 4, 2], [8, 1, 1], [1, 1, 8]];
    let mesh = |[tp, cp, dp]: [usize; 3]| Mesh::new([(Axis::Dp, dp), (Axis::Cp, cp), (Axis::Tp, tp)]);
    degrees.into_iter().filter_map(|degrees| mesh(degrees).ok()).collect()
}

//! Elements of a parameter held by a rank. Arithmetic only.

use crate::Piece;
use std::ops::Range;

/// Returns, for each element that a rank holds of a parameter of this shape, its row-major index in the parameter, in the rank's storage
/// order.
///
/// ```
/// use meshstep_parallel3d::{Axis, Mesh, Placement, elements};
///
/// let mesh: Mesh = "tp=2".parse()?;
/// let columns = Placement::whole().cut(Axis::Tp, 1).pieces("w", &[2, 4], &mesh, &mesh.coordinate(1)?)?;
/// assert_eq!(elements(&[2, 4], &columns), [2, 3, 6, 7]);
/// # Ok::<(), meshstep_parallel3d::MeshError>(())
/// ```
pub fn elements(shape: &[usize], pieces: &[Piece]) -> Vec<usize> {
    let extent = |dim: usize| pieces.iter().map(|piece| piece.local[dim].end).max().unwrap_or(0);
    let local: Vec<usize> = (0..shape.len()).map(extent).collect();
    let mut held = vec![0; local.iter().product()];
    for piece in pieces {
        for (place, element) in indices(&local, &piece.local).into_iter().zip(indices(shape, &piece.global)) {
            held[place] = element;
        }
    }
    held
}

/// Returns the row-major indices, in a tensor of `shape`, of the elements within one range per dimension.
fn indices(shape: &[usize], ranges: &[Range<usize>]) -> Vec<usize> {
    shape.iter().zip(ranges).fold(vec![0], |outer, (extent, range)| {
        outer.iter().flat_map(|row| range.clone().map(move |i| row * extent + i)).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Axis, Mesh, Placement};

    /// Returns the elements that every rank holds of a parameter of this shape.
    fn held(placement: &Placement, shape: &[usize], mesh: &str) -> Vec<Vec<usize>> {
        let mesh: Mesh = mesh.parse().unwrap();
        let pieces =
            |rank: usize| placement.pieces("w", shape, &mesh, &mesh.coordinate(rank).unwrap()).unwrap();
        (0..mesh.world_size()).map(|rank| elements(shape, &pieces(rank))).collect()
    }

    #[test]
    fn blocks_of_columns_are_held_row_by_row() {
        let blocks = Placement::whole().cut_in_blocks(Axis::Tp, 1, [4, 2]);
        assert_eq!(held(&blocks, &[2, 6], "tp=2"), [[0, 1, 4, 6, 7, 10], [2, 3, 5, 8, 9, 11]]);
    }

    #[test]
    fn two_cuts_of_three_dimensions_hold_everything_once() {
        let twice = Placement::whole().cut(Axis::Tp, 2).cut(Axis::Cp, 0).reduced_over(Axis::Dp);
        let mut all: Vec<usize> = held(&twice, &[4, 3, 6], "tp=3,cp=2").concat();
        all.sort_unstable();
        assert_eq!(all, (0..72).collect::<Vec<_>>());
    }

    #[test]
    fn a_whole_parameter_is_held_in_order_and_so_is_a_single_number() {
        assert_eq!(held(&Placement::whole(), &[2, 2], "tp=1"), [[0, 1, 2, 3]]);
        assert_eq!(held(&Placement::whole(), &[], "tp=1"), [[0]]);
        assert_eq!(held(&Placement::whole(), &[0, 3], "tp=1"), [[0usize; 0]]);
    }
}

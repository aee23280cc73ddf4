//! A rank's position in a model on a mesh. Translates errors of the ranks as one group into coordinates of the mesh.

use crate::{Axes, Axis, Communicators, Coordinate, Differs, Error, Mesh, Model, Parameter};
use meshstep_shard::{Difference, VerifyError, WeightError};

/// Communicators of the mesh, coordinate of this rank, and the whole model.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) comms: Communicators,
    pub(crate) coordinate: Coordinate,
    pub(crate) model: Model,
}

impl Site {
    pub(crate) fn mesh(&self) -> &Mesh {
        self.comms.mesh()
    }

    /// Translates an error of the ranks as one group into the mesh's terms.
    pub(crate) fn located(&self, error: meshstep_shard::Error) -> Error {
        match error {
            meshstep_shard::Error::Differs(difference) => Error::Differs(Box::new(self.locate(*difference))),
            meshstep_shard::Error::Verify(VerifyError::NoMajority(difference)) => {
                Error::NoMajority(Box::new(self.locate(*difference)))
            }
            meshstep_shard::Error::Weights(WeightError::Apart { ranks, weights }) => {
                Error::Weights { ranks, axes: self.axes_between(ranks), weights }
            }
            other => other.into(),
        }
    }

    /// Returns the axes along which two ranks differ.
    fn axes_between(&self, ranks: [usize; 2]) -> Axes {
        let mesh = self.mesh();
        mesh.all()
            .iter()
            .filter(|&axis| mesh.seat(ranks[0], axis.into()) != mesh.seat(ranks[1], axis.into()))
            .collect()
    }

    /// Adds axes, coordinates and whole-parameter indices to a difference.
    pub(crate) fn locate(&self, difference: Difference) -> Differs {
        let odd = difference.odd();
        let all = difference.held.iter().map(|held| held.rank);
        let ranks: Vec<usize> = if odd.is_empty() { all.collect() } else { odd };
        let place = |rank: usize| self.mesh().coordinate(rank).unwrap_or_else(|_| self.coordinate.clone());
        let at: Vec<Coordinate> = ranks.into_iter().map(place).collect();
        let parameter = self.model.get(&difference.param);
        let found = parameter.zip(difference.element).zip(at.first());
        let index = found.and_then(|((parameter, element), at)| self.index(parameter, element, at));
        let element = index.as_ref().zip(parameter).map(|(index, parameter)| ravel(index, &parameter.shape));
        Differs { axes: self.axes_of(&difference), at, index, element, difference }
    }

    /// Returns the axes along which ranks of one group hold different hashes.
    fn axes_of(&self, difference: &Difference) -> Axes {
        let mesh = self.mesh();
        let hash = |rank: usize| difference.held.iter().find(|held| held.rank == rank).map(|held| held.hash);
        let parts = |axis: Axis| {
            difference.held.iter().any(|held| {
                let along = mesh.group(held.rank, axis).map(|group| group.ranks().collect::<Vec<_>>());
                let others = along.unwrap_or_default();
                others.into_iter().filter_map(hash).any(|other| other != held.hash)
            })
        };
        mesh.axes().iter().map(|&(axis, _)| axis).filter(|&axis| parts(axis)).collect()
    }

    /// Returns the indices, in the whole parameter, of element `element` of the part held by the rank at `at`.
    fn index(&self, parameter: &Parameter, element: usize, at: &Coordinate) -> Option<Vec<usize>> {
        let Parameter { name, shape, placement, .. } = parameter;
        let local = unravel(element, &placement.local_shape(name, shape, self.mesh()).ok()?);
        let pieces = placement.pieces(name, shape, self.mesh(), at).ok()?;
        let has = |piece: &&crate::Piece| piece.local.iter().zip(&local).all(|(range, i)| range.contains(i));
        let piece = pieces.iter().find(has)?;
        let parts = piece.global.iter().zip(&piece.local).zip(&local);
        Some(parts.map(|((global, own), i)| global.start + i - own.start).collect())
    }
}

fn unravel(element: usize, shape: &[usize]) -> Vec<usize> {
    let mut rest = element;
    let mut index: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&extent| {
            let i = rest % extent.max(1);
            rest /= extent.max(1);
            i
        })
        .collect();
    index.reverse();
    index
}

fn ravel(index: &[usize], shape: &[usize]) -> usize {
    index.iter().zip(shape).fold(0, |element, (i, extent)| element * extent + i)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_have_indices() {
        for element in 0..24 {
            assert_eq!(ravel(&unravel(element, &[2, 3, 4]), &[2, 3, 4]), element);
        }
        assert_eq!(unravel(13, &[2, 3, 4]), [1, 0, 1]);
        assert_eq!(unravel(0, &[]), [0; 0]);
    }
}

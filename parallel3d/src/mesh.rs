//! Which rank sits where: ranks to coordinates and back, and the ranks that share all coordinates but some. Arithmetic only.

use crate::{Axes, Axis, MeshError};
use std::fmt;
use std::str::FromStr;

/// Ranks arranged along named axes, in row-major order: the last axis is the one along which ranks are neighbours.
///
/// ```
/// use meshstep_parallel3d::{Axis, Mesh};
///
/// let mesh: Mesh = "tp=2,cp=2,dp=2".parse()?;
/// let coordinate = mesh.coordinate(5)?;
/// assert_eq!(coordinate.to_string(), "dp=1 cp=0 tp=1");
/// assert_eq!(mesh.rank(&coordinate), 5);
/// assert_eq!(mesh.group(5, Axis::Dp | Axis::Cp)?.ranks().collect::<Vec<_>>(), [1, 3, 5, 7]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    /// Outermost first, none twice, no degree 0.
    axes: Vec<(Axis, usize)>,
}

/// Where a rank sits along each axis of its mesh.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Coordinate(Vec<(Axis, usize)>);

/// Ranks that share all coordinates but those along some axes, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The rank whose free coordinates are all 0.
    first: usize,
    /// Degree and stride of each free axis, outermost first.
    free: Vec<(usize, usize)>,
}

impl Mesh {
    /// The axes with their degrees, outermost first, as PyTorch's `init_device_mesh` has them.
    pub fn new(axes: impl IntoIterator<Item = (Axis, usize)>) -> Result<Mesh, MeshError> {
        let mesh = Mesh { axes: axes.into_iter().collect() };
        let mut world_size = 1usize;
        for (i, &(axis, degree)) in mesh.axes.iter().enumerate() {
            if degree == 0 {
                return Err(MeshError::NoRanks { axis });
            }
            if mesh.axes[..i].iter().any(|&(other, _)| other == axis) {
                return Err(MeshError::AxisTwice { axis });
            }
            world_size = world_size.checked_mul(degree).ok_or(MeshError::TooManyRanks)?;
        }
        let parts = [Axis::DpReplicate, Axis::DpShard].into_iter().find(|&part| mesh.has(part));
        match parts.filter(|_| mesh.has(Axis::Dp)) {
            Some(part) => Err(MeshError::DpTwice { part }),
            None => Ok(mesh),
        }
    }

    /// The axes in Megatron's order, the one along which ranks are neighbours first: `"tp-cp-dp-pp"`. An axis without a degree
    /// has 1; one with another degree must be in the order.
    pub fn megatron(
        order: &str,
        degrees: impl IntoIterator<Item = (Axis, usize)>,
    ) -> Result<Mesh, MeshError> {
        let names: Vec<Axis> = order.split('-').map(Axis::from_str).collect::<Result<_, _>>()?;
        let mut axes: Vec<(Axis, usize)> = names.into_iter().rev().map(|axis| (axis, 1)).collect();
        let degrees: Vec<(Axis, usize)> = degrees.into_iter().collect();
        for (i, &(given, degree)) in degrees.iter().enumerate() {
            if degrees[..i].iter().any(|&(other, _)| other == given) {
                return Err(MeshError::AxisTwice { axis: given });
            }
            match axes.iter_mut().find(|(axis, _)| *axis == given) {
                Some((_, own)) => *own = degree,
                None if degree == 1 => {}
                None => return Err(MeshError::NotInOrder { axis: given, degree, order: order.to_owned() }),
            }
        }
        Mesh::new(axes)
    }

    /// The mesh, if it has `world_size` ranks.
    pub fn of(self, world_size: usize) -> Result<Mesh, MeshError> {
        match self.world_size() {
            ranks if ranks == world_size => Ok(self),
            ranks => Err(MeshError::WorldSize { mesh: self, ranks, world_size }),
        }
    }

    /// The axes with their degrees, outermost first.
    pub fn axes(&self) -> &[(Axis, usize)] {
        &self.axes
    }

    /// All ranks.
    pub fn world_size(&self) -> usize {
        self.axes.iter().map(|(_, degree)| degree).product()
    }

    /// The mesh of one replica: what `dp_replicate` repeats.
    pub fn replica(&self) -> Mesh {
        let axes = self.axes.iter().filter(|(axis, _)| *axis != Axis::DpReplicate);
        Mesh { axes: axes.copied().collect() }
    }

    /// Ranks along `axes` together; 1 along an axis the mesh does not have.
    pub fn degree(&self, axes: impl Into<Axes>) -> usize {
        let axes = self.resolve(axes);
        self.axes.iter().filter(|(axis, _)| axes.contains(*axis)).map(|(_, degree)| degree).product()
    }

    /// Those of `axes` that the mesh has; for `dp`, both of its parts where it is in two.
    pub fn resolve(&self, axes: impl Into<Axes>) -> Axes {
        let axes = axes.into();
        let parts = if axes.contains(Axis::Dp) { Axis::DpReplicate | Axis::DpShard } else { Axes::NONE };
        let wanted = axes | parts;
        self.axes.iter().map(|&(axis, _)| axis).filter(|&axis| wanted.contains(axis)).collect()
    }

    /// All axes.
    pub(crate) fn all(&self) -> Axes {
        self.axes.iter().map(|&(axis, _)| axis).collect()
    }

    /// Those of `axes` along which there are several ranks: the others make no difference.
    pub(crate) fn several(&self, axes: Axes) -> Axes {
        axes.iter().filter(|&axis| self.degree(axis) > 1).collect()
    }

    /// Where `rank` sits.
    pub fn coordinate(&self, rank: usize) -> Result<Coordinate, MeshError> {
        self.check(rank)?;
        let place = |(axis, degree, stride): (Axis, usize, usize)| (axis, rank / stride % degree);
        Ok(Coordinate(self.strides().map(place).collect()))
    }

    /// Where `coordinate` is along `axis`; for `dp` in two parts, along both together.
    pub fn place(&self, coordinate: &Coordinate, axis: Axis) -> usize {
        let axes = self.resolve(axis);
        let parts = self.axes.iter().filter(|(axis, _)| axes.contains(*axis));
        parts.fold(0, |place, &(axis, degree)| place * degree + coordinate.along(axis))
    }

    /// The rank that sits there. Coordinates along axes the mesh does not have do not count, missing ones are 0.
    ///
    /// # Panics
    /// If a coordinate is not below the axis' degree.
    pub fn rank(&self, coordinate: &Coordinate) -> usize {
        let part = |(axis, degree, stride): (Axis, usize, usize)| {
            let at = coordinate.along(axis);
            assert!(at < degree, "coordinate {at} along {axis}, which has {degree} ranks");
            at * stride
        };
        self.strides().map(part).sum()
    }

    /// The ranks that share `rank`'s coordinates but those along `axes`, itself among them.
    pub fn group(&self, rank: usize, axes: impl Into<Axes>) -> Result<Group, MeshError> {
        self.check(rank)?;
        let axes = self.resolve(axes);
        let (mut first, mut free) = (rank, Vec::new());
        for (_, degree, stride) in self.strides().filter(|&(axis, ..)| axes.contains(axis)) {
            first -= rank / stride % degree * stride;
            free.push((degree, stride));
        }
        Ok(Group { first, free })
    }

    /// Where `rank` is in its group along `axes`, which the mesh has.
    pub(crate) fn seat(&self, rank: usize, axes: Axes) -> usize {
        let along = self.strides().filter(|&(axis, ..)| axes.contains(axis));
        along.fold(0, |seat, (_, degree, stride)| seat * degree + rank / stride % degree)
    }

    /// All groups along `axes`, by their first ranks: every rank is in one.
    pub fn groups(&self, axes: impl Into<Axes>) -> impl Iterator<Item = Group> {
        let axes = self.resolve(axes);
        let group = move |rank| self.group(rank, axes).ok().filter(|group| group.first == rank);
        (0..self.world_size()).filter_map(group)
    }

    fn has(&self, axis: Axis) -> bool {
        self.axes.iter().any(|&(own, _)| own == axis)
    }

    fn check(&self, rank: usize) -> Result<(), MeshError> {
        let world_size = self.world_size();
        if rank < world_size { Ok(()) } else { Err(MeshError::NoSuchRank { rank, world_size }) }
    }

    /// Axis, degree and the distance between neighbours along it, outermost first.
    fn strides(&self) -> impl Iterator<Item = (Axis, usize, usize)> {
        let mut inner = self.world_size();
        self.axes.iter().map(move |&(axis, degree)| {
            inner /= degree;
            (axis, degree, inner)
        })
    }
}

/// `tp=2,cp=2,dp=2`: degrees by name, in any order of writing; nested as Megatron does by default, `tp-cp-dp-pp`.
impl FromStr for Mesh {
    type Err = MeshError;

    fn from_str(text: &str) -> Result<Mesh, MeshError> {
        let mut degrees: Vec<(Axis, usize)> = Vec::new();
        for part in text.split(',') {
            let unreadable = || MeshError::Unreadable { part: part.to_owned() };
            let (name, degree) = part.split_once('=').ok_or_else(unreadable)?;
            let axis: Axis = name.trim().parse()?;
            if degrees.iter().any(|&(other, _)| other == axis) {
                return Err(MeshError::AxisTwice { axis });
            }
            degrees.push((axis, degree.trim().parse().map_err(|_| unreadable())?));
        }
        degrees.sort_by_key(|&(axis, _)| axis);
        Mesh::new(degrees)
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes: Vec<String> = self.axes.iter().map(|(axis, degree)| format!("{axis}={degree}")).collect();
        f.pad(&if axes.is_empty() { "one rank".to_owned() } else { axes.join(",") })
    }
}

impl Coordinate {
    /// The place along `axis`: 0 along one that the mesh does not have, as `dp` where it is in two parts, along which
    /// [`Mesh::place`] tells.
    pub fn along(&self, axis: Axis) -> usize {
        self.0.iter().find(|&&(own, _)| own == axis).map_or(0, |&(_, at)| at)
    }

    /// The same with another place along `axis`, one that the mesh has.
    pub fn with(mut self, axis: Axis, at: usize) -> Coordinate {
        match self.0.iter_mut().find(|(own, _)| *own == axis) {
            Some((_, place)) => *place = at,
            None => self.0.push((axis, at)),
        }
        self
    }

    /// Whether it is 0 along all of `axes`: the one of its group that stands for all.
    pub fn is_first(&self, axes: impl Into<Axes>) -> bool {
        let axes = axes.into();
        let parts = if axes.contains(Axis::Dp) { Axis::DpReplicate | Axis::DpShard } else { Axes::NONE };
        (axes | parts).iter().all(|axis| self.along(axis) == 0)
    }
}

impl fmt::Display for Coordinate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places: Vec<String> = self.0.iter().map(|(axis, at)| format!("{axis}={at}")).collect();
        f.pad(&places.join(" "))
    }
}

impl Group {
    /// Ranks in it.
    #[allow(clippy::len_without_is_empty, reason = "a group has its own rank at least")]
    pub fn len(&self) -> usize {
        self.free.iter().map(|(degree, _)| degree).product()
    }

    /// Its ranks, ascending.
    pub fn ranks(&self) -> impl Iterator<Item = usize> {
        (0..self.len()).map(|place| self.rank(place))
    }

    /// The rank at `place`.
    ///
    /// # Panics
    /// If `place` is not below [`len`](Self::len).
    pub fn rank(&self, place: usize) -> usize {
        assert!(place < self.len(), "place {place} in a group of {}", self.len());
        let mut rest = place;
        let parts = self.free.iter().rev().map(|&(degree, stride)| {
            let at = rest % degree;
            rest /= degree;
            at * stride
        });
        self.first + parts.sum::<usize>()
    }

    /// Where `rank` is in it, if it is.
    pub fn place(&self, rank: usize) -> Option<usize> {
        let place = self.free.iter().fold(0, |place, &(degree, stride)| {
            place * degree + rank.saturating_sub(self.first) / stride % degree
        });
        (self.rank(place) == rank).then_some(place)
    }
}

//! Mesh arithmetic: rank to coordinate and back, and groups of ranks that share all other coordinates.

pub(crate) mod axis;
pub(crate) mod communicators;
pub(crate) mod differs;
pub(crate) mod site;

use crate::{Axes, Axis, MeshError};
use std::fmt;
use std::str::FromStr;

/// Ranks arranged along named axes, in row-major order: ranks are neighbours along the last axis.
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
    /// Axes, outermost first; no axis twice, no degree 0.
    axes: Vec<(Axis, usize)>,
}

/// Position of a rank along each axis of its mesh.
///
/// ```
/// use meshstep_parallel3d::{Axes, Axis, Coordinate, Group, Mesh, UnknownAxis};
///
/// let mesh: Mesh = "tp=2,dp=3".parse()?;
/// let at: Coordinate = mesh.coordinate(3)?;
/// assert_eq!((at.along(Axis::Dp), at.along(Axis::Tp)), (1, 1));
/// assert_eq!(mesh.rank(&at.with(Axis::Dp, 2)), 5);
/// let axes: Axes = Axis::Dp | Axis::Cp;
/// let group: Group = mesh.group(3, axes)?;
/// assert_eq!((group.ranks().collect::<Vec<_>>(), group.rank(2)), (vec![1, 3, 5], 5));
/// let unknown: Result<Axis, UnknownAxis> = "xp".parse();
/// assert_eq!(unknown.unwrap_err().name, "xp");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Coordinate(Vec<(Axis, usize)>);

/// Ranks that differ only along some axes, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Rank with all free coordinates 0.
    first: usize,
    /// Degree and stride of each free axis, outermost first.
    free: Vec<(usize, usize)>,
}

impl Mesh {
    /// Creates a mesh from axes with their degrees, outermost first, as in PyTorch's `init_device_mesh`.
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

    /// Creates a mesh with axes in Megatron's order, innermost first: `"tp-cp-dp-pp"`. An axis without a degree has degree 1; an axis
    /// with a degree above 1 must be in the order.
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

    /// Returns the mesh if it has `world_size` ranks.
    pub fn of(self, world_size: usize) -> Result<Mesh, MeshError> {
        match self.world_size() {
            ranks if ranks == world_size => Ok(self),
            ranks => Err(MeshError::WorldSize { mesh: self, ranks, world_size }),
        }
    }

    /// Returns the axes with their degrees, outermost first.
    pub fn axes(&self) -> &[(Axis, usize)] {
        &self.axes
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.axes.iter().map(|(_, degree)| degree).product()
    }

    /// Returns the mesh of one replica: all axes except `dp_replicate`.
    pub fn replica(&self) -> Mesh {
        let axes = self.axes.iter().filter(|(axis, _)| *axis != Axis::DpReplicate);
        Mesh { axes: axes.copied().collect() }
    }

    /// Returns the number of ranks along `axes` together. An axis that the mesh does not have counts as 1.
    pub fn degree(&self, axes: impl Into<Axes>) -> usize {
        let axes = self.resolve(axes);
        self.axes.iter().filter(|(axis, _)| axes.contains(*axis)).map(|(_, degree)| degree).product()
    }

    /// Returns the subset of `axes` that the mesh has. `dp` resolves to both of its parts if the mesh has them.
    pub fn resolve(&self, axes: impl Into<Axes>) -> Axes {
        let axes = axes.into();
        let parts = if axes.contains(Axis::Dp) { Axis::DpReplicate | Axis::DpShard } else { Axes::NONE };
        let wanted = axes | parts;
        self.axes.iter().map(|&(axis, _)| axis).filter(|&axis| wanted.contains(axis)).collect()
    }

    /// Returns all axes.
    pub(crate) fn all(&self) -> Axes {
        self.axes.iter().map(|&(axis, _)| axis).collect()
    }

    /// Returns the subset of `axes` with more than one rank; axes of one rank do not affect a group.
    pub(crate) fn several(&self, axes: Axes) -> Axes {
        axes.iter().filter(|&axis| self.degree(axis) > 1).collect()
    }

    /// Returns the coordinate of `rank`.
    pub fn coordinate(&self, rank: usize) -> Result<Coordinate, MeshError> {
        self.check(rank)?;
        let place = |(axis, degree, stride): (Axis, usize, usize)| (axis, rank / stride % degree);
        Ok(Coordinate(self.strides().map(place).collect()))
    }

    /// Returns the index of `coordinate` along `axis`. If the mesh splits `dp` into two parts, the index along `dp` spans both.
    pub fn place(&self, coordinate: &Coordinate, axis: Axis) -> usize {
        let axes = self.resolve(axis);
        let parts = self.axes.iter().filter(|(axis, _)| axes.contains(*axis));
        parts.fold(0, |place, &(axis, degree)| place * degree + coordinate.along(axis))
    }

    /// Returns the rank at `coordinate`. Coordinates along axes that the mesh does not have are ignored; missing ones are 0.
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

    /// Returns the group of `rank` along `axes`: the ranks that share all its other coordinates, including `rank`.
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

    /// Returns the index of `rank` in its group along `axes`, which the mesh must have.
    pub(crate) fn seat(&self, rank: usize, axes: Axes) -> usize {
        let along = self.strides().filter(|&(axis, ..)| axes.contains(axis));
        along.fold(0, |seat, (_, degree, stride)| seat * degree + rank / stride % degree)
    }

    /// Iterates over all groups along `axes`, ordered by their first ranks. Every rank is in exactly one.
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

    /// Iterates over axis, degree and rank distance between neighbours, outermost first.
    fn strides(&self) -> impl Iterator<Item = (Axis, usize, usize)> {
        let mut inner = self.world_size();
        self.axes.iter().map(move |&(axis, degree)| {
            inner /= degree;
            (axis, degree, inner)
        })
    }
}

/// Parses `tp=2,cp=2,dp=2`: degrees by name, written in any order, nested in Megatron's default order `tp-cp-dp-pp`.
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
    /// Returns the index along `axis`, or 0 if the mesh does not have it. `dp` counts as missing in a mesh with its two parts; use
    /// [`Mesh::place`] there.
    pub fn along(&self, axis: Axis) -> usize {
        self.0.iter().find(|&&(own, _)| own == axis).map_or(0, |&(_, at)| at)
    }

    /// Returns the coordinate with another index along `axis`, which the mesh must have.
    pub fn with(mut self, axis: Axis, at: usize) -> Coordinate {
        match self.0.iter_mut().find(|(own, _)| *own == axis) {
            Some((_, place)) => *place = at,
            None => self.0.push((axis, at)),
        }
        self
    }

    /// Returns true if the index is 0 along all of `axes`: the rank that represents its group.
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
    /// Returns the number of ranks in the group.
    #[allow(clippy::len_without_is_empty, reason = "a group has its own rank at least")]
    pub fn len(&self) -> usize {
        self.free.iter().map(|(degree, _)| degree).product()
    }

    /// Iterates over the ranks of the group, ascending.
    pub fn ranks(&self) -> impl Iterator<Item = usize> {
        (0..self.len()).map(|place| self.rank(place))
    }

    /// Returns the rank at index `place`.
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

    /// Returns the index of `rank` in the group, or `None` if it is not a member.
    pub fn place(&self, rank: usize) -> Option<usize> {
        let place = self.free.iter().fold(0, |place, &(degree, stride)| {
            place * degree + rank.saturating_sub(self.first) / stride % degree
        });
        (self.rank(place) == rank).then_some(place)
    }
}

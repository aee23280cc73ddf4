//! Named axes along which ranks are arranged.

use std::fmt;
use std::ops::BitOr;
use std::str::FromStr;

/// Axis of a mesh: one kind of parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Pipeline stages: each rank has its own parameters.
    Pp,
    /// Data: each rank has its own samples. In a mesh with `dp_replicate` and `dp_shard`, both of them together.
    Dp,
    /// Data, between groups that hold the same shards (HSDP).
    DpReplicate,
    /// Data, within a group that divides parameters or state.
    DpShard,
    /// Context: each rank has a part of every sequence.
    Cp,
    /// Tensors: each rank has a part of every large matrix.
    Tp,
}

impl Axis {
    /// All axes in the nesting order of Megatron and torchtitan, outermost first.
    pub const ALL: [Axis; 6] = [Axis::Pp, Axis::Dp, Axis::DpReplicate, Axis::DpShard, Axis::Cp, Axis::Tp];

    /// Returns the name of the axis in text form.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Pp => "pp",
            Axis::Dp => "dp",
            Axis::DpReplicate => "dp_replicate",
            Axis::DpShard => "dp_shard",
            Axis::Cp => "cp",
            Axis::Tp => "tp",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Error for a name that no axis has.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("no axis is called {name:?}; there are pp, dp, dp_replicate, dp_shard, cp and tp")]
pub struct UnknownAxis {
    /// Name that was given.
    pub name: String,
}

meshstep_tensor::debug_is_display!(UnknownAxis);

impl FromStr for Axis {
    type Err = UnknownAxis;

    fn from_str(name: &str) -> Result<Axis, UnknownAxis> {
        let found = Axis::ALL.into_iter().find(|axis| axis.name() == name);
        found.ok_or_else(|| UnknownAxis { name: name.to_owned() })
    }
}

/// Set of axes, such as `Axis::Dp | Axis::Cp`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Axes(u8);

impl Axes {
    /// Empty set.
    pub const NONE: Axes = Axes(0);

    /// Returns true if the set contains `axis`.
    pub fn contains(self, axis: Axis) -> bool {
        self.0 & (1 << axis as u8) != 0
    }

    /// Returns true if the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Iterates over the axes in the order of [`Axis::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Axis> {
        Axis::ALL.into_iter().filter(move |&axis| self.contains(axis))
    }

    /// Returns the set without `others`.
    pub fn without(self, others: impl Into<Axes>) -> Axes {
        Axes(self.0 & !others.into().0)
    }
}

impl From<Axis> for Axes {
    fn from(axis: Axis) -> Axes {
        Axes(1 << axis as u8)
    }
}

impl<A: Into<Axes>> FromIterator<A> for Axes {
    fn from_iter<I: IntoIterator<Item = A>>(axes: I) -> Axes {
        axes.into_iter().fold(Axes::NONE, |all, axes| all | axes)
    }
}

impl<A: Into<Axes>> BitOr<A> for Axis {
    type Output = Axes;

    fn bitor(self, other: A) -> Axes {
        Axes::from(self) | other
    }
}

impl<A: Into<Axes>> BitOr<A> for Axes {
    type Output = Axes;

    fn bitor(self, other: A) -> Axes {
        Axes(self.0 | other.into().0)
    }
}

impl fmt::Display for Axes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.iter().map(Axis::name).collect();
        f.pad(&if names.is_empty() { "no axis".to_owned() } else { names.join(" x ") })
    }
}

impl fmt::Debug for Axes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

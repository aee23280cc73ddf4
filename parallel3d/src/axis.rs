//! The axes ranks are arranged along, by name.

use std::fmt;
use std::ops::BitOr;
use std::str::FromStr;

/// A direction of a mesh, and what its ranks share among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Pipeline stages: each has parameters of its own.
    Pp,
    /// Data: each has samples of its own. Where a mesh has `dp_replicate` and `dp_shard`, both of them.
    Dp,
    /// Data, between groups that hold the same shards (HSDP).
    DpReplicate,
    /// Data, within a group that divides parameters or state.
    DpShard,
    /// Context: each has a part of every sequence.
    Cp,
    /// Tensors: each has a part of every large matrix.
    Tp,
}

impl Axis {
    /// All of them, in the order Megatron and torchtitan nest them: outermost first.
    pub const ALL: [Axis; 6] = [Axis::Pp, Axis::Dp, Axis::DpReplicate, Axis::DpShard, Axis::Cp, Axis::Tp];

    /// How it is written.
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

/// A name that no axis has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no axis is called {name:?}; there are pp, dp, dp_replicate, dp_shard, cp and tp")]
pub struct UnknownAxis {
    /// What was asked for.
    pub name: String,
}

impl FromStr for Axis {
    type Err = UnknownAxis;

    fn from_str(name: &str) -> Result<Axis, UnknownAxis> {
        let found = Axis::ALL.into_iter().find(|axis| axis.name() == name);
        found.ok_or_else(|| UnknownAxis { name: name.to_owned() })
    }
}

/// Some axes: `Axis::Dp | Axis::Cp`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Axes(u8);

impl Axes {
    /// No axis.
    pub const NONE: Axes = Axes(0);

    /// Whether `axis` is one of them.
    pub fn contains(self, axis: Axis) -> bool {
        self.0 & (1 << axis as u8) != 0
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Each of them, in the order of [`Axis::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Axis> {
        Axis::ALL.into_iter().filter(move |&axis| self.contains(axis))
    }

    /// These without `others`.
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

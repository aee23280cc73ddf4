//! The precision of parameters, masters and moments: a recipe that is checked, never inferred.

use crate::{Error, Groups};
use meshstep_optim::{NEAREST_RETENTION, Rounding};
use meshstep_tensor::DType;
use std::collections::BTreeSet;
use twox_hash::XxHash3_64;

/// Storage types of parameters and state. Gradients have a type of their own, [`Options::grads`](crate::Options).
///
/// | parameters | master | bytes of parameter and master |
/// |---|---|---|
/// | f32, f64 | none | 4, 8 |
/// | bf16, f16 | [`Master::F32`] | 2 + 4 |
/// | bf16 | [`Master::Remainder`] | 2 + 2 |
/// | bf16 | none, with [`Rounding::Stochastic`] | 2 |
///
/// A layout may mix types: each type takes the settings that apply to it, and a setting that applies to no parameter is refused.
/// Settings that would lose steps or decays are refused too: the error says why, and what would work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Precision {
    /// Master values from which 16-bit parameters are rounded.
    pub master: Master,
    /// Type of the state vectors.
    pub moments: Moments,
    /// Rounding of bf16 moments, and of bf16 parameters without a master.
    pub rounding: Rounding,
    /// Seed of stochastic rounding: one seed gives one result, for every stage, bucket length and number of ranks.
    pub seed: u64,
}

/// Where small steps accumulate if parameters have 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Master {
    /// The parameters themselves.
    #[default]
    None,
    /// An f32 copy, of which the parameters are the nearest numbers of their type.
    F32,
    /// The lower half of an f32 number; its upper half, rounded to nearest, is the bf16 parameter: 2 bytes instead of 4. The f32
    /// number is restored to the bit, with two exceptions: numbers half-way between two bf16 numbers (65,278 of 2^32) move by one
    /// unit in the last place of f32 towards the one they round to, and numbers above bf16's largest become infinite.
    /// [`meshstep_optim::remainder`] has the formula, and joins masters from [`ParamState::values`](crate::ParamState::values) and
    /// [`ParamState::master`](crate::ParamState::master).
    Remainder,
}

/// Type of the state vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Moments {
    /// The type updates are computed in: f64 for f64 parameters, else f32.
    #[default]
    Full,
    /// bf16.
    BF16,
}

/// Types of the vectors that belong to parameters of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    /// Type of the update's arithmetic.
    pub(crate) update: DType,
    pub(crate) master: Option<DType>,
    pub(crate) state: DType,
}

impl Precision {
    /// Returns the types for a parameter, or an error if this recipe does not fit its type.
    pub(crate) fn kept(&self, name: &str, dtype: DType) -> Result<Kept, Error> {
        let name = || name.to_owned();
        let master = match (dtype, self.master) {
            (DType::BF16 | DType::F16, Master::F32) => Some(DType::F32),
            (DType::BF16, Master::Remainder) => Some(DType::U16),
            (DType::F16, Master::Remainder) => return Err(Error::RemainderOfF16 { name: name() }),
            (DType::BF16, Master::None) if self.rounding == Rounding::Stochastic => None,
            (DType::BF16 | DType::F16, Master::None) => {
                let works = if dtype == DType::F16 { IN_F16 } else { IN_BF16 };
                return Err(Error::NeedsMaster { name: name(), dtype, works });
            }
            _ => None,
        };
        let update = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let state = match self.moments {
            Moments::Full => update,
            Moments::BF16 if dtype == DType::F64 => return Err(Error::NarrowF64 { name: name() }),
            Moments::BF16 => DType::BF16,
        };
        Ok(Kept { update, master, state })
    }

    /// Refuses settings that no parameter uses; `dtypes` are the types of the parameters.
    pub fn check_used(&self, dtypes: impl IntoIterator<Item = DType>) -> Result<(), Error> {
        let dtypes: BTreeSet<DType> = dtypes.into_iter().collect();
        let any = |has: fn(DType) -> bool| dtypes.iter().copied().any(has);
        let unused = |what, works| Err(Error::UnusedPrecision { what, works });
        let narrow = |d| matches!(d, DType::BF16 | DType::F16);
        let low = self.master == Master::None && any(|d| d == DType::BF16);
        match self.master {
            Master::F32 if !any(narrow) => unused("an f32 master of 16-bit parameters", "Master::None"),
            Master::Remainder if !any(|d| d == DType::BF16) => {
                unused("the remainders of bf16 parameters", "Master::None")
            }
            _ if self.rounding == Rounding::Stochastic && self.moments == Moments::Full && !low => {
                unused("stochastic rounding of bf16 moments or parameters", "Rounding::Nearest")
            }
            _ => Ok(()),
        }
    }

    /// Refuses rules with state that these moments cannot hold.
    pub(crate) fn check_rules(&self, groups: &Groups) -> Result<(), Error> {
        if self.moments == Moments::Full {
            return Ok(());
        }
        if groups.state().is_empty() {
            let (what, works) = ("bf16 moments of a rule with state", "Moments::Full");
            return Err(Error::UnusedPrecision { what, works });
        }
        let lossy = |retention: f64| self.rounding == Rounding::Nearest && retention > NEAREST_RETENTION;
        let rules = groups.groups.iter().map(|g| &g.rule);
        let lost = rules.map(|r| (r.name(), r.retention())).find(|&(_, retention)| lossy(retention));
        lost.map_or(Ok(()), |(rule, retention)| {
            let works = NEAREST_RETENTION;
            Err(meshstep_optim::Error::NearestState { rule, retention, works }.into())
        })
    }
}

/// Returns the key of a parameter's random numbers in stochastic rounding ([`Segment::key`](meshstep_optim::Segment::key)).
pub fn rounding_key(seed: u64, param: &str) -> u64 {
    XxHash3_64::oneshot_with_seed(seed, param.as_bytes())
}

const IN_BF16: &str = "`Master::F32`, `Master::Remainder` or `Rounding::Stochastic`";
const IN_F16: &str = "`Master::F32`";

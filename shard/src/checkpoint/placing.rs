//! What of a model a rank's parameters are.

use super::holding::Holding;
use meshstep_tensor::Param;
use std::collections::BTreeMap;

/// Tells what of the whole model this rank holds: for whoever cuts parameters.
pub trait Placing {
    /// The ranks, for people: `tp=2,dp=4`.
    fn mesh(&self) -> String;

    /// What this rank holds of a parameter; all of it, unless it is cut.
    fn holding(&self, param: &Param) -> Holding {
        Holding::whole(&shape(param))
    }

    /// Other names of parameters, and which they are names of.
    fn tied(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }
}

/// Ranks that all hold whole parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Alike {
    pub(crate) ranks: usize,
}

impl Placing for Alike {
    fn mesh(&self) -> String {
        format!("ranks={}", self.ranks)
    }
}

/// A parameter's, as it is on this rank.
pub(super) fn shape(param: &Param) -> Vec<u64> {
    param.shape().iter().map(|&extent| extent as u64).collect()
}

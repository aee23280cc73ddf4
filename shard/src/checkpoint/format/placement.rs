//! Placement of a rank's parameters in the whole model.

use super::local_pieces::LocalPieces;
use meshstep_tensor::Param;
use std::collections::BTreeMap;

/// Placement of local parameters in the whole model, implemented by the code that cuts parameters.
pub trait ModelPlacement {
    /// Describes the ranks, for people: `tp=2,dp=4`.
    fn mesh(&self) -> String;

    /// Returns the local part of a parameter; by default the whole parameter.
    fn holding(&self, param: &Param) -> LocalPieces {
        LocalPieces::whole(&shape(param))
    }

    /// Returns other names of parameters, each with the name of the parameter it denotes.
    fn tied(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }
}

/// Placement in which all ranks hold whole parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unsharded {
    pub(crate) ranks: usize,
}

impl ModelPlacement for Unsharded {
    fn mesh(&self) -> String {
        format!("ranks={}", self.ranks)
    }
}

/// Returns the local shape of a parameter.
pub(crate) fn shape(param: &Param) -> Vec<u64> {
    param.shape().iter().map(|&extent| extent as u64).collect()
}

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

impl<P: ModelPlacement + ?Sized> ModelPlacement for &P {
    fn mesh(&self) -> String {
        (**self).mesh()
    }

    fn holding(&self, param: &Param) -> LocalPieces {
        (**self).holding(param)
    }

    fn tied(&self) -> BTreeMap<String, String> {
        (**self).tied()
    }
}

/// Placement in which all ranks hold whole parameters; the default.
#[derive(Clone, Copy, Debug)]
pub struct Unsharded {
    /// Number of ranks.
    pub ranks: usize,
}

impl ModelPlacement for Unsharded {
    fn mesh(&self) -> String {
        format!("ranks={}", self.ranks)
    }
}

/// Placement of several groups or workers, each of which is placed like `inside`.
#[expect(missing_debug_implementations, reason = "placements need no Debug")]
pub struct Copies<'a> {
    /// `groups` or `workers`.
    pub of: &'static str,
    /// Number of groups or workers.
    pub count: usize,
    /// Placement of each.
    pub inside: Box<dyn ModelPlacement + 'a>,
}

impl ModelPlacement for Copies<'_> {
    fn mesh(&self) -> String {
        format!("{}={},{}", self.of, self.count, self.inside.mesh())
    }

    fn holding(&self, param: &Param) -> LocalPieces {
        self.inside.holding(param)
    }

    fn tied(&self) -> BTreeMap<String, String> {
        self.inside.tied()
    }
}

/// Returns the local shape of a parameter.
pub(crate) fn shape(param: &Param) -> Vec<u64> {
    param.shape().iter().map(|&extent| extent as u64).collect()
}

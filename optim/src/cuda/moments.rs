//! Kernel arguments of slow moments.

use super::Hyper;
use crate::engine::frame::Common;
use crate::engine::moments::Moments;

impl Moments {
    /// Returns the kernel family for this number of moments, with its arguments: betas, weights, the gradient's weight, and the rule's
    /// `own`.
    pub(crate) fn on_device(
        &self,
        families: [&'static str; Self::MAX],
        common: &Common,
        own: [f64; 2],
    ) -> Hyper {
        let (betas, weights) = (self.pairs.map(|(beta, _)| beta), self.pairs.map(|(_, weight)| weight));
        let given = [&betas[..], &weights, &[1.0 - self.sum()], &own].concat();
        Hyper::new(families[self.len - 1], common, &given)
    }
}

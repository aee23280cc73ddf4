//! Result of clipping a rank's own gradients before they are combined with other ranks'.

/// Result of clipping before the reduction, on this rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalClip {
    /// Norm of this rank's own gradients over all its micro-batches, unscaled; of the finite elements if some are not finite.
    pub norm: f64,
    /// Factor on the gradients; 1 if their norm was within the bound, or if some are not finite.
    pub coef: f64,
}

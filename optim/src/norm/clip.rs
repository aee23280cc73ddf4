//! Clipping by the global norm, as one factor in the update.

use crate::Error;

/// Keeps the factor finite at norm 0; PyTorch's value.
const EPS: f64 = 1e-6;

/// Returns `min(1, max_norm / (norm + 1e-6))`, the factor on every gradient that limits the norm to `max_norm`.
///
/// Same as PyTorch's `clip_grad_norm_`, except that the factor goes into `grad_scale` instead of a pass over the gradients. A norm beyond
/// f64 gives 0; NaN is refused.
///
/// ```
/// assert_eq!(meshstep_optim::clip_coef(0.5, 1.0)?, 1.0);
/// assert!((meshstep_optim::clip_coef(4.0, 1.0)? - 0.25).abs() < 1e-6);
/// # Ok::<(), meshstep_optim::Error>(())
/// ```
pub fn clip_coef(norm: f64, max_norm: f64) -> Result<f64, Error> {
    if !(max_norm.is_finite() && max_norm > 0.0) {
        return Err(Error::Scalar { name: "max_norm", value: max_norm, works: "a finite number > 0" });
    }
    if norm.is_nan() || norm < 0.0 {
        return Err(Error::Scalar { name: "norm", value: norm, works: "a norm: a number >= 0" });
    }
    Ok((max_norm / (norm + EPS)).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_norms_above_the_limit_are_cut() {
        assert_eq!(clip_coef(0.0, 1e-3), Ok(1.0));
        assert_eq!(clip_coef(3.0, 2.0), Ok(2.0 / (3.0 + 1e-6)));
        assert_eq!(clip_coef(f64::INFINITY, 2.0), Ok(0.0));
    }

    #[test]
    fn what_is_no_limit_or_no_norm_is_refused() {
        for max_norm in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(clip_coef(1.0, max_norm), Err(Error::Scalar { name: "max_norm", .. })));
        }
        for norm in [-1.0, f64::NAN, f64::NEG_INFINITY] {
            assert!(matches!(clip_coef(norm, 1.0), Err(Error::Scalar { name: "norm", .. })));
        }
    }
}

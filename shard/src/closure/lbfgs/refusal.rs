//! What L-BFGS cannot be made of.

use meshstep_tensor::DType;

/// Why options, an optimizer or its parameters are not for L-BFGS.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotForLbfgs {
    /// An option that only an optimizer's own step carries out.
    #[error("L-BFGS takes no {option}: it reads gradients as they were combined; leave it at its default")]
    Option {
        /// The option.
        option: &'static str,
    },
    /// Weights, of which a line search knows nothing.
    #[error("L-BFGS takes no weights; use Combine::Sum and divide losses and gradients by the total weight")]
    Weights,
    /// An optimizer whose own rule has state, which would never be used.
    #[error(
        "L-BFGS over an optimizer of {rule}, which keeps {state:?} beside it; make that optimizer with Sgd::default()"
    )]
    State {
        /// The rule.
        rule: &'static str,
        /// Its state.
        state: &'static [&'static str],
    },
    /// Parameters that one vector cannot hold.
    #[error("L-BFGS on {first} and {other} parameters; all must be of one type, f32 or f64")]
    Types {
        /// The first type updated.
        first: DType,
        /// Another.
        other: DType,
    },
}

//! Refusals of L-BFGS: options, optimizers and parameters it does not work with.

use meshstep_tensor::DType;

/// Reason why L-BFGS does not work with an option, an optimizer or its parameters.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotForLbfgs {
    /// Only an optimizer's own step carries out the option.
    #[error("L-BFGS takes no {option}: it reads gradients as they were combined; leave it at its default")]
    Option {
        /// The option.
        option: &'static str,
    },
    /// A line search does not support weights.
    #[error("L-BFGS takes no weights; use Combine::Sum and divide losses and gradients by the total weight")]
    Weights,
    /// The optimizer's own rule has state, which would never be used.
    #[error(
        "L-BFGS needs an optimizer without state, and {rule} keeps {state:?}; build the optimizer with Sgd::default()"
    )]
    State {
        /// The rule.
        rule: &'static str,
        /// Its state.
        state: &'static [&'static str],
    },
    /// One vector cannot hold the parameters.
    #[error("L-BFGS on {first} and {other} parameters; all must be of one type, f32 or f64")]
    Types {
        /// Type of the first parameters.
        first: DType,
        /// Another type.
        other: DType,
    },
}

meshstep_tensor::debug_is_display!(NotForLbfgs);

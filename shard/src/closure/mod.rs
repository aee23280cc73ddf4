//! Steps that evaluate a closure (L-BFGS, runs to a tolerance), and the trait of everything that takes steps.

pub(crate) mod lbfgs;
pub(crate) mod minimize;
pub(crate) mod step;

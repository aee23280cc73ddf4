//! Steps that evaluate a closure: L-BFGS, and runs to a tolerance.

pub(crate) mod lbfgs;
pub(crate) mod minimize;

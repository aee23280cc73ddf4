//! Update rules, one folder each: the formula, its scalar reference, SIMD bodies and kernels.

pub(crate) mod adagrad;
pub(crate) mod adam;
pub(crate) mod adopt;
pub(crate) mod lamb;
pub(crate) mod lars;
pub(crate) mod lion;
pub(crate) mod matrix_rule;
pub(crate) mod muon;
pub(crate) mod qhadamw;
pub(crate) mod rmsprop;
pub(crate) mod schedulefree;
pub(crate) mod sgd;
pub(crate) mod uncorrected;

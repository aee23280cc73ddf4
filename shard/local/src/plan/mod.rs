//! Plans of exchanges as data: fragments, timing and selections, checked and counted without ranks.

mod check;
mod describe;
pub(crate) mod local_plan;
pub(crate) mod packing;
pub(crate) mod param_spec;
pub(crate) mod presets;
pub(crate) mod select;
pub(crate) mod timing;
pub(crate) mod traffic;

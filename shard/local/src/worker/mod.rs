//! A worker: an optimizer that steps and exchanges by a plan, and continues while workers join and leave.

mod elastic;
pub(crate) mod optimizer;
mod regroup;
mod step;

//! Settings of an optimizer: options, precision, parameter groups, schedules, loss scales, fault injection.

pub(crate) mod fault;
pub(crate) mod loss_scale;
pub(crate) mod options;
pub(crate) mod param_groups;
pub(crate) mod precision;
pub(crate) mod schedule;
pub(crate) mod selection;

//! Settings of an optimizer: options, precision, parameter groups, preemption, schedules, loss scales, fault injection.

pub(crate) mod digest;
pub(crate) mod fault;
pub(crate) mod hidden_matrices;
pub(crate) mod mixed_rules;
pub(crate) mod options;
pub(crate) mod param_groups;
pub(crate) mod precision;
pub(crate) mod preemption;
pub(crate) mod quote;
pub(crate) mod schedule;
pub(crate) mod selection;
pub(crate) mod slots;
pub(crate) mod stage;

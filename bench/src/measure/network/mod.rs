//! Workers of `bench network`: processes in network namespaces of their own, joined by links of a limited rate.

mod fleet;
mod namespaces;
pub(crate) mod worker;

pub(crate) use fleet::{Fleet, Places};
pub(crate) use namespaces::probe;

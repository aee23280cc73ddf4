//! Membership over TCP: the arbiter as a service, and its workers as callers.

mod arbiter;
mod worker;

pub use arbiter::Service;
pub use worker::{Caller, Remote};

//! Membership over TCP: the arbiter as a service, its workers as callers, and a standby that keeps a copy of its log.

mod arbiter;
mod connections;
#[cfg(unix)]
mod contact;
mod dial;
pub(crate) mod protocol;
mod standby;
mod worker;

pub use arbiter::Service;
#[cfg(unix)]
pub use contact::Contact;
pub use standby::{Standby, StandbyCopy};
pub use worker::{Caller, Remote};

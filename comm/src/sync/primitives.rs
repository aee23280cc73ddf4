//! Primitives of the standard library. Models compile the files that name this module with loom's in their place.

pub(super) use std::sync::atomic::{AtomicU32, Ordering};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};

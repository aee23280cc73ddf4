//! Primitives of the standard library. A model compiles the file that names this module with loom's in their place.

pub(super) use std::sync::atomic::{AtomicU64, Ordering};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};
pub(super) use std::{hint, thread};

/// Turns of a caller that waits for its helpers before it sleeps: the last part of a helper ends within microseconds, and waking a
/// thread takes longer.
pub(super) const TURNS: usize = 2_000;

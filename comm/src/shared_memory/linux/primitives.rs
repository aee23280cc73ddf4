//! Atomic words of the standard library. A model compiles the file that names this module with loom's in their place.

pub(super) use std::sync::atomic::{AtomicU64, Ordering, fence};

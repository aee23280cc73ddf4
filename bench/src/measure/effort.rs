//! Amount of measuring: quick or full.

/// Amount of measuring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    pub(crate) quick: bool,
}

impl Effort {
    /// Returns `quick` for quick runs, else `full`.
    pub(crate) fn pick<T>(self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }
}

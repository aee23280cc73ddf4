//! Where work is ordered.

/// An order of work on one device.
///
/// On CPU work is done when the call returns, so the queue holds nothing; it is in every signature so that the same
/// code orders work on a device's stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Queue(());

impl Queue {
    /// The CPU's queue: work is done when the call that does it returns.
    pub const fn cpu() -> Self {
        Queue(())
    }
}

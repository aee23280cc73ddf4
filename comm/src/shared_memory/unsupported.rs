//! Systems without memory that can be sealed.

use super::{MeetError, RingBytes};
use crate::p2p::transport::Transport;
use std::time::Duration;

/// Listener of a system without shared memory: there is none.
#[derive(Debug)]
pub(crate) enum MemoryListener {}

impl MemoryListener {
    /// Refuses.
    pub(crate) fn open(_rings: RingBytes) -> Result<Self, MeetError> {
        Err(MeetError::Unsupported)
    }

    /// Returns the card of a listener.
    pub(crate) fn card(&self) -> Vec<u8> {
        match *self {}
    }

    /// Meets other ranks.
    pub(crate) fn connect(
        self,
        _rank: usize,
        _cards: &[Vec<u8>],
        _within: Duration,
        _hopeless: impl Fn() -> bool,
    ) -> Result<Box<dyn Transport>, MeetError> {
        match self {}
    }
}

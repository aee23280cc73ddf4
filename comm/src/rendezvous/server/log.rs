//! Messages to all ranks in one order, by numbers.

use std::collections::VecDeque;
use std::sync::Arc;

/// Memory of a message beside its bytes.
const OVERHEAD: usize = 64;

/// The messages that some rank has not received.
#[derive(Debug, Default)]
pub(super) struct MessageLog {
    messages: VecDeque<Arc<[u8]>>,
    begin: usize,
    bytes: usize,
}

impl MessageLog {
    /// Memory of the messages.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of the first message: earlier ones have been sent to all ranks.
    #[cfg(test)]
    pub(super) fn begin(&self) -> usize {
        self.begin
    }

    /// Returns the number after the last message.
    pub(super) fn end(&self) -> usize {
        self.begin + self.messages.len()
    }

    pub(super) fn push(&mut self, message: Arc<[u8]>) {
        self.bytes += message.len() + OVERHEAD;
        self.messages.push_back(message);
    }

    /// Returns the messages from number `from`, which has not been dropped.
    pub(super) fn since(&self, from: usize) -> impl Iterator<Item = &Arc<[u8]>> {
        self.messages.range(from - self.begin..)
    }

    /// Drops the messages before number `sent`.
    pub(super) fn trim(&mut self, sent: usize) {
        let dropped = self.messages.drain(..sent.saturating_sub(self.begin));
        let (count, bytes) =
            dropped.fold((0, 0), |(count, bytes), message| (count + 1, bytes + message.len() + OVERHEAD));
        self.begin += count;
        self.bytes -= bytes;
    }
}

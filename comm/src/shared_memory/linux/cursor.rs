//! Positions in a stream. Positions of a peer are untrusted: each is compared with the possible ones. Arithmetic alone.

use std::cell::Cell;

/// A peer published a position that no honest peer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Impossible;

/// This rank's place in a stream that a peer writes.
#[derive(Debug)]
pub(super) struct ReadCursor {
    capacity: u64,
    /// Position up to which bytes are known to have arrived.
    seen: Cell<u64>,
    read: u64,
}

impl ReadCursor {
    pub(super) fn new(capacity: usize) -> Self {
        ReadCursor { capacity: capacity as u64, seen: Cell::new(0), read: 0 }
    }

    /// Takes the writer's position, and returns true if it is a new one.
    pub(super) fn advance(&self, written: u64) -> Result<bool, Impossible> {
        let seen = self.seen.get();
        if written < seen || written - self.read > self.capacity {
            return Err(Impossible);
        }
        self.seen.set(written);
        Ok(written != seen)
    }

    /// Number of bytes that have arrived and are not consumed.
    pub(super) fn ready(&self) -> usize {
        (self.seen.get() - self.read) as usize
    }

    /// Position of the first byte that is not consumed.
    pub(super) fn position(&self) -> u64 {
        self.read
    }

    /// Consumes `len` bytes and returns the new position.
    ///
    /// # Panics
    /// If fewer have arrived.
    pub(super) fn consume(&mut self, len: usize) -> u64 {
        assert!(len <= self.ready(), "{len} bytes consumed, {} have arrived", self.ready());
        self.read += len as u64;
        self.read
    }
}

/// This rank's place in a stream that it writes.
#[derive(Debug)]
pub(super) struct WriteCursor {
    capacity: u64,
    written: u64,
    /// Smallest position that its readers are known to have.
    acked: u64,
    /// True if the last write was cut short.
    pub(super) short: bool,
}

impl WriteCursor {
    pub(super) fn new(capacity: usize) -> Self {
        WriteCursor { capacity: capacity as u64, written: 0, acked: 0, short: false }
    }

    /// Number of bytes that fit.
    pub(super) fn room(&self) -> usize {
        (self.capacity - (self.written - self.acked)) as usize
    }

    pub(super) fn position(&self) -> u64 {
        self.written
    }

    /// Adds `len` written bytes and returns the new position.
    pub(super) fn advance(&mut self, len: usize) -> u64 {
        assert!(len <= self.room(), "{len} bytes written into {}", self.room());
        self.written += len as u64;
        self.written
    }

    /// Takes the smallest position of the readers, each of which passed [`AckCursor::advance`]; returns true if it is a new one.
    pub(super) fn acknowledge(&mut self, acked: u64) -> bool {
        let before = self.acked;
        self.acked = acked;
        acked != before
    }
}

/// Position of one reader in a stream that this rank writes.
#[derive(Debug, Default)]
pub(super) struct AckCursor {
    acked: u64,
}

impl AckCursor {
    /// Takes the reader's position.
    pub(super) fn advance(&mut self, acked: u64, written: u64) -> Result<(), Impossible> {
        if acked < self.acked || acked > written {
            return Err(Impossible);
        }
        self.acked = acked;
        Ok(())
    }

    pub(super) fn position(&self) -> u64 {
        self.acked
    }
}

#[cfg(test)]
mod tests {
    use super::{AckCursor, Impossible, ReadCursor, WriteCursor};

    #[test]
    fn a_reader_takes_no_position_but_the_possible_ones() {
        let mut cursor = ReadCursor::new(100);
        assert_eq!(cursor.advance(0), Ok(false));
        assert_eq!(cursor.advance(101), Err(Impossible), "more than the ring");
        assert_eq!(cursor.advance(70), Ok(true));
        assert_eq!(cursor.advance(69), Err(Impossible), "backwards");
        assert_eq!(cursor.consume(50), 50);
        assert_eq!(cursor.ready(), 20);
        assert_eq!(cursor.advance(150), Ok(true));
        assert_eq!(cursor.advance(151), Err(Impossible));
        assert_eq!(cursor.advance(u64::MAX), Err(Impossible));
        assert_eq!(cursor.ready(), 100);
    }

    #[test]
    fn a_writer_takes_no_acknowledgement_but_the_possible_ones() {
        let mut writer = WriteCursor::new(100);
        writer.advance(60);
        let mut ack = AckCursor::default();
        assert_eq!(ack.advance(61, writer.position()), Err(Impossible), "more than written");
        assert_eq!(ack.advance(40, writer.position()), Ok(()));
        assert_eq!(ack.advance(39, writer.position()), Err(Impossible), "backwards");
        assert!(writer.acknowledge(ack.position()));
        assert!(!writer.acknowledge(ack.position()));
        assert_eq!(writer.room(), 80);
    }
}

//! Outgoing half of a stream: bytes are copied into tiles, and a tile that is full, or flushed, is a message.

use super::calls::{CallFault, Calls, Requests};
use super::tiles::{TILE, TILES, Tiles};
use std::ffi::c_int;

/// Stream to one rank.
#[derive(Debug)]
pub(super) struct Outgoing {
    /// Slot of the first tile's request.
    first_slot: usize,
    tiles: Tiles,
    /// Rank in the job, and tag of the messages.
    address: (usize, c_int),
    /// Tile that is filled next.
    head: usize,
    /// Bytes in that tile.
    filled: usize,
    end: TileEnd,
}

/// State of the end of a stream, which is a message without bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TileEnd {
    Open,
    Wanted,
    Sent,
}

impl Outgoing {
    /// Opens a stream. Its first message is `announcement`, sent under `announced_under`.
    pub(super) fn open(
        calls: &Calls,
        requests: &mut Requests,
        (to, tag): (usize, c_int),
        (announcement, announced_under): (&[u8], c_int),
    ) -> Result<Self, CallFault> {
        let first_slot = requests.grow(TILES);
        let mut stream = Outgoing {
            first_slot,
            tiles: Tiles::new(),
            address: (to, tag),
            head: 0,
            filled: 0,
            end: TileEnd::Open,
        };
        stream.append(announcement);
        stream.post(calls, requests, announced_under)?;
        Ok(stream)
    }

    /// Copies as many bytes as free tiles hold, sends the full ones, and returns the number of bytes.
    pub(super) fn write(
        &mut self,
        calls: &Calls,
        requests: &mut Requests,
        bytes: &[u8],
    ) -> Result<usize, CallFault> {
        let mut written = 0;
        while written < bytes.len() && self.has_room(requests) {
            written += self.append(&bytes[written..]);
            if self.filled == TILE {
                self.post(calls, requests, self.address.1)?;
            }
        }
        Ok(written)
    }

    /// Sends what is in the unfinished tile, and then the end of the stream if it is wanted. Returns true if it sent anything.
    pub(super) fn flush(&mut self, calls: &Calls, requests: &mut Requests) -> Result<bool, CallFault> {
        let mut sent = false;
        while self.has_room(requests) && (self.filled > 0 || self.end == TileEnd::Wanted) {
            if self.filled == 0 {
                self.end = TileEnd::Sent;
            }
            self.post(calls, requests, self.address.1)?;
            sent = true;
        }
        Ok(sent)
    }

    /// Ends the stream behind the bytes that were written.
    pub(super) fn finish(&mut self) {
        if self.end == TileEnd::Open {
            self.end = TileEnd::Wanted;
        }
    }

    /// Returns true if every byte and the end of the stream have reached the other rank.
    pub(super) fn is_finished(&self, requests: &Requests) -> bool {
        self.end == TileEnd::Sent && (0..TILES).all(|tile| requests.is_free(self.first_slot + tile))
    }

    fn has_room(&self, requests: &Requests) -> bool {
        requests.is_free(self.first_slot + self.head)
    }

    /// Copies bytes into the unfinished tile, which has no message under way, and returns their number.
    fn append(&mut self, bytes: &[u8]) -> usize {
        // SAFETY: the callers have asked `has_room`, or the stream is new: no message is under way in this tile.
        let room = unsafe { &mut self.tiles.bytes_mut(self.head)[self.filled..] };
        let len = room.len().min(bytes.len());
        room[..len].copy_from_slice(&bytes[..len]);
        self.filled += len;
        len
    }

    /// Sends the unfinished tile as it is.
    fn post(&mut self, calls: &Calls, requests: &mut Requests, tag: c_int) -> Result<(), CallFault> {
        let (slot, address) = (self.first_slot + self.head, (self.address.0, tag));
        // SAFETY: no message is under way in this tile.
        let message: *const [u8] = unsafe { &self.tiles.bytes(self.head)[..self.filled] };
        self.head = (self.head + 1) % TILES;
        self.filled = 0;
        // SAFETY: the tile is written again only when its slot is free, and streams with a slot in use are not freed (`GroupStreams`).
        unsafe { calls.send(message, address, requests, slot) }
    }
}

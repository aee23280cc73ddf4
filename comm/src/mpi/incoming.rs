//! IncomingTiles half of a stream: posted receives fill tiles, which are read in the order of the messages.

use super::calls::{CallFault, Calls, Requests};
use super::tiles::{TILES, Tiles};
use std::ffi::c_int;

/// Stream from one rank.
#[derive(Debug)]
pub(super) struct IncomingTiles {
    /// Slot of the first tile's request.
    first_slot: usize,
    tiles: Tiles,
    /// Rank in the job, and tag of the messages.
    address: (usize, c_int),
    /// Tile of the oldest message.
    head: usize,
    /// Bytes of it that have been consumed.
    consumed: usize,
    /// Bytes of the message in each tile, once it has arrived.
    arrived: [Option<usize>; TILES],
    ended: bool,
}

impl IncomingTiles {
    /// Opens a stream that the other rank has announced.
    pub(super) fn open(
        calls: &Calls,
        requests: &mut Requests,
        address: (usize, c_int),
    ) -> Result<Self, CallFault> {
        let (first_slot, tiles) = (requests.grow(TILES), Tiles::new());
        let stream = IncomingTiles {
            first_slot,
            tiles,
            address,
            head: 0,
            consumed: 0,
            arrived: [None; TILES],
            ended: false,
        };
        for tile in 0..TILES {
            stream.post(calls, requests, tile)?;
        }
        Ok(stream)
    }

    /// Index of the tile with request `slot`, if it is one of this stream.
    pub(super) fn tile_of(&self, slot: usize) -> Option<usize> {
        slot.checked_sub(self.first_slot).filter(|&tile| tile < TILES)
    }

    /// Notes that the message of a tile has arrived; after the end of the stream, that its receive was cancelled.
    pub(super) fn arrive(&mut self, tile: usize, len: usize) {
        if !self.ended {
            self.arrived[tile] = Some(len);
        }
    }

    /// Returns the bytes of the oldest message that have not been consumed.
    pub(super) fn bytes(&self) -> &[u8] {
        match self.arrived[self.head] {
            // SAFETY: the message of this tile has arrived and the next receive is not posted before it is consumed.
            Some(len) => unsafe { &self.tiles.bytes(self.head)[self.consumed..len] },
            None => &[],
        }
    }

    /// Consumes bytes of the oldest message. A tile without further bytes is posted again.
    pub(super) fn consume(
        &mut self,
        calls: &Calls,
        requests: &mut Requests,
        len: usize,
    ) -> Result<(), CallFault> {
        let left = self.bytes().len();
        assert!(len <= left, "{len} bytes cannot be consumed: {left} have arrived");
        self.consumed += len;
        if len < left || self.arrived[self.head].is_none() {
            return Ok(());
        }
        let tile = self.head;
        self.arrived[tile] = None;
        (self.head, self.consumed) = ((tile + 1) % TILES, 0);
        self.post(calls, requests, tile)
    }

    /// Ends the stream if its oldest message is the end, and asks for the end of the posted receives. Returns true if it has ended.
    pub(super) fn end(&mut self, calls: &Calls, requests: &mut Requests) -> Result<bool, CallFault> {
        if !self.ended && self.arrived[self.head] == Some(0) {
            self.ended = true;
            self.arrived = [None; TILES];
            (0..TILES).try_for_each(|tile| calls.cancel(requests, self.first_slot + tile))?;
        }
        Ok(self.ended)
    }

    /// Returns true if the stream has ended and MPI accesses none of its tiles.
    pub(super) fn is_finished(&self, requests: &Requests) -> bool {
        self.ended && (0..TILES).all(|tile| requests.is_free(self.first_slot + tile))
    }

    fn post(&self, calls: &Calls, requests: &mut Requests, tile: usize) -> Result<(), CallFault> {
        let slot = self.first_slot + tile;
        // SAFETY: the tile is not read before `arrive`, and streams with a slot in use are not freed (`GroupStreams`).
        unsafe {
            calls.receive(self.tiles.whole(tile), (Some(self.address.0), self.address.1), requests, slot)
        }
    }
}

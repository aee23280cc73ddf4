//! Operations on small buffers: each rank's bytes travel with its call, and every rank computes its result from all of them.

use super::links::Links;
use super::memory::OpMemory;
use crate::communicator::stats::chunk;
use crate::group::fold::{TileMemory, Tiles, fold};
use crate::{Action, Called, Reduction};
use std::ops::Range;
use std::ptr::NonNull;

/// Largest buffer that travels with the call, in bytes.
pub(super) const MOST_BYTES: usize = 32 << 10;
/// Largest total of bytes that a rank sends so: with many ranks the bytes of a collective in chunks are fewer.
const MOST_SENT: usize = 96 << 10;

/// Returns true if the bytes travel with the call. All ranks with equal calls decide alike.
pub(super) fn is_small(called: &Called, world_size: usize) -> bool {
    let bytes = called.len * called.dtype.size();
    let copies = if called.action.peer().is_some() { 1 } else { world_size - 1 };
    called.action.moves_data() && bytes <= MOST_BYTES && bytes * copies <= MOST_SENT
}

/// Returns the bytes of chunk `index`.
pub(super) fn chunk_bytes(called: &Called, world_size: usize, index: usize) -> Range<usize> {
    let (range, size) = (chunk(called.len, world_size, index), called.dtype.size());
    range.start * size..range.end * size
}

/// Returns the bytes that rank `from` sends with its call to rank `to`, or to its audience.
pub(super) fn payload(called: &Called, world_size: usize, from: usize, to: Option<usize>) -> Range<usize> {
    let whole = 0..called.len * called.dtype.size();
    match called.action {
        _ if !is_small(called, world_size) => 0..0,
        Action::AllGather => chunk_bytes(called, world_size, from),
        Action::Broadcast { root } if root != from => 0..0,
        Action::ReduceScatter(_) | Action::AllToAll => {
            to.map_or(whole, |to| chunk_bytes(called, world_size, to))
        }
        Action::Recv { .. } => 0..0,
        _ => whole,
    }
}

/// Writes the result into the buffer, once all payloads have arrived.
///
/// # Safety
/// The operation of `memory` runs, and nothing else accesses the buffer.
pub(super) unsafe fn finish(links: &Links, called: &Called, memory: &OpMemory, tiles: &mut Tiles) {
    let (me, n) = (links.rank, links.world_size());
    match called.action {
        // SAFETY: the caller's promise.
        Action::AllReduce(reduction) => unsafe {
            reduce(links, 0..memory.bytes(), memory, reduction, tiles);
        },
        // SAFETY: the caller's promise.
        Action::ReduceScatter(reduction) => unsafe {
            reduce(links, chunk_bytes(called, n, me), memory, reduction, tiles);
        },
        Action::AllGather => {
            for from in links.others() {
                copy(links, from, 0, memory, chunk_bytes(called, n, from));
            }
        }
        Action::AllToAll => {
            let mine = chunk_bytes(called, n, me);
            for from in links.others() {
                let start = if payload_len(links, from) > mine.len() { mine.start } else { 0 };
                copy(links, from, start, memory, chunk_bytes(called, n, from));
            }
        }
        Action::Broadcast { root: from } if from != me => copy(links, from, 0, memory, 0..memory.bytes()),
        Action::Recv { from } => copy(links, from, 0, memory, 0..memory.bytes()),
        _ => {}
    }
}

fn received(links: &Links, from: usize) -> &[u8] {
    let payload = links.peers[from].inbox_with_call().and_then(|inbox| inbox.payload());
    payload.unwrap_or_default()
}

fn payload_len(links: &Links, from: usize) -> usize {
    received(links, from).len()
}

/// Copies bytes from `start` on of rank `from`'s payload into the buffer.
fn copy(links: &Links, from: usize, start: usize, memory: &OpMemory, into: Range<usize>) {
    let bytes = &received(links, from)[start..start + into.len()];
    // SAFETY: the contract of `finish`, the only caller: the operation runs, and this is the only access to its buffer.
    unsafe { memory.slice_mut(into) }.copy_from_slice(bytes);
}

/// Reduces bytes `range` of all ranks. A payload is the whole buffer, or the range alone.
///
/// # Safety
/// As for [`finish`].
unsafe fn reduce(
    links: &Links,
    range: Range<usize>,
    memory: &OpMemory,
    reduction: Reduction,
    tiles: &mut Tiles,
) {
    tiles.from.clear();
    for from in 0..links.world_size() {
        let tile = if from == links.rank {
            memory.address(range.start)
        } else {
            let bytes = received(links, from);
            let start = if bytes.len() > range.len() { range.start } else { 0 };
            NonNull::from(&bytes[start..start + range.len()]).cast()
        };
        tiles.from.push(tile);
    }
    // SAFETY: each payload has been sliced to the range's length, this rank's tile is the range itself, and the caller promises that
    // nothing else accesses the buffer.
    unsafe { fold((tiles, TileMemory::Cached), memory.tile(range), reduction) }
}

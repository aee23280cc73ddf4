//! Operations on registered memory: ranks of one host read each other's buffers where they lie.
//!
//! Every rank reads the chunks that it needs from the others' memory and writes its own memory alone. It announces the part of its
//! chunk that is reduced or written, which the others may copy from then on, and then that it reads no more. An operation has ended when all
//! ranks read no more, so no buffer goes back to its caller while another rank reads it.
//!
//! A rank that fails writes that to the others before its buffer goes back. So a rank looks for failures after its last read: a
//! result is valid only if no other rank had failed by then.

use super::cause::{OpWindow, Progress, WindowRange};
use super::engine::{Engine, Running};
use super::failure::Stop;
use super::links::Links;
use super::memory::OpMemory;
use super::pace::Pace;
use super::small::chunk_bytes;
use crate::group::chunk_writer::ChunkWriter;
use crate::group::fold::{FoldInto, TileMemory, Tiles, fold};
use crate::group::verdict::Party;
use crate::{Action, Called, Error, Reduction};
use meshstep_tensor::copy_bytes_non_temporal;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering::SeqCst, fence};

/// Bytes that a rank reduces or copies between looks at its streams.
const PORTION: usize = 256 << 10;
/// Bytes that a rank reduces before it has copied as many of the other chunks: these are then in the cache that the cores share.
const AHEAD: usize = 1 << 20;
/// Total bytes of the buffers from which copies bypass the cache, which would not keep them.
const NON_TEMPORAL_FROM: usize = 32 << 20;

/// Work that is left of an operation in place.
#[derive(Debug, Default)]
pub(super) struct InPlace {
    running: bool,
    /// Range of this rank's chunk that is to be reduced or written.
    chunk: Option<(Range<usize>, ChunkWork)>,
    /// Ranges to copy, each from the rank's memory.
    copies: Vec<ChunkCopy>,
    /// This rank's announcements.
    own: Progress,
    /// True if no rank had failed after this one's last read.
    valid: bool,
    /// Addresses of the operation's first byte, by rank.
    from: Vec<NonNull<u8>>,
    /// Addresses of the first byte of the values to reduce, by rank.
    sources: Vec<NonNull<u8>>,
    /// True for ranks that write their chunks meanwhile.
    writes: Vec<bool>,
    /// True if the others copy this rank's chunk as it grows.
    announces: bool,
    non_temporal: bool,
}

/// Work of a rank on its own chunk.
#[derive(Clone, Copy, Debug)]
enum ChunkWork {
    Reduce(Reduction),
    Write,
    /// Each part is written from its reduced values.
    ReduceAndWrite(Reduction),
}

// SAFETY: addresses, which only `step` dereferences, with its own contract.
unsafe impl Send for InPlace {}

/// Range to copy from a rank's memory.
#[derive(Debug)]
struct ChunkCopy {
    from: usize,
    range: Range<usize>,
    /// First byte of a chunk that its rank reduces or writes first; `None` if the bytes are there.
    grows_from: Option<usize>,
}

impl InPlace {
    pub(super) fn clear(&mut self) {
        self.running = false;
    }

    /// Returns true if rank `peer` has to announce more in the running operation.
    pub(super) fn needs_from(&self, links: &Links, peer: usize) -> bool {
        self.running && !links.peers[peer].notes.progress.done
    }

    /// Returns true if this rank waits for rank `peer`: to copy the rest of its chunk, or, once it has copied all chunks, to read no more.
    pub(super) fn waits_for(&self, links: &Links, peer: usize) -> bool {
        let copies = self.copies.iter().any(|copy| copy.from == peer);
        self.needs_from(links, peer) && (copies || self.copies.is_empty())
    }

    /// Plans an operation whose memory is at `from`, by rank.
    fn plan(&mut self, links: &Links, called: &Called, writes: bool) {
        let (me, n) = (links.rank, links.world_size());
        let (chunk, whole) = (|of| chunk_bytes(called, n, of), 0..called.len * called.dtype.size());
        self.running = true;
        (self.own, self.valid) = (Progress::default(), false);
        self.non_temporal = whole.len().saturating_mul(n) >= NON_TEMPORAL_FROM;
        let work = match (called.action, called.action.reduction()) {
            (Action::ReduceAndGather(reduction), _) => Some(ChunkWork::ReduceAndWrite(reduction)),
            (_, Some(reduction)) => Some(ChunkWork::Reduce(reduction)),
            _ => writes.then_some(ChunkWork::Write),
        };
        self.chunk = work.map(|work| (chunk(me), work)).filter(|(range, _)| !range.is_empty());
        self.announces = writes || matches!(called.action, Action::AllReduce(_));
        self.copies.clear();
        // A rank begins with the next rank, so that all ranks' memory is read at once.
        let others = (1..n).map(|step| (me + step) % n);
        match called.action {
            Action::AllReduce(_) => self.copies.extend(others.map(|from| {
                let range = chunk(from);
                ChunkCopy { from, grows_from: Some(range.start), range }
            })),
            Action::AllGather | Action::ReduceAndGather(_) => {
                self.copies.extend(others.map(|from| {
                    let range = chunk(from);
                    ChunkCopy { from, grows_from: self.writes[from].then_some(range.start), range }
                }));
            }
            Action::Broadcast { root } if root != me => {
                self.copies.push(ChunkCopy { from: root, range: whole, grows_from: None });
            }
            _ => {}
        }
        self.copies.retain(|copy| !copy.range.is_empty());
    }

    /// Reduces, writes or copies a portion of each kind. Returns true if anything was left to do and possible.
    ///
    /// # Safety
    /// - Each of `from` is the first of the operation's bytes of that rank, which is in the same operation.
    /// - Nothing else in this process accesses the buffer of `memory`.
    unsafe fn step(
        &mut self,
        links: &mut Links,
        memory: &OpMemory,
        tiles: &mut Tiles,
        writer: Option<&mut ChunkWriter<'_>>,
    ) -> bool {
        // SAFETY: the caller's promise.
        let moved = unsafe { self.advance(links, memory, tiles, writer) | self.copy(links, memory) };
        if self.chunk.is_none() && self.copies.is_empty() && !self.own.done {
            self.own.done = true;
            self.announce(links);
        }
        // The next look at the streams comes after these reads.
        fence(SeqCst);
        moved
    }

    /// Reduces or writes the next portion of this rank's chunk.
    ///
    /// # Safety
    /// As for [`step`](InPlace::step).
    unsafe fn advance(
        &mut self,
        links: &mut Links,
        memory: &OpMemory,
        tiles: &mut Tiles,
        writer: Option<&mut ChunkWriter<'_>>,
    ) -> bool {
        if self.own.ready >= self.copied().saturating_add(AHEAD) {
            return false;
        }
        let Some((range, work)) = &mut self.chunk else { return false };
        let len = match (*work, writer) {
            (ChunkWork::Reduce(reduction), _) => {
                let now = range.start..range.end.min(range.start + PORTION);
                tiles.from.clear();
                // SAFETY: the range lies in the operation's bytes of every rank.
                tiles.from.extend(self.sources.iter().map(|base| unsafe { base.add(now.start) }));
                // SAFETY: the memory of the others is mapped as long as the transport lives. They write other chunks of their own
                // memory meanwhile. This rank's tile is the range itself.
                unsafe { fold((tiles, TileMemory::Main), memory.tile(now.clone()), reduction) };
                // SAFETY: the caller's promise; the others only read.
                unsafe { memory.show(now.clone()) };
                now.len()
            }
            (ChunkWork::Write, writer) => {
                // After a failure of the writer the operation fails.
                let written = writer.and_then(ChunkWriter::write_next);
                written.map_or(0, |part| part.len() * memory.dtype.size())
            }
            (ChunkWork::ReduceAndWrite(reduction), writer) => {
                let Some(writer) = writer else { return false };
                let size = memory.dtype.size();
                let reduce = |into: FoldInto, _: &mut Tiles| {
                    tiles.from.clear();
                    // SAFETY: the part lies in the operation's elements of every rank, and sources are as long.
                    tiles.from.extend(self.sources.iter().map(|base| unsafe { base.add(into.first * size) }));
                    // SAFETY: the sources are mapped as long as the transport lives, and nobody writes them while the operation runs.
                    unsafe { fold((tiles, TileMemory::Main), into, reduction) };
                    true
                };
                // SAFETY: `fold` writes values of the operation's type.
                let written = unsafe { writer.reduce_next(reduce) };
                written.map_or(0, |part| part.len() * size)
            }
        };
        range.start += len;
        self.own.ready += len;
        self.chunk = self.chunk.take().filter(|(range, _)| !range.is_empty());
        if self.announces {
            self.announce(links);
        }
        len > 0
    }

    /// # Safety
    /// As for [`step`](InPlace::step).
    unsafe fn copy(&mut self, links: &Links, memory: &OpMemory) -> bool {
        let mut moved = false;
        for ChunkCopy { from, range, grows_from } in &mut self.copies {
            let ready = links.peers[*from].notes.progress.ready;
            let ready = grows_from.map_or(range.end, |start| range.end.min(start + ready));
            let now = range.start..ready.min(range.start + PORTION);
            if now.is_empty() {
                continue;
            }
            // SAFETY: these bytes of the other rank are mapped and final, and it leaves them alone until this rank reads no more, unless it
            // fails: then this operation fails too, whatever was read. The owner of the chunk has read this rank's bytes of it, and
            // nobody else reads them.
            let (to, from) = unsafe {
                let from = self.from[*from].add(now.start).as_ptr();
                (memory.slice_mut(now.clone()), std::slice::from_raw_parts(from, now.len()))
            };
            if self.non_temporal {
                copy_bytes_non_temporal(to, from)
            } else {
                to.copy_from_slice(from)
            }
            range.start = now.end;
            moved = true;
        }
        self.copies.retain(|copy| !copy.range.is_empty());
        moved
    }

    /// Least number of bytes that this rank has copied of the chunks that other ranks reduce or write.
    fn copied(&self) -> usize {
        let copied = |copy: &ChunkCopy| copy.grows_from.map(|start| copy.range.start - start);
        self.copies.iter().filter_map(copied).min().unwrap_or(usize::MAX)
    }

    fn announce(&self, links: &mut Links) {
        if !links.common.has_ended() {
            self.own.put(links.common.frames());
        }
    }

    fn has_ended(&self, links: &Links) -> bool {
        self.valid && links.others().all(|peer| links.peers[peer].notes.progress.done)
    }
}

impl Engine {
    /// Returns the place of the operation's buffer in registered memory, if its bytes may be read there.
    pub(super) fn window_of(&mut self, called: &Called, memory: &OpMemory) -> Option<OpWindow> {
        let reads = matches!(
            called.action,
            Action::AllReduce(_)
                | Action::ReduceScatter(_)
                | Action::AllGather
                | Action::ReduceAndGather(_)
                | Action::Broadcast { .. }
        );
        let windows = self.links.transport.windows().filter(|_| reads)?;
        let find = |address| {
            let (id, offset) = windows.find(address)?;
            Some(WindowRange { id, offset: offset as u64 })
        };
        let source = match memory.source {
            Some(source) => Some(find(source.address())?),
            None => None,
        };
        Some(OpWindow { buffer: find(memory.address(0))?, source })
    }

    /// Prepares to read the others' memory in place, if the buffers of all ranks are at `window`. All ranks decide alike.
    pub(super) fn opens_in_place(&mut self, window: Option<OpWindow>, party: Party) -> bool {
        let Some(window) = window else { return false };
        let at = |peer: usize| self.links.peers[peer].call().and_then(|call| call.window);
        if !self.others_of(party).all(|peer| at(peer) == Some(window)) {
            return false;
        }
        let n = self.links.world_size();
        let Some(windows) = self.links.transport.windows() else { return false };
        let OpWindow { buffer, source } = window;
        for (at, list) in
            [(buffer, &mut self.in_place.from), (source.unwrap_or(buffer), &mut self.in_place.sources)]
        {
            list.clear();
            list.extend((0..n).filter_map(|rank| windows.address(rank, at.id, at.offset as usize)));
        }
        let writes = |rank: usize| self.links.peers[rank].call().is_some_and(|call| call.writes);
        self.in_place.writes.clear();
        self.in_place.writes.extend((0..n).map(writes));
        self.in_place.from.len() == n && self.in_place.sources.len() == n
    }

    /// Fails if a rank was lost before this one has read all it needs: a rank that ends in order waits for that, and the cause of
    /// one that failed may be lost too.
    fn look_at_reads(&mut self, party: Party) -> Result<(), Stop> {
        if self.in_place.valid {
            return Ok(());
        }
        match self.others_of(party).find(|peer| self.links.peers[*peer].lost.is_some()) {
            Some(peer) => Err(self.lost(peer)),
            None => {
                self.in_place.valid = self.in_place.own.done;
                Ok(())
            }
        }
    }

    /// Moves the bytes of an operation whose buffers are registered memory.
    ///
    /// # Safety
    /// As for [`run`](Engine::run).
    pub(super) unsafe fn exchange_in_place(
        &mut self,
        running: Running<'_>,
        party: Party,
        memory: &OpMemory,
        mut writer: Option<&mut ChunkWriter<'_>>,
    ) -> Result<(), Stop> {
        self.in_place.plan(&self.links, &running.called, writer.is_some());
        let (mut idle, mut pace) = (0, Pace::start());
        loop {
            let moved = self.links.poll();
            // A failure comes before the end: what was read after it may be anything.
            self.look_at_party(running, party, false)?;
            self.look_at_reads(party)?;
            // SAFETY: the caller's promise, and all ranks have called this operation with buffers at these addresses.
            let stepped = unsafe {
                let tiles = &mut self.transfer.tiles;
                self.in_place.step(&mut self.links, memory, tiles, writer.as_deref_mut())
            };
            if let Some(error) = writer.as_ref().and_then(|writer| writer.failure()) {
                return Err(Stop::Found(error.clone()));
            }
            if !stepped && self.in_place.has_ended(&self.links) && self.links.is_flushed() {
                self.in_place.clear();
                return Ok(());
            }
            pace.note(moved || stepped);
            self.look_at_clock(running, party, false, &mut pace)?;
            self.rest(running, moved || stepped, &mut idle);
        }
    }
}

/// Writes the whole chunk, before its bytes travel.
pub(super) fn write_all(called: &Called, writer: Option<&mut ChunkWriter<'_>>) -> Result<(), Stop> {
    let Some(writer) = writer else { return Ok(()) };
    if writer.source().is_some() {
        return Err(Stop::Found(Error::UnlikePlaces { called: Box::new(*called) }));
    }
    writer.finish();
    writer.failure().map_or(Ok(()), |error| Err(Stop::Found(error.clone())))
}

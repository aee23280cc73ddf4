//! Bytes of a large operation on their way: parts of the buffer to write, parts to read, and the chunk that this rank reduces.

use super::codec::FrameKind;
use super::links::Links;
use super::memory::OpMemory;
use super::outbox::Outbox;
use super::small::chunk_bytes;
use super::transport::{Source, Target};
use crate::group::fold::{TileMemory, Tiles, fold};
use crate::{Action, Called, Reduction};
use std::ops::Range;
use std::ptr::NonNull;

/// Bytes of each rank that are reduced at a time, at most; few enough to stay in the cache.
const TILE: usize = 64 << 10;
/// Reduced bytes that are worth a frame, unless the chunk ends.
const WORTH: usize = 64 << 10;

/// What an operation still has to move.
#[derive(Debug, Default)]
pub(super) struct Transfer {
    outs: Vec<Outflow>,
    ins: Vec<Inflow>,
    /// Range of this rank's chunk that is to be reduced.
    fold: Option<(Range<usize>, Reduction)>,
    pub(super) tiles: Tiles,
}

/// Part of the buffer to write.
#[derive(Debug)]
struct Outflow {
    to: Target,
    kind: FrameKind,
    range: Range<usize>,
    ready: Ready,
}

/// Part of an outflow's range that may be written.
#[derive(Clone, Copy, Debug)]
enum Ready {
    /// All of it.
    All,
    /// The reduced part of the chunk.
    Reduced,
    /// The bytes that have arrived from this rank: they are passed on.
    Arrived(usize),
}

impl Outflow {
    /// Returns true if this outflow's bytes come before those of `other` in the same stream.
    fn precedes(&self, other: &Outflow) -> bool {
        self.to == other.to && self.kind == other.kind && !self.range.is_empty()
    }
}

/// Part of the buffer to read.
#[derive(Debug)]
struct Inflow {
    from: Source,
    range: Range<usize>,
    /// True if the rank that it comes from gets the former contents, which go first.
    swaps: bool,
    /// Owner of the bytes, which another rank may pass on.
    origin: usize,
}

impl Transfer {
    /// Plans an operation that all its ranks have agreed on.
    pub(super) fn plan(&mut self, links: &Links, called: &Called) {
        self.clear();
        let (me, n) = (links.rank, links.world_size());
        let (chunk, whole) = (|of| chunk_bytes(called, n, of), 0..called.len * called.dtype.size());
        match called.action {
            Action::AllGather => self.gather(links, &chunk, Ready::All),
            Action::AllReduce(reduction) => {
                self.gather(links, &chunk, Ready::Reduced);
                self.scatter(links, &chunk, reduction);
            }
            Action::ReduceScatter(reduction) => self.scatter(links, &chunk, reduction),
            Action::AllToAll => {
                for peer in links.others() {
                    self.write(Target::Rank(peer), FrameKind::Final, chunk(peer));
                    self.ins.push(Inflow {
                        from: Source::Rank(peer),
                        range: chunk(peer),
                        swaps: true,
                        origin: peer,
                    });
                }
            }
            Action::Broadcast { root } if root == me => self.write_all(links, whole, Ready::All),
            Action::Broadcast { root } => self.read(links, root, whole),
            Action::Send { to } => self.write(Target::Rank(to), FrameKind::Final, whole),
            Action::Recv { from } => {
                self.ins.push(Inflow { from: Source::Rank(from), range: whole, swaps: false, origin: from });
            }
            // Only in place.
            Action::ReduceAndGather(_) => {}
            Action::Barrier | Action::Split { .. } => {}
        }
    }

    /// Forgets what was planned.
    pub(super) fn clear(&mut self) {
        self.outs.clear();
        self.ins.clear();
        self.fold = None;
    }

    fn gather(&mut self, links: &Links, chunk: &impl Fn(usize) -> Range<usize>, ready: Ready) {
        self.write_all(links, chunk(links.rank), ready);
        // A stream has its rank's own bytes first, then those that it passes on, in the order of their ranks.
        let passed_on = |peer: &usize| links.hosts.sender(*peer, links.rank) != *peer;
        for peer in links.others().filter(|peer| !passed_on(peer)).chain(links.others().filter(passed_on)) {
            self.read(links, peer, chunk(peer));
        }
    }

    fn scatter(&mut self, links: &Links, chunk: &impl Fn(usize) -> Range<usize>, reduction: Reduction) {
        for peer in links.others() {
            self.write(Target::Rank(peer), FrameKind::Contribution, chunk(peer));
        }
        self.fold = Some((chunk(links.rank), reduction));
    }

    /// Writes to the ranks of this host, and to one rank of each other host.
    fn write_all(&mut self, links: &Links, range: Range<usize>, ready: Ready) {
        self.write_near(links, range.clone(), ready);
        let (hosts, me) = (&links.hosts, links.rank);
        for peer in links.others().filter(|peer| !hosts.share(me, *peer) && hosts.sender(me, *peer) == me) {
            let (to, kind) = (Target::Rank(peer), FrameKind::Final);
            self.outs.push(Outflow { to, kind, range: range.clone(), ready });
        }
    }

    /// Writes to the other ranks of this host.
    fn write_near(&mut self, links: &Links, range: Range<usize>, ready: Ready) {
        let near = links.others().filter(|peer| links.hosts.share(links.rank, *peer));
        let alone = near.filter(|peer| !links.peers[*peer].in_audience).map(Target::Rank);
        let common = (!links.common.has_ended()).then_some(Target::Audience);
        let outflow = |to| Outflow { to, kind: FrameKind::Final, range: range.clone(), ready };
        self.outs.extend(common.into_iter().chain(alone).map(outflow));
    }

    fn write(&mut self, to: Target, kind: FrameKind, range: Range<usize>) {
        self.outs.push(Outflow { to, kind, range, ready: Ready::All });
    }

    /// Reads what `peer` writes to all, and passes it on if this rank is its host's relay.
    fn read(&mut self, links: &Links, peer: usize, range: Range<usize>) {
        let sender = links.hosts.sender(peer, links.rank);
        let common = links.peers[sender].in_audience;
        let from = if common { Source::Common(sender) } else { Source::Rank(sender) };
        self.ins.push(Inflow { from, range: range.clone(), swaps: false, origin: peer });
        if links.hosts.passes_on(peer, links.rank) {
            self.write_near(links, range, Ready::Arrived(peer));
        }
    }

    /// Moves what can be moved now. Returns true if anything was.
    ///
    /// # Safety
    /// The operation of `memory` runs until all outboxes are idle or have abandoned their spans, and nothing else accesses the buffer.
    pub(super) unsafe fn step(&mut self, links: &mut Links, memory: &OpMemory) -> bool {
        // SAFETY: the caller's promise, for each.
        let (folded, read, wrote) =
            unsafe { (self.fold_tiles(links, memory), self.fill(links, memory), self.offer(links, memory)) };
        folded | read | wrote
    }

    /// # Safety
    /// As for [`step`](Transfer::step). A range that is offered is not written to before it has been sent: this rank's chunk is
    /// offered when it is final, the reduction that overwrites a contribution comes from the rank that has received the contribution, and a swapped chunk is
    /// filled behind the bytes that have been written.
    unsafe fn offer(&mut self, links: &mut Links, memory: &OpMemory) -> bool {
        let mut moved = false;
        for i in 0..self.outs.len() {
            let out = &self.outs[i];
            let ready = self.ready(out);
            let len = ready.saturating_sub(out.range.start);
            let waits = self.outs[..i].iter().any(|before| before.precedes(out));
            if len == 0 || waits || len < WORTH && ready < out.range.end {
                continue;
            }
            // SAFETY: this function's contract.
            let taken =
                unsafe { outbox(links, out.to).offer(out.kind, memory.address(out.range.start), len) };
            self.outs[i].range.start += taken;
            moved |= taken > 0;
        }
        self.outs.retain(|out| !out.range.is_empty());
        moved
    }

    /// Returns the end of the part of an outflow's range that may be written.
    fn ready(&self, out: &Outflow) -> usize {
        let until = match out.ready {
            Ready::All => None,
            Ready::Reduced => self.fold.as_ref().map(|(range, _)| range.start),
            Ready::Arrived(peer) => {
                let inflow = self.ins.iter().find(|inflow| inflow.from == Source::Rank(peer));
                inflow.map(|inflow| inflow.range.start)
            }
        };
        until.map_or(out.range.end, |until| until.min(out.range.end))
    }

    /// Reads into the buffer what has arrived.
    ///
    /// # Safety
    /// As for [`step`](Transfer::step).
    unsafe fn fill(&mut self, links: &mut Links, memory: &OpMemory) -> bool {
        let mut moved = false;
        for i in 0..self.ins.len() {
            let (before, after) = self.ins.split_at_mut(i);
            let inflow = &mut after[0];
            let waits = before.iter().any(|before| before.from == inflow.from && !before.range.is_empty());
            let peer = sender(inflow);
            let end = if inflow.swaps {
                written(&self.outs, links, peer, inflow.range.end)
            } else {
                inflow.range.end
            };
            if waits || inflow.range.start >= end {
                continue;
            }
            // SAFETY: bytes of this rank's buffer that are not offered any more, or never were.
            let into = unsafe { memory.slice_mut(inflow.range.start..end) };
            let common = matches!(inflow.from, Source::Common(_));
            let from = &mut links.peers[peer];
            let inbox = if common { &mut from.common } else { &mut from.own };
            match inbox.read_span(&mut *links.transport, FrameKind::Final, into) {
                Ok(read) => {
                    inflow.range.start += read;
                    moved |= read > 0;
                }
                Err(lost) => moved |= links.lose(lost),
            }
        }
        self.ins.retain(|inflow| !inflow.range.is_empty());
        moved
    }

    /// Reduces what all ranks have sent of this rank's chunk.
    ///
    /// # Safety
    /// As for [`step`](Transfer::step).
    unsafe fn fold_tiles(&mut self, links: &mut Links, memory: &OpMemory) -> bool {
        let Some((mut range, reduction)) = self.fold.clone() else { return false };
        let size = memory.dtype.size();
        let mut moved = false;
        while !range.is_empty() {
            moved |= carry(links, size);
            let arrived = |peer: usize| links.peers[peer].own.contribution(&*links.transport, size);
            let least = links.others().map(|peer| arrived(peer).len()).min().unwrap_or(usize::MAX);
            let len = least.min(TILE).min(range.len()) / size * size;
            if len == 0 {
                break;
            }
            let now = range.start..range.start + len;
            self.tiles.from.clear();
            for peer in 0..links.world_size() {
                let own = peer == links.rank;
                let tile = if own { memory.address(now.start) } else { NonNull::from(arrived(peer)).cast() };
                self.tiles.from.push(tile);
            }
            // SAFETY: every contribution has at least `len` bytes, in memory that the transport keeps until they are consumed, and this
            // rank's own tile is the range, which is not offered before it is reduced.
            unsafe { fold((&self.tiles, TileMemory::Cached), memory.tile(now), reduction) };
            for peer in links.others() {
                links.peers[peer].own.consume_contribution(&mut *links.transport, len);
            }
            range.start += len;
            moved = true;
            // A frame's end may hide the next one's beginning, which the next poll reads.
            if links.others().any(|peer| arrived_none(links, peer, size)) {
                break;
            }
        }
        self.fold = Some((range, reduction)).filter(|(range, _)| !range.is_empty());
        moved
    }

    /// Returns true if all parts have been read and offered. Offered bytes may still have to be written.
    pub(super) fn is_done(&self) -> bool {
        self.outs.is_empty() && self.ins.is_empty() && self.fold.is_none()
    }

    /// Returns true if rank `peer` has to send more.
    pub(super) fn needs_from(&self, peer: usize) -> bool {
        self.ins.iter().any(|inflow| sender(inflow) == peer) || self.fold.is_some()
    }

    /// Returns true if only relayed bytes are missing: the relay finds the late rank.
    pub(super) fn waits_for_relays(&self) -> bool {
        let idle = self.fold.is_none() && self.outs.is_empty() && !self.ins.is_empty();
        idle && self.ins.iter().all(|inflow| sender(inflow) != inflow.origin)
    }

    /// Returns true if bytes of rank `origin` are missing, which another rank may have to pass on.
    pub(super) fn misses(&self, origin: usize) -> bool {
        self.ins.iter().any(|inflow| inflow.origin == origin)
    }

    /// Returns true if rank `peer` has to read more.
    pub(super) fn needs_to(&self, links: &Links, peer: usize) -> bool {
        let in_audience = links.peers[peer].in_audience;
        let writes = |to| match to {
            Target::Rank(to) => to == peer,
            Target::Audience => in_audience,
        };
        self.outs.iter().any(|out| writes(out.to))
            || in_audience && !links.common.is_idle()
            || !links.outboxes[peer].is_idle()
    }
}

/// Returns the rank that sends an inflow's bytes.
fn sender(inflow: &Inflow) -> usize {
    let (Source::Rank(peer) | Source::Common(peer)) = inflow.from;
    peer
}

fn arrived_none(links: &Links, peer: usize, size: usize) -> bool {
    links.peers[peer].own.contribution(&*links.transport, size).is_empty()
}

fn carry(links: &mut Links, size: usize) -> bool {
    let mut moved = false;
    for peer in links.others() {
        match links.peers[peer].own.carry(&mut *links.transport, size) {
            Ok(read) => moved |= read,
            Err(lost) => moved |= links.lose(lost),
        }
    }
    moved
}

fn outbox(links: &mut Links, to: Target) -> &mut Outbox {
    match to {
        Target::Rank(peer) => &mut links.outboxes[peer],
        Target::Audience => &mut links.common,
    }
}

/// Returns the end of the part of the chunk for `peer` that has been written, of one that ends at `end`.
fn written(outs: &[Outflow], links: &Links, peer: usize, end: usize) -> usize {
    let out = outs.iter().find(|out| out.to == Target::Rank(peer));
    out.map_or(end, |out| out.range.start) - links.outboxes[peer].unwritten()
}

//! Operations whose ranks have all arrived, until their bytes have moved. Any thread of the group that waits moves some.

use super::meeting::MOVED_BY_ONE;
use super::shared::{ChunkUse, View};
use crate::sync::Counter;
use crate::{Action, Called};
use meshstep_tensor::DType;
use std::collections::VecDeque;
use std::sync::Arc;

/// Initial number of transfers at the same time, and of threads that move bytes at the same time.
const ROOM: usize = 16;

/// Transfers of a group, in memory that is used again, so that operations do not allocate.
#[derive(Debug)]
pub(super) struct Transfers {
    world_size: usize,
    all: Vec<MeetingTransfer>,
    free: Vec<usize>,
    /// Memory for views of threads that will move bytes.
    spare: Vec<Vec<View>>,
    /// Transfers with portions left that nobody has drawn, in the order of their beginnings.
    open: VecDeque<usize>,
}

/// Operation whose bytes move.
#[derive(Debug)]
struct MeetingTransfer {
    /// Call of one member, and its rank.
    called: Called,
    rank: usize,
    /// Buffers by rank; empty for ranks that are no members.
    views: Vec<View>,
    /// Ranks with the numbers of their operations.
    members: Vec<(usize, u64)>,
    /// Number of portions drawn.
    portions: Arc<Counter>,
    /// One thread moves all bytes: others would take longer to wake.
    solo: bool,
    /// Threads that move bytes now.
    movers: usize,
    /// No portion is left to draw.
    drained: bool,
    /// A thread panicked while it moved bytes.
    spoilt: bool,
    /// Non-finite elements found in the result, if the operation keeps former values.
    non_finite: u64,
}

/// A thread's part in a transfer, with its own copy of the views.
#[derive(Debug)]
pub(super) struct TransferShare {
    index: usize,
    pub(super) called: Called,
    pub(super) rank: usize,
    pub(super) views: Vec<View>,
    pub(super) portions: Arc<Counter>,
    /// This thread moves all bytes.
    pub(super) solo: bool,
    /// This thread found no portion left to draw.
    pub(super) drained: bool,
}

/// A transfer that has ended.
#[derive(Debug)]
pub(super) struct FinishedTransfer {
    index: usize,
    pub(super) spoilt: bool,
    pub(super) non_finite: u64,
}

impl Transfers {
    pub(super) fn new(world_size: usize) -> Self {
        Transfers {
            world_size,
            all: (0..ROOM).map(|_| MeetingTransfer::new(world_size)).collect(),
            free: (0..ROOM).collect(),
            spare: (0..ROOM).map(|_| Vec::with_capacity(world_size)).collect(),
            open: VecDeque::with_capacity(ROOM),
        }
    }

    /// Adds a transfer of `bytes` bytes; `called` is the call of `rank`. Returns its index, and true if several threads are to move them.
    pub(super) fn add(
        &mut self,
        (called, rank): (Called, usize),
        bytes: usize,
        views: impl Iterator<Item = View>,
        members: impl Iterator<Item = (usize, u64)>,
    ) -> (usize, bool) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.all.push(MeetingTransfer::new(self.world_size));
            self.all.len() - 1
        });
        let transfer = &mut self.all[index];
        transfer.begin(called, rank, bytes <= MOVED_BY_ONE);
        transfer.views.extend(views);
        transfer.members.extend(members);
        self.open.push_back(index);
        (index, !transfer.solo)
    }

    /// Returns true if a transfer has portions left; with `solo`, one that a single thread moves.
    pub(super) fn has_work(&self, solo: bool) -> bool {
        self.open.iter().any(|&index| !solo || self.all[index].solo)
    }

    /// Joins the first transfer that has portions left; with `solo`, the first that a single thread moves.
    pub(super) fn join(&mut self, solo: bool) -> Option<TransferShare> {
        let at = self.open.iter().position(|&index| !solo || self.all[index].solo)?;
        let index = self.open[at];
        if self.all[index].solo {
            self.open.remove(at);
        }
        Some(self.share(index))
    }

    /// Joins the transfer `index`.
    pub(super) fn share(&mut self, index: usize) -> TransferShare {
        let transfer = &mut self.all[index];
        transfer.movers += 1;
        let mut views = self.spare.pop().unwrap_or_default();
        views.extend_from_slice(&transfer.views);
        let MeetingTransfer { called, rank, ref portions, solo, .. } = *transfer;
        let portions = Arc::clone(portions);
        TransferShare { index, called, rank, views, portions, solo, drained: false }
    }

    /// Leaves a transfer, with the non-finite elements found; `None` if this thread panicked. Returns the transfer if it has ended:
    /// no portion is left, no other thread moves one, and no rank writes its chunk.
    pub(super) fn leave(&mut self, mut work: TransferShare, found: Option<u64>) -> Option<FinishedTransfer> {
        work.views.clear();
        self.spare.push(work.views);
        let transfer = &mut self.all[work.index];
        transfer.movers -= 1;
        transfer.non_finite += found.unwrap_or(0);
        transfer.spoilt |= found.is_none();
        // After a panic nobody moves the rest.
        if (work.drained || found.is_none()) && !std::mem::replace(&mut transfer.drained, true) {
            self.open.retain(|&index| index != work.index);
        }
        self.finished(work.index)
    }

    /// Returns the ranks that still write their chunks.
    pub(super) fn writers(&self, index: usize) -> impl Iterator<Item = usize> {
        let views = self.all[index].views.iter().enumerate();
        views.filter(|(_, view)| view.chunk == ChunkUse::Written).map(|(rank, _)| rank)
    }

    /// Notes that a rank has written its chunk and has copied it to the others. Returns the transfer if it has ended.
    pub(super) fn stop_writing(&mut self, index: usize, rank: usize) -> Option<FinishedTransfer> {
        self.all[index].views[rank].chunk = ChunkUse::Sent;
        self.finished(index)
    }

    /// Spoils a transfer in which ranks write their chunks: it ends when no thread moves bytes any more. Returns it if it has ended.
    pub(super) fn give_up_writers(&mut self, index: usize) -> Option<FinishedTransfer> {
        let transfer = &mut self.all[index];
        transfer.views.iter_mut().for_each(|view| view.chunk = ChunkUse::Sent);
        (transfer.spoilt, transfer.drained) = (true, true);
        self.open.retain(|&open| open != index);
        self.finished(index)
    }

    fn finished(&self, index: usize) -> Option<FinishedTransfer> {
        let MeetingTransfer { spoilt, non_finite, movers, drained, .. } = self.all[index];
        let ended = drained && movers == 0 && self.writers(index).next().is_none();
        ended.then_some(FinishedTransfer { index, spoilt, non_finite })
    }

    /// Calls `each` with every member of a transfer that has ended, and its operation; then forgets the transfer.
    pub(super) fn end(&mut self, moved: &FinishedTransfer, each: impl FnMut((usize, u64))) {
        self.all[moved.index].members.drain(..).for_each(each);
        self.free.push(moved.index);
    }
}

impl MeetingTransfer {
    fn new(world_size: usize) -> Self {
        let nothing = Called { op_number: 0, action: Action::Barrier, len: 0, dtype: DType::F32, by: None };
        MeetingTransfer {
            called: nothing,
            rank: 0,
            views: Vec::with_capacity(world_size),
            members: Vec::with_capacity(world_size),
            portions: Arc::new(Counter::new()),
            solo: false,
            movers: 0,
            drained: false,
            spoilt: false,
            non_finite: 0,
        }
    }

    fn begin(&mut self, called: Called, rank: usize, solo: bool) {
        (self.called, self.rank, self.solo) = (called, rank, solo);
        (self.movers, self.non_finite) = (0, 0);
        (self.drained, self.spoilt) = (false, false);
        self.views.clear();
        self.members.clear();
        self.portions.reset();
    }
}

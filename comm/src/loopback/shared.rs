//! Access to other ranks' memory: the only such place, with its safety argument.
//!
//! The elements of an operation are cut into portions, and a shared counter gives each portion to exactly one thread, the next that
//! asks. Only that thread may access these elements of these buffers:
//!
//! | operation | portion |
//! |---|---|
//! | all_reduce, reduce_scatter, all_gather, broadcast | a range within one chunk, in every buffer |
//! | all_to_all | a range of chunk `b` of buffer `a` and the same of chunk `a` of buffer `b` |
//! | send, recv | a range, in both buffers |
//! | barrier, split | none |
//!
//! In an all-gather a rank may write its chunk while bytes move. Then the portions of that chunk are its own: as many as it writes parts.
//! It may write from reduced values of further buffers, the sources, which every rank reads and none writes.
//!
//! An all-reduce may work on values that a rank lends for the time of a call, in segments; the rank's buffer then keeps the former
//! values, and both belong to the portion that has their elements.
//!
//! So no transfer waits for a thread that the system has not woken yet, and the result does not depend on the thread that moves a
//! portion.

use super::cut::{Cut, CutPart};
use super::moves;
use super::transfers::TransferShare;
use crate::Action;
use crate::group::chunk_writer::ReduceSource;
use crate::group::fold::{FoldInto, TileMemory, Tiles, fold};
use crate::group::seat::Besides;
use crate::group::segments::{LentValues, Segment};
use crate::sync::Counter;
use meshstep_tensor::fetch::LINE;
use meshstep_tensor::{Buffer, DType, Element, Threads};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

/// Address of a rank's buffer, dereferenced only by [`Portion`] and [`flip_a_bit`](View::flip_a_bit), and the factor of its values.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    base: NonNull<u8>,
    len: usize,
    dtype: DType,
    factor: f64,
    /// Values to reduce in place of the buffer, which then keeps their former contents.
    lent: Option<LentValues>,
    /// Buffer of the values to reduce, if the rank writes its chunk from them.
    source: Option<ReduceSource>,
    /// Contiguous memory of the values: the buffer, or the segment of the lent values that a portion has entered.
    here: Segment,
    /// Use of the rank's chunk in an all-gather.
    pub(super) chunk: ChunkUse,
}

/// Use of a rank's chunk while it is gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChunkUse {
    /// Any thread copies it.
    Shared,
    /// The rank still writes it, and copies the parts itself.
    Written,
    /// The rank has written and copied it.
    Sent,
}

// SAFETY: a view is an address and a size; only its own methods and `Portion` dereference it, with their own safety arguments.
unsafe impl Send for View {}

impl View {
    /// Returns an empty view.
    pub(super) fn empty() -> Self {
        let base = NonNull::<u64>::dangling().cast();
        let here = Segment { base, start: 0, len: 0 };
        View {
            base,
            len: 0,
            dtype: DType::F32,
            factor: 1.0,
            lent: None,
            source: None,
            here,
            chunk: ChunkUse::Shared,
        }
    }

    /// Returns a view of the whole of `buffer`, on which its rank calls `action`, or of lent values that are as long as the buffer.
    pub(super) fn of(buffer: &Buffer, action: Action, besides: Besides<'_>) -> Self {
        let (base, len, dtype) = (buffer.as_ptr(), buffer.len(), buffer.dtype());
        let lent = if let Besides::Lent(values) = besides { Some(values) } else { None };
        // Lent values are entered segment by segment.
        let here = Segment { base, start: 0, len: if lent.is_some() { 0 } else { len } };
        let written = matches!(besides, Besides::Writer(_));
        let chunk = if written { ChunkUse::Written } else { ChunkUse::Shared };
        View { base, len, dtype, factor: action.factor(), lent, source: besides.source(), here, chunk }
    }

    /// Returns the view of the operation's input: of the source if there is one.
    pub(super) fn input(self) -> Self {
        let Some(source) = self.source else { return self };
        let base = source.address();
        View { base, source: None, here: Segment { base, ..self.here }, ..self }
    }

    /// Returns the view of a rank that does not write its chunk meanwhile.
    pub(super) fn with_shared_chunk(self) -> Self {
        View { chunk: ChunkUse::Shared, ..self }
    }

    pub(super) fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Returns true if the rank lends values, whose former contents its buffer keeps.
    pub(super) fn keeps(&self) -> bool {
        self.lent.is_some()
    }

    /// Flips a bit in the middle of the values, as a faulty link would.
    ///
    /// # Safety
    /// The view is of this rank's own running operation, which has not been posted yet or which all ranks have left.
    pub(super) unsafe fn flip_a_bit(&self) {
        let (size, middle) = (self.dtype.size(), self.bytes() / 2);
        if self.len == 0 {
            return;
        }
        // SAFETY: the caller's promise: the operation is this rank's own and runs, so its segments are alive.
        let here = self.lent.map_or(self.here, |lent| unsafe { lent.at(middle / size) });
        let offset = middle - here.start * size;
        // SAFETY: the byte lies in the segment. By the caller's promise the memory is alive, and no other rank accesses it now.
        unsafe { *here.base.as_ptr().add(offset) ^= 1 << 6 }
    }
}

/// Memory of an operation while bytes move, as seen by one thread.
pub(super) struct Share<'a> {
    action: Action,
    cut: Cut,
    views: &'a mut [View],
    next: &'a Counter,
    /// Returns true if this thread draws no further portion.
    stops: &'a dyn Fn() -> bool,
    /// Set when no portion is left.
    drained: &'a mut bool,
}

/// Elements that one thread may access exclusively until this is dropped.
#[derive(Debug)]
pub(super) struct Portion<'a> {
    pub(super) part: CutPart,
    /// Range within a part that lies at the same place in every buffer; for a swap, the offset into the two chunks.
    pub(super) range: Range<usize>,
    cut: Cut,
    views: &'a mut [View],
}

impl Share<'_> {
    pub(super) fn action(&self) -> Action {
        self.action
    }

    pub(super) fn dtype(&self) -> DType {
        self.views[self.cut.rank].dtype
    }

    pub(super) fn world_size(&self) -> usize {
        self.views.len()
    }

    /// Total bytes of the buffers that the operation reads or writes.
    pub(super) fn bytes(&self) -> usize {
        let buffers = if self.action.peer().is_some() { 2 } else { self.views.len() };
        self.views[self.cut.rank].bytes() * buffers
    }

    /// Returns true if a rank lends values, whose former contents are kept.
    pub(super) fn keeps(&self) -> bool {
        self.views.iter().any(View::keeps)
    }

    /// Claims the next portion; `None` if none is left, or if this thread is to stop.
    pub(super) fn claim(&mut self) -> Option<Portion<'_>> {
        while !(self.stops)() {
            let Some((part, range)) = self.cut.portion(self.next.next()) else {
                *self.drained = true;
                return None;
            };
            let written = matches!(part, CutPart::Chunk(of) if self.views[of].chunk != ChunkUse::Shared);
            if !range.is_empty() && !written {
                return Some(Portion { part, range, cut: self.cut, views: &mut *self.views });
            }
        }
        None
    }
}

impl Portion<'_> {
    pub(super) fn dtype(&self) -> DType {
        self.views[self.cut.rank].dtype
    }

    pub(super) fn world_size(&self) -> usize {
        self.views.len()
    }

    /// Total bytes of the buffers of all ranks.
    pub(super) fn bytes(&self) -> usize {
        self.views[self.cut.rank].bytes() * self.views.len()
    }

    /// Returns the factor of rank `of`'s values.
    pub(super) fn factor(&self, of: usize) -> f64 {
        self.views[of].factor
    }

    /// Returns the ranges of this portion in the buffers of ranks `a` and `b`, which exchange their chunks.
    pub(super) fn swapped(&self, a: usize, b: usize) -> (Range<usize>, Range<usize>) {
        let at = |chunk: Range<usize>| chunk.start + self.range.start..chunk.start + self.range.end;
        (at(self.cut.chunk(b)), at(self.cut.chunk(a)))
    }

    /// Returns the range from element `at` of this portion in which the values of every rank are contiguous, and enters it: until the
    /// next call only elements of this range can be borrowed.
    pub(super) fn enter(&mut self, at: usize) -> Range<usize> {
        assert!(self.range.contains(&at), "an element outside this portion");
        let mut end = self.range.end;
        for view in self.views.iter_mut() {
            if let Some(lent) = view.lent {
                // SAFETY: the operation runs, so its segments are alive, and they cover every element of the operation.
                view.here = unsafe { lent.at(at) };
            }
            end = end.min(view.here.start + view.here.len);
        }
        at..end
    }

    /// Number of elements from `at` to the next one that begins a cache line in the memory that keeps former values.
    pub(super) fn to_line(&self, at: usize) -> usize {
        let Some(view) = self.views.iter().find(|view| view.lent.is_some()) else { return 0 };
        let size = view.dtype.size();
        let address = view.base.addr().get() + at * size;
        (address.next_multiple_of(LINE) - address) / size
    }

    /// Calls `copy` with the elements `range` of the memory that keeps rank `of`'s former values, and with the values; not at all if
    /// the rank does not keep them.
    ///
    /// # Panics
    /// As for [`slice`](Portion::slice).
    #[inline(always)]
    pub(super) fn keep<T: Element>(
        &mut self,
        of: usize,
        range: Range<usize>,
        copy: impl FnOnce(&mut [T], &[T]),
    ) {
        if self.views[of].lent.is_none() {
            return;
        }
        let (kept, end) = (self.views[of].base.cast::<T>(), self.views[of].len);
        let len = range.len();
        assert!(range.end <= end, "a range beyond the buffer");
        let start = range.start;
        let values = self.slice::<T>(of, range);
        // SAFETY: the range lies in the buffer, which has the values' type, and belongs to this portion, which no other rank has. The
        // rank owns the buffer and has borrowed the values exclusively, so they do not overlap.
        let kept = unsafe { std::slice::from_raw_parts_mut(kept.as_ptr().add(start), len) };
        copy(kept, values);
    }

    /// Borrows elements `range` of rank `of`'s values: of its buffer, unless it lends others.
    ///
    /// # Panics
    /// If they are outside this portion or outside the range that was entered last, or not of type `T`.
    pub(super) fn slice<T: Element>(&mut self, of: usize, range: Range<usize>) -> &mut [T] {
        let here = self.allow::<T>(of, &range);
        // SAFETY: `allow` has checked that the range lies in this memory, holds `T`, and belongs to this portion, which no other
        // rank has; the borrow of `self` keeps this rank from borrowing it twice.
        unsafe {
            let first = here.base.cast::<T>().as_ptr().add(range.start - here.start);
            std::slice::from_raw_parts_mut(first, range.len())
        }
    }

    /// Borrows two ranges of equal length in the buffers of two different ranks.
    ///
    /// # Panics
    /// As for [`slice`](Portion::slice), and if both are of one rank.
    pub(super) fn two<T: Element>(
        &mut self,
        (a, in_a): (usize, Range<usize>),
        (b, in_b): (usize, Range<usize>),
    ) -> (&mut [T], &mut [T]) {
        assert_ne!(a, b, "one buffer cannot be borrowed twice");
        let (here_a, here_b) = (self.allow::<T>(a, &in_a), self.allow::<T>(b, &in_b));
        // SAFETY: as in `slice` for both ranges, and values of different ranks do not overlap, because each rank owns its buffer or
        // has borrowed its values exclusively.
        unsafe {
            let a = here_a.base.cast::<T>().as_ptr().add(in_a.start - here_a.start);
            let b = here_b.base.cast::<T>().as_ptr().add(in_b.start - here_b.start);
            (std::slice::from_raw_parts_mut(a, in_a.len()), std::slice::from_raw_parts_mut(b, in_b.len()))
        }
    }

    #[inline(always)]
    fn allow<T: Element>(&self, of: usize, range: &Range<usize>) -> Segment {
        let View { dtype, here, .. } = self.views[of];
        assert_eq!(dtype, T::DTYPE, "the operation's type is not the kernel's");
        let inside =
            here.start <= range.start && range.start <= range.end && range.end <= here.start + here.len;
        assert!(inside, "a range beyond the values");
        assert!(self.cut.holds(self.part, &self.range, of, range), "a range outside this portion");
        here
    }
}

/// Copies elements `part` of the chunk of the rank that joined the transfer as `work` to all other ranks, on several threads if there
/// are more of them than ranks. Returns `None` after a panic.
pub(super) fn copy_part(
    work: &mut TransferShare,
    (rank, world_size): (usize, usize),
    part: Range<usize>,
    threads: &Threads,
) -> Option<u64> {
    let cut = Cut::new(work.called.action, rank, world_size, work.views[rank].len);
    let first = cut.chunk(rank).start;
    let range = first + part.start..first + part.end;
    // The other threads skip this chunk, as its view says that the rank writes it (`Share::claim`); the rest is as in `move_bytes`.
    let portion = Portion { part: CutPart::Chunk(rank), range, cut, views: work.views.as_mut_slice() };
    catch_unwind(AssertUnwindSafe(|| moves::send(portion, rank, threads))).ok().map(|()| 0)
}

/// Reduces the sources of the ranks of a transfer into memory for elements of this rank's chunk. Returns `None` after a panic.
pub(super) fn reduce_part(work: &TransferShare, into: FoldInto, tiles: &mut Tiles) -> Option<u64> {
    let Some(reduction) = work.called.action.reduction() else { return Some(0) };
    let reduce = || {
        tiles.from.clear();
        tiles.factors.clear();
        for view in &work.views {
            let size = view.dtype.size();
            assert!(
                into.dtype == view.dtype && into.first + into.len <= view.len,
                "a part beyond the source"
            );
            let base = view.source.map_or(view.base, ReduceSource::address);
            // SAFETY: a source is as long as the buffer (`reduces_in_one_pass`), so the element is within it.
            tiles.from.push(unsafe { base.add(into.first * size) });
            tiles.factors.push(view.factor);
        }
        // SAFETY: every rank of the transfer has lent its source until the operation has ended, which comes after this thread has left
        // the transfer, and none writes it meanwhile. The caller's memory for the result is no part of them.
        unsafe { fold((tiles, TileMemory::Main), into, reduction) }
    };
    catch_unwind(AssertUnwindSafe(reduce)).ok().map(|()| 0)
}

/// Moves bytes of a transfer in a group of `world_size` until no portion is left to draw, or until `stops` before a portion. Returns
/// the non-finite elements found in the result, or `None` after a panic.
pub(super) fn move_bytes(
    work: &mut TransferShare,
    world_size: usize,
    stops: &dyn Fn() -> bool,
) -> Option<u64> {
    // From `Transfers::join` to `Transfers::leave`, the group holds every member's operation: its result is recorded after the last
    // thread has left the transfer. All members have posted operations that agree, with lengths and types that agree. So each thread
    // makes the same cut of the same views and shares the transfer's counter, which was zero when the last member arrived: no number
    // is drawn twice, and different numbers are disjoint portions. The memory stays allocated, because a rank's buffer remains in its
    // lane until the rank has collected the result, and the call that lends values returns after that (`RankWorker::keep`). A transfer
    // may move at the same time as another of the same ranks: their buffers are different.
    let TransferShare { called, rank, views, portions, drained, .. } = work;
    let (action, cut) = (called.action, Cut::new(called.action, *rank, world_size, views[*rank].len));
    let share = Share { action, cut, views: views.as_mut_slice(), next: portions, stops, drained };
    // A panic would be a bug of this crate. Even then no buffer goes back while other threads access it, and no rank treats the
    // result as valid.
    catch_unwind(AssertUnwindSafe(|| moves::perform(share))).ok()
}

//! Access to other ranks' memory: the only such place, with its safety argument.
//!
//! The elements of an operation are cut into portions, and a shared counter gives each portion to exactly one rank, the next that
//! asks. Only that rank may access these elements of these buffers:
//!
//! | operation | portion |
//! |---|---|
//! | all_reduce, reduce_scatter, all_gather, broadcast | a range within one chunk, in every buffer |
//! | all_to_all | a range of chunk `b` of buffer `a` and the same of chunk `a` of buffer `b` |
//! | send, recv | a range, in both buffers |
//! | barrier, split | none |
//!
//! So no transfer waits for a thread that the system has not woken yet, and the result does not depend on the rank that moves a
//! portion.

use super::cut::{Cut, CutPart};
use super::meeting::{MeetingSeat, Met};
use super::verdict::Party;
use crate::sync::Counter;
use crate::{Action, Called, Error};
use meshstep_tensor::{Buffer, DType, Element};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// Address of a rank's buffer, dereferenced only by [`Portion`], and the factor of its values.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    base: NonNull<u8>,
    len: usize,
    dtype: DType,
    factor: f64,
}

// SAFETY: a view is an address and a size; only `Portion` dereferences it, with its own safety argument.
unsafe impl Send for View {}

impl View {
    /// Returns an empty view.
    pub(super) fn empty() -> Self {
        View { base: NonNull::<u64>::dangling().cast(), len: 0, dtype: DType::F32, factor: 1.0 }
    }

    /// Returns a view of the whole of `buffer`, on which its rank calls `action`.
    pub(super) fn of(buffer: &Buffer, action: Action) -> Self {
        let (len, dtype, factor) = (buffer.len(), buffer.dtype(), action.factor());
        View { base: buffer.as_ptr(), len, dtype, factor }
    }

    pub(super) fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }
}

/// Memory of an operation while bytes move, as seen by one rank of its party.
#[derive(Debug)]
pub(super) struct Share<'a> {
    action: Action,
    cut: Cut,
    views: &'a [View],
    next: &'a Counter,
}

/// Elements that one rank may access exclusively until this is dropped.
#[derive(Debug)]
pub(super) struct Portion<'a> {
    pub(super) part: CutPart,
    /// Range within a part that lies at the same place in every buffer; for a swap, the offset into the two chunks.
    pub(super) range: Range<usize>,
    cut: Cut,
    views: &'a [View],
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

    /// Claims the next portion.
    pub(super) fn claim(&mut self) -> Option<Portion<'_>> {
        loop {
            let (part, range) = self.cut.portion(self.next.next())?;
            if !range.is_empty() {
                return Some(Portion { part, range, cut: self.cut, views: self.views });
            }
        }
    }
}

impl Portion<'_> {
    /// Returns the factor of rank `of`'s values.
    pub(super) fn factor(&self, of: usize) -> f64 {
        self.views[of].factor
    }

    /// Returns the ranges of this portion in the buffers of ranks `a` and `b`, which exchange their chunks.
    pub(super) fn swapped(&self, a: usize, b: usize) -> (Range<usize>, Range<usize>) {
        let at = |chunk: Range<usize>| chunk.start + self.range.start..chunk.start + self.range.end;
        (at(self.cut.chunk(b)), at(self.cut.chunk(a)))
    }

    /// Borrows elements `range` of rank `of`'s buffer.
    ///
    /// # Panics
    /// If they are outside this portion, or not of type `T`.
    pub(super) fn slice<T: Element>(&mut self, of: usize, range: Range<usize>) -> &mut [T] {
        let view = self.allow::<T>(of, &range);
        // SAFETY: `allow` has checked that the range lies in the buffer, holds `T`, and belongs to this portion, which no other
        // rank has; the borrow of `self` keeps this rank from borrowing it twice.
        unsafe {
            std::slice::from_raw_parts_mut(view.base.cast::<T>().as_ptr().add(range.start), range.len())
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
        let (view_a, view_b) = (self.allow::<T>(a, &in_a), self.allow::<T>(b, &in_b));
        // SAFETY: as in `slice` for both ranges, and buffers of different ranks do not overlap, because each `Buffer` is the only
        // owner of its range.
        unsafe {
            let a =
                std::slice::from_raw_parts_mut(view_a.base.cast::<T>().as_ptr().add(in_a.start), in_a.len());
            let b =
                std::slice::from_raw_parts_mut(view_b.base.cast::<T>().as_ptr().add(in_b.start), in_b.len());
            (a, b)
        }
    }

    fn allow<T: Element>(&self, of: usize, range: &Range<usize>) -> View {
        let view = self.views[of];
        assert_eq!(view.dtype, T::DTYPE, "the operation's type is not the kernel's");
        assert!(range.start <= range.end && range.end <= view.len, "a range beyond the buffer");
        assert!(self.cut.holds(self.part, &self.range, of, range), "a range outside this portion");
        view
    }
}

/// Runs one operation of one rank: meets the other ranks, lets `body` move this rank's share, if any, and returns when all ranks
/// have moved theirs, so that no rank accesses the buffer behind `view` any more.
pub(super) fn exchange(
    seat: &MeetingSeat,
    called: Called,
    view: View,
    after: Duration,
    views: &mut Vec<View>,
    body: impl FnOnce(Share<'_>),
) -> Result<Option<MeetingSeat>, Arc<Error>> {
    let MeetingSeat { group, rank } = seat;
    if let Met::Done(formed) = group.meet(*rank, called, view, after, views)? {
        return Ok(formed);
    }
    let party = match called.action {
        Action::Send { to } => Party::Pair { from: *rank, to },
        Action::Recv { from } => Party::Pair { from, to: *rank },
        _ => Party::All,
    };
    // From here until `leave` returns, `Group` holds every rank of the party between these two calls, or within `meet` if this
    // rank moves the bytes of all, and lets no rank post another operation. All have posted operations that agree, with lengths
    // and types that agree. So each rank that moves bytes makes the same cut of the same views and shares the party's counter,
    // which was zero when the party was complete: no number is drawn twice, and different numbers are disjoint portions. The
    // memory stays allocated, because a rank's buffer remains in its lane until this function has returned there.
    let cut = Cut::new(called.action, *rank, group.world_size(), view.len);
    let share = Share { action: called.action, cut, views, next: group.counter(party) };
    // A panic in `body` would be a bug of this crate. Even then no buffer goes back while other ranks access it, and no rank
    // treats the result as valid.
    if catch_unwind(AssertUnwindSafe(|| body(share))).is_err() {
        group.spoil(*rank);
    }
    group.leave(*rank, party)
}

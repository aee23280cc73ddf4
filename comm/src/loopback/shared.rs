//! The one place where ranks touch each other's memory, and the reason why they may.
//!
//! The elements of an operation are cut into portions, and a shared counter gives each portion to exactly one rank, the
//! next that asks. Who gets it may touch these elements of these buffers, and no other rank does:
//!
//! | operation | a portion is |
//! |---|---|
//! | all_reduce, reduce_scatter, all_gather, broadcast | a range within one chunk, in every buffer |
//! | all_to_all | a range of chunk `b` of buffer `a` and the same of chunk `a` of buffer `b` |
//! | send, recv | a range, in both buffers |
//! | barrier, split | there is none |
//!
//! So the bytes do not wait for a thread that the system has not woken yet, and the result does not depend on who moves
//! them.

use super::cut::{Cut, Part};
use super::meeting::{Met, Seat};
use super::verdict::Party;
use crate::sync::Counter;
use crate::{Action, Called, Error};
use meshstep_tensor::{Buffer, DType, Element};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// Where a rank's buffer lies, where only [`Portion`] looks, and what its values are multiplied by.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    base: NonNull<u8>,
    len: usize,
    dtype: DType,
    factor: f64,
}

// SAFETY: a view is an address and a size; only `Portion` looks behind it, and says why it may.
unsafe impl Send for View {}

impl View {
    /// A view of nothing.
    pub(super) fn empty() -> Self {
        View { base: NonNull::<u64>::dangling().cast(), len: 0, dtype: DType::F32, factor: 1.0 }
    }

    /// The whole of `buffer`, on which its rank calls `action`.
    pub(super) fn of(buffer: &Buffer, action: Action) -> Self {
        let (len, dtype, factor) = (buffer.len(), buffer.dtype(), action.factor());
        View { base: buffer.as_ptr(), len, dtype, factor }
    }

    pub(super) fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }
}

/// The memory of an operation while bytes move, as one rank of its party sees it.
#[derive(Debug)]
pub(super) struct Share<'a> {
    action: Action,
    cut: Cut,
    views: &'a [View],
    next: &'a Counter,
}

/// What one rank, and no other, may touch until it has dropped this.
#[derive(Debug)]
pub(super) struct Portion<'a> {
    pub(super) part: Part,
    /// For a part that lies in every buffer alike: where. For a swap: how far into the two chunks.
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

    /// Bytes of the buffers that the operation reads or writes, together.
    pub(super) fn bytes(&self) -> usize {
        let buffers = if self.action.peer().is_some() { 2 } else { self.views.len() };
        self.views[self.cut.rank].bytes() * buffers
    }

    /// The next portion that nobody has had.
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
    /// What rank `of` has its values multiplied by.
    pub(super) fn factor(&self, of: usize) -> f64 {
        self.views[of].factor
    }

    /// Where this portion of the chunks that ranks `a` and `b` exchange lies in their buffers.
    pub(super) fn swapped(&self, a: usize, b: usize) -> (Range<usize>, Range<usize>) {
        let at = |chunk: Range<usize>| chunk.start + self.range.start..chunk.start + self.range.end;
        (at(self.cut.chunk(b)), at(self.cut.chunk(a)))
    }

    /// Elements `range` of the buffer of rank `of`.
    ///
    /// # Panics
    /// If they are not of this portion, or not of type `T`.
    pub(super) fn slice<T: Element>(&mut self, of: usize, range: Range<usize>) -> &mut [T] {
        let view = self.allow::<T>(of, &range);
        // SAFETY: `allow` has checked that the range lies in the buffer, holds `T`, and is of this portion, which no
        // other rank has; the borrow of `self` keeps this rank from having it twice.
        unsafe {
            std::slice::from_raw_parts_mut(view.base.cast::<T>().as_ptr().add(range.start), range.len())
        }
    }

    /// Two ranges of equal length in the buffers of two different ranks at once.
    ///
    /// # Panics
    /// As [`slice`](Portion::slice), and if both are of one rank.
    pub(super) fn two<T: Element>(
        &mut self,
        (a, in_a): (usize, Range<usize>),
        (b, in_b): (usize, Range<usize>),
    ) -> (&mut [T], &mut [T]) {
        assert_ne!(a, b, "one buffer cannot be borrowed twice");
        let (view_a, view_b) = (self.allow::<T>(a, &in_a), self.allow::<T>(b, &in_b));
        // SAFETY: as in `slice` for each of them, and buffers of different ranks do not overlap, because each `Buffer`
        // owns its range alone.
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
        assert!(self.cut.holds(self.part, &self.range, of, range), "a range that is not of this portion");
        view
    }
}

/// One operation of one rank: meets the others, lets `body` move this rank's share, if it has one, and returns when all have
/// moved theirs, so that nobody touches the buffer behind `view` any more.
pub(super) fn exchange(
    seat: &Seat,
    called: Called,
    view: View,
    after: Duration,
    views: &mut Vec<View>,
    body: impl FnOnce(Share<'_>),
) -> Result<Option<Seat>, Arc<Error>> {
    let Seat { group, rank } = seat;
    if let Met::Done(formed) = group.meet(*rank, called, view, after, views)? {
        return Ok(formed);
    }
    let party = match called.action {
        Action::Send { to } => Party::Pair { from: *rank, to },
        Action::Recv { from } => Party::Pair { from, to: *rank },
        _ => Party::All,
    };
    // From here until `leave` returns, `Group` holds every rank of the party between these two calls, or within `meet`
    // where this rank moves the bytes of all, and lets no rank post anything else. All have posted operations that agree,
    // with lengths and types that agree. So each rank that moves bytes makes the same cut of the same views, and shares the
    // party's counter, which stood at zero when the party was complete: no number is drawn twice, and different numbers are
    // portions without a common element. The memory stays, because a rank's buffer remains in its lane until this function
    // has returned there.
    let cut = Cut::new(called.action, *rank, group.world_size(), view.len);
    let share = Share { action: called.action, cut, views, next: group.counter(party) };
    // A panic in `body` would be a bug of ours; even then nobody gets a buffer back while others touch it, and nobody
    // takes the result for a good one.
    if catch_unwind(AssertUnwindSafe(|| body(share))).is_err() {
        group.spoil(*rank);
    }
    group.leave(*rank, party)
}

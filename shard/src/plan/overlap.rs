//! Overlaps of ranges.

use std::ops::Range;

/// Returns the items that overlap `range`, and items without elements within it. The ranges of all items are disjoint and in
/// ascending order.
pub(crate) fn overlapping<'s, T>(
    items: &'s [T],
    range: &Range<usize>,
    of: impl Fn(&T) -> Range<usize>,
) -> &'s [T] {
    let rest = &items[items.partition_point(|item| of(item).end <= range.start)..];
    &rest[..rest.partition_point(|item| of(item).start < range.end)]
}

/// Returns the intersection of two ranges.
pub fn overlap(a: &Range<usize>, b: &Range<usize>) -> Option<Range<usize>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (!both.is_empty()).then_some(both)
}

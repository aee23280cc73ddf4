//! Values that a rank lends to an operation: slices laid end to end.

use meshstep_tensor::{Error, SliceMut};
use std::ptr::NonNull;

/// Contiguous memory of an operation's elements from `start` on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) base: NonNull<u8>,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

// SAFETY: a segment is an address and a size; access to its memory has its own safety argument (`Portion`).
unsafe impl Send for Segment {}

/// Address of a list of segments, for as long as the operation runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LentValues {
    segments: NonNull<Segment>,
    count: usize,
}

impl LentValues {
    /// Returns the address of a list that is not empty.
    pub(crate) fn of(segments: &[Segment]) -> Option<Self> {
        let (list, count) = (NonNull::from(segments).cast(), segments.len());
        (count > 0).then_some(LentValues { segments: list, count })
    }

    /// Returns the segment with element `at`, or the last one.
    ///
    /// # Safety
    /// The list is alive, and nothing writes it.
    pub(crate) unsafe fn at(self, at: usize) -> Segment {
        // SAFETY: the caller's promise, and the address and count are those of a slice.
        let segments = unsafe { std::slice::from_raw_parts(self.segments.as_ptr(), self.count) };
        segments[segments.partition_point(|segment| segment.start <= at).saturating_sub(1)]
    }
}

/// Writes the segments of `values` into `segments`; slices without elements have none.
pub(crate) fn lay_end_to_end(values: &mut [SliceMut<'_>], segments: &mut Vec<Segment>) -> Result<(), Error> {
    let mut start = 0;
    segments.clear();
    for slice in values.iter_mut().filter(|slice| !slice.is_empty()) {
        let (len, base) = (slice.len(), NonNull::from(slice.bytes_mut()?).cast());
        segments.push(Segment { base, start, len });
        start += len;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_in_the_segment_that_holds_it() {
        let (mut a, mut b, mut c) = ([0f32; 3], [0f32; 0], [0f32; 5]);
        let addresses = [a.as_ptr().addr(), c.as_ptr().addr()];
        let mut values = [SliceMut::from(&mut a), SliceMut::from(&mut b), SliceMut::from(&mut c)];
        let mut segments = Vec::new();
        lay_end_to_end(&mut values, &mut segments).unwrap();
        let lent = LentValues::of(&segments).unwrap();
        for at in 0..8 {
            // SAFETY: `segments` lives until the end of the test, and is not written.
            let found = unsafe { lent.at(at) };
            let second = usize::from(at >= 3);
            assert_eq!((found.base.addr().get(), found.start), (addresses[second], 3 * second), "{at}");
            assert!(found.start <= at && at < found.start + found.len, "{at}");
        }
        lay_end_to_end(&mut [SliceMut::from(&mut b)], &mut segments).unwrap();
        assert!(LentValues::of(&segments).is_none());
    }
}

//! Elements of a tensor held by a part of it: runs at equal distances.

use std::ops::Range;

/// Elements of a tensor by row-major index: `run` of them from `first` on, as many from `first + stride` on, and so on. A matrix cut by
/// columns has such parts: a run for each row, with the whole row's length as stride.
///
/// ```
/// use meshstep_optim::Strided;
///
/// // The right half of a matrix with rows of 6.
/// let half = Strided { first: 3, run: 3, stride: 6 };
/// assert_eq!((0..7).map(|place| half.index(place)).collect::<Vec<_>>(), [3, 4, 5, 9, 10, 11, 15]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strided {
    /// Index of the first element.
    pub first: u64,
    /// Number of contiguous elements in a run; at least 1.
    pub run: u64,
    /// Distance from the start of one run to the start of the next.
    pub stride: u64,
}

impl Strided {
    /// All elements of a tensor.
    pub const WHOLE: Strided = Strided { first: 0, run: 1 << 63, stride: 0 };

    /// Returns the index in the tensor of the element at position `place` of this part.
    pub fn index(&self, place: u64) -> u64 {
        // A whole tensor needs no division.
        let along = if place < self.run {
            place
        } else {
            (place / self.run).wrapping_mul(self.stride).wrapping_add(place % self.run)
        };
        self.first.wrapping_add(along)
    }

    /// Returns the number of elements left in a run, from position `place` on.
    fn left(self, place: u64) -> u64 {
        self.run - if place < self.run { place } else { place % self.run }
    }

    /// Returns the index of the first of `len` elements from position `place` on, if they are contiguous.
    pub(crate) fn together(self, place: u64, len: u64) -> Option<u64> {
        (len <= self.left(place)).then(|| self.index(place))
    }

    /// Splits `len` elements from position `place` on at the ends of runs. Returns for each piece its range, relative to `place`, and the
    /// index of its first element in the tensor.
    pub(crate) fn runs(self, place: u64, len: usize) -> impl Iterator<Item = (Range<usize>, u64)> {
        let mut start = 0;
        std::iter::from_fn(move || {
            if start == len {
                return None;
            }
            let at = place.wrapping_add(start as u64);
            let left = usize::try_from(self.left(at)).unwrap_or(usize::MAX);
            let end = len.min(start.saturating_add(left));
            let range = std::mem::replace(&mut start, end)..end;
            Some((range, self.index(at)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_what_the_index_says() {
        for (run, stride) in [(1, 1), (1, 7), (3, 3), (3, 10), (128, 1024), (1 << 63, 0)] {
            let strided = Strided { first: 5, run, stride };
            for (place, len) in [(0, 0), (0, 1), (0, 300), (2, 300), (127, 2), (1000, 129)] {
                let expected: Vec<u64> = (place..place + len).map(|i| strided.index(i)).collect();
                let mut found = Vec::new();
                for (range, first) in strided.runs(place, len as usize) {
                    assert_eq!(range.start, found.len());
                    found.extend((0..range.len() as u64).map(|i| first + i));
                }
                assert_eq!(found, expected, "{strided:?} from {place}");
                let neighbours = expected.windows(2).all(|pair| pair[0] + 1 == pair[1]);
                let together = strided.together(place, len).is_some();
                assert!(
                    if together { neighbours } else { stride == run || !neighbours },
                    "{strided:?} {place}"
                );
            }
        }
    }
}

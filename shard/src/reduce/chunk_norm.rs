//! Norm of this rank's chunk of a bucket, taken while the chunk is reduced and in the cache.

use crate::plan::overlap::{overlap, overlapping};
use meshstep_comm::ReduceObserver;
use meshstep_optim::{Isa, Norm, NormAccumulator};
use meshstep_tensor::{Slice, Threads};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Least counted elements for which an observer is worth its calls.
const LEAST: usize = 64 << 10;

/// Observer of a bucket's reduction that takes the norm of the counted ranges it sees.
#[derive(Debug)]
pub(crate) struct ChunkNorm {
    norm: Norm,
    /// Ranges of the bucket that count, in ascending order.
    counted: Vec<Range<usize>>,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    sum: NormAccumulator,
    elements: usize,
}

impl ChunkNorm {
    /// Makes an observer of these ranges, if they are long.
    pub(crate) fn new(norm: Norm, counted: &[Range<usize>]) -> Option<Self> {
        let len: usize = counted.iter().map(ExactSizeIterator::len).sum();
        let seen = || Mutex::new(Seen { sum: NormAccumulator::new(norm), elements: 0 });
        (len >= LEAST).then(|| ChunkNorm { norm, counted: counted.to_vec(), seen: seen() })
    }

    /// Forgets what it has seen, before a reduction.
    pub(crate) fn reset(&self) {
        let mut seen = self.seen();
        (seen.sum, seen.elements) = (NormAccumulator::new(self.norm), 0);
    }

    /// Returns the sum of the counted ranges, if all of them were seen.
    pub(crate) fn sum(&self) -> Option<NormAccumulator> {
        let seen = self.seen();
        let all = self.counted.iter().map(ExactSizeIterator::len).sum::<usize>();
        (seen.elements == all).then(|| seen.sum.clone())
    }

    /// Returns what was seen, also after a panic (decision 119): it is held for one merge, which does not panic.
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReduceObserver for ChunkNorm {
    fn see(&self, first: usize, values: Slice<'_>) {
        let range = first..first + values.len();
        for counted in overlapping(&self.counted, &range, Range::clone) {
            let Some(both) = overlap(counted, &range) else { continue };
            let mut sum = NormAccumulator::new(self.norm);
            let part = values.slice(both.start - first..both.end - first);
            // Elements of a type without a norm are left to the reducer, which reports them.
            let added = part.map(|part| sum.add_on(Isa::detect(), &Threads::caller(), part));
            if let Ok(Ok(())) = added {
                let mut seen = self.seen();
                seen.sum.merge(&sum);
                seen.elements += both.len();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_in_any_order_have_the_norm_of_the_counted_ranges() {
        let values: Vec<f32> = (0..200_000).map(|i| (i % 1000) as f32 - 3.5).collect();
        let counted = [10..70_000, 70_100..70_101, 120_000..199_999];
        let observer = ChunkNorm::new(Norm::L2, &counted).unwrap();
        let mut expected = NormAccumulator::new(Norm::L2);
        counted.iter().for_each(|range| expected.add((&values[range.clone()]).into()).unwrap());
        for step in [7, 30_000, 64 << 10, 200_000] {
            observer.reset();
            let starts: Vec<usize> = (0..values.len()).step_by(step.max(1000)).collect();
            for &start in starts.iter().rev() {
                assert!(observer.sum().is_none(), "not all of them yet");
                let end = values.len().min(start + step.max(1000));
                observer.see(start, (&values[start..end]).into());
            }
            assert_eq!(observer.sum().unwrap().finish().to_bits(), expected.finish().to_bits(), "{step}");
        }
        assert!(ChunkNorm::new(Norm::L2, &counted[1..2]).is_none(), "too short");
    }
}

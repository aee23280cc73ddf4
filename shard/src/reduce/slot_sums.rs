//! Sums over slots: those of one rank, kept like the digits of a binary counter, and the rest of the tree once all ranks' sums are here.

use crate::error::Error;
use crate::plan::slot_tree::{Addition, Node, PartialPlace, SlotTree};
use meshstep_comm::InFlight;
use meshstep_optim::accumulate;
use meshstep_tensor::{Buffer, Place, Queue, Slice, SliceMut};
use std::ops::Range;

/// Elements that are summed at once on the CPU: those of all ranks stay in the second-level cache.
const BLOCK: usize = 4096;

/// Sums of a bucket over this rank's slots, and memory for more.
#[derive(Debug)]
pub(crate) struct SlotSums {
    run: Range<usize>,
    /// Next slot.
    next: usize,
    /// True if a slot is added to the one before it where that lies.
    in_place: bool,
    /// True if the vector that fills has the slot before the next one.
    paired: bool,
    /// Sums of complete nodes, in the order of slots.
    sums: Vec<(Node, Buffer)>,
    spare: Vec<Buffer>,
    /// Exchanges in flight, except the first.
    pub(crate) more: Vec<InFlight>,
}

impl SlotSums {
    /// Sums of the slots of `run` in these vectors and one more.
    pub(crate) fn new(run: Range<usize>, in_place: bool, spare: Vec<Buffer>) -> Self {
        let sums = Vec::with_capacity(spare.len() + 1);
        SlotSums { next: run.start, run, in_place, paired: false, sums, spare, more: Vec::new() }
    }

    /// Returns true if the next slot is added to the one before it.
    pub(crate) fn is_paired(&self) -> bool {
        self.paired
    }

    /// Goes on to the slot after the next one if that is added to it where it lies.
    pub(crate) fn pair(&mut self) -> bool {
        let pairs =
            self.in_place && !self.paired && self.next.is_multiple_of(2) && self.next + 1 < self.run.end;
        self.next += usize::from(pairs);
        self.paired |= pairs;
        pairs
    }

    /// Takes a vector without sums.
    pub(crate) fn take_spare(&mut self) -> Option<Buffer> {
        self.spare.pop()
    }

    /// Adds the next slot's gradients, or the sum of that slot and the one before. Those beyond the run are dropped: the step is an error
    /// then.
    pub(crate) fn add(&mut self, slot: Buffer, queue: &Queue) -> Result<(), Error> {
        if self.next >= self.run.end {
            self.spare.push(slot);
            return Ok(());
        }
        let paired = std::mem::take(&mut self.paired);
        let first = if paired { Node { level: 1, index: self.next / 2 } } else { Node::leaf(self.next) };
        let (mut node, mut sum) = (first, slot);
        self.next += 1;
        while let Some(joined) = self.sums.last().and_then(|(left, _)| left.join(node)) {
            let Some((_, mut both)) = self.sums.pop() else { break };
            let added = accumulate(both.as_mut(), sum.as_slice(), 1.0, false, queue);
            self.spare.push(sum);
            (node, sum) = (joined, both);
            if let Err(error) = added {
                self.spare.push(sum);
                return Err(error.into());
            }
        }
        self.sums.push((node, sum));
        Ok(())
    }

    /// Takes the vectors that travel, one for each of `rounds` exchanges: the sums in order, then any.
    pub(crate) fn take(&mut self, rounds: usize) -> Vec<Buffer> {
        let spare = &mut self.spare;
        let mut all: Vec<Buffer> = self.sums.drain(..).map(|(_, sum)| sum).collect();
        spare.extend(all.split_off(rounds.min(all.len())));
        let padding = spare.len().saturating_sub(rounds - all.len());
        all.extend(spare.drain(padding..));
        all
    }

    /// Takes vectors back that have travelled.
    pub(crate) fn put_back(&mut self, vectors: impl IntoIterator<Item = Buffer>) {
        self.spare.extend(vectors);
    }

    /// Forgets the step's sums. Returns memory for the next slot: `whole`, if it is there.
    pub(crate) fn forget(&mut self, whole: Option<Buffer>) -> Option<Buffer> {
        (self.next, self.paired) = (self.run.start, false);
        self.spare.extend(self.sums.drain(..).map(|(_, sum)| sum));
        whole.or_else(|| self.spare.pop())
    }
}

impl SlotTree {
    /// Adds the chunks that ranks have sent to the one at `rank`, in the order of the tree. `vectors` has one vector for each exchange, with a
    /// chunk of each rank; the sum is chunk `rank` of the first.
    pub(crate) fn add_up(&self, vectors: &mut [Buffer], rank: usize, queue: &Queue) -> Result<(), Error> {
        let ranks = self.runs().ranks();
        let chunk = vectors.first().map_or(0, Buffer::len) / ranks;
        let block = if queue.place() == Place::Cpu { BLOCK } else { chunk.max(1) };
        for start in (0..chunk).step_by(block) {
            let part = start..chunk.min(start + block);
            let of = |place: PartialPlace| place.rank * chunk + part.start..place.rank * chunk + part.end;
            for &Addition { left, right } in self.additions() {
                let (into, from) = both(vectors, (left.round, of(left)), (right.round, of(right)))?;
                accumulate(into, from, 1.0, false, queue)?;
            }
            if rank > 0 {
                let [first, own] = [0, rank].map(|rank| (0, of(PartialPlace { round: 0, rank })));
                let (into, from) = both(vectors, own, first)?;
                queue.copy(from, into)?;
            }
        }
        Ok(())
    }
}

/// Returns two ranges of vectors, of which the first is written. The ranges are apart.
fn both(
    vectors: &mut [Buffer],
    (i, into): (usize, Range<usize>),
    (j, from): (usize, Range<usize>),
) -> Result<(SliceMut<'_>, Slice<'_>), Error> {
    if i != j {
        let [a, b] =
            vectors.get_disjoint_mut([i, j]).unwrap_or_else(|_| unreachable!("two rounds of a tree"));
        return Ok((a.as_mut().slice(into)?, b.as_slice().slice(from)?));
    }
    let (low, high) = vectors[i].as_mut().split_at(into.start.max(from.start))?;
    Ok(match into.start < from.start {
        true => (low.slice(into)?, high.into_slice().slice(0..from.len())?),
        false => (high.slice(0..into.len())?, low.into_slice().slice(from)?),
    })
}

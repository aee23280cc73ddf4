//! Transfer of bytes from one rank to another, through one window of memory on each.

use meshstep_comm::{Action, Communicator, Op};
use meshstep_shard::Error;
use meshstep_shard::extend::host_words;
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Queue, Slice, SliceMut};

/// Size of the unit of transfer: bytes travel in pairs, as no element type is shorter.
const PAIR: usize = DType::F16.size();

/// Window of memory to send from and receive into, used for one other rank at a time.
#[derive(Debug)]
pub(crate) struct Window<'a> {
    comm: &'a dyn Communicator,
    queue: Queue,
    meter: Meter,
    host: Buffer,
    /// Window in the communicator's memory, if that is not the host's.
    there: Option<Buffer>,
    /// Buffer for elements on their way from the device to the host.
    room: Option<Buffer>,
    peer: usize,
    /// Bytes of the window that were filled, or taken.
    at: usize,
    /// Bytes received into the window.
    here: usize,
    /// Bytes still to be sent or received.
    left: u64,
}

impl<'a> Window<'a> {
    /// Allocates a window of `bytes` bytes for operations on `queue`.
    pub(crate) fn new(
        comm: &'a dyn Communicator,
        queue: &Queue,
        meter: &Meter,
        bytes: usize,
    ) -> Result<Self, meshstep_tensor::Error> {
        let len = bytes.div_ceil(PAIR);
        let host = Buffer::zeroed(len, DType::F16, meter, Category::Staging)?;
        let there = match queue.place() {
            Place::Cpu => None,
            _ => Some(Buffer::zeroed_on(queue, len, DType::F16, meter, Category::Staging)?),
        };
        let (queue, meter) = (queue.clone(), meter.clone());
        Ok(Window { comm, queue, meter, host, there, room: None, peer: 0, at: 0, here: 0, left: 0 })
    }

    /// Begins a transfer of `bytes` bytes to or from rank `peer`.
    pub(crate) fn begin(&mut self, peer: usize, bytes: u64) {
        (self.peer, self.left, self.at, self.here) = (peer, bytes, 0, 0);
    }

    /// Appends values in the memory of `queue` to the transfer.
    pub(crate) fn send(&mut self, values: Slice<'_>) -> Result<(), Error> {
        if values.place() == Place::Cpu {
            return self.send_bytes(values.bytes()?);
        }
        let (at_once, dtype) = ((self.host.bytes() / values.dtype().size()).max(1), values.dtype());
        let mut room = match self.room.take() {
            Some(room) if room.dtype() == dtype => room,
            _ => Buffer::zeroed(at_once, dtype, &self.meter, Category::Staging)?,
        };
        for start in (0..values.len()).step_by(at_once) {
            let some = values.slice(start..values.len().min(start + at_once))?;
            self.queue.download(some, room.as_mut().slice(0..some.len())?)?;
            self.send_bytes(room.as_slice().slice(0..some.len())?.bytes()?)?;
        }
        self.room = Some(room);
        Ok(())
    }

    fn send_bytes(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let most = (self.host.bytes() as u64).min(self.left) as usize;
            let (now, rest) = bytes.split_at(bytes.len().min(most - self.at));
            self.host.as_mut().bytes_mut()?[self.at..self.at + now.len()].copy_from_slice(now);
            (self.at, bytes) = (self.at + now.len(), rest);
            if self.at == most {
                self.travel(Op::send(self.peer), most)?;
                (self.at, self.left) = (0, self.left - most as u64);
            }
        }
        Ok(())
    }

    /// Fills host memory with the next bytes of the transfer.
    pub(crate) fn receive(&mut self, mut into: SliceMut<'_>) -> Result<(), Error> {
        let mut into = into.bytes_mut()?;
        while !into.is_empty() {
            if self.at == self.here {
                let next = (self.host.bytes() as u64).min(self.left) as usize;
                self.travel(Op::recv(self.peer), next)?;
                (self.at, self.here, self.left) = (0, next, self.left - next as u64);
            }
            let now = into.len().min(self.here - self.at);
            let (some, rest) = into.split_at_mut(now);
            some.copy_from_slice(&self.host.as_slice().bytes()?[self.at..self.at + now]);
            (self.at, into) = (self.at + now, rest);
        }
        Ok(())
    }

    /// Runs `op` on the first `bytes` bytes of the window.
    fn travel(&mut self, op: Op, bytes: usize) -> Result<(), Error> {
        let len = bytes / PAIR;
        let sends = matches!(op.action(), Action::Send { .. });
        if let (true, Some(there)) = (sends, &mut self.there) {
            self.queue.upload(self.host.as_slice().slice(0..len)?, there.as_mut().slice(0..len)?)?;
        }
        let window = self.there.as_mut().unwrap_or(&mut self.host);
        let rest = window.split_off(len)?;
        let travelled = host_words::run(self.comm, &self.queue, op, window);
        *window = window.take().join(rest).unwrap_or_else(|_| unreachable!("joined where it was cut"));
        travelled?;
        if let (false, Some(there)) = (sends, &self.there) {
            self.queue.download(there.as_slice().slice(0..len)?, self.host.as_mut().slice(0..len)?)?;
        }
        // On a GPU an aborted operation completes on its queue with bytes that no rank sent.
        Ok(self.comm.sound()?)
    }
}

/// Returns the partner of rank `rank` of `ranks` in each round of a tournament: every other rank once, paired in the same round.
pub(crate) fn partners(rank: usize, ranks: usize) -> impl Iterator<Item = usize> {
    let even = ranks.next_multiple_of(2).max(2);
    let rounds = even - 1;
    (0..rounds).filter_map(move |round| {
        let partner = match rank == rounds {
            // The partner `p` with `2 p = round` modulo `rounds`: the rank that would be paired with itself.
            true => round * (even / 2) % rounds,
            false => (round + rounds - rank) % rounds,
        };
        let partner = if partner == rank { rounds } else { partner };
        (partner < ranks).then_some(partner)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_meets_everybody_once_and_in_the_same_round() {
        for ranks in 1..12 {
            let rounds = |rank| partners(rank, ranks).collect::<Vec<_>>();
            for rank in 0..ranks {
                let mut met = rounds(rank);
                met.sort_unstable();
                assert_eq!(met, (0..ranks).filter(|&other| other != rank).collect::<Vec<_>>(), "{ranks}");
            }
            // Ranks do not wait in a circle: among the next partners there is always a pair that waits for each other.
            let mut queues: Vec<_> = (0..ranks).map(|rank| rounds(rank).into_iter().peekable()).collect();
            let mut left = ranks * (ranks - 1);
            while left > 0 {
                let next: Vec<Option<usize>> = queues.iter_mut().map(|queue| queue.peek().copied()).collect();
                let meets = |rank: usize| next[rank].is_some_and(|other| next[other] == Some(rank));
                let met: Vec<usize> = (0..ranks).filter(|&rank| meets(rank)).collect();
                assert!(!met.is_empty(), "{ranks} ranks wait in a circle");
                met.iter().for_each(|&rank| _ = queues[rank].next());
                left -= met.len();
            }
        }
    }
}

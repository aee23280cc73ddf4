//! Transport of groups that span machines: ranks of this machine by one transport, the others by another.

use crate::p2p::transport::{Lost, Source, Target, Transport, Waker, WindowAllocator, Windows};
use std::sync::Arc;
use std::time::Duration;

/// Shortest and longest wait for one of the two transports; bytes of the other one wait as long.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// Transport over two others.
#[derive(Debug)]
pub(super) struct Mixed {
    /// Ranks of this machine, with ranks of their own.
    near: Box<dyn Transport>,
    /// All ranks of the group.
    far: Box<dyn Transport>,
    /// For each rank of the group, its rank in `near` if it is there.
    map: Vec<Option<usize>>,
    /// For each rank of `near`, its rank in the group.
    members: Vec<usize>,
    /// Ranks of the group that read the common stream of `near`.
    audience: Vec<usize>,
    /// Wait for each transport, longer with every one in vain.
    patience: Duration,
    /// Loss that is to be reported after another one.
    unreported: Option<Lost>,
    waker: Arc<BothWakers>,
}

/// One of the two transports.
#[derive(Clone, Copy, Debug)]
enum Side {
    Near,
    Far,
}

impl Mixed {
    /// Joins two transports of one group. `members` are the group's ranks of `near`, in the order of their ranks there.
    ///
    /// # Panics
    /// If `near` has another number of ranks, or one of the two has another rank for this process.
    pub(super) fn new(near: Box<dyn Transport>, far: Box<dyn Transport>, members: Vec<usize>) -> Self {
        assert_eq!(near.world_size(), members.len(), "ranks of this machine");
        assert_eq!(members[near.rank()], far.rank(), "rank of this process");
        let place = |rank| members.iter().position(|member| *member == rank);
        let map = (0..far.world_size()).map(place).collect();
        let audience = near.audience().iter().map(|rank| members[*rank]).collect();
        let waker = Arc::new(BothWakers([near.waker(), far.waker()]));
        Mixed { near, far, map, members, audience, patience: SHORTEST, unreported: None, waker }
    }

    /// Returns true if all ranks are of this machine.
    fn is_near(&self) -> bool {
        self.members.iter().copied().eq(0..self.far.world_size())
    }

    /// Returns the transport of a rank, and its rank there.
    fn locate(&self, rank: usize) -> (Side, usize) {
        self.map[rank].map_or((Side::Far, rank), |near| (Side::Near, near))
    }

    fn source(&self, from: Source) -> (Side, Source) {
        match from {
            Source::Rank(rank) => {
                let (side, rank) = self.locate(rank);
                (side, Source::Rank(rank))
            }
            Source::Common(rank) => match self.locate(rank) {
                (Side::Near, rank) => (Side::Near, Source::Common(rank)),
                (Side::Far, rank) => {
                    panic!("rank {rank} is on another machine and has no common stream here")
                }
            },
        }
    }

    fn target(&self, to: Target) -> (Side, Target) {
        match to {
            Target::Audience => (Side::Near, to),
            Target::Rank(rank) => {
                let (side, rank) = self.locate(rank);
                (side, Target::Rank(rank))
            }
        }
    }

    fn side(&mut self, side: Side) -> &mut dyn Transport {
        match side {
            Side::Near => &mut *self.near,
            Side::Far => &mut *self.far,
        }
    }

    /// Gives a lost rank its number in the group.
    fn renamed<T>(&self, side: Side, result: Result<T, Lost>) -> Result<T, Lost> {
        result.map_err(|Lost { peer, why }| match side {
            Side::Near => Lost { peer: self.members[peer], why },
            Side::Far => Lost { peer, why },
        })
    }
}

impl Transport for Mixed {
    fn rank(&self) -> usize {
        self.far.rank()
    }

    fn world_size(&self) -> usize {
        self.far.world_size()
    }

    fn audience(&self) -> &[usize] {
        &self.audience
    }

    fn write(&mut self, to: Target, bytes: &[u8]) -> Result<usize, Lost> {
        let (side, to) = self.target(to);
        let result = self.side(side).write(to, bytes);
        self.renamed(side, result)
    }

    fn progress(&mut self) -> Result<bool, Lost> {
        if let Some(lost) = self.unreported.take() {
            return Err(lost);
        }
        let (near, far) = (self.near.progress(), self.far.progress());
        match (self.renamed(Side::Near, near), far) {
            (Ok(near), Ok(far)) => {
                if near | far {
                    self.patience = SHORTEST;
                }
                Ok(near | far)
            }
            (Err(lost), far) => {
                self.unreported = far.err();
                Err(lost)
            }
            (Ok(_), Err(lost)) => Err(lost),
        }
    }

    fn arrived(&self, from: Source) -> &[u8] {
        match self.source(from) {
            (Side::Near, from) => self.near.arrived(from),
            (Side::Far, from) => self.far.arrived(from),
        }
    }

    fn consume(&mut self, from: Source, len: usize) {
        let (side, from) = self.source(from);
        self.side(side).consume(from, len);
    }

    fn read(&mut self, from: Source, into: &mut [u8]) -> Result<usize, Lost> {
        let (side, from) = self.source(from);
        let result = self.side(side).read(from, into);
        self.renamed(side, result)
    }

    fn wait(&mut self, at_most: Duration) -> Result<(), Lost> {
        std::thread::yield_now();
        let each = self.patience.min(at_most / 2);
        self.patience = (self.patience * 2).min(LONGEST);
        let near = self.near.wait(each);
        self.renamed(Side::Near, near)?;
        self.far.wait(each)
    }

    fn waker(&self) -> Arc<dyn Waker> {
        Arc::<BothWakers>::clone(&self.waker)
    }

    fn split(&mut self, members: &[usize], channel: u64) -> Result<Box<dyn Transport>, Lost> {
        let far = self.far.split(members, channel)?;
        let near: Vec<usize> = members.iter().filter_map(|rank| self.map[*rank]).collect();
        let places = (0..members.len()).filter(|place| self.map[members[*place]].is_some()).collect();
        let near = self.near.split(&near, channel);
        Ok(Box::new(Mixed::new(self.renamed(Side::Near, near)?, far, places)))
    }

    fn window_allocator(&self) -> Option<Arc<dyn WindowAllocator>> {
        if self.is_near() { self.near.window_allocator() } else { None }
    }

    fn windows(&mut self) -> Option<&mut dyn Windows> {
        if self.is_near() { self.near.windows() } else { None }
    }

    fn drop_wait(&self) -> Duration {
        self.far.drop_wait()
    }

    fn close(&mut self) {
        self.near.close();
        self.far.close();
    }
}

/// Wakers of both transports.
#[derive(Debug)]
struct BothWakers([Arc<dyn Waker>; 2]);

impl Waker for BothWakers {
    fn wake(&self) {
        self.0.iter().for_each(|waker| waker.wake());
    }
}

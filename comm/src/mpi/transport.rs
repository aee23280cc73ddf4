//! Transport over MPI: the streams of one group of a job.

use super::Reductions;
use super::calls::CallFault;
use super::identity::GroupId;
use super::job::MpiJob;
use super::library::LibraryReductions;
use super::pause::Pause;
use super::streams::GroupStreams;
use crate::Called;
use crate::p2p::transport::{Lost, LostWhy, Source, SystemReduction, Target, Transport, Waker};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// GroupStreams of one group. Bytes are copied into memory of the transport, so MPI never has a caller's buffer.
#[derive(Debug)]
pub(super) struct MpiTransport {
    /// `None` only while it is dropped.
    streams: Option<GroupStreams>,
    /// The library's reductions, if they are wanted.
    library: Option<LibraryReductions>,
    rank: usize,
    world_size: usize,
    waker: Arc<Flag>,
    closed: bool,
    job: Arc<MpiJob>,
}

#[derive(Debug, Default)]
struct Flag(AtomicBool);

impl Waker for Flag {
    fn wake(&self) {
        self.0.store(true, Ordering::Release);
    }
}

impl MpiTransport {
    /// Transport of `streams`, in which this process is `rank`.
    pub(super) fn new(job: Arc<MpiJob>, mut streams: GroupStreams, rank: usize) -> Self {
        if rank == 0 {
            streams.choose_creation_tag(job.announcements.new_creation_tag());
        }
        let world_size = streams.len();
        let members = (0..world_size).map(|rank| streams.in_job(rank));
        let library =
            (job.announcements.reductions == Reductions::Library).then(|| LibraryReductions::new(members));
        MpiTransport {
            streams: Some(streams),
            library,
            rank,
            world_size,
            waker: Arc::default(),
            closed: false,
            job,
        }
    }

    /// The job that the group is part of.
    pub(super) fn job(&self) -> Arc<MpiJob> {
        Arc::clone(&self.job)
    }

    fn streams(&self) -> &GroupStreams {
        let Some(streams) = &self.streams else {
            unreachable!("a transport has streams until it is dropped")
        };
        streams
    }

    /// Returns the streams, and the job with the calls that they need.
    fn parts(&mut self) -> (&mut GroupStreams, &MpiJob) {
        let Some(streams) = &mut self.streams else {
            unreachable!("a transport has streams until it is dropped")
        };
        (streams, &self.job)
    }

    /// Moves the library's reductions; returns true if a block has ended.
    fn poll_library(&mut self) -> bool {
        let tag = self.streams().creation_tag();
        let MpiJob { calls, announcements, .. } = &*self.job;
        let tag = tag.map(|tag| announcements.creation_tag(tag)).transpose();
        self.library.as_mut().is_some_and(|library| library.poll(calls, tag))
    }

    /// Marks the job as failed if the library itself refused a call.
    fn told(&self, lost: Lost) -> Lost {
        if let LostWhy::System { .. } = lost.why {
            self.job.fail(&lost);
        }
        lost
    }

    /// A failure that is no single stream's is this rank's own.
    fn all_lost(&mut self, fault: CallFault) -> Lost {
        let rank = self.rank;
        let (streams, _) = self.parts();
        let lost = streams.lose(rank, fault.into());
        self.told(lost)
    }
}

impl Transport for MpiTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn write(&mut self, to: Target, bytes: &[u8]) -> Result<usize, Lost> {
        let Target::Rank(to) = to else { panic!("MPI has no common streams; write to each rank") };
        if self.closed {
            return Err(Lost { peer: to, why: LostWhy::Closed });
        }
        let (streams, job) = self.parts();
        let written = streams.write(&job.calls, &job.announcements, to, bytes);
        written.map_err(|lost| self.told(lost))
    }

    fn progress(&mut self) -> Result<bool, Lost> {
        let (streams, job) = self.parts();
        let moved = match streams.poll(&job.calls, &job.announcements) {
            Ok(moved) => moved,
            Err(fault) => return Err(self.all_lost(fault)),
        };
        if !moved {
            job.sweep();
        }
        let moved = self.poll_library() || moved;
        let (streams, _) = self.parts();
        match streams.next_lost() {
            Some(lost) => Err(self.told(lost)),
            None => Ok(moved),
        }
    }

    fn arrived(&self, from: Source) -> &[u8] {
        match from {
            Source::Rank(from) => self.streams().arrived(from),
            Source::Common(_) => &[],
        }
    }

    fn consume(&mut self, from: Source, len: usize) {
        let (Source::Rank(from) | Source::Common(from)) = from;
        let (streams, job) = self.parts();
        streams.consume(&job.calls, from, len);
    }

    fn wait(&mut self, at_most: Duration) -> Result<(), Lost> {
        let pause = Pause::begin();
        loop {
            if self.waker.0.swap(false, Ordering::Acquire) || self.progress()? || !pause.once(at_most) {
                return Ok(());
            }
        }
    }

    fn waker(&self) -> Arc<dyn Waker> {
        Arc::clone(&self.waker) as _
    }

    /// Splits without a message, so it cannot wait for a late member.
    fn split(&mut self, members: &[usize], channel: u64) -> Result<Box<dyn Transport>, Lost> {
        let rank = members.iter().position(|&member| member == self.rank);
        let Some(rank) = rank else { panic!("rank {} is not one of the members {members:?}", self.rank) };
        let streams = self.streams();
        let in_job = members.iter().map(|&member| streams.in_job(member));
        let streams = GroupStreams::new(streams.group().split(channel), in_job);
        Ok(Box::new(MpiTransport::new(Arc::clone(&self.job), streams, rank)))
    }

    fn system_reduction(&mut self, called: &Called) -> Option<&mut dyn SystemReduction> {
        let library = self.library.as_mut().filter(|_| LibraryReductions::take(called))?;
        Some(library)
    }

    fn drop_wait(&self) -> Duration {
        Duration::MAX
    }

    /// A failure of the world is the job's. After the failure of a smaller group the world may go on.
    fn note_failure(&mut self, error: &crate::Error) {
        if self.streams().group() == GroupId::WORLD {
            self.job.fail(error);
        }
    }

    fn close(&mut self) {
        self.closed = true;
        let (streams, _) = self.parts();
        streams.finish();
    }
}

impl Drop for MpiTransport {
    /// Leaves the streams to the job: it sends what was written, and keeps the memory while MPI may access it.
    fn drop(&mut self) {
        self.close();
        if self.library.as_ref().is_some_and(LibraryReductions::is_under_way) {
            self.job.give_up();
        }
        if let Some(streams) = self.streams.take() {
            self.job.leave(streams);
        }
    }
}

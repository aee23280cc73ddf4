//! Ranks that end, stop or write garbage at any byte: the others return one typed error in time.

use super::hosts::Hosts;
use super::in_process::streams;
use super::seat::communicator;
use super::system::tests::SlowSystem;
use super::transport::{Lost, LostWhy, Source, SystemReduction, Target, Transport, Waker};
use crate::{Called, Clock, Communicator, Error, Faults, Op, Reduction};
use meshstep_tensor::{Buffer, Category, DType, Meter};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_millis(300);
/// Bound on the time that an error takes after the deadline.
const GRACE: Duration = Duration::from_secs(2);
const SICK: usize = 1;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Illness {
    /// The process ends.
    Ends,
    /// The process stops: it neither reads nor writes.
    Stops,
    /// Its bytes come a few at a time.
    Trickles,
    /// The next frame is garbage.
    Garbles,
    /// The system refuses what a split needs.
    CannotSplit,
}

/// Transport of a rank that falls ill after it has written `healthy` bytes.
#[derive(Debug)]
pub(super) struct Sick {
    pub(super) inner: Box<dyn Transport>,
    pub(super) healthy: usize,
    pub(super) illness: Illness,
    /// Bytes written to each rank alone.
    pub(super) sent: Arc<Vec<AtomicUsize>>,
    /// Reductions of its system, if it has any.
    pub(super) system: Option<SlowSystem>,
}

impl Sick {
    fn is_stopped(&self) -> bool {
        self.healthy == 0 && self.illness == Illness::Stops
    }
}

impl Transport for Sick {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn audience(&self) -> &[usize] {
        self.inner.audience()
    }

    fn write(&mut self, to: Target, bytes: &[u8]) -> Result<usize, Lost> {
        if self.healthy > 0 {
            let len = bytes.len().min(self.healthy);
            let written = self.inner.write(to, &bytes[..len])?;
            self.healthy -= written;
            if let Target::Rank(peer) = to {
                self.sent[peer].fetch_add(written, Relaxed);
            }
            return Ok(written);
        }
        match self.illness {
            Illness::Stops | Illness::CannotSplit => Ok(0),
            Illness::Trickles => {
                std::thread::sleep(Duration::from_millis(1));
                self.inner.write(to, &bytes[..bytes.len().min(64)])
            }
            Illness::Garbles => self.inner.write(to, &vec![0xA5; bytes.len()]),
            Illness::Ends => {
                self.inner.close();
                Err(Lost { peer: (SICK + 1) % self.world_size(), why: LostWhy::Closed })
            }
        }
    }

    fn progress(&mut self) -> Result<bool, Lost> {
        if self.is_stopped() { Ok(false) } else { self.inner.progress() }
    }

    fn arrived(&self, from: Source) -> &[u8] {
        if self.is_stopped() { &[] } else { self.inner.arrived(from) }
    }

    fn consume(&mut self, from: Source, len: usize) {
        self.inner.consume(from, len);
    }

    fn wait(&mut self, at_most: Duration) -> Result<(), Lost> {
        self.inner.wait(at_most)
    }

    fn waker(&self) -> Arc<dyn Waker> {
        self.inner.waker()
    }

    fn split(&mut self, members: &[usize], channel: u64) -> Result<Box<dyn Transport>, Lost> {
        if self.illness == Illness::CannotSplit {
            let why = LostWhy::System { what: "creating memory", message: "too many open files".to_owned() };
            return Err(Lost { peer: self.rank(), why });
        }
        self.inner.split(members, channel)
    }

    fn system_reduction(&mut self, _: &Called) -> Option<&mut dyn SystemReduction> {
        self.system.as_mut().map(|system| system as _)
    }

    fn close(&mut self) {
        self.inner.close();
    }
}

fn operations() -> [Op; 5] {
    let sum = Reduction::Sum;
    [Op::all_reduce(sum), Op::reduce_scatter(sum), Op::all_gather(), Op::all_to_all(), Op::broadcast(SICK)]
}

/// Runs operations on every rank until the first error; returns each rank's, and the time that it took.
fn run(transports: Vec<Box<dyn Transport>>, hosts: &Hosts, len: usize) -> Vec<(Option<Error>, Duration)> {
    let ranks = transports.into_iter().map(|transport| {
        let hosts = hosts.clone();
        let body = move || {
            let comm = communicator((transport, hosts), Clock::real(), DEADLINE, Faults::none()).unwrap();
            let mut buffer = Buffer::zeroed(len, DType::F32, &Meter::new(), Category::Grads).unwrap();
            for op in operations() {
                let begun = Instant::now();
                let whole = buffer.take();
                let (back, result) = comm.complete(op, whole);
                buffer = back;
                if let Err(error) = result {
                    return (Some(error), begun.elapsed());
                }
            }
            (None, Duration::ZERO)
        };
        std::thread::spawn(body)
    });
    let ranks: Vec<_> = ranks.collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

/// Runs with a rank that falls ill after `healthy` bytes; returns the error of the others, if any, which must be the same.
fn run_with(n: usize, len: usize, host_size: usize, illness: Illness, healthy: usize) -> Option<Error> {
    let hosts = Hosts::blocks(n, host_size);
    let mut transports = streams::world(n, 4096, hosts.clone());
    let inner = transports.remove(SICK);
    transports.insert(SICK, Box::new(Sick { inner, healthy, illness, sent: counters(n), system: None }));
    let ends = run(transports, &hosts, len);
    let context =
        format!("{n} ranks, {len} elements, {illness:?} after {healthy} bytes, {host_size} on a host");
    let healthy: Vec<_> = ends.into_iter().enumerate().filter(|(rank, _)| *rank != SICK).collect();
    for (_, (error, took)) in &healthy {
        assert!(*took < DEADLINE + GRACE, "{context}: {took:?} until {error:?}");
    }
    let failed: Vec<Error> = healthy.into_iter().filter_map(|(_, (error, _))| error).collect();
    assert!(failed.iter().all(|error| error == &failed[0]), "{context}: {failed:?}");
    failed.into_iter().next()
}

pub(super) fn counters(n: usize) -> Arc<Vec<AtomicUsize>> {
    Arc::new((0..n).map(|_| AtomicUsize::new(0)).collect())
}

/// Bytes that cross from the first host of two, of two ranks each, in one operation on `len` elements.
fn crossing(op: Op, len: usize) -> usize {
    let hosts = Hosts::blocks(4, 2);
    let sent: Vec<_> = (0..4).map(|_| counters(4)).collect();
    let count = |(rank, inner): (usize, Box<dyn Transport>)| {
        let (illness, sent) = (Illness::Ends, Arc::clone(&sent[rank]));
        Box::new(Sick { inner, healthy: usize::MAX, illness, sent, system: None }) as Box<dyn Transport>
    };
    let transports = streams::world(4, 4096, hosts.clone()).into_iter().enumerate().map(count);
    let ranks = transports.map(|transport| {
        let hosts = hosts.clone();
        std::thread::spawn(move || {
            let comm = communicator((transport, hosts), Clock::real(), 20 * GRACE, Faults::none()).unwrap();
            let buffer = Buffer::zeroed(len, DType::F32, &Meter::new(), Category::Grads).unwrap();
            comm.complete(op, buffer).1.unwrap();
        })
    });
    ranks.collect::<Vec<_>>().into_iter().for_each(|rank| rank.join().unwrap());
    let from = |rank: usize| sent[rank][2].load(Relaxed) + sent[rank][3].load(Relaxed);
    from(0) + from(1)
}

#[test]
fn bytes_for_all_cross_to_another_host_once() {
    let (len, sum) = (200_000, Reduction::Sum);
    let vector = 4 * len;
    // The halves of the vector that the first host owns, or contributes to twice.
    let expected = [
        (Op::all_gather(), vector / 2),
        (Op::reduce_scatter(sum), vector),
        (Op::all_reduce(sum), vector / 2 + vector),
        (Op::broadcast(0), vector),
        (Op::broadcast(3), 0),
    ];
    for (op, bytes) in expected {
        let crossed = crossing(op, len);
        assert!((bytes..bytes + bytes / 100 + 4096).contains(&crossed), "{op:?}: {crossed}, not {bytes}");
    }
}

/// Numbers of bytes at and around the ends of frames and of operations.
fn moments() -> impl Iterator<Item = usize> {
    let few = meshstep_cases::cases(12, 400) as usize;
    (0..few).map(|i| i * i * 97 + i)
}

#[test]
fn a_rank_that_ends_at_any_byte_is_lost_or_has_left() {
    for healthy in moments() {
        let (n, host_size) = (2 + healthy % 3, 1 + healthy % 4);
        let error = run_with(n, 6000, host_size, Illness::Ends, healthy);
        assert!(matches!(error, Some(Error::Lost { rank: SICK, .. })), "after {healthy} bytes: {error:?}");
    }
}

#[test]
fn a_rank_that_stops_at_any_byte_is_missed_in_time() {
    for healthy in moments().step_by(3) {
        let (n, host_size) = (2 + healthy % 3, 1 + healthy % 4);
        let error = run_with(n, 24_000, host_size, Illness::Stops, healthy);
        let missed =
            |error: &Error| matches!(error, Error::Timeout { missing, .. } if missing.contains(&SICK));
        assert!(error.as_ref().is_some_and(missed), "after {healthy} bytes: {error:?}");
    }
}

#[test]
fn a_rank_whose_bytes_trickle_is_given_up_in_time() {
    for host_size in [1, 2, 3] {
        let error = run_with(3, 1_000_000, host_size, Illness::Trickles, 5000);
        assert!(matches!(error, Some(Error::Timeout { .. })), "{host_size} on a host: {error:?}");
    }
}

#[test]
fn a_failed_rank_leaves_without_a_wait_for_one_that_does_not_read() {
    let hosts = Hosts::blocks(2, 1);
    let mut transports = streams::world(2, 4096, hosts.clone());
    let _unread = transports.remove(SICK);
    let patient = Duration::from_secs(60);
    let comm = communicator((transports.remove(0), hosts), Clock::real(), patient, Faults::none()).unwrap();
    let buffer = Buffer::zeroed(4000, DType::F32, &Meter::new(), Category::Grads).unwrap();
    let (_, result) = comm.complete(Op::all_gather().within(DEADLINE), buffer);
    assert!(matches!(result, Err(Error::Timeout { .. })), "{result:?}");
    let begin = Instant::now();
    drop(comm);
    // A departure that has not ended is left alone after a second.
    assert!(begin.elapsed() < Duration::from_millis(800), "{:?}", begin.elapsed());
}

#[test]
fn garbage_is_noticed() {
    for host_size in [1, 2, 3] {
        let error = run_with(3, 60, host_size, Illness::Garbles, 0);
        let Some(Error::Lost { rank: SICK, why }) = error else { panic!("{error:?}") };
        assert_eq!(why, LostWhy::Altered.to_string());
    }
}

#[test]
fn a_group_that_one_rank_cannot_form_fails_on_the_others_before_their_deadline() {
    for host_size in [1, 3] {
        let hosts = Hosts::blocks(3, host_size);
        let mut transports = streams::world(3, 4096, hosts.clone());
        let (inner, illness, sent) = (transports.remove(SICK), Illness::CannotSplit, counters(3));
        transports.insert(SICK, Box::new(Sick { inner, healthy: usize::MAX, illness, sent, system: None }));
        let ranks = transports.into_iter().map(|transport| {
            let (clock, faults, within) = (Clock::real(), Faults::none(), Duration::from_secs(60));
            let comm = communicator((transport, hosts.clone()), clock, within, faults).unwrap();
            std::thread::spawn(move || {
                let begun = Instant::now();
                let group = comm.split(Some(0), 0).and_then(|group| group.unwrap().barrier());
                (group, begun.elapsed())
            })
        });
        for rank in ranks.collect::<Vec<_>>() {
            let (result, took) = rank.join().unwrap();
            assert!(matches!(result, Err(Error::Lost { rank: SICK, .. })), "{result:?}");
            assert!(took < GRACE, "{took:?}");
        }
    }
}

/// Transport that shows the bytes of a rank's own stream one turn after those of its common stream, as another thread's writes
/// between the looks at both may do.
#[derive(Debug)]
struct Late {
    inner: Box<dyn Transport>,
    shown: Vec<usize>,
}

impl Transport for Late {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn audience(&self) -> &[usize] {
        self.inner.audience()
    }

    fn write(&mut self, to: Target, bytes: &[u8]) -> Result<usize, Lost> {
        self.inner.write(to, bytes)
    }

    fn progress(&mut self) -> Result<bool, Lost> {
        let mut showed = false;
        for (peer, shown) in self.shown.iter_mut().enumerate() {
            let arrived = self.inner.arrived(Source::Rank(peer)).len();
            showed |= arrived > *shown;
            *shown = arrived;
        }
        Ok(self.inner.progress()? | showed)
    }

    fn arrived(&self, from: Source) -> &[u8] {
        let arrived = self.inner.arrived(from);
        match from {
            Source::Rank(peer) => &arrived[..self.shown[peer]],
            Source::Common(_) => arrived,
        }
    }

    fn consume(&mut self, from: Source, len: usize) {
        self.inner.consume(from, len);
        if let Source::Rank(peer) = from {
            self.shown[peer] -= len;
        }
    }

    fn wait(&mut self, _: Duration) -> Result<(), Lost> {
        self.inner.wait(Duration::from_micros(100))
    }

    fn waker(&self) -> Arc<dyn Waker> {
        self.inner.waker()
    }

    fn split(&mut self, members: &[usize], channel: u64) -> Result<Box<dyn Transport>, Lost> {
        self.inner.split(members, channel)
    }

    fn close(&mut self) {
        self.inner.close();
    }
}

/// A rank that has sent goes on to a collective, whose call may be seen before that of the send.
#[test]
fn a_collective_behind_a_send_is_no_mismatch() {
    let late = |inner| Box::new(Late { inner, shown: vec![0; 3] }) as Box<dyn Transport>;
    let rank = |transport: Box<dyn Transport>| {
        let comm =
            communicator((late(transport), Hosts::blocks(3, 3)), Clock::real(), 20 * GRACE, Faults::none())
                .unwrap();
        std::thread::spawn(move || {
            let mut result = Ok(());
            for _ in 0..300 {
                let empty = || Buffer::zeroed(3, DType::F32, &Meter::new(), Category::Grads).unwrap();
                let pair = [Some(Op::recv(2)), None, Some(Op::send(0))][comm.rank()];
                let ops = pair.into_iter().chain([Op::all_gather()]);
                result = ops.into_iter().try_for_each(|op| comm.complete(op, empty()).1);
                if result.is_err() {
                    break;
                }
            }
            result
        })
    };
    let ranks: Vec<_> = streams::world(3, 4096, Hosts::blocks(3, 3)).into_iter().map(rank).collect();
    for rank in ranks {
        assert_eq!(rank.join().unwrap(), Ok(()));
    }
}

#[test]
fn healthy_ranks_end_well() {
    for host_size in [1, 2, 3] {
        assert_eq!(run_with(3, 600, host_size, Illness::Ends, usize::MAX), None);
    }
}

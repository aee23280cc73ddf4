//! Operations in graphs: every launch gives the results of the direct calls, under the same watch.

use crate::nccl::bench::{
    Rank, alone, available, fail, graphs, multiplies, options, patient, plan, ranks, seed, stand_in,
};
use meshstep_comm::nccl::{Captured, LastResort, Nccl, Options};
use meshstep_comm::{Communicator, Error, InFlight, Op, Reduction};
use meshstep_tensor::cuda::{self, Stream};
use meshstep_tensor::{Buffer, Queue};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

const RANKS: usize = 3;
const LEN: usize = 4 * RANKS;

/// Input of each round, and the results of earlier operations.
struct Work {
    rank: Rank,
    fresh: Buffer,
    given: Buffer,
    sums: Buffer,
    passed: [Buffer; 2],
}

impl Work {
    fn new(comm: Arc<Nccl>) -> Self {
        let rank = Rank::new(comm);
        let buffer = || rank.buffer(&[0u64; LEN]);
        Work { fresh: buffer(), given: buffer(), sums: buffer(), passed: [buffer(), buffer()], rank }
    }

    fn stream(&self) -> Stream {
        self.rank.queue.stream().unwrap().clone()
    }

    fn bring(&mut self, round: u64) {
        let me = self.rank.comm.rank() as u64;
        let values: Vec<u64> = (0..LEN as u64).map(|i| (i + 1) * (round + 1) * (me + 3)).collect();
        self.rank.queue.upload(values[..].into(), self.fresh.as_mut()).unwrap();
        // The host does not wait for this copy.
        self.rank.queue.copy(self.fresh.as_slice(), self.given.as_mut()).unwrap();
    }

    /// Sums the input and the results of earlier rounds, on two streams; then each rank sends its sums to the next.
    fn round(&mut self) -> Result<(), Error> {
        let Work { rank, given, sums, passed, .. } = self;
        let (comm, queue) = (&*rank.comm, &rank.queue);
        let (me, world_size) = (comm.rank(), comm.world_size());
        let start =
            |op, buffer: &mut Buffer| comm.start(op, buffer.take(), queue).map_err(|(_, error)| error);
        queue.copy(given.as_slice(), sums.as_mut())?;
        let reduced = start(Op::reduce_scatter(Reduction::Sum), sums)?;
        let largest = start(Op::all_reduce(Reduction::Max), given)?;
        *sums = land(reduced, queue)?;
        *given = land(largest, queue)?;
        let gathered = start(Op::all_gather(), sums)?;
        *sums = land(gathered, queue)?;
        let [old, new] = passed;
        queue.copy(sums.as_slice(), old.as_mut())?;
        let pair = [
            (Op::send((me + 1) % world_size), old.take()),
            (Op::recv((me + world_size - 1) % world_size), new.take()),
        ];
        let [sent, received] = comm.start_group(pair, queue).map_err(|(_, error)| error)?;
        *old = land(sent, queue)?;
        *new = land(received, queue)?;
        Ok(())
    }

    fn captured(&mut self) -> Captured {
        let (comm, stream) = (Arc::clone(&self.rank.comm), self.stream());
        comm.capture(&stream, || self.round()).unwrap()
    }

    fn launch(&self, graph: &Captured) -> Result<(), Error> {
        // SAFETY: the memory lives in `self`, and is used again only by calls on the same queue.
        unsafe { graph.launch(self.rank.queue.stream().unwrap()) }
    }

    fn read(&self) -> Vec<Vec<u64>> {
        [&self.given, &self.sums, &self.passed[0], &self.passed[1]].map(|b| self.rank.read(b)).to_vec()
    }
}

fn land(flight: InFlight, queue: &Queue) -> Result<Buffer, Error> {
    let (buffer, ended) = flight.wait(queue);
    ended.map(|()| buffer)
}

#[test]
fn launched_operations_do_what_started_ones_do() {
    let _alone = alone();
    if !available(RANKS) {
        return;
    }
    for order in 0..if stand_in(RANKS) { 30 } else { 1 } {
        if stand_in(RANKS) {
            seed(order);
        }
        ranks(RANKS, &patient(), |comm| replay(comm, order));
    }
}

/// Alternates graphs and started operations, with an order of the streams' work that the message names.
pub(crate) fn replay(comm: Arc<Nccl>, order: u64) {
    let (mut direct, mut replayed) = (Work::new(Arc::clone(&comm)), Work::new(comm));
    let before = replayed.rank.comm.stats();
    let graph = replayed.captured();
    assert_eq!(replayed.read(), vec![vec![0; LEN]; 4], "nothing is done by a capture");
    assert_eq!(replayed.rank.comm.stats(), before);
    for round in 0..6 {
        replayed.bring(round);
        replayed.launch(&graph).unwrap();
        direct.bring(round);
        direct.round().unwrap();
        // In some rounds started and launched operations follow one another without a host wait.
        if round % 2 == 0 {
            assert_eq!(replayed.read(), direct.read(), "round {round}, order {order}");
        }
    }
    for _ in 0..10 {
        replayed.launch(&graph).unwrap();
        direct.round().unwrap();
    }
    assert_eq!(replayed.read(), direct.read(), "order {order}");
    assert!(direct.read().iter().all(|values| values.iter().any(|&x| x > 0)));
}

#[test]
fn a_graph_keeps_the_factors_it_was_captured_with() {
    let _alone = alone();
    if !available(2) || !multiplies() {
        return;
    }
    ranks(2, &patient(), |comm| {
        let rank = Rank::new(Arc::clone(&comm));
        let stream = rank.queue.stream().unwrap().clone();
        let mut buffer = rank.buffer(&[8f32, -2.0]);
        let op = Op::all_reduce(Reduction::PreMulSum { factor: [0.25, 0.5][comm.rank()] });
        let graph = comm.capture(&stream, || -> Result<(), Error> {
            let started = comm.start(op, buffer.take(), &rank.queue).map_err(|(_, error)| error)?;
            buffer = land(started, &rank.queue)?;
            Ok(())
        });
        let graph = graph.unwrap();
        for _ in 0..2 {
            // SAFETY: the buffer stays, and no other code accesses it before the work has ended.
            unsafe { graph.launch(&stream).unwrap() };
        }
        assert_eq!(rank.read::<f32>(&buffer), [8.0, -2.0].map(|x| x * 0.75 * 0.75));
    });
}

#[test]
fn launches_are_numbered_recorded_and_counted() {
    let _alone = alone();
    if !available(2) {
        return;
    }
    ranks(2, &patient(), |comm| {
        let mut work = Work::new(comm);
        let graph = work.captured();
        for _ in 0..3 {
            work.launch(&graph).unwrap();
        }
        work.read();
        let record = work.rank.comm.flight_record();
        let lines: Vec<&str> = record.lines().collect();
        assert_eq!(lines.len(), 15, "{record}");
        for (number, line) in lines.iter().enumerate() {
            assert!(line.starts_with(&format!("operation {number} ")), "{line}");
            assert!(line.contains("began") && !line.contains("not seen"), "{line}");
        }
        let mut started = Work::new(Arc::clone(&work.rank.comm));
        let launched = work.rank.comm.stats().total();
        for _ in 0..3 {
            started.round().unwrap();
        }
        started.read();
        let both = work.rank.comm.stats().total();
        assert_eq!((both.operations, both.bytes), (2 * launched.operations, 2 * launched.bytes));
    });
}

#[test]
fn a_launch_that_hangs_ends_at_its_deadline() {
    let _alone = alone();
    if !stand_in(2) {
        return;
    }
    // The second operation of rank 1's graph.
    plan("hang 1 1");
    let options = options(Duration::from_millis(400));
    let (begun, both) = (Instant::now(), Barrier::new(2));
    let told = ranks(2, &options, |comm| {
        let mut work = Work::new(comm);
        let graph = work.captured();
        work.launch(&graph).unwrap();
        let ended = loop {
            match work.launch(&graph) {
                Ok(()) => std::thread::sleep(Duration::from_millis(5)),
                Err(error) => break error,
            }
        };
        assert!(matches!(work.launch(&graph), Err(Error::Poisoned { .. })));
        let again = work.stream();
        let refused = work.rank.comm.capture::<Error>(&again, || Ok(())).unwrap_err();
        assert!(matches!(refused, Error::Poisoned { .. }));
        let record = work.rank.comm.flight_record();
        assert!(record.contains("ended not seen"), "{record}");
        // NCCL does not end before the graphs are dropped, no matter which handles still exist.
        while graphs() > 0 && begun.elapsed() < Duration::from_secs(2) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let left = graphs();
        both.wait();
        drop(graph);
        (ended, left)
    });
    assert!(begun.elapsed() < Duration::from_secs(2) + options.deadline);
    for (error, left) in &told {
        assert_eq!(*left, 0, "graphs");
        let Error::Stuck { op_number: 0 | 5, .. } = error.cause() else { panic!("{error:?}") };
    }
}

/// NCCL does not end before graphs and captures have ended, so ending it comes after dropping them.
#[test]
fn a_failed_capture_or_launch_ends_all_ranks() {
    let _alone = alone();
    if !stand_in(2) {
        return;
    }
    const LAUNCH_FAILED: i32 = 719;
    for in_capture in [true, false] {
        let calls: Arc<Mutex<Vec<Error>>> = Arc::default();
        let noted = Arc::clone(&calls);
        let last_resort = LastResort::new(move |cause| noted.lock().unwrap().push(cause.clone()));
        let abort_within = Duration::from_secs(2);
        let options = Options { abort_within, last_resort, ..patient() };
        let (begun, both) = (Instant::now(), Barrier::new(2));
        let told = ranks(2, &options, |comm| {
            let mut work = Work::new(Arc::clone(&comm));
            let graph = work.captured();
            both.wait();
            let mut told = Ok(());
            if comm.rank() == 1 && in_capture {
                let (stream, aside) = (work.stream(), work.rank.buffer(&[7u64; LEN]));
                told =
                    comm.capture(&stream, || work.round().and_then(|()| again(&mut work, aside))).map(drop);
            } else if comm.rank() == 1 {
                fail(c"cuGraphLaunch", LAUNCH_FAILED);
                told = work.launch(&graph);
            }
            both.wait();
            // From here on launches and operations fail.
            let later = work.launch(&graph).unwrap_err();
            let refused = work.rank.sum(1.0).unwrap_err();
            assert_eq!(refused.cause(), later.cause());
            told.err().unwrap_or(later)
        });
        assert_eq!(told[0], told[1], "in a capture: {in_capture}");
        assert!(!matches!(told[0], Error::Poisoned { .. }), "{told:?}");
        assert!(begun.elapsed() < abort_within, "{:?}", begun.elapsed());
        assert!(calls.lock().unwrap().is_empty(), "in a capture: {in_capture}");
    }

    /// A second round of a capture, in which the first call fails in NCCL.
    fn again(work: &mut Work, aside: Buffer) -> Result<(), Error> {
        fail(c"cuLaunchHostFunc", LAUNCH_FAILED);
        let first = work.round().unwrap_err();
        let (_, second) = work.rank.comm.start(Op::broadcast(0), aside, &work.rank.queue).unwrap_err();
        assert_eq!(second, first);
        Err(first)
    }
}

#[test]
fn invalid_launches_are_refused_and_spoil_nothing() {
    let _alone = alone();
    if !available(2) {
        return;
    }
    let capturing = |error: &Error| {
        matches!(error, Error::Buffer(meshstep_tensor::Error::Cuda(cuda::Error::Capturing { .. })))
            && error.to_string().contains("before the capture")
    };
    ranks(2, &patient(), |comm| {
        let mut work = Work::new(Arc::clone(&comm));
        let first = work.captured();
        let (stream, queue) = (work.stream(), work.rank.queue.clone());
        let mut aside = Some(work.rank.buffer(&[7u64; LEN]));
        let graph = comm.capture(&stream, || {
            let (buffer, told) =
                comm.start(Op::all_to_all(), aside.take().unwrap(), &queue).map(drop).unwrap_err();
            assert!(capturing(&told), "{told}");
            let flight = comm.start(Op::broadcast(0), buffer, &queue).map_err(|(_, error)| error)?;
            assert!(flight.is_done());
            let (buffer, told) = flight.wait(&Queue::cpu());
            assert!(capturing(&told.unwrap_err()));
            let told = comm.start(Op::broadcast(0), buffer, &queue).map_err(|(_, error)| error)?.wait(&queue);
            aside = Some(told.0);
            assert!(capturing(&work.launch(&first).unwrap_err()));
            let second = Stream::new(comm.device()).unwrap();
            assert!(capturing(&comm.capture::<Error>(&second, || Ok(())).unwrap_err()));
            work.round()
        });
        let graph = graph.unwrap();
        // In a capture that was not started by the communicator.
        let told = stream.capture(|| work.round().map_err(Told::Comm)).err().unwrap();
        let told = match told {
            Told::Comm(told) => told,
            Told::Driver(told) => panic!("{told}"),
        };
        assert!(capturing(&told) && told.to_string().contains("Nccl::capture"), "{told}");
        // The captured stream does not wait for it.
        let unjoined = comm.capture(&stream, || {
            let flight = comm.start(Op::broadcast(0), aside.take().unwrap(), &queue);
            drop(flight.map_err(|(_, error)| error)?);
            Ok::<_, Error>(())
        });
        assert!(unjoined.unwrap_err().to_string().contains("second stream"));
        // The refused round has given up its buffers, like one that fails.
        drop(work);
        let (mut direct, mut other) = (Work::new(Arc::clone(&comm)), Work::new(Arc::clone(&comm)));
        let last = other.captured();
        [&mut direct, &mut other].into_iter().for_each(|work| work.bring(3));
        direct.round().unwrap();
        other.launch(&last).unwrap();
        assert_eq!(other.read(), direct.read());
        drop((first, graph));
    });
}

enum Told {
    Comm(Error),
    Driver(cuda::Error),
}

impl From<cuda::Error> for Told {
    fn from(error: cuda::Error) -> Self {
        Told::Driver(error)
    }
}

//! Captured work gives the results of the direct calls, at any number of launches.

use crate::cuda::{Bench, available, fail, seed, seeds, stand_in, values};
use meshstep_tensor::cuda::{self, Device, Error, Graph, Mail, Stream};
use meshstep_tensor::{Buffer, Queue};
use std::panic::{AssertUnwindSafe, catch_unwind};

const LEN: usize = 40;

/// Three vectors that a round of work rotates by one place, over a fourth, on two streams.
struct Ring {
    bench: Bench,
    second: Queue,
    ring: [Buffer; 3],
    spare: Buffer,
}

/// Start of the second stream's part of a round.
#[derive(Clone, Copy, PartialEq)]
enum Begins {
    /// After the vector that it overwrites has been saved.
    InTime,
    /// At the beginning of the round.
    TooEarly,
}

impl Ring {
    fn new() -> Self {
        let bench = Bench::new();
        let second = Queue::cuda(Stream::new(&bench.device).unwrap());
        let mut ring = [0; 3].map(|_| bench.buffer(LEN));
        for (i, buffer) in ring.iter_mut().enumerate() {
            bench.queue.upload(values(LEN, i as u64)[..].into(), buffer.as_mut()).unwrap();
        }
        let spare = bench.buffer(LEN);
        bench.queue.synchronize().unwrap();
        Ring { bench, second, ring, spare }
    }

    /// Rotates the vectors: each becomes the next one.
    fn round(&mut self, begins: Begins) -> Result<(), meshstep_tensor::Error> {
        let (first, second) = (&self.bench.queue, &self.second);
        let [a, b, c] = &mut self.ring;
        let early = self.bench.stream.record()?;
        first.copy(a.as_slice(), self.spare.as_mut())?;
        let saved = if begins == Begins::InTime { self.bench.stream.record()? } else { early };
        second.stream().unwrap().wait(&saved)?;
        second.copy(b.as_slice(), a.as_mut())?;
        second.copy(c.as_slice(), b.as_mut())?;
        self.bench.stream.wait(&second.stream().unwrap().record()?)?;
        first.copy(self.spare.as_slice(), c.as_mut())
    }

    fn captured(&mut self, begins: Begins) -> Graph {
        let stream = self.bench.stream.clone();
        stream.capture(|| self.round(begins)).unwrap()
    }

    fn launch(&mut self, graph: &Graph, times: usize) {
        for _ in 0..times {
            // SAFETY: the memory lives in `self`, which is borrowed until the caller reads, waiting for the work.
            unsafe { graph.launch(&self.bench.stream) }.unwrap();
        }
    }

    fn read(&self) -> [Vec<u16>; 3] {
        self.ring.each_ref().map(|buffer| self.bench.read(buffer))
    }
}

fn shifted(by: u64) -> [Vec<u16>; 3] {
    [0, 1, 2].map(|i| values(LEN, (i + by) % 3))
}

#[test]
fn a_graph_of_two_streams_launched_again_and_again_equals_the_direct_run() {
    if !available() {
        return;
    }
    for order in 0..seeds() {
        seed(order);
        let (mut direct, mut replayed) = (Ring::new(), Ring::new());
        let graph = replayed.captured(Begins::InTime);
        assert_eq!(replayed.read(), shifted(0), "nothing is done by a capture");
        for _ in 0..100 {
            direct.round(Begins::InTime).unwrap();
        }
        replayed.launch(&graph, 99);
        assert_eq!(replayed.read(), shifted(99), "order {order}");
        replayed.launch(&graph, 1);
        // Work in flight completes.
        drop(graph);
        assert_eq!(replayed.read(), direct.read(), "order {order}");
        assert_eq!(replayed.read(), shifted(100));
    }
}

#[test]
fn launches_of_one_graph_on_two_streams_do_not_meet() {
    if !available() {
        return;
    }
    for order in 0..seeds() {
        seed(order);
        let mut ring = Ring::new();
        let graph = ring.captured(Begins::InTime);
        ring.launch(&graph, 3);
        for _ in 0..4 {
            // SAFETY: as in `launch`; both streams are waited for below.
            unsafe { graph.launch(ring.second.stream().unwrap()) }.unwrap();
        }
        ring.second.synchronize().unwrap();
        assert_eq!(ring.read(), shifted(7), "order {order}");
    }
}

#[test]
fn a_missing_wait_shows_in_a_graph_too() {
    if !stand_in() {
        return println!("skipped: needs the stand-in");
    }
    let wrong = |order: &u64| {
        seed(*order);
        let mut ring = Ring::new();
        let graph = ring.captured(Begins::TooEarly);
        ring.launch(&graph, 1);
        ring.read() != shifted(1)
    };
    let count = (0..100).filter(wrong).count();
    assert!((10..=90).contains(&count), "{count} of 100 orders");
}

#[test]
fn host_operations_are_refused_and_spoil_nothing() {
    if !available() {
        return;
    }
    let (mut ring, bench) = (Ring::new(), Bench::new());
    let mut buffer = bench.buffer(LEN);
    let (host, mail) = (bench.pinned(&[1; 2 * LEN]), Mail::new(&bench.device, 2 * LEN, &bench.meter));
    let nothing = bench.stream.capture(|| Ok::<_, Error>(())).unwrap();
    let (stream, queue) = (ring.bench.stream.clone(), ring.bench.queue.clone());
    let mut bytes = [0u16; LEN];
    let live = bench.meter.live_total();
    let graph = stream.capture(|| {
        let mut refused = Vec::new();
        refused.push(stream.synchronize().unwrap_err());
        refused.push(stream.copy_in(&host, 0, buffer.as_mut()).unwrap_err());
        refused.push(stream.copy_out(buffer.as_slice(), &host, 0).unwrap_err());
        refused.push(mail.send(&stream, &[1; 2 * LEN], buffer.as_mut()).unwrap_err());
        refused.push(mail.fetch(&stream, buffer.as_slice()).unwrap_err());
        refused.push(stream.capture(|| Ok::<_, Error>(())).unwrap_err());
        // SAFETY: no work.
        refused.push(unsafe { nothing.launch(&stream) }.unwrap_err());
        let mut general = vec![queue.upload(values(LEN, 9)[..].into(), buffer.as_mut()).unwrap_err()];
        general.push(queue.download(buffer.as_slice(), (&mut bytes[..]).into()).unwrap_err());
        let made =
            Buffer::zeroed_on(&queue, 4, buffer.dtype(), &bench.meter, meshstep_tensor::Category::State);
        general.push(made.unwrap_err());
        for error in refused.into_iter().map(Into::into).chain(general) {
            let capturing = matches!(error, meshstep_tensor::Error::Cuda(Error::Capturing { .. }));
            assert!(capturing && error.to_string().contains("before the capture"), "{error:?}");
        }
        assert_eq!(stream.is_capturing(), Ok(true));
        ring.round(Begins::InTime)
    });
    assert_eq!(stream.is_capturing(), Ok(false));
    ring.launch(&graph.unwrap(), 1);
    assert_eq!(ring.read(), shifted(1));
    assert_eq!((bench.read(&buffer), bytes), (vec![0; LEN], [0; LEN]));
    assert_eq!(bench.meter.live_total(), live, "no letter waits to be sent");
}

#[test]
fn a_spoilt_capture_is_an_error_and_leaves_the_stream_as_it_was() {
    if !available() {
        return;
    }
    let mut ring = Ring::new();
    let stream = ring.bench.stream.clone();
    // An error of the work, and a panic in it.
    let own = stream.capture(|| ring.round(Begins::InTime).and(Err(Error::InUse.into())));
    assert_eq!(own.unwrap_err(), meshstep_tensor::Error::Cuda(Error::InUse));
    let panicked = catch_unwind(AssertUnwindSafe(|| stream.capture::<Error>(|| panic!("on purpose"))));
    assert!(panicked.is_err());
    // The captured stream does not wait for the second one's end.
    let unjoined = stream.capture(|| {
        ring.second.stream().unwrap().wait(&stream.record()?)?;
        ring.second.zero(ring.spare.as_mut())
    });
    assert_eq!(unjoined.unwrap_err(), Error::Unjoined.into());
    // The host cannot wait for captured events, even if the error of the wait is dropped.
    let asked = |ask: fn(&cuda::Event) -> Result<(), Error>| {
        stream.capture(|| {
            let event = stream.record()?;
            assert!(matches!(ask(&event), Err(Error::Capturing { .. })));
            Ok::<_, Error>(())
        })
    };
    for ask in [cuda::Event::synchronize, |event: &cuda::Event| event.is_done().map(drop)] {
        let Err(Error::Call { code: 901, name, .. }) = asked(ask) else { panic!("spoilt") };
        assert_eq!(name, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED");
    }
    // An event before the capture is not part of it.
    let before = ring.second.stream().unwrap().record().unwrap();
    let Err(Error::Call { code: 905, .. }) = stream.capture(|| stream.wait(&before)) else {
        panic!("isolated")
    };
    assert_eq!((stream.is_capturing(), stream.synchronize()), (Ok(false), Ok(())));
    assert_eq!(ring.second.stream().unwrap().is_capturing(), Ok(false));
    let graph = ring.captured(Begins::InTime);
    ring.launch(&graph, 2);
    assert_eq!(ring.read(), shifted(2));
    if cuda::probe().unwrap().devices > 1 {
        let other = Stream::new(&Device::open(1).unwrap()).unwrap();
        // SAFETY: refused.
        assert!(matches!(unsafe { graph.launch(&other) }, Err(Error::Elsewhere { ordinal: 1, .. })));
    }
}

#[test]
fn driver_errors_are_returned() {
    if !stand_in() {
        return println!("skipped: needs the stand-in");
    }
    let mut ring = Ring::new();
    let stream = ring.bench.stream.clone();
    // The stand-in's last failure does not end the capture, as a driver's would, so it comes last.
    for function in ["cuStreamBeginCapture_v2", "cuGraphInstantiateWithFlags", "cuStreamEndCapture"] {
        fail(function, 2);
        let refused = stream.capture(|| ring.round(Begins::InTime)).unwrap_err();
        assert_eq!(refused.to_string(), format!("{function} failed with CUDA_ERROR_OUT_OF_MEMORY (2)"));
    }
}

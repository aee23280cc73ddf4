//! Devices, streams and memory, on a GPU or on the stand-in (`cargo xtask ci --only standin`).

mod contexts;
mod drivers;
mod faults;
mod graphs;
mod interop;
mod refusals;

use meshstep_tensor::cuda::{self, Device, Error, Pinned, Stream};
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Queue};
use std::ffi::{CString, c_char, c_int};
use std::process::{Command, Output};

/// Driver's error code for an invalid value.
const INVALID_VALUE: c_int = 1;

/// Returns true if there is a device; otherwise prints a note, or fails under REQUIRE_GPU=1.
fn available() -> bool {
    let found = cuda::probe();
    if let Err(missing) = found {
        assert!(std::env::var_os("REQUIRE_GPU").is_none(), "{missing}");
        println!("skipped: {missing}");
        return false;
    }
    true
}

fn stand_in() -> bool {
    available() && cuda::probe().unwrap().stand_in
}

fn in_stand_in<F: Copy>(name: &str) -> F {
    // SAFETY: the stand-in is loaded and stays; each caller names the type that it documents.
    unsafe { *libloading::Library::new("libcuda.so.1").unwrap().get::<F>(name.as_bytes()).unwrap() }
}

/// Chooses the order of asynchronous work, on the stand-in.
fn seed(seed: u64) {
    if stand_in() {
        in_stand_in::<extern "C" fn(u64)>("meshstep_standin_seed")(seed);
    }
}

/// Makes the next call of `function` fail.
fn fail(function: &str, code: c_int) {
    let function = CString::new(function).unwrap();
    in_stand_in::<extern "C" fn(*const c_char, c_int)>("meshstep_standin_fail")(function.as_ptr(), code);
}

/// Number of orders of work to try: one where the order cannot be chosen.
fn seeds() -> u64 {
    if stand_in() { 100 } else { 1 }
}

/// Runs one test of this program as a separate process, with these variables set or unset.
fn child(test: &str, variables: &[(&str, Option<&str>)]) -> Output {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env_remove("REQUIRE_GPU");
    for (name, value) in variables {
        match value {
            Some(value) => child.env(name, value),
            None => child.env_remove(name),
        };
    }
    child.output().unwrap()
}

struct Bench {
    device: Device,
    stream: Stream,
    queue: Queue,
    meter: Meter,
}

impl Bench {
    fn new() -> Self {
        let device = Device::open(0).unwrap();
        let stream = Stream::new(&device).unwrap();
        Bench { device, queue: Queue::cuda(stream.clone()), stream, meter: Meter::new() }
    }

    fn buffer(&self, len: usize) -> Buffer {
        Buffer::zeroed_on(&self.queue, len, DType::U16, &self.meter, Category::State).unwrap()
    }

    fn pinned(&self, bytes: &[u8]) -> Pinned {
        let pinned = Pinned::zeroed(&self.device, bytes.len(), &self.meter, Category::Staging).unwrap();
        pinned.write(0, bytes).unwrap();
        pinned
    }

    fn read(&self, buffer: &Buffer) -> Vec<u16> {
        let mut values = vec![0u16; buffer.len()];
        self.queue.download(buffer.as_slice(), (&mut values[..]).into()).unwrap();
        values
    }
}

fn values(len: usize, seed: u64) -> Vec<u16> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 17) as u16 ^ seed as u16).collect()
}

#[test]
fn uploads_come_back_unchanged() {
    if !available() {
        return;
    }
    let bench = Bench::new();
    for len in [0, 1, 127, 128, 129, 65_537] {
        let (expected, mut buffer) = (values(len, 3), bench.buffer(len));
        assert_eq!((buffer.place(), buffer.len()), (Place::Cuda(0), len));
        assert_eq!(bench.read(&buffer), vec![0; len]);
        bench.queue.upload(expected[..].into(), buffer.as_mut()).unwrap();
        assert_eq!(bench.read(&buffer), expected);
        let mut other = bench.buffer(len);
        bench.queue.copy(buffer.as_slice(), other.as_mut()).unwrap();
        bench.queue.zero(buffer.as_mut()).unwrap();
        assert_eq!((bench.read(&buffer), bench.read(&other)), (vec![0; len], expected));
    }
}

#[test]
fn parts_of_a_buffer_travel_singly() {
    if !available() {
        return;
    }
    let bench = Bench::new();
    let mut whole = bench.buffer(10);
    bench.queue.upload(values(10, 0)[..].into(), whole.as_mut()).unwrap();
    let mut middle = whole.split_off(3).unwrap();
    let mut last = middle.split_off(4).unwrap();
    bench.queue.zero(middle.as_mut()).unwrap();
    let host = bench.pinned(bytemuck::cast_slice(&[0u16, 7, 8, 9]));
    bench.stream.copy_in(&host, 2, last.as_mut()).unwrap();
    let joined = whole.join(middle).unwrap().join(last).unwrap();
    let mut expected = values(10, 0);
    expected[3..].copy_from_slice(&[0, 0, 0, 0, 7, 8, 9]);
    assert_eq!(bench.read(&joined), expected);
    let slice = joined.as_slice().slice(4..10).unwrap();
    assert_eq!((slice.len(), slice.place()), (6, Place::Cuda(0)));
    assert_eq!(slice.address(), joined.as_ptr().addr().get() + 8);
}

/// Copies in on one stream and on to another buffer on a second stream, which waits for the first or does not.
fn relayed(bench: &Bench, waits: bool) -> Vec<u16> {
    let second = Queue::cuda(Stream::urgent(&bench.device).unwrap());
    let host = bench.pinned(bytemuck::cast_slice(&values(300, 9)));
    let (mut first, mut last) = (bench.buffer(300), bench.buffer(300));
    bench.queue.synchronize().unwrap();
    bench.stream.copy_in(&host, 0, first.as_mut()).unwrap();
    let copied = bench.stream.record().unwrap();
    if waits {
        second.stream().unwrap().wait(&copied).unwrap();
    }
    drop(copied);
    second.copy(first.as_slice(), last.as_mut()).unwrap();
    second.synchronize().unwrap();
    bench.read(&last)
}

#[test]
fn a_stream_that_waits_for_an_event_sees_the_work_before_it() {
    if !available() {
        return;
    }
    for order in 0..seeds() {
        seed(order);
        assert_eq!(relayed(&Bench::new(), true), values(300, 9), "order {order}");
    }
}

#[test]
fn a_missing_wait_shows_under_the_stand_in() {
    if !stand_in() {
        return println!("skipped: needs the stand-in");
    }
    let wrong = |order: &u64| {
        seed(*order);
        relayed(&Bench::new(), false) != values(300, 9)
    };
    let count = (0..100).filter(wrong).count();
    assert!((10..=90).contains(&count), "{count} of 100 orders");
}

#[test]
fn a_device_tells_how_long_work_takes() {
    if !available() {
        return;
    }
    let bench = Bench::new();
    let (from, mut to) = (bench.buffer(1 << 24), bench.buffer(1 << 24));
    bench.queue.synchronize().unwrap();
    let begun = std::time::Instant::now();
    let before = bench.stream.moment().unwrap();
    bench.queue.copy(from.as_slice(), to.as_mut()).unwrap();
    let between = bench.stream.moment().unwrap();
    let after = bench.stream.moment().unwrap();
    let (copy, nothing) = (between.since(&before).unwrap(), after.since(&between).unwrap());
    let here = begun.elapsed().as_secs_f64();
    assert!(copy > 1e-6 && nothing >= 0.0 && copy + nothing < here, "{copy} s, {nothing} s, here {here} s");
    assert!((after.since(&before).unwrap() - copy - nothing).abs() < 1e-5);
    assert!(before.since(&between).unwrap() < 0.0);
}

#[test]
fn waits_of_the_host_are_counted() {
    if !available() {
        return;
    }
    let bench = Bench::new();
    let (from, mut to, host) = (bench.buffer(64), bench.buffer(64), bench.pinned(&[1; 128]));
    let begun = cuda::waits();
    bench.stream.copy_in(&host, 0, to.as_mut()).unwrap();
    bench.queue.copy(from.as_slice(), to.as_mut()).unwrap();
    let event = bench.stream.record().unwrap();
    bench.stream.wait(&event).unwrap();
    event.is_done().unwrap();
    let told = cuda::waits() - begun;
    event.synchronize().unwrap();
    bench.stream.synchronize().unwrap();
    drop(from);
    // Tests that run beside this one in the process also wait.
    assert!(cuda::waits() - begun >= told + 3);
    if std::env::var_os("NEXTEST").is_some() {
        assert_eq!((told, cuda::waits() - begun), (0, 3));
    }
}

#[test]
fn pinned_memory_in_use_is_not_touched() {
    if !available() {
        return;
    }
    for order in 0..seeds() {
        seed(order);
        let bench = Bench::new();
        let (host, mut buffer) = (bench.pinned(&[7; 64]), bench.buffer(32));
        bench.queue.synchronize().unwrap();
        bench.stream.copy_in(&host, 0, buffer.as_mut()).unwrap();
        // The copy may be done already; until it is, nothing is written.
        let mut tries = 0;
        while let Err(error) = host.write(0, &[8; 64]) {
            assert_eq!(error, Error::InUse);
            tries += 1;
            assert!(tries < 1_000_000, "a copy ends");
        }
        assert_eq!(bench.read(&buffer), [0x707; 32]);
        // Dropped in the middle of a copy, the memory is freed after the copy.
        bench.stream.copy_in(&host, 0, buffer.as_mut()).unwrap();
        drop(host);
        assert_eq!(bench.read(&buffer), [0x808; 32]);
        assert_eq!(bench.meter.live(Category::Staging), 0);
        let back = bench.pinned(&[0; 66]);
        bench.stream.copy_out(buffer.as_slice(), &back, 2).unwrap();
        bench.queue.synchronize().unwrap();
        let mut bytes = [9; 66];
        back.read(0, &mut bytes).unwrap();
        assert_eq!((&bytes[..2], &bytes[2..]), (&[0u8; 2][..], &[8u8; 64][..]));
    }
}

#[test]
fn memory_is_counted_while_it_lives() {
    if !available() {
        return;
    }
    let bench = Bench::new();
    let (mut buffer, host) = (bench.buffer(500), bench.pinned(&[0; 24]));
    assert_eq!(bench.meter.live(Category::State), 1000);
    assert_eq!(bench.meter.live(Category::Staging), 24);
    let half = buffer.split_off(250).unwrap();
    drop((buffer, host));
    assert_eq!(bench.meter.live_total(), 1000);
    drop(half);
    assert_eq!((bench.meter.live_total(), bench.meter.peak_total()), (0, 1024));
    // The driver has less free memory meanwhile, apart from allocations and frees of other tests.
    let (free, bytes) = (bench.device.free_memory().unwrap(), 64 << 20);
    let large = bench.buffer(bytes / 2);
    let left = bench.device.free_memory().unwrap();
    assert!(free <= bench.device.memory().unwrap() && left + bytes / 2 <= free, "{free}, then {left}");
    drop(large);
    assert!(bench.device.free_memory().unwrap() >= left + bytes / 2);
}

//! Devices, streams and memory, on a GPU or on the stand-in (`cargo xtask ci --only standin`).
#![cfg(feature = "cuda")]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking and say what they skip"
)]

use meshstep_tensor::cuda::{self, Device, Error, Memory, Pinned, Stream, Unavailable};
use meshstep_tensor::{Category, Meter};
use std::ffi::{CString, c_char, c_int};

/// The driver's number for an invalid value.
const INVALID_VALUE: c_int = 1;

/// Whether there is a device; if not, says so, which REQUIRE_GPU=1 makes a failure.
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

/// Chooses the order of work, where that can be chosen.
fn seed(seed: u64) {
    if stand_in() {
        in_stand_in::<extern "C" fn(u64)>("meshstep_standin_seed")(seed);
    }
}

/// The next call of `function` fails.
fn fail(function: &str, code: c_int) {
    let function = CString::new(function).unwrap();
    in_stand_in::<extern "C" fn(*const c_char, c_int)>("meshstep_standin_fail")(function.as_ptr(), code);
}

/// Orders of work to try: one where it cannot be chosen.
fn seeds() -> u64 {
    if stand_in() { 100 } else { 1 }
}

struct Place {
    device: Device,
    stream: Stream,
    meter: Meter,
}

impl Place {
    fn new() -> Self {
        let device = Device::open(0).unwrap();
        let stream = Stream::new(&device).unwrap();
        Place { device, stream, meter: Meter::new() }
    }

    fn memory(&self, len: usize) -> Memory {
        Memory::zeroed(&self.stream, len, &self.meter, Category::State).unwrap()
    }

    fn pinned(&self, bytes: &[u8]) -> Pinned {
        let pinned = Pinned::zeroed(&self.device, bytes.len(), &self.meter, Category::Staging).unwrap();
        pinned.write(0, bytes).unwrap();
        pinned
    }

    fn read(&self, memory: &Memory) -> Vec<u8> {
        let host = self.pinned(&vec![0; memory.len()]);
        self.stream.copy_out(memory, 0, &host, 0, memory.len()).unwrap();
        self.stream.synchronize().unwrap();
        let mut bytes = vec![0; memory.len()];
        host.read(0, &mut bytes).unwrap();
        bytes
    }
}

fn bytes(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 17) as u8 ^ seed as u8).collect()
}

#[test]
fn a_machine_without_a_driver_says_what_is_missing() {
    match cuda::probe() {
        Ok(driver) => assert!(driver.devices > 0 && driver.version >= 12_000, "{driver:?}"),
        Err(missing @ Unavailable::NoDriver { .. }) => {
            let text = missing.to_string();
            assert!(text.contains("libcuda.so.1") && text.contains("install"), "{text}");
            // What needs a driver says the same, each time.
            for _ in 0..2 {
                assert_eq!(Device::open(0).unwrap_err(), Error::Unavailable(missing.clone()));
            }
        }
        Err(other) => println!("a driver that cannot be used: {other}"),
    }
}

/// What a process that sees these variables is told.
fn probed_with(name: &str, value: Option<&str>) -> String {
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "what_is_probed_is_printed", "--nocapture"]).env_remove("REQUIRE_GPU");
    match value {
        Some(value) => child.env(name, value),
        None => child.env_remove(name),
    };
    String::from_utf8(child.output().unwrap().stdout).unwrap()
}

#[test]
fn what_is_probed_is_printed() {
    println!("probed: {:?}", cuda::probe());
}

#[test]
fn drivers_that_will_not_do_are_told_apart() {
    if !stand_in() {
        return println!("skipped: needs the stand-in");
    }
    for (name, value, told) in [
        ("MESHSTEP_STANDIN", None, "StandIn {"),
        ("MESHSTEP_STANDIN", Some("yes"), "StandIn {"),
        ("MESHSTEP_STANDIN_VERSION", Some("11080"), "TooOld { found: 11080, needed: 12000 }"),
        ("MESHSTEP_STANDIN_DEVICES", Some("0"), "NoDevice"),
        ("MESHSTEP_STANDIN_DEVICES", Some("3"), "devices: 3, stand_in: true"),
        ("LD_LIBRARY_PATH", None, "NoDriver {"),
    ] {
        let said = probed_with(name, value);
        // A machine with a driver of its own finds that one without the path.
        let real = name == "LD_LIBRARY_PATH" && said.contains("stand_in: false");
        assert!(said.contains(told) || real, "{name}={value:?}: {said}");
    }
}

#[test]
fn what_goes_in_comes_out() {
    if !available() {
        return;
    }
    let place = Place::new();
    for len in [0, 1, 127, 128, 129, 65_537] {
        let (expected, memory) = (bytes(len, 3), place.memory(len));
        assert_eq!(place.read(&memory), vec![0; len]);
        let host = place.pinned(&expected);
        place.stream.copy_in(&host, 0, &memory, 0, len).unwrap();
        assert_eq!(place.read(&memory), expected);
    }
    let (host, memory) = (place.pinned(&[1, 2, 3, 4, 5, 6, 7]), place.memory(12));
    place.stream.copy_in(&host, 1, &memory, 2, 5).unwrap();
    place.stream.copy(&memory, 3, &memory, 8, 3).unwrap();
    assert_eq!(place.read(&memory), [0, 0, 2, 3, 4, 5, 6, 0, 3, 4, 5, 0]);
    place.stream.zero(&memory).unwrap();
    assert_eq!(place.read(&memory), [0; 12]);
}

/// Copies in on one stream and on to another place on a second, which waits for the first or does not.
fn relayed(place: &Place, waits: bool) -> Vec<u8> {
    let second = Stream::urgent(&place.device).unwrap();
    let (host, first, last) = (place.pinned(&bytes(300, 9)), place.memory(300), place.memory(300));
    place.stream.synchronize().unwrap();
    place.stream.copy_in(&host, 0, &first, 0, 300).unwrap();
    let copied = place.stream.record().unwrap();
    if waits {
        second.wait(&copied).unwrap();
    }
    drop(copied);
    second.copy(&first, 0, &last, 0, 300).unwrap();
    second.synchronize().unwrap();
    place.read(&last)
}

#[test]
fn what_waits_for_an_event_sees_what_was_before_it() {
    if !available() {
        return;
    }
    for order in 0..seeds() {
        seed(order);
        assert_eq!(relayed(&Place::new(), true), bytes(300, 9), "order {order}");
    }
}

#[test]
fn a_missing_wait_shows_under_the_stand_in() {
    if !stand_in() {
        return println!("skipped: needs the stand-in");
    }
    let wrong = |order: &u64| {
        seed(*order);
        relayed(&Place::new(), false) != bytes(300, 9)
    };
    let count = (0..100).filter(wrong).count();
    assert!((10..=90).contains(&count), "{count} of 100 orders");
}

#[test]
fn pinned_memory_in_use_is_not_touched() {
    if !available() {
        return;
    }
    for order in 0..seeds() {
        seed(order);
        let place = Place::new();
        let (host, memory) = (place.pinned(&[7; 64]), place.memory(64));
        place.stream.synchronize().unwrap();
        place.stream.copy_in(&host, 0, &memory, 0, 64).unwrap();
        // It may be done already; until it is, nothing is written.
        let mut tries = 0;
        while let Err(error) = host.write(0, &[8; 64]) {
            assert_eq!(error, Error::InUse);
            tries += 1;
            assert!(tries < 1_000_000, "a copy ends");
        }
        assert_eq!(place.read(&memory), [7; 64]);
        // Dropped in the middle of a copy, it is freed after it.
        place.stream.copy_in(&host, 0, &memory, 0, 64).unwrap();
        drop(host);
        assert_eq!(place.read(&memory), [8; 64]);
        assert_eq!(place.meter.live(Category::Staging), 0);
    }
}

#[test]
fn memory_is_counted_while_it_lives() {
    if !available() {
        return;
    }
    let place = Place::new();
    let (memory, host) = (place.memory(1000), place.pinned(&[0; 24]));
    assert_eq!(place.meter.live(Category::State), 1000);
    assert_eq!(place.meter.live(Category::Staging), 24);
    drop((memory, host));
    assert_eq!(place.meter.live_total(), 0);
    assert_eq!(place.meter.peak_total(), 1024);
}

#[test]
fn what_cannot_be_is_refused() {
    if !available() {
        return;
    }
    let devices = cuda::probe().unwrap().devices;
    for ordinal in [devices, 1 << 40] {
        assert_eq!(Device::open(ordinal).unwrap_err(), Error::Ordinal { ordinal, devices });
    }
    let place = Place::new();
    let (host, memory) = (place.pinned(&[1; 10]), place.memory(10));
    for (from, len) in [(0, 11), (10, 1), (11, 0), (usize::MAX, 2)] {
        let refused = [
            place.stream.copy_in(&host, from, &memory, 0, len),
            place.stream.copy_in(&host, 0, &memory, from, len),
            place.stream.copy_out(&memory, from, &host, 0, len),
            place.stream.copy(&memory, from, &memory, 0, len),
            host.read(from, &mut vec![0; len]),
        ];
        assert!(refused.iter().all(|r| matches!(r, Err(Error::OutOfBounds { .. }))), "{refused:?}");
    }
    let onto = place.stream.copy(&memory, 0, &memory, 3, 4);
    assert_eq!(onto, Err(Error::Overlap { len: 4, apart: 3 }));
    let too_much = place.device.memory().unwrap() + 1;
    let refused = Memory::zeroed(&place.stream, too_much, &place.meter, Category::Params).unwrap_err();
    assert_eq!(refused, Error::OutOfMemory { ordinal: 0, bytes: too_much, category: Category::Params });
    assert_eq!(place.meter.live(Category::Params), 0);
    assert_eq!(place.read(&memory), [0; 10]);
}

#[test]
fn another_devices_memory_is_refused() {
    if !available() || cuda::probe().unwrap().devices < 2 {
        return println!("skipped: needs two devices");
    }
    let (place, other) = (Place::new(), Stream::new(&Device::open(1).unwrap()).unwrap());
    let (host, memory) = (place.pinned(&[1; 8]), place.memory(8));
    let elsewhere = Err(Error::OtherDevice { what: "device memory", given: 0, expected: 1 });
    assert_eq!(other.copy_in(&host, 0, &memory, 0, 8), elsewhere);
    assert_eq!(other.copy_out(&memory, 0, &host, 0, 8), elsewhere);
    assert_eq!(other.zero(&memory), elsewhere);
    let there = Memory::zeroed(&other, 8, &place.meter, Category::State).unwrap();
    let crossed = place.stream.copy(&memory, 0, &there, 0, 8);
    assert_eq!(crossed, Err(Error::OtherDevice { what: "the target", given: 1, expected: 0 }));
}

#[test]
fn what_a_drop_could_not_do_is_told_by_the_next_call() {
    if !stand_in() {
        return println!("skipped: needs the stand-in");
    }
    let place = Place::new();
    for function in ["cuMemFree_v2", "cuEventDestroy_v2", "cuStreamDestroy_v2", "cuMemFreeHost"] {
        let things = (
            place.memory(5),
            place.stream.record().unwrap(),
            Stream::new(&place.device).unwrap(),
            place.pinned(&[1]),
        );
        fail(function, INVALID_VALUE);
        drop(things);
        let told = place.stream.synchronize().unwrap_err();
        let Error::Call { call, code: 1, name } = &told else { panic!("{told:?}") };
        assert_eq!((*call, name.as_str()), (function, "CUDA_ERROR_INVALID_VALUE"));
        assert_eq!(place.stream.synchronize(), Ok(()), "told once");
    }
}

#[test]
fn a_refused_call_has_its_name_and_number() {
    if !stand_in() {
        return println!("skipped: needs the stand-in");
    }
    let place = Place::new();
    let (host, memory) = (place.pinned(&[3; 4]), place.memory(4));
    fail("cuEventRecord", 700);
    let refused = place.stream.copy_in(&host, 0, &memory, 0, 4).unwrap_err();
    assert_eq!(refused.to_string(), "cuEventRecord failed with CUDA_ERROR_ILLEGAL_ADDRESS (700)");
    // The copy had been started, so it was waited for: the host's memory is free.
    host.write(0, &[4; 4]).unwrap();
    assert_eq!(place.read(&memory), [3; 4]);
}

//! Calls that are refused: arguments, kernels, memory of other places, errors of drops.

use super::{Bench, INVALID_VALUE, available, fail, stand_in};
use meshstep_tensor::cuda::{self, Device, Error, Module, Stream};
use meshstep_tensor::{Buffer, Category, DType, Place, Queue};

#[test]
fn invalid_calls_are_refused() {
    if !available() {
        return;
    }
    let devices = cuda::probe().unwrap().devices;
    for ordinal in [devices, 1 << 40] {
        assert_eq!(Device::open(ordinal).unwrap_err(), Error::Ordinal { ordinal, devices });
    }
    let bench = Bench::new();
    let (host, mut buffer) = (bench.pinned(&[1; 10]), bench.buffer(5));
    for (from, end) in [(1, 11), (11, 21), (usize::MAX, usize::MAX)] {
        let refused = Err(Error::OutOfBounds { start: from, end, len: 10 });
        assert_eq!(bench.stream.copy_in(&host, from, buffer.as_mut()), refused);
        assert_eq!(bench.stream.copy_out(buffer.as_slice(), &host, from), refused);
        assert_eq!(host.read(from, &mut [0; 10]), refused);
        assert_eq!(host.write(from, &[0; 10]), refused);
    }
    let too_much = bench.device.memory().unwrap() / 2 + 1;
    let refused = Buffer::zeroed_on(&bench.queue, too_much, DType::U16, &bench.meter, Category::Params);
    let bytes = 2 * too_much;
    assert_eq!(
        refused.unwrap_err(),
        Error::OutOfMemory { ordinal: 0, bytes, category: Category::Params }.into()
    );
    assert_eq!(bench.meter.live(Category::Params), 0);
    assert_eq!(bench.read(&buffer), [0; 5]);
}

#[test]
fn kernels_that_cannot_be_are_refused() {
    if !available() {
        return;
    }
    let bench = Bench::new();
    for text in ["", "no kernels", ".version 7.0\n", "a zero\0byte"] {
        let refused = Module::load(&bench.device, text).unwrap_err();
        assert!(matches!(&refused, Error::Ptx { log } if !log.is_empty()), "{refused:?}");
    }
    let empty = Module::load(&bench.device, ".version 7.0\n.target sm_80\n.address_size 64\n").unwrap();
    for name in ["absent", "a zero\0byte"] {
        assert_eq!(empty.function(name).unwrap_err(), Error::NoKernel { name: name.to_owned() });
    }
    assert!(bench.device.multiprocessors().unwrap() > 0);
    assert!(bench.device.clock_rate().unwrap() > 100_000_000);
    assert_eq!(bench.stream.synchronize(), Ok(()), "a refusal breaks nothing");
}

#[test]
fn memory_elsewhere_is_refused() {
    use meshstep_tensor::Error::{Place as Elsewhere, WrongDType, WrongLen};
    if !available() {
        return;
    }
    let bench = Bench::new();
    let (mut there, cpu) = (bench.buffer(4), Queue::cpu());
    let mut here = Buffer::from_slice(&[1u16; 4], &bench.meter, Category::State).unwrap();
    let on_gpu = Elsewhere { given: Place::Cuda(0), expected: Place::Cpu };
    let on_cpu = Elsewhere { given: Place::Cpu, expected: Place::Cuda(0) };
    assert_eq!(there.typed::<u16>().unwrap_err(), on_gpu);
    assert_eq!(there.as_mut().zero().unwrap_err(), on_gpu);
    assert_eq!(there.as_mut().copy_from(here.as_slice()).unwrap_err(), on_gpu);
    assert_eq!(cpu.copy(there.as_slice(), here.as_mut()).unwrap_err(), on_gpu);
    assert_eq!(cpu.zero(there.as_mut()).unwrap_err(), on_gpu);
    assert_eq!(bench.queue.copy(here.as_slice(), there.as_mut()).unwrap_err(), on_cpu);
    assert_eq!(bench.queue.zero(here.as_mut()).unwrap_err(), on_cpu);
    assert_eq!(bench.queue.upload(there.as_slice(), bench.buffer(4).as_mut()).unwrap_err(), on_gpu);
    let host = bench.pinned(&[0; 8]);
    let elsewhere = Error::Elsewhere { given: Place::Cpu, ordinal: 0 };
    assert_eq!(bench.stream.copy_in(&host, 0, here.as_mut()), Err(elsewhere));
    let short = bench.queue.upload([1u16; 3][..].into(), there.as_mut()).unwrap_err();
    assert_eq!(short, WrongLen { given: 3, expected: 4 });
    let wide = bench.queue.upload([1f32; 4][..].into(), there.as_mut()).unwrap_err();
    assert_eq!(wide, WrongDType { asked: DType::U16, holds: DType::F32 });
    assert_eq!((bench.read(&there), here.typed::<u16>().unwrap()), (vec![0; 4], &[1u16; 4][..]));
}

#[test]
fn another_devices_memory_is_refused() {
    if !available() || cuda::probe().unwrap().devices < 2 {
        return println!("skipped: needs two devices");
    }
    let bench = Bench::new();
    let other = Stream::new(&Device::open(1).unwrap()).unwrap();
    let (host, mut buffer) = (bench.pinned(&[1; 8]), bench.buffer(4));
    let elsewhere = Err(Error::Elsewhere { given: Place::Cuda(0), ordinal: 1 });
    assert_eq!(other.copy_in(&host, 0, buffer.as_mut()), elsewhere);
    assert_eq!(other.copy_out(buffer.as_slice(), &host, 0), elsewhere);
    let refused = Queue::cuda(other).zero(buffer.as_mut()).unwrap_err();
    let expected = meshstep_tensor::Error::Place { given: Place::Cuda(0), expected: Place::Cuda(1) };
    assert_eq!(refused, expected);
}

#[test]
fn errors_of_drops_are_returned_by_the_next_call() {
    if !stand_in() {
        return println!("skipped: needs the stand-in");
    }
    let bench = Bench::new();
    for function in ["cuMemFree_v2", "cuStreamDestroy_v2", "cuMemFreeHost"] {
        let things = (bench.buffer(5), Stream::new(&bench.device).unwrap(), bench.pinned(&[1]));
        fail(function, INVALID_VALUE);
        drop(things);
        let told = bench.stream.synchronize().unwrap_err();
        let Error::Call { call, code: 1, name } = &told else { panic!("{told:?}") };
        assert_eq!((*call, name.as_str()), (function, "CUDA_ERROR_INVALID_VALUE"));
        assert_eq!(bench.stream.synchronize(), Ok(()), "told once");
    }
}

#[test]
fn a_refused_call_has_its_name_and_number() {
    if !stand_in() {
        return println!("skipped: needs the stand-in");
    }
    let bench = Bench::new();
    let (host, mut buffer) = (bench.pinned(&[3; 4]), bench.buffer(2));
    fail("cuEventRecord", 700);
    let refused = bench.stream.copy_in(&host, 0, buffer.as_mut()).unwrap_err();
    assert_eq!(refused.to_string(), "cuEventRecord failed with CUDA_ERROR_ILLEGAL_ADDRESS (700)");
    // The copy had been started, and the call waited for it: the host memory is free.
    host.write(0, &[4; 4]).unwrap();
    assert_eq!(bench.read(&buffer), [0x303; 2]);
}

//! Memory and streams that belong to cudarc or are lent to it.

use crate::cuda::{Bench, available, seed, seeds, stand_in, values};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use meshstep_tensor::cuda::{self, Device, Error, Found, Stream};
use meshstep_tensor::{Buffer, Category, DType, Place, Queue, Slice, SliceMut};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Weak};

fn theirs() -> Arc<CudaStream> {
    CudaContext::new(0).unwrap().new_stream().unwrap()
}

fn address<T>(slice: &CudaSlice<T>) -> u64 {
    slice.device_ptr(slice.stream()).0
}

#[test]
fn a_stream_of_cudarcs_is_one_of_ours_and_stays_theirs() {
    if !available() {
        return;
    }
    let stream = theirs();
    let (one, two) =
        (Stream::from_cudarc(stream.clone()).unwrap(), Stream::from_cudarc(stream.clone()).unwrap());
    assert_eq!(one, two);
    assert_eq!(one.as_raw(), stream.cu_stream().cast());
    assert_ne!(one, Stream::new(one.device()).unwrap());
    drop(two);
    let kept: Weak<CudaStream> = Arc::downgrade(&stream);
    drop(stream);
    let bench =
        Bench { device: one.device().clone(), queue: Queue::cuda(one.clone()), stream: one, ..Bench::new() };
    let mut buffer = bench.buffer(40);
    bench.queue.upload(values(40, 1)[..].into(), buffer.as_mut()).unwrap();
    assert_eq!(bench.read(&buffer), values(40, 1));
    assert!(kept.upgrade().is_some());
    drop((bench, buffer));
    assert!(kept.upgrade().is_none());
}

#[test]
fn the_default_stream_is_one_and_that_of_each_thread_is_none() {
    if !available() {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let queue = Queue::cuda(Stream::from_cudarc(context.default_stream()).unwrap());
    let bench = Bench { queue, ..Bench::new() };
    let mut buffer = bench.buffer(40);
    bench.queue.upload(values(40, 2)[..].into(), buffer.as_mut()).unwrap();
    assert_eq!(bench.read(&buffer), values(40, 2));
    assert_eq!(Stream::from_cudarc(context.per_thread_stream()).unwrap_err(), Error::PerThread);
}

#[test]
fn a_slice_of_cudarcs_becomes_a_buffer_after_its_work_and_is_freed_after_ours() {
    if !available() {
        return;
    }
    for order in 0..seeds() {
        seed(order);
        let (bench, stream, expected) = (Bench::new(), theirs(), values(300, order));
        let slice = stream.clone_htod(&expected).unwrap();
        let at = address(&slice);
        let mut buffer = Buffer::from_cudarc(&bench.queue, slice).unwrap();
        assert_eq!((buffer.as_slice().address() as u64, buffer.dtype()), (at, DType::U16));
        assert_eq!(bench.meter.live_total(), 0);
        let (mut copied, mut after) = (bench.buffer(300), bench.buffer(300));
        bench.queue.copy(buffer.as_slice(), copied.as_mut()).unwrap();
        bench.queue.zero(buffer.as_mut()).unwrap();
        bench.queue.copy(buffer.as_slice(), after.as_mut()).unwrap();
        drop((stream, buffer));
        assert_eq!((bench.read(&copied), bench.read(&after)), (expected, vec![0; 300]), "order {order}");
    }
}

/// Sets a flag on drop.
struct Owner(Arc<AtomicBool>, #[expect(dead_code, reason = "kept")] CudaSlice<u16>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

#[test]
fn an_owner_lives_as_long_as_the_last_part_and_is_counted_if_asked() {
    if !available() {
        return;
    }
    let (bench, stream) = (Bench::new(), theirs());
    let slice = stream.clone_htod(&values(10, 0)).unwrap();
    stream.synchronize().unwrap();
    let (at, gone) = (address(&slice), Arc::new(AtomicBool::new(false)));
    let keep = (Owner(Arc::clone(&gone), slice), bench.meter.claim(Category::Framework, 20));
    // SAFETY: the slice owns the memory and is kept; its work is done.
    let mut left = unsafe { Buffer::from_raw_on(&bench.queue, at, 10, DType::U16, keep) }.unwrap();
    assert_eq!(bench.meter.live(Category::Framework), 20);
    let right = left.split_off(4).unwrap();
    drop(left);
    assert!(!gone.load(SeqCst));
    assert_eq!(bench.read(&right), values(10, 0)[4..]);
    drop(right);
    assert!(gone.load(SeqCst));
    assert_eq!((bench.meter.live_total(), bench.stream.synchronize()), (0, Ok(())));
}

#[test]
fn memory_of_others_is_not_freed() {
    if !available() {
        return;
    }
    let bench = Bench::new();
    let mut whole = bench.buffer(64);
    bench.queue.upload(values(64, 5)[..].into(), whole.as_mut()).unwrap();
    let at = whole.as_slice().address() as u64;
    // SAFETY: `whole` outlives the buffer and is not used meanwhile; its work is done.
    let alias = unsafe { Buffer::from_raw_on(&bench.queue, at, 64, DType::U16, ()) }.unwrap();
    assert_eq!(bench.read(&alias), values(64, 5));
    drop(alias);
    assert_eq!(bench.read(&whole), values(64, 5));
    drop(whole);
    assert_eq!(bench.stream.synchronize(), Ok(()), "freed once");
}

#[test]
fn borrowed_memory_is_read_and_written_where_it_is_and_no_wait_is_added() {
    if !available() {
        return;
    }
    for order in 0..seeds() {
        seed(order);
        let (bench, expected) = (Bench::new(), values(64, order));
        let mut whole = bench.buffer(64);
        bench.queue.upload(expected[..].into(), whole.as_mut()).unwrap();
        let (at, before) = (whole.as_slice().address() as u64, cuda::waits());
        // SAFETY: `whole` outlives the queue's work on the first half, which nothing writes.
        let from = unsafe { Slice::from_raw_on(&bench.queue, at, 32, DType::U16) }.unwrap();
        // SAFETY: as above; nothing else accesses the second half.
        let into = unsafe { SliceMut::from_raw_on(&bench.queue, at + 64, 32, DType::U16) }.unwrap();
        assert_eq!((from.place(), from.len(), into.len()), (Place::Cuda(0), 32, 32));
        bench.queue.copy(from, into).unwrap();
        assert_eq!(cuda::waits(), before);
        assert_eq!(bench.read(&whole), [&expected[..32], &expected[..32]].concat(), "order {order}");
    }
    // SAFETY: no memory is touched, as there is none.
    let nothing = unsafe { Slice::from_raw_on(&Bench::new().queue, 0, 0, DType::F32) }.unwrap();
    assert!(nothing.is_empty());
}

#[test]
fn memory_of_other_places_is_refused() {
    if !available() {
        return;
    }
    let (bench, host) = (Bench::new(), [0u64; 4]);
    let buffer = bench.buffer(64);
    let refused = |at: u64, len, dtype| {
        // SAFETY: nothing touches the memory.
        let error = unsafe { Buffer::from_raw_on(&bench.queue, at, len, dtype, ()) }.unwrap_err();
        // SAFETY: as above.
        assert_eq!(unsafe { Slice::from_raw_on(&bench.queue, at, len, dtype) }.unwrap_err(), error);
        // SAFETY: as above.
        assert_eq!(unsafe { SliceMut::from_raw_on(&bench.queue, at, len, dtype) }.unwrap_err(), error);
        error
    };
    let (at, unknown) = (buffer.as_slice().address() as u64, host.as_ptr().addr() as u64);
    let elsewhere = |address, found| Error::NotThere { address, ordinal: 0, found }.into();
    assert_eq!(refused(0, 1, DType::U16), Error::Null.into());
    let misaligned = Error::Misaligned { address: at + 2, dtype: DType::F32, align: 4 };
    assert_eq!(refused(at + 2, 1, DType::F32), misaligned.into());
    assert_eq!(refused(unknown, 4, DType::U64), elsewhere(unknown, Found::Unknown));
    assert!(matches!(refused(at, usize::MAX, DType::F64), meshstep_tensor::Error::TooLarge { .. }));
    if stand_in() {
        assert_eq!(refused(at, 65, DType::U16), elsewhere(at + 129, Found::Unknown));
    }
    if cuda::probe().unwrap().devices > 1 {
        let queue = Queue::cuda(Stream::new(&Device::open(1).unwrap()).unwrap());
        let other = Buffer::zeroed_on(&queue, 8, DType::F64, &bench.meter, Category::State).unwrap();
        let at = other.as_slice().address() as u64;
        assert_eq!(refused(at, 8, DType::F64), elsewhere(at, Found::Device(1)));
    }
    // SAFETY: no memory is touched, as there is none.
    let nothing = unsafe { Buffer::from_raw_on(&bench.queue, 0, 0, DType::F32, ()) }.unwrap();
    assert_eq!((nothing.len(), nothing.place()), (0, Place::Cuda(0)));
    // SAFETY: refused.
    let cpu = unsafe { Buffer::from_raw_on(&Queue::cpu(), at, 1, DType::U16, ()) }.unwrap_err();
    assert_eq!(cpu, meshstep_tensor::Error::Place { given: Place::Cpu, expected: Place::Cuda(0) });
}

#[test]
fn pinned_memory_is_the_hosts() {
    if !available() {
        return;
    }
    let bench = Bench::new();
    let context = CudaContext::new(0).unwrap();
    // SAFETY: written before it is read.
    let pinned = unsafe { context.alloc_pinned::<u16>(4) }.unwrap();
    let at = pinned.as_ptr().unwrap().addr() as u64;
    // SAFETY: refused.
    let refused = unsafe { Buffer::from_raw_on(&bench.queue, at, 4, DType::U16, ()) }.unwrap_err();
    assert_eq!(refused, Error::NotThere { address: at, ordinal: 0, found: Found::Host }.into());
}

#[test]
fn lent_memory_comes_back_written_in_order() {
    if !available() {
        return;
    }
    for order in 0..seeds() {
        seed(order);
        let (bench, stream) = (Bench::new(), theirs());
        let (mut buffer, mut source) = (bench.buffer(200), bench.buffer(200));
        let (ours, given) = (values(200, 1), values(200, 2));
        bench.queue.upload(ours[..].into(), source.as_mut()).unwrap();
        bench.queue.copy(source.as_slice(), buffer.as_mut()).unwrap();
        let mut lent = buffer.lend::<u16>(&bench.queue, &stream).unwrap();
        assert_eq!(lent.len(), 200);
        let mut seen = stream.clone_dtod(&*lent).unwrap();
        stream.memcpy_htod(&given, &mut lent.view_mut()).unwrap();
        drop(lent);
        let mut back = bench.buffer(200);
        bench.queue.copy(buffer.as_slice(), back.as_mut()).unwrap();
        assert_eq!(bench.read(&back), given, "order {order}");
        let mut read = vec![0; 200];
        stream.memcpy_dtoh(&seen.as_view_mut(), &mut read).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(read, ours, "order {order}");
        drop((buffer, source, back));
        assert_eq!((bench.meter.live_total(), bench.stream.synchronize()), (0, Ok(())), "freed once");
    }
}

#[test]
fn invalid_loans_are_refused() {
    use meshstep_tensor::Error::{Place as Elsewhere, WrongDType};
    if !available() {
        return;
    }
    let (bench, stream) = (Bench::new(), theirs());
    let mut buffer = bench.buffer(8);
    let wide = buffer.lend::<f32>(&bench.queue, &stream).unwrap_err();
    assert_eq!(wide, WrongDType { asked: DType::F32, holds: DType::U16 });
    let each = CudaContext::new(0).unwrap().per_thread_stream();
    assert_eq!(buffer.lend::<u16>(&bench.queue, &each).unwrap_err(), Error::PerThread.into());
    let cpu = buffer.lend::<u16>(&Queue::cpu(), &stream).unwrap_err();
    assert_eq!(cpu, Elsewhere { given: Place::Cuda(0), expected: Place::Cpu });
    assert_eq!(bench.read(&buffer), [0; 8]);
    if cuda::probe().unwrap().devices > 1 {
        let other = CudaContext::new(1).unwrap().new_stream().unwrap();
        let refused = buffer.lend::<u16>(&bench.queue, &other).unwrap_err();
        assert_eq!(refused, Elsewhere { given: Place::Cuda(1), expected: Place::Cuda(0) });
    }
}

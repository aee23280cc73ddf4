//! Memory and streams of other libraries, and ours for them, without a copy.

use super::driver::{call, told};
use super::memory::Foreign;
use super::{Device, Error, Found, Stream};
use crate::memory::Slab;
use crate::{Buffer, DType, Element, Place, Queue};
use cudarc::driver::{CudaSlice, CudaStream, CudaViewMut, DevicePtrMut, DriverError, sys};
use std::any::Any;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

/// The handle that means another stream on each thread.
const PER_THREAD: usize = 2;

impl Stream {
    /// Somebody else's stream; null is the device's default one. `keep` lives as long as this stream and its clones, which never
    /// destroy it. A stream that is another one on each thread is refused.
    ///
    /// # Safety
    /// `handle` is a stream of the device's primary context, and lives as long as `keep` does.
    pub unsafe fn from_raw(
        device: &Device,
        handle: *mut c_void,
        keep: impl Any + Send + Sync,
    ) -> Result<Self, Error> {
        if handle.addr() == PER_THREAD {
            return Err(Error::PerThread);
        }
        Ok(Stream::of(device, handle.cast(), Some(Box::new(keep))))
    }

    /// The same order of work as cudarc's stream, which lives as long as this one. Streams of a context that is not the
    /// device's primary one are refused, and those that are another one on each thread.
    pub fn from_cudarc(stream: Arc<CudaStream>) -> Result<Self, Error> {
        let device = Device::open(stream.context().ordinal())?;
        if stream.context().cu_ctx() != device.context() {
            return Err(Error::OtherContext { ordinal: device.ordinal() });
        }
        // SAFETY: a stream of the primary context, which its owner, kept, destroys when it is dropped.
        unsafe { Stream::from_raw(&device, stream.cu_stream().cast(), stream) }
    }
}

impl Buffer {
    /// Somebody else's memory: `len` elements from `address` on, of the device where `queue` works.
    ///
    /// `keep` lives until the last part of the buffer is gone and the device is idle, which that drop waits for; where it cannot,
    /// `keep` is leaked. No [`Meter`](crate::Meter) counts the memory; to have it counted, put a
    /// [`claim`](crate::Meter::claim) into `keep`. Refused are null, an address that is not a multiple of the element's size, and
    /// addresses where the driver knows no memory of this device; without elements, any address will do.
    ///
    /// # Safety
    /// - The memory lives as long as `keep` does.
    /// - Until the buffer is gone, nobody else touches it but through what the buffer lends, and work that others have started on
    ///   it comes before the work that is started through the buffer.
    pub unsafe fn from_raw_on(
        queue: &Queue,
        address: u64,
        len: usize,
        dtype: DType,
        keep: impl Any + Send + Sync,
    ) -> Result<Buffer, crate::Error> {
        let stream = stream(queue)?;
        let bytes = crate::buffer::bytes(len, dtype)?;
        let mut base = NonNull::<u64>::dangling().cast();
        if bytes > 0 {
            check(stream, address, bytes, dtype)?;
            base = NonNull::new(std::ptr::without_provenance_mut(address as usize)).ok_or(Error::Null)?;
        }
        let slab = Slab::foreign(base, Foreign::new(stream.device(), Box::new(keep)));
        Ok(Buffer::of_slab(slab, len, dtype))
    }

    /// cudarc's memory, ours from now on: freed when the last part of the buffer is gone. What `queue` does from here on comes
    /// after the work on it so far. On an error the slice is dropped. Counted as memory of [`from_raw_on`](Self::from_raw_on) is.
    pub fn from_cudarc<T: Element>(queue: &Queue, mut slice: CudaSlice<T>) -> Result<Buffer, crate::Error> {
        let ours = stream(queue)?;
        let theirs = Stream::from_cudarc(Arc::clone(slice.stream()))?;
        let (len, order) = (slice.len(), Arc::clone(slice.stream()));
        // That stream waits for what cudarc knows of others.
        let (address, _touched) = slice.device_ptr_mut(&order);
        ours.wait(&theirs.record()?)?;
        drop(_touched);
        // SAFETY: the slice owns the memory alone and is kept; the queue waits for the work on it so far.
        unsafe { Buffer::from_raw_on(queue, address, len, T::DTYPE, slice) }
    }

    /// The buffer as cudarc's memory, for libraries on cudarc that work on `stream`: their work comes after `queue`'s so far, and
    /// what `queue` does once the loan is over comes after theirs.
    pub fn lend<T: Element>(
        &mut self,
        queue: &Queue,
        stream: &Arc<CudaStream>,
    ) -> Result<Lent<'_, T>, crate::Error> {
        if T::DTYPE != self.dtype() {
            return Err(crate::Error::WrongDType { asked: T::DTYPE, holds: self.dtype() });
        }
        self.place().check(queue.place())?;
        let ours = self::stream(queue)?.clone();
        let theirs = Stream::from_cudarc(Arc::clone(stream))?;
        Place::Cuda(theirs.device().ordinal()).check(queue.place())?;
        theirs.wait(&ours.record()?)?;
        // An error that cudarc has kept would be a panic where it makes events.
        stream.context().bind_to_thread().map_err(cudarc_said)?;
        // SAFETY: so many elements, initialised, borrowed for as long as the loan lasts, which never frees them.
        let slice = unsafe { stream.upgrade_device_ptr(self.as_slice().address() as u64, self.len()) };
        Ok(Lent { slice: ManuallyDrop::new(slice), ours, theirs, _buffer: PhantomData })
    }
}

/// A [`Buffer`] as cudarc's memory: a [`CudaSlice`] to read, [`view_mut`](Self::view_mut) to write. Its drop frees nothing.
#[derive(Debug)]
pub struct Lent<'a, T> {
    /// Leaked in the end. Handed out shared only: in exchange for another slice it would be freed.
    slice: ManuallyDrop<CudaSlice<T>>,
    ours: Stream,
    theirs: Stream,
    _buffer: PhantomData<&'a mut Buffer>,
}

impl<T> Lent<'_, T> {
    /// The elements, to write.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.slice.as_view_mut()
    }
}

impl<T> Deref for Lent<'_, T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.slice
    }
}

impl<T> Drop for Lent<'_, T> {
    fn drop(&mut self) {
        // SAFETY: taken once, here. Its stream now waits for the others that have used it.
        unsafe { ManuallyDrop::take(&mut self.slice) }.leak();
        self.ours.device().late(|| self.ours.wait(&self.theirs.record()?));
    }
}

fn stream(queue: &Queue) -> Result<&Stream, crate::Error> {
    let wrong = crate::Error::Place { given: queue.place(), expected: Place::Cuda(0) };
    queue.stream().ok_or(wrong)
}

/// Whether elements can be at `address`, and are where the stream works.
fn check(stream: &Stream, address: u64, bytes: usize, dtype: DType) -> Result<(), Error> {
    let (ordinal, align) = (stream.device().ordinal(), dtype.size());
    if address == 0 {
        return Err(Error::Null);
    }
    if !address.is_multiple_of(align as u64) {
        return Err(Error::Misaligned { address, dtype, align });
    }
    stream.enter()?;
    for address in [address, address.saturating_add(bytes as u64 - 1)] {
        let found = at(address)?;
        if found != Found::Device(ordinal) {
            return Err(Error::NotThere { address, ordinal, found });
        }
    }
    Ok(())
}

/// What the driver knows of an address. A context is current.
fn at(address: u64) -> Result<Found, Error> {
    use sys::CUpointer_attribute::{
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as DEVICE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE as KIND,
    };
    const HOST: u32 = sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32;
    let (mut kind, mut ordinal) = (0u32, 0i32);
    // SAFETY: any address may be asked about; the place has the attribute's type and outlives the call, as below.
    match unsafe { sys::cuPointerGetAttribute((&raw mut kind).cast(), KIND, address) } {
        sys::CUresult::CUDA_ERROR_INVALID_VALUE => return Ok(Found::Unknown),
        other => told("cuPointerGetAttribute", other)?,
    }
    if kind == HOST {
        return Ok(Found::Host);
    }
    // SAFETY: as above.
    unsafe { call!(cuPointerGetAttribute((&raw mut ordinal).cast(), DEVICE, address))? };
    Ok(usize::try_from(ordinal).map_or(Found::Unknown, Found::Device))
}

fn cudarc_said(DriverError(result): DriverError) -> Error {
    match told("cudarc", result) {
        Err(Error::Call { code, name, .. }) => Error::Cudarc { code, name },
        Err(other) => other,
        Ok(()) => Error::Cudarc { code: 0, name: "no error".to_owned() },
    }
}

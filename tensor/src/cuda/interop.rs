//! Memory and streams shared with other libraries without a copy.

use super::driver::{call, told};
use super::memory::Foreign;
use super::{Device, Error, Found, Stream};
use crate::memory::Slab;
use crate::{Buffer, DType, Element, Place, Queue, Slice, SliceMut};
use cudarc::driver::{CudaSlice, CudaStream, CudaViewMut, DevicePtrMut, DriverError, sys};
use std::any::Any;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

/// Handle of the per-thread default stream.
const PER_THREAD: usize = 2;

impl Stream {
    /// Wraps another library's stream; null is the device's default one. `keep` lives as long as this stream and its clones,
    /// which never destroy the handle. The per-thread default stream is an error.
    ///
    /// # Safety
    /// `handle` is a stream of the device's primary context and lives as long as `keep` does.
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

    /// Wraps cudarc's stream and keeps it alive. Returns an error for streams of a context other than the device's primary one,
    /// and for the per-thread default stream.
    pub fn from_cudarc(stream: Arc<CudaStream>) -> Result<Self, Error> {
        let device = Device::open(stream.context().ordinal())?;
        if stream.context().cu_ctx() != device.context() {
            return Err(Error::OtherContext { ordinal: device.ordinal() });
        }
        // SAFETY: `stream` belongs to the primary context and is kept; its owner destroys it on drop.
        unsafe { Stream::from_raw(&device, stream.cu_stream().cast(), stream) }
    }
}

impl Buffer {
    /// Wraps another library's memory: `len` elements from `address` on, on the device of `queue`.
    ///
    /// `keep` lives until the last part of the buffer is dropped and the device is idle, which that drop waits for; if the wait
    /// fails, `keep` is leaked. No [`Meter`](crate::Meter) counts the memory; to have it counted, put a
    /// [`claim`](crate::Meter::claim) into `keep`. Errors: a null address, an address that is not a multiple of the element's
    /// size, and an address where the driver knows no memory of this device. With `len` 0 any address is valid.
    ///
    /// # Safety
    /// - The memory lives as long as `keep` does.
    /// - Until the buffer is dropped, other code accesses the memory only through what the buffer lends, and work that other code
    ///   has started on it comes before the work started through the buffer.
    pub unsafe fn from_raw_on(
        queue: &Queue,
        address: u64,
        len: usize,
        dtype: DType,
        keep: impl Any + Send + Sync,
    ) -> Result<Buffer, crate::Error> {
        let (base, _) = checked(queue, address, len, dtype)?;
        let slab = Slab::foreign(base, Foreign::new(stream(queue)?.device(), Box::new(keep)));
        Ok(Buffer::of_slab(slab, len, dtype))
    }

    /// Takes over cudarc's memory, which is freed when the last part of the buffer is dropped. Later work on `queue` comes after
    /// all work on the slice so far. On an error the slice is dropped. Metering is as for [`from_raw_on`](Self::from_raw_on).
    pub fn from_cudarc<T: Element>(queue: &Queue, mut slice: CudaSlice<T>) -> Result<Buffer, crate::Error> {
        let ours = stream(queue)?;
        let theirs = Stream::from_cudarc(Arc::clone(slice.stream()))?;
        let (len, order) = (slice.len(), Arc::clone(slice.stream()));
        // cudarc makes that stream wait for the other streams that it knows to use the slice.
        let (address, _touched) = slice.device_ptr_mut(&order);
        ours.wait(&theirs.record()?)?;
        drop(_touched);
        // SAFETY: the slice is the only owner of the memory and is kept; the queue waits for the work on it so far.
        unsafe { Buffer::from_raw_on(queue, address, len, T::DTYPE, slice) }
    }

    /// Lends the buffer as cudarc's memory, for libraries on cudarc that work on `stream`. Their work comes after `queue`'s work
    /// so far, and `queue`'s work after the loan comes after theirs.
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
        // cudarc panics on a stored error when it makes events; binding the context returns the error first.
        stream.context().bind_to_thread().map_err(cudarc_said)?;
        // SAFETY: `self.len()` initialised elements, borrowed for as long as the loan lasts, which never frees them.
        let slice = unsafe { stream.upgrade_device_ptr(self.as_slice().address() as u64, self.len()) };
        Ok(Lent { slice: ManuallyDrop::new(slice), ours, theirs, _buffer: PhantomData })
    }
}

impl Slice<'_> {
    /// Views another library's memory to read: `len` elements from `address` on, on the device of `queue`. No drop waits for the device,
    /// unlike [`Buffer::from_raw_on`], whose errors this has.
    ///
    /// # Safety
    /// Until all work that gets the slice is done:
    /// - The elements are initialised, and their memory lives.
    /// - No other work writes them; work that has written them comes before the work that gets the slice.
    pub unsafe fn from_raw_on(
        queue: &Queue,
        address: u64,
        len: usize,
        dtype: DType,
    ) -> Result<Self, crate::Error> {
        let (base, bytes) = checked(queue, address, len, dtype)?;
        // SAFETY: the caller's promise; the address was checked.
        Ok(unsafe { Slice::from_parts(base, bytes, dtype, queue.place()) })
    }
}

impl SliceMut<'_> {
    /// Views another library's memory to write, as [`Slice::from_raw_on`] does to read.
    ///
    /// # Safety
    /// As for [`Slice::from_raw_on`], and no other work reads the elements until all work that gets the slice is done. Elements that are
    /// only overwritten need not be initialised.
    pub unsafe fn from_raw_on(
        queue: &Queue,
        address: u64,
        len: usize,
        dtype: DType,
    ) -> Result<Self, crate::Error> {
        let (base, bytes) = checked(queue, address, len, dtype)?;
        // SAFETY: the caller's promise; the address was checked.
        Ok(unsafe { SliceMut::from_parts(base, bytes, dtype, queue.place()) })
    }
}

/// A [`Buffer`] viewed as cudarc's memory: a [`CudaSlice`] to read, [`view_mut`](Self::view_mut) to write. Dropping it frees
/// nothing.
#[derive(Debug)]
pub struct Lent<'a, T> {
    /// Leaked on drop. Handed out shared only: a caller with `&mut` could swap the slice, and cudarc would free it.
    slice: ManuallyDrop<CudaSlice<T>>,
    ours: Stream,
    theirs: Stream,
    _buffer: PhantomData<&'a mut Buffer>,
}

impl<T> Lent<'_, T> {
    /// Returns a mutable view of the elements.
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
        // SAFETY: taken once, here. `leak` makes its stream wait for the other streams that have used the slice.
        unsafe { ManuallyDrop::take(&mut self.slice) }.leak();
        self.ours.device().late(|| self.ours.wait(&self.theirs.record()?));
    }
}

fn stream(queue: &Queue) -> Result<&Stream, crate::Error> {
    let wrong = crate::Error::Place { given: queue.place(), expected: Place::Cuda(0) };
    queue.stream().ok_or(wrong)
}

/// Returns the checked address of `len` elements on the queue's device, and their bytes.
fn checked(
    queue: &Queue,
    address: u64,
    len: usize,
    dtype: DType,
) -> Result<(NonNull<u8>, usize), crate::Error> {
    let stream = stream(queue)?;
    let bytes = crate::buffer::bytes(len, dtype)?;
    if bytes == 0 {
        return Ok((NonNull::<u64>::dangling().cast(), 0));
    }
    check(stream, address, bytes, dtype)?;
    let base = NonNull::new(std::ptr::without_provenance_mut(address as usize));
    Ok((base.ok_or(Error::Null)?, bytes))
}

/// Checks that `address` is aligned, and that its first and last byte are memory of the stream's device.
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

/// Asks the driver which memory is at an address. A context must be current.
fn at(address: u64) -> Result<Found, Error> {
    use sys::CUpointer_attribute::{
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as DEVICE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE as KIND,
    };
    const HOST: u32 = sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32;
    let (mut kind, mut ordinal) = (0u32, 0i32);
    // SAFETY: any address may be queried; the place has the attribute's type and outlives the call, as below.
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

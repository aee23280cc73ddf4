//! Queues that order work on a device, and the threads that share it on the CPU.

mod crew;
#[cfg(test)]
#[cfg(not(miri))]
mod model;
mod parts;
mod primitives;
#[cfg(test)]
mod tests;
mod threads;

pub use crew::Helper;
pub use parts::SplitParts;
pub use threads::Threads;

#[cfg(feature = "cuda")]
use crate::cuda::Stream;
use crate::{Error, Place, Slice, SliceMut};

/// Order of work on one device.
///
/// On the CPU the work is done when the call returns, so the queue holds only the threads that share it. Every signature takes a queue,
/// so that the same code orders work on a GPU's stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queue(Order);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Order {
    Cpu(Threads),
    #[cfg(feature = "cuda")]
    Cuda(Stream),
}

impl Default for Queue {
    fn default() -> Self {
        Self::cpu()
    }
}

impl Queue {
    /// Returns the CPU's queue: work is done when the call that does it returns, by the threads that the process shares.
    pub const fn cpu() -> Self {
        Queue(Order::Cpu(Threads::shared()))
    }

    /// Returns the CPU's queue with these threads.
    pub fn cpu_on(threads: &Threads) -> Self {
        Queue(Order::Cpu(threads.clone()))
    }

    /// Returns the threads that share work on CPU memory. On a GPU's queue, which may leave such work to the host, the process's.
    pub fn threads(&self) -> &Threads {
        match &self.0 {
            Order::Cpu(threads) => threads,
            #[cfg(feature = "cuda")]
            Order::Cuda(_) => {
                static SHARED: Threads = Threads::shared();
                &SHARED
            }
        }
    }

    /// Returns the queue of a stream: work runs asynchronously to the call that enqueues it.
    #[cfg(feature = "cuda")]
    pub fn cuda(stream: Stream) -> Self {
        Queue(Order::Cuda(stream))
    }

    /// Returns the stream, or `None` on the CPU.
    #[cfg(feature = "cuda")]
    pub fn stream(&self) -> Option<&Stream> {
        match &self.0 {
            Order::Cpu(_) => None,
            Order::Cuda(stream) => Some(stream),
        }
    }

    /// Returns the place where the work runs.
    pub fn place(&self) -> Place {
        match &self.0 {
            Order::Cpu(_) => Place::Cpu,
            #[cfg(feature = "cuda")]
            Order::Cuda(stream) => Place::Cuda(stream.device().ordinal()),
        }
    }

    /// Waits until all work so far is done.
    pub fn synchronize(&self) -> Result<(), Error> {
        match &self.0 {
            Order::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Order::Cuda(stream) => Ok(stream.synchronize()?),
        }
    }

    /// Fills memory at this queue's place with `values` from the CPU, of the same type and length. The caller may change `values`
    /// as soon as the call returns.
    pub fn upload(&self, values: Slice<'_>, mut into: SliceMut<'_>) -> Result<(), Error> {
        into.place().check(self.place())?;
        values.place().check(Place::Cpu)?;
        match &self.0 {
            Order::Cpu(_) => into.copy_from(values),
            #[cfg(feature = "cuda")]
            Order::Cuda(stream) => {
                same_kind(values, into.as_slice())?;
                Ok(stream.upload(values.bytes()?, into)?)
            }
        }
    }

    /// Copies memory at this queue's place into CPU memory of the same type and length. Returns when all work so far and the copy
    /// are done.
    pub fn download(&self, from: Slice<'_>, mut into: SliceMut<'_>) -> Result<(), Error> {
        from.place().check(self.place())?;
        into.place().check(Place::Cpu)?;
        match &self.0 {
            Order::Cpu(_) => into.copy_from(from),
            #[cfg(feature = "cuda")]
            Order::Cuda(stream) => {
                same_kind(from, into.as_slice())?;
                Ok(stream.download(from, into.bytes_mut()?)?)
            }
        }
    }

    /// Copies between two ranges at this queue's place, of the same type and length.
    pub fn copy(&self, from: Slice<'_>, mut into: SliceMut<'_>) -> Result<(), Error> {
        from.place().check(self.place())?;
        into.place().check(self.place())?;
        match &self.0 {
            Order::Cpu(_) => into.copy_from(from),
            #[cfg(feature = "cuda")]
            Order::Cuda(stream) => {
                same_kind(from, into.as_slice())?;
                Ok(stream.copy(from, into)?)
            }
        }
    }

    /// Sets every element of memory at this queue's place to zero.
    pub fn zero(&self, mut memory: SliceMut<'_>) -> Result<(), Error> {
        memory.place().check(self.place())?;
        match &self.0 {
            Order::Cpu(_) => memory.zero(),
            #[cfg(feature = "cuda")]
            Order::Cuda(stream) => Ok(stream.zero(memory)?),
        }
    }
}

#[cfg(feature = "cuda")]
fn same_kind(from: Slice<'_>, into: Slice<'_>) -> Result<(), Error> {
    if from.dtype() != into.dtype() {
        return Err(Error::WrongDType { asked: into.dtype(), holds: from.dtype() });
    }
    if from.len() != into.len() {
        return Err(Error::WrongLen { given: from.len(), expected: into.len() });
    }
    Ok(())
}

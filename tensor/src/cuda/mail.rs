//! A few bytes to a device and back, again and again, without waiting.

use super::{Device, Error, Event, Pinned, Stream};
use crate::{Category, Meter, Slice, SliceMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Page-locked memory for messages of one length, as many as are under way at once.
#[derive(Clone, Debug)]
pub struct Mail(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device: Device,
    len: usize,
    meter: Meter,
    /// Memory that no letter holds; a stream may still copy from it.
    spare: Mutex<Vec<Pinned>>,
}

/// A message on its way to the host.
#[derive(Debug)]
pub struct Letter {
    mail: Mail,
    /// Gone once it was read.
    memory: Option<Pinned>,
    sent: Event,
}

impl Mail {
    /// For messages of `len` bytes; counted as staging.
    pub fn new(device: &Device, len: usize, meter: &Meter) -> Self {
        Mail(Arc::new(Inner { device: device.clone(), len, meter: meter.clone(), spare: Mutex::default() }))
    }

    /// Writes `message` into memory of the device, after the stream's work so far. The host goes on.
    pub fn send(&self, stream: &Stream, message: &[u8], into: SliceMut<'_>) -> Result<(), Error> {
        let memory = self.idle()?;
        let sent = memory.write(0, message).and_then(|()| stream.copy_in(&memory, 0, into));
        self.put_back(memory);
        sent
    }

    /// Sends what memory of the device holds after the stream's work so far. The host goes on.
    pub fn fetch(&self, stream: &Stream, from: Slice<'_>) -> Result<Letter, Error> {
        let memory = self.idle()?;
        stream.copy_out(from, &memory, 0)?;
        Ok(Letter { mail: self.clone(), memory: Some(memory), sent: stream.record()? })
    }

    /// Memory that no stream uses: some that was used before, or more.
    fn idle(&self) -> Result<Pinned, Error> {
        let Inner { device, len, meter, .. } = &*self.0;
        let mut spare = self.lock();
        for i in 0..spare.len() {
            if spare[i].is_idle()? {
                return Ok(spare.swap_remove(i));
            }
        }
        drop(spare);
        Pinned::zeroed(device, *len, meter, Category::Staging)
    }

    fn put_back(&self, memory: Pinned) {
        self.lock().push(memory);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Pinned>> {
        self.0.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Letter {
    /// Whether it has arrived, so that [`read`](Self::read) does not wait.
    pub fn has_arrived(&self) -> Result<bool, Error> {
        self.sent.is_done()
    }

    /// Waits for it, and copies it.
    pub fn read(&self, into: &mut [u8]) -> Result<(), Error> {
        self.sent.synchronize()?;
        self.memory.as_ref().map_or(Ok(()), |memory| memory.read(0, into))
    }
}

impl Drop for Letter {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.mail.put_back(memory);
        }
    }
}

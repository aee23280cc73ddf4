//! Small messages to a device and back that neither side waits for.

use super::{Device, Error, Event, Pinned, Stream};
use crate::{Category, Meter, Slice, SliceMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Pool of page-locked memory for messages of one length; it grows to the number of messages in flight.
#[derive(Clone, Debug)]
pub struct Mail(Arc<MailInner>);

#[derive(Debug)]
struct MailInner {
    device: Device,
    len: usize,
    meter: Meter,
    /// Memory that no letter holds; a stream may still copy from it or to it.
    spare: Mutex<Vec<Pinned>>,
}

/// Message in flight to the host.
#[derive(Debug)]
pub struct Letter {
    mail: Mail,
    /// `None` only during the drop.
    memory: Option<Pinned>,
    sent: Event,
}

impl Mail {
    /// Creates a pool for messages of `len` bytes, counted as staging.
    pub fn new(device: &Device, len: usize, meter: &Meter) -> Self {
        Mail(Arc::new(MailInner {
            device: device.clone(),
            len,
            meter: meter.clone(),
            spare: Mutex::default(),
        }))
    }

    /// Writes `message` into device memory, after the stream's work so far. Does not wait.
    pub fn send(&self, stream: &Stream, message: &[u8], into: SliceMut<'_>) -> Result<(), Error> {
        let memory = self.idle()?;
        let sent = memory.write(0, message).and_then(|()| stream.copy_in(&memory, 0, into));
        self.put_back(memory);
        sent
    }

    /// Copies device memory to the host, after the stream's work so far. Does not wait.
    pub fn fetch(&self, stream: &Stream, from: Slice<'_>) -> Result<Letter, Error> {
        let memory = self.idle()?;
        stream.copy_out(from, &memory, 0)?;
        Ok(Letter { mail: self.clone(), memory: Some(memory), sent: stream.record()? })
    }

    /// Returns memory that no stream uses: an idle one of the pool, or a new one.
    fn idle(&self) -> Result<Pinned, Error> {
        let MailInner { device, len, meter, .. } = &*self.0;
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

    /// Returns the spare memory, also after a panic (decision 119): each change is one call of `Vec`.
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Pinned>> {
        self.0.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Letter {
    /// Returns true once the message has arrived, so that [`read`](Self::read) does not wait.
    pub fn has_arrived(&self) -> Result<bool, Error> {
        self.sent.is_done()
    }

    /// Waits for the message and copies it into `into`.
    pub fn read(&self, into: &mut [u8]) -> Result<(), Error> {
        if !self.has_arrived()? {
            self.sent.synchronize()?;
        }
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

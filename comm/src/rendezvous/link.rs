//! Frames over one socket: receive with a deadline, send with a timeout.

use super::Why;
use super::frame::{self, FrameError, Frames, Seals};
use super::message::Message;
use super::proof::Key;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait, for callers that set no end.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Returns the time `duration` from now; very long durations are capped.
pub(super) fn after(duration: Duration) -> Instant {
    Instant::now() + duration.min(FOREVER)
}

/// Reading half.
#[derive(Debug)]
pub(super) struct Receiver {
    stream: Arc<TcpStream>,
    frames: Frames,
}

/// Writing half.
#[derive(Debug)]
pub(super) struct Sender {
    stream: Arc<TcpStream>,
    seals: Option<Seals>,
    patience: Duration,
}

/// Returns both halves of `stream`; a write fails if it takes longer than `patience`.
pub(super) fn ends(stream: &Arc<TcpStream>, patience: Duration) -> Result<(Receiver, Sender), Why> {
    stream.set_nonblocking(false).map_err(|error| why(&error, patience))?;
    stream.set_nodelay(true).map_err(|error| why(&error, patience))?;
    let sender = Sender { stream: Arc::clone(stream), seals: None, patience };
    sender.limit()?;
    Ok((Receiver { stream: Arc::clone(stream), frames: Frames::default() }, sender))
}

/// Shuts a connection down, for readers and writers on both sides.
pub(super) fn cut(stream: &TcpStream) {
    // An error here means that the other side has closed already.
    let _ = stream.shutdown(Shutdown::Both);
}

impl Receiver {
    pub(super) fn expect_seals(&mut self, key: Key) {
        self.frames.expect_seals(Seals::new(key));
    }

    /// Returns the next message and its bytes, if it arrives completely before `until`; a message that trickles in counts as
    /// silence.
    pub(super) fn message(&mut self, until: Instant) -> Result<(Message, Vec<u8>), Why> {
        let payload = self.payload(until)?;
        let message = Message::decode(&payload).ok_or(Why::NotUnderstood)?;
        Ok((message, payload))
    }

    /// Returns the next frame's bytes, in the same way; the caller may keep waiting after [`Why::Silent`].
    pub(super) fn payload(&mut self, until: Instant) -> Result<Vec<u8>, Why> {
        let begin = Instant::now();
        let mut chunk = [0; 4096];
        loop {
            let payload = self.frames.next().map_err(|error| match error {
                FrameError::TooLong { len, max } => Why::TooLong { len, max },
                FrameError::Forged => Why::Forged,
            })?;
            if let Some(payload) = payload {
                return Ok(payload);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Why::Silent { after: begin.elapsed() });
            }
            match self.read(&mut chunk, left) {
                Ok(0) => return Err(Why::Closed),
                Ok(n) => self.frames.feed(&chunk[..n]),
                Err(error) if is_timeout(error.kind()) => {}
                Err(error) => return Err(why(&error, begin.elapsed())),
            }
        }
    }

    fn read(&mut self, chunk: &mut [u8], at_most: Duration) -> std::io::Result<usize> {
        // A timeout of zero would mean no timeout.
        let timeout = at_most.clamp(Duration::from_millis(1), Duration::from_secs(3600));
        self.stream.set_read_timeout(Some(timeout))?;
        (&*self.stream).read(chunk)
    }
}

impl Sender {
    pub(super) fn seal(&mut self, key: Key) {
        self.seals = Some(Seals::new(key));
    }

    /// Sets the timeout of later writes.
    pub(super) fn set_patience(&mut self, patience: Duration) -> Result<(), Why> {
        self.patience = patience;
        self.limit()
    }

    fn limit(&self) -> Result<(), Why> {
        let timeout = self.patience.clamp(Duration::from_millis(1), Duration::from_secs(3600));
        self.stream.set_write_timeout(Some(timeout)).map_err(|error| why(&error, self.patience))
    }

    pub(super) fn message(&mut self, message: &Message) -> Result<(), Why> {
        self.payloads(&[message.encode().into()])
    }

    /// Sends all payloads in as few writes as possible. After an error the connection is unusable.
    pub(super) fn payloads(&mut self, payloads: &[Arc<[u8]>]) -> Result<(), Why> {
        for some in payloads.chunks(64) {
            let mut bytes = Vec::new();
            some.iter().for_each(|payload| frame::write(payload, self.seals.as_mut(), &mut bytes));
            (&*self.stream).write_all(&bytes).map_err(|error| why(&error, self.patience))?;
        }
        Ok(())
    }

    pub(super) fn cut(&self) {
        cut(&self.stream);
    }

    /// Closes the writing half; bytes written before still arrive.
    pub(super) fn finish(&self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

fn is_timeout(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

fn why(error: &std::io::Error, after: Duration) -> Why {
    use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, UnexpectedEof};
    match error.kind() {
        ConnectionReset | ConnectionAborted | BrokenPipe | NotConnected | UnexpectedEof => Why::Closed,
        kind if is_timeout(kind) => Why::Silent { after },
        _ => Why::System { message: error.to_string() },
    }
}

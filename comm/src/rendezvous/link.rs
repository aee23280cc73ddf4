//! Messages over one socket: receive with a deadline, send with a timeout.

use super::Why;
use super::message::Message;
use super::noise::{Cipher, FrameError, Frames, Session, write};
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
    cipher: Option<Cipher>,
    patience: Duration,
}

/// Returns both halves of `stream`; a write fails if it takes longer than `patience`.
pub(super) fn ends(stream: &Arc<TcpStream>, patience: Duration) -> Result<(Receiver, Sender), Why> {
    stream.set_nonblocking(false).map_err(|error| why(&error, patience))?;
    stream.set_nodelay(true).map_err(|error| why(&error, patience))?;
    let sender = Sender { stream: Arc::clone(stream), cipher: None, patience };
    sender.limit()?;
    Ok((Receiver { stream: Arc::clone(stream), frames: Frames::default() }, sender))
}

/// Returns both halves of a connection that a listener has admitted, with the bytes that have arrived on it.
pub(super) fn admitted_ends(
    stream: &Arc<TcpStream>,
    frames: Frames,
    cipher: Cipher,
    patience: Duration,
) -> Result<(Receiver, Sender), Why> {
    let (receiver, sender) = ends(stream, patience)?;
    Ok((Receiver { frames, ..receiver }, Sender { cipher: Some(cipher), ..sender }))
}

/// Encrypts what follows on both halves; the caller has checked that the listener knows the token.
pub(super) fn encrypt(receiver: &mut Receiver, sender: &mut Sender, session: Session) {
    receiver.frames.expect_records(session.incoming);
    receiver.frames.trust();
    sender.cipher = Some(session.outgoing);
}

/// Returns the socket, the bytes that have arrived, and the ciphers of both directions: incoming, outgoing.
pub(super) fn into_raw(
    receiver: Receiver,
    sender: Sender,
) -> Option<(Arc<TcpStream>, Vec<u8>, Cipher, Cipher)> {
    let (received, incoming) = receiver.frames.into_raw();
    Some((sender.stream, received, incoming?, sender.cipher?))
}

/// Shuts a connection down, for readers and writers on both sides.
pub(super) fn cut(stream: &TcpStream) {
    // An error here means that the other side has closed already.
    let _ = stream.shutdown(Shutdown::Both);
}

impl Receiver {
    /// Returns the next batch of messages, if it arrives completely before `until`; a batch that trickles in counts as silence.
    pub(super) fn messages(&mut self, until: Instant) -> Result<Vec<Message>, Why> {
        let payload = self.payload(until)?;
        Message::decode_batch(&payload).ok_or(Why::NotUnderstood)
    }

    /// Returns the next payload, in the same way; the caller may keep waiting after [`Why::Silent`].
    pub(super) fn payload(&mut self, until: Instant) -> Result<Vec<u8>, Why> {
        let begin = Instant::now();
        let mut chunk = [0; 16 * 1024];
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
    fn limit(&self) -> Result<(), Why> {
        let timeout = self.patience.clamp(Duration::from_millis(1), Duration::from_secs(3600));
        self.stream.set_write_timeout(Some(timeout)).map_err(|error| why(&error, self.patience))
    }

    /// Sends a batch of one message.
    pub(super) fn message(&mut self, message: &Message) -> Result<(), Why> {
        let mut batch = Vec::new();
        Message::batch(&message.encode(), &mut batch);
        self.payload(&batch)
    }

    /// Sends a payload. After an error the connection is unusable.
    pub(super) fn payload(&mut self, payload: &[u8]) -> Result<(), Why> {
        let mut bytes = Vec::new();
        write(payload, self.cipher.as_mut(), &mut bytes);
        (&*self.stream).write_all(&bytes).map_err(|error| why(&error, self.patience))
    }

    pub(super) fn socket(&self) -> &TcpStream {
        &self.stream
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

/// Returns the reason for a connection's end; `after` is the time that a call has waited.
pub(super) fn why(error: &std::io::Error, after: Duration) -> Why {
    use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, UnexpectedEof};
    match error.kind() {
        ConnectionReset | ConnectionAborted | BrokenPipe | NotConnected | UnexpectedEof => Why::Closed,
        kind if is_timeout(kind) => Why::Silent { after },
        _ => Why::System { message: error.to_string() },
    }
}

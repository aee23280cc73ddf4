//! Sending half of a stream: cuts bytes into records and hands them to the socket.

use super::record::{HEADER, RECORD, RecordHeader, checksum};
use crate::p2p::transport::LostWhy;
use crate::rendezvous::Cipher;
use std::io::{ErrorKind, IoSlice, Write};

/// Writes up to this length are gathered, so that a short one shares a system call with the next.
const SHORT: usize = 1 << 10;
/// Longest gathered records.
const GATHERED: usize = 4 << 10;

/// Records of one direction, as they are sent.
///
/// A record is promised by its header, so one that the system takes in part is kept here to its end. Its last byte is then not yet
/// reported as written: the caller returns with it, and by that the rest is sent.
#[derive(Debug)]
pub(super) struct Outbox {
    cipher: Option<Cipher>,
    sequence: u32,
    /// Records to be sent, from `sent` on.
    kept: Vec<u8>,
    sent: usize,
    /// True if the last byte of the kept record was not reported as written.
    owes: bool,
}

/// Extent to which the system has taken a record.
enum Taken {
    All,
    Part,
    Nothing,
}

impl Outbox {
    pub(super) fn new(cipher: Option<Cipher>) -> Self {
        let kept = Vec::with_capacity(GATHERED + HEADER + RECORD);
        Outbox { cipher, sequence: 0, kept, sent: 0, owes: false }
    }

    /// Writes as many bytes as fit now; returns their number. A short write is sent with the next long one, or by
    /// [`flush`](Self::flush).
    pub(super) fn write(&mut self, socket: &mut impl Write, bytes: &[u8]) -> Result<usize, LostWhy> {
        let gathers = self.sent == 0 && !self.owes && self.kept.len() + HEADER + SHORT <= GATHERED;
        if bytes.len() <= SHORT && gathers {
            self.append(bytes);
            return Ok(bytes.len());
        }
        if !gathers && !self.flush(socket)? {
            return Ok(0);
        }
        let mut done = usize::from(std::mem::take(&mut self.owes));
        while done < bytes.len() {
            let part = &bytes[done..];
            let part = &part[..part.len().min(self.longest())];
            match self.send(socket, part)? {
                Taken::All => done += part.len(),
                Taken::Part => {
                    self.owes = true;
                    return Ok(done + part.len() - 1);
                }
                Taken::Nothing => break,
            }
        }
        Ok(done)
    }

    /// Sends what is kept; returns true if nothing is left.
    pub(super) fn flush(&mut self, socket: &mut impl Write) -> Result<bool, LostWhy> {
        while self.sent < self.kept.len() {
            match taken(socket.write(&self.kept[self.sent..]))? {
                Some(len) => self.sent += len,
                None => return Ok(false),
            }
        }
        self.kept.clear();
        self.sent = 0;
        Ok(true)
    }

    /// True if a record is kept.
    pub(super) fn keeps(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Sends the goodbye, an empty record, if the system takes it now.
    pub(super) fn goodbye(&mut self, socket: &mut impl Write) -> Result<bool, LostWhy> {
        if !self.flush(socket)? {
            return Ok(false);
        }
        self.append(&[]);
        self.flush(socket)
    }

    fn longest(&self) -> usize {
        if self.cipher.is_some() { Cipher::MAX } else { RECORD }
    }

    fn send(&mut self, socket: &mut impl Write, payload: &[u8]) -> Result<Taken, LostWhy> {
        if self.cipher.is_some() {
            self.send_sealed(socket, payload)
        } else {
            self.send_plain(socket, payload)
        }
    }

    /// Sends the kept records and one of `payload` behind them.
    fn send_plain(&mut self, socket: &mut impl Write, payload: &[u8]) -> Result<Taken, LostWhy> {
        let header = self.header(payload);
        let parts = [IoSlice::new(&self.kept[self.sent..]), IoSlice::new(&header), IoSlice::new(payload)];
        let Some(sent) = taken(socket.write_vectored(&parts))? else { return Ok(Taken::Nothing) };
        let kept = self.kept.len() - self.sent;
        if sent <= kept && kept > 0 {
            self.sent += sent;
            return Ok(Taken::Nothing);
        }
        self.kept.clear();
        (self.sent, self.sequence) = (0, self.sequence.wrapping_add(1));
        let sent = sent - kept;
        if sent == HEADER + payload.len() {
            return Ok(Taken::All);
        }
        self.kept.extend_from_slice(header.get(sent..).unwrap_or_default());
        self.kept.extend_from_slice(&payload[sent.saturating_sub(HEADER)..]);
        Ok(Taken::Part)
    }

    fn send_sealed(&mut self, socket: &mut impl Write, payload: &[u8]) -> Result<Taken, LostWhy> {
        self.append(payload);
        Ok(if self.flush(socket)? { Taken::All } else { Taken::Part })
    }

    /// Adds the record of `payload` to those that are kept.
    fn append(&mut self, payload: &[u8]) {
        let header = self.header(payload);
        self.kept.extend_from_slice(&header);
        match &mut self.cipher {
            Some(cipher) => cipher.seal(payload, &mut self.kept),
            None => self.kept.extend_from_slice(payload),
        }
        self.sequence = self.sequence.wrapping_add(1);
    }

    /// Header of the next record.
    fn header(&self, payload: &[u8]) -> [u8; HEADER] {
        let sequence = self.sequence;
        let (len, checksum) = match self.cipher {
            Some(_) => (payload.len() + Cipher::TAG, 0),
            None => (payload.len(), checksum(payload, sequence)),
        };
        RecordHeader { len, sequence, checksum }.encode()
    }
}

/// Number of bytes that a call of the system has moved; `None` if it would have to wait.
fn taken(result: std::io::Result<usize>) -> Result<Option<usize>, LostWhy> {
    match result {
        Ok(len) => Ok(Some(len).filter(|len| *len > 0)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(lost("sending", &error)),
    }
}

/// Returns the reason for which a stream has ended, from the error of a call on its socket.
pub(super) fn lost(what: &'static str, error: &std::io::Error) -> LostWhy {
    use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, UnexpectedEof};
    match error.kind() {
        ConnectionReset | ConnectionAborted | BrokenPipe | NotConnected | UnexpectedEof => LostWhy::Closed,
        _ => LostWhy::System { what, message: error.to_string() },
    }
}

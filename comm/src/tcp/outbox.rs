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
/// A record that the system takes in part stays open: the caller's next write begins with the rest of its payload. A plain payload is
/// sent from the caller's memory. A sealed one is kept here, and is reported as written once it has been sent.
#[derive(Debug)]
pub(super) struct Outbox {
    cipher: Option<Cipher>,
    sequence: u32,
    /// Bytes to be sent, from `sent` on: short records, sealed ones, the rest of the open record's header.
    kept: Vec<u8>,
    sent: usize,
    /// Bytes of the open record's payload that have not been reported as written.
    open: usize,
}

impl Outbox {
    pub(super) fn new(cipher: Option<Cipher>) -> Self {
        let sealed = if cipher.is_some() { HEADER + Cipher::MAX + Cipher::TAG } else { HEADER };
        Outbox { cipher, sequence: 0, kept: Vec::with_capacity(GATHERED + sealed), sent: 0, open: 0 }
    }

    /// Writes as many bytes as fit now; returns their number. A short write is sent with the next long one, or by
    /// [`flush`](Self::flush).
    pub(super) fn write(&mut self, socket: &mut impl Write, bytes: &[u8]) -> Result<usize, LostWhy> {
        let gathers = self.sent == 0 && self.open == 0 && self.kept.len() + HEADER + SHORT <= GATHERED;
        if bytes.len() <= SHORT && gathers {
            self.append(bytes);
            return Ok(bytes.len());
        }
        if !gathers && !self.flush(socket)? {
            return Ok(0);
        }
        let mut done = self.go_on(socket, bytes)?;
        while self.open == 0 && done < bytes.len() {
            let part = &bytes[done..];
            let part = &part[..part.len().min(self.longest())];
            match self.begin(socket, part)? {
                Some(len) => done += len,
                None => break,
            }
        }
        Ok(done)
    }

    /// Sends the rest of the open record, with which `bytes` begin, once its header has been sent. Returns the bytes that are written.
    fn go_on(&mut self, socket: &mut impl Write, bytes: &[u8]) -> Result<usize, LostWhy> {
        let rest = &bytes[..self.open.min(bytes.len())];
        let len = match (rest, &self.cipher) {
            ([], _) => 0,
            (_, Some(_)) => rest.len(),
            (_, None) => taken(socket.write(rest))?.unwrap_or(0),
        };
        self.open -= len;
        Ok(len)
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

    /// Sends the goodbye, an empty record, if the system takes it now and no record is open.
    pub(super) fn goodbye(&mut self, socket: &mut impl Write) -> Result<bool, LostWhy> {
        if !self.flush(socket)? || self.open > 0 && self.cipher.is_none() {
            return Ok(false);
        }
        self.append(&[]);
        self.flush(socket)
    }

    fn longest(&self) -> usize {
        if self.cipher.is_some() { Cipher::MAX } else { RECORD }
    }

    /// Begins the record of `payload`, and sends what the system takes. Returns the bytes that are written; `None` if the record has
    /// not begun.
    fn begin(&mut self, socket: &mut impl Write, payload: &[u8]) -> Result<Option<usize>, LostWhy> {
        if self.cipher.is_none() {
            return self.begin_plain(socket, payload);
        }
        self.append(payload);
        self.open = if self.flush(socket)? { 0 } else { payload.len() };
        Ok(Some(payload.len() - self.open))
    }

    /// Sends the kept records and one of `payload` behind them.
    fn begin_plain(&mut self, socket: &mut impl Write, payload: &[u8]) -> Result<Option<usize>, LostWhy> {
        let header = self.header(payload);
        let parts = [IoSlice::new(&self.kept[self.sent..]), IoSlice::new(&header), IoSlice::new(payload)];
        let Some(sent) = taken(socket.write_vectored(&parts))? else { return Ok(None) };
        let kept = self.kept.len() - self.sent;
        if sent <= kept && kept > 0 {
            self.sent += sent;
            return Ok(None);
        }
        self.kept.clear();
        (self.sent, self.sequence) = (0, self.sequence.wrapping_add(1));
        let sent = sent - kept;
        self.kept.extend_from_slice(header.get(sent..).unwrap_or_default());
        let len = sent.saturating_sub(HEADER);
        self.open = payload.len() - len;
        Ok(Some(len))
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

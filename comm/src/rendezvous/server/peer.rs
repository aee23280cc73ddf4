//! Connection of an admitted rank: messages in, and batches of the ledger out.

use super::super::Why;
use super::super::door::Admitted;
use super::super::link::why;
use super::super::message::Message;
use super::super::noise::{Cipher, FrameError, Frames, write};
use super::ledger::Ledger;
use mio::net::TcpStream;
use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of messages that are encrypted together, and bytes that wait for a connection before more are encrypted.
const BATCH: usize = 60 * 1024;
const QUEUE: usize = 256 * 1024;

/// A rank, or a process with a refused claim.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) rank: usize,
    stream: TcpStream,
    frames: Frames,
    cipher: Cipher,
    /// Encrypted bytes that the system has not taken.
    queue: Vec<u8>,
    /// Number of the next message of the ledger.
    place: usize,
    /// Messages to this rank alone, sent after the ledger's.
    private: Vec<Arc<[u8]>>,
    received_at: Instant,
    sent_at: Instant,
    /// True if the writing half closes once the queue is empty.
    finishing: bool,
    refused: bool,
}

/// Batches of the ledger by their first messages: most ranks are at the same place.
#[derive(Debug, Default)]
pub(super) struct Batches(HashMap<usize, (Arc<[u8]>, usize)>);

impl Batches {
    /// Returns the batch from number `from`, and the number after it.
    fn get(&mut self, ledger: &Ledger, from: usize) -> (Arc<[u8]>, usize) {
        let make = || {
            let (mut batch, mut next) = (Vec::new(), from);
            for message in ledger.since(from) {
                if next > from && batch.len() + message.len() > BATCH {
                    break;
                }
                Message::batch(message, &mut batch);
                next += 1;
            }
            (batch.into(), next)
        };
        self.0.entry(from).or_insert_with(make).clone()
    }
}

impl Peer {
    pub(super) fn new(admitted: Admitted, rank: usize) -> Self {
        let Admitted { stream, frames, outgoing, .. } = admitted;
        let now = Instant::now();
        Peer {
            rank,
            stream,
            frames,
            cipher: outgoing,
            queue: Vec::new(),
            place: 0,
            private: Vec::new(),
            received_at: now,
            sent_at: now,
            finishing: false,
            refused: false,
        }
    }

    /// Sends a refusal, and nothing after it.
    pub(super) fn refuse(&mut self, refusal: &Message) {
        self.push(&refusal.encode());
        self.refused = true;
        self.finishing = true;
    }

    pub(super) fn is_refused(&self) -> bool {
        self.refused
    }

    /// Number of the next message of the ledger.
    pub(super) fn place(&self) -> usize {
        self.place
    }

    /// Adds a message, before those of the ledger that have not been taken.
    pub(super) fn push(&mut self, encoded: &[u8]) {
        let mut batch = Vec::new();
        Message::batch(encoded, &mut batch);
        write(&batch, Some(&mut self.cipher), &mut self.queue);
    }

    /// Adds messages to this rank alone.
    pub(super) fn defer(&mut self, messages: impl Iterator<Item = Arc<[u8]>>) {
        if !self.refused {
            self.private.extend(messages);
        }
    }

    /// Closes the writing half after the messages that wait.
    pub(super) fn finish(&mut self) {
        self.finishing = true;
        self.close_if_finished();
    }

    /// Ends the connection in both directions.
    pub(super) fn cut(&self) {
        // An error here means that the other side has closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Reads until nothing is left; returns the messages, and the reason for the connection's end if it has ended.
    pub(super) fn read(&mut self) -> (Vec<Message>, Result<(), Why>) {
        let mut messages = Vec::new();
        let mut chunk = [0; 16 * 1024];
        let end = loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => break Err(Why::Closed),
                Ok(len) => {
                    self.frames.feed(&chunk[..len]);
                    if let Err(why) = self.decode(&mut messages) {
                        break Err(why);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break self.decode(&mut messages),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Err(why(&error, Duration::ZERO)),
            }
        };
        if !messages.is_empty() {
            self.received_at = Instant::now();
        }
        (messages, end)
    }

    /// Decodes the frames that have arrived.
    fn decode(&mut self, messages: &mut Vec<Message>) -> Result<(), Why> {
        loop {
            match self.frames.next() {
                Ok(None) => return Ok(()),
                Ok(Some(batch)) => {
                    messages.extend(Message::decode_batch(&batch).ok_or(Why::NotUnderstood)?);
                }
                Err(FrameError::TooLong { len, max }) => return Err(Why::TooLong { len, max }),
                Err(FrameError::Forged) => return Err(Why::Forged),
            }
        }
    }

    /// Encrypts and sends the messages of the ledger and those to this rank, as many as the connection takes.
    pub(super) fn send(&mut self, ledger: &Ledger, batches: &mut Batches) -> Result<(), Why> {
        loop {
            while !self.refused && self.queue.len() < QUEUE && self.place < ledger.end() {
                let (batch, next) = batches.get(ledger, self.place);
                write(&batch, Some(&mut self.cipher), &mut self.queue);
                self.place = next;
            }
            if self.place == ledger.end() {
                let private = std::mem::take(&mut self.private);
                private.iter().for_each(|message| self.push(message));
            }
            if self.queue.is_empty() || !self.flush()? {
                return Ok(());
            }
        }
    }

    /// Writes the queue; returns false if the system took only a part.
    fn flush(&mut self) -> Result<bool, Why> {
        let mut written = 0;
        while written < self.queue.len() {
            match self.stream.write(&self.queue[written..]) {
                Ok(len) => written += len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The peer may have said why before it closed: its messages are read first.
                Err(_) if self.refused => break,
                Err(error) => return Err(why(&error, Duration::ZERO)),
            }
        }
        self.queue.drain(..written);
        if written > 0 {
            self.sent_at = Instant::now();
        }
        self.close_if_finished();
        Ok(self.queue.is_empty())
    }

    fn close_if_finished(&self) {
        if self.finishing && self.queue.is_empty() {
            // An error here means that the other side has closed already.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }

    /// Returns true if nothing was received, or nothing of a full queue was taken, for `silence`.
    pub(super) fn is_late(&self, now: Instant, silence: Duration) -> bool {
        let since = |time: Instant| now.saturating_duration_since(time);
        since(self.received_at) >= silence || !self.queue.is_empty() && since(self.sent_at) >= silence
    }

    pub(super) fn is_beat_due(&self, now: Instant, beat: Duration) -> bool {
        !self.finishing && self.queue.is_empty() && now.saturating_duration_since(self.sent_at) >= beat
    }
}

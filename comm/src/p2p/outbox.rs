//! Bytes on their way to one rank, or to the audience: frames, and parts of a buffer that are written from where they lie.

use super::codec::{FrameKind, PREFIX, prefix};
use super::transport::{Lost, Target, Transport};
use std::ptr::NonNull;

/// Longest part of a buffer in one frame. A failure waits for the end of a frame. A multiple of every element's size.
const SPAN: usize = 256 << 10;
/// Initial capacity for frames, with a small operation's bytes.
const ROOM: usize = 512;

/// Outgoing side of one stream.
#[derive(Debug)]
pub(super) struct Outbox {
    target: Target,
    frames: Vec<u8>,
    written: usize,
    /// Frames behind the open span.
    later: Vec<u8>,
    /// The rest of the frame from a buffer.
    span: (NonNull<u8>, usize),
    /// True if nothing more can be written.
    ended: bool,
}

// SAFETY: the address is dereferenced only by `flush`, which `offer`'s contract covers.
unsafe impl Send for Outbox {}

impl Outbox {
    pub(super) fn new(target: Target) -> Self {
        let (frames, later) = (Vec::with_capacity(ROOM), Vec::new());
        Outbox { target, frames, written: 0, later, span: (NonNull::dangling(), 0), ended: false }
    }

    /// Returns the queue of frames, to append to; what is appended to an ended stream is dropped.
    pub(super) fn frames(&mut self) -> &mut Vec<u8> {
        if self.span.1 > 0 { &mut self.later } else { &mut self.frames }
    }

    /// Returns true if all bytes have been written, or no more can be.
    pub(super) fn is_idle(&self) -> bool {
        self.ended || self.written == self.frames.len() && self.span.1 == 0
    }

    /// Number of offered bytes that have not been written.
    pub(super) fn unwritten(&self) -> usize {
        self.span.1
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Ends the stream: nothing more is written.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.forget();
    }

    /// Opens a frame with the first of `len` bytes from `bytes` on, if the stream is idle, and returns their number.
    ///
    /// # Safety
    /// The bytes are alive and are not written to until the outbox is idle or [`abandon`](Outbox::abandon) was called.
    pub(super) unsafe fn offer(&mut self, kind: FrameKind, bytes: NonNull<u8>, len: usize) -> usize {
        if !self.is_idle() || self.ended || len == 0 {
            return 0;
        }
        let len = len.min(SPAN);
        self.frames.extend_from_slice(&prefix(kind, len));
        debug_assert_eq!(self.frames.len() - self.written, PREFIX);
        self.span = (bytes, len);
        len
    }

    /// Forgets the buffer. A frame that has begun is left incomplete, so the stream ends.
    pub(super) fn abandon(&mut self) {
        if self.span.1 > 0 {
            self.end();
        }
    }

    fn forget(&mut self) {
        self.frames.clear();
        self.later.clear();
        (self.written, self.span) = (0, (NonNull::dangling(), 0));
    }

    /// Writes as much as fits now; returns true if anything was written.
    pub(super) fn flush(&mut self, transport: &mut dyn Transport) -> Result<bool, Lost> {
        if self.ended {
            self.forget();
            return Ok(false);
        }
        let mut moved = false;
        while !self.is_idle() {
            if self.written < self.frames.len() {
                let len = transport.write(self.target, &self.frames[self.written..])?;
                self.written += len;
                moved |= len > 0;
                if len == 0 {
                    return Ok(moved);
                }
                continue;
            }
            let len = self.write_span(transport)?;
            moved |= len > 0;
            if len == 0 {
                return Ok(moved);
            }
            if self.span.1 == 0 {
                self.frames.clear();
                self.written = 0;
                std::mem::swap(&mut self.frames, &mut self.later);
            }
        }
        self.frames.clear();
        self.written = 0;
        Ok(moved)
    }

    fn write_span(&mut self, transport: &mut dyn Transport) -> Result<usize, Lost> {
        let (base, left) = self.span;
        // SAFETY: `offer`'s contract: the bytes are alive and not written to.
        let bytes = unsafe { std::slice::from_raw_parts(base.as_ptr(), left) };
        let len = transport.write(self.target, bytes)?;
        assert!(len <= left, "a transport wrote more than it was given");
        // SAFETY: `len` is at most the length of the span.
        self.span = (unsafe { base.add(len) }, left - len);
        Ok(len)
    }
}

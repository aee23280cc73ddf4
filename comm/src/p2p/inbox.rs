//! Bytes of one stream from one rank, read as frames. A call, or a part of a buffer, stays at the front until an operation takes it.

use super::cause::{Cause, Departure, Progress, Relay, WireCall};
use super::codec::{FrameKind, FrameReader, LONGEST_BODY, PREFIX, read_prefix};
use super::small;
use super::transport::{Lost, LostWhy, Source, Transport};

/// Longest element in bytes.
pub(super) const ELEMENT: usize = 8;

/// Incoming side of one stream.
#[derive(Debug)]
pub(super) struct Inbox {
    pub(super) source: Source,
    /// Prefix or body of the frame that is being read.
    head: Vec<u8>,
    frame: Option<(FrameKind, usize)>,
    /// Call that no operation of this rank has taken.
    pub(super) call: Option<WireCall>,
    /// Bytes that came with the call.
    payload: Vec<u8>,
    payload_read: usize,
    /// FrameKind and remaining bytes of the frame from the rank's buffer.
    span: Option<(FrameKind, usize)>,
    /// Part of an element, if the transport's memory ends within one.
    carry: [u8; ELEMENT],
    carried: usize,
    /// True if only the notes of a failed group are read, and everything else is dropped.
    pub(super) drains: bool,
}

/// Notes that a rank has sent, beside its calls.
#[derive(Debug, Default)]
pub(super) struct Notes {
    pub(super) left: Option<Departure>,
    /// Failure of the group, and the number of the operation in which the rank failed.
    pub(super) failed: Option<(u64, Cause)>,
    pub(super) relays: Vec<Relay>,
    /// Progress in the operation whose call was taken last.
    pub(super) progress: Progress,
}

impl Inbox {
    pub(super) fn new(source: Source) -> Self {
        Inbox {
            source,
            head: Vec::with_capacity(256),
            frame: None,
            call: None,
            payload: Vec::new(),
            payload_read: 0,
            span: None,
            carry: [0; ELEMENT],
            carried: 0,
            drains: false,
        }
    }

    fn peer(&self) -> usize {
        let (Source::Rank(peer) | Source::Common(peer)) = self.source;
        peer
    }

    /// Bytes that came with the call; `None` until all have arrived.
    pub(super) fn payload(&self) -> Option<&[u8]> {
        (self.call.is_some() && self.payload_read == self.payload.len()).then_some(&self.payload)
    }

    /// Takes the call, so that later frames are read.
    pub(super) fn take_call(&mut self) {
        self.call = None;
        self.payload.clear();
        self.payload_read = 0;
    }

    /// Reads frames until one must stay at the front. Returns true if anything was read.
    pub(super) fn advance(&mut self, transport: &mut dyn Transport, notes: &mut Notes) -> Result<bool, Lost> {
        let mut moved = false;
        while !transport.arrived(self.source).is_empty() {
            // A frame may have waited for its turn.
            self.open(notes)?;
            let read = match (self.span, self.frame) {
                _ if self.payload_read < self.payload.len() => self.read_payload(transport)?,
                (Some(_), _) if self.drains => self.drop_span(transport),
                (Some(_), _) => break,
                (None, None) => self.read_head(transport, PREFIX)?,
                (None, Some((kind, _))) if self.waits(kind) => break,
                (None, Some((_, len))) => self.read_head(transport, len)?,
            };
            moved |= read;
            self.open(notes)?;
            if !read {
                break;
            }
        }
        Ok(moved)
    }

    /// Returns true if a frame of `kind` must wait until an operation takes the call before it.
    fn waits(&self, kind: FrameKind) -> bool {
        self.call.is_some()
            && !self.drains
            && matches!(
                kind,
                FrameKind::Call | FrameKind::Contribution | FrameKind::Final | FrameKind::Progress
            )
    }

    fn read_head(&mut self, transport: &mut dyn Transport, len: usize) -> Result<bool, Lost> {
        let start = self.head.len();
        self.head.resize(len, 0);
        let read = transport.read(self.source, &mut self.head[start..])?;
        self.head.truncate(start + read);
        Ok(read > 0)
    }

    fn read_payload(&mut self, transport: &mut dyn Transport) -> Result<bool, Lost> {
        let read = transport.read(self.source, &mut self.payload[self.payload_read..])?;
        self.payload_read += read;
        if self.drains && self.payload_read == self.payload.len() {
            self.take_call();
        }
        Ok(read > 0)
    }

    fn drop_span(&mut self, transport: &mut dyn Transport) -> bool {
        let Some((_, left)) = self.span else { return false };
        let len = transport.arrived(self.source).len().min(left);
        transport.consume(self.source, len);
        self.shorten(len);
        len > 0
    }

    /// Interprets a prefix or a body that is complete.
    fn open(&mut self, notes: &mut Notes) -> Result<(), Lost> {
        if self.frame.is_none() {
            let Ok(bytes) = <[u8; PREFIX]>::try_from(&self.head[..]) else { return Ok(()) };
            self.frame = Some(read_prefix(bytes).ok_or_else(|| self.altered())?);
            self.head.clear();
        }
        let Some((kind, len)) = self.frame else { return Ok(()) };
        if self.waits(kind) {
            return Ok(());
        }
        if matches!(kind, FrameKind::Contribution | FrameKind::Final) {
            self.frame = None;
            self.span = Some((kind, len)).filter(|_| len > 0);
            return Ok(());
        }
        if len > LONGEST_BODY {
            return Err(self.altered());
        }
        if self.head.len() == len {
            self.take_body(kind, notes).ok_or_else(|| self.altered())?;
            self.frame = None;
            self.head.clear();
        }
        Ok(())
    }

    fn take_body(&mut self, kind: FrameKind, notes: &mut Notes) -> Option<()> {
        match kind {
            FrameKind::Call => self.begin_call(WireCall::read(&self.head)?)?,
            FrameKind::Left => notes.left = Some(Departure::read(&self.head)?),
            FrameKind::Failed => {
                let mut reader = FrameReader(&self.head);
                let at = reader.u64()?;
                notes.failed.get_or_insert((at, Cause::read(reader.0)?));
            }
            FrameKind::Relay => notes.relays.push(Relay::read(&self.head)?),
            FrameKind::Progress => notes.progress = Progress::read(&self.head)?,
            FrameKind::Contribution | FrameKind::Final => {}
        }
        Some(())
    }

    fn begin_call(&mut self, call: WireCall) -> Option<()> {
        if call.payload > small::MOST_BYTES {
            return None;
        }
        self.payload.resize(call.payload, 0);
        self.payload_read = 0;
        if !self.drains || call.payload > 0 {
            self.call = Some(call);
        }
        Some(())
    }

    fn altered(&self) -> Lost {
        Lost { peer: self.peer(), why: LostWhy::Altered }
    }

    /// Bytes of the open frame from the rank's buffer, if it is of `kind`, as far as they have arrived.
    pub(super) fn span<'a>(&self, transport: &'a dyn Transport, kind: FrameKind) -> &'a [u8] {
        match self.span {
            Some((open, left)) if open == kind => {
                let arrived = transport.arrived(self.source);
                &arrived[..arrived.len().min(left)]
            }
            _ => &[],
        }
    }

    /// Reads bytes of the open frame, if it is of `kind`, and returns their number.
    pub(super) fn read_span(
        &mut self,
        transport: &mut dyn Transport,
        kind: FrameKind,
        into: &mut [u8],
    ) -> Result<usize, Lost> {
        let Some((open, left)) = self.span else { return Ok(0) };
        if open != kind || into.is_empty() {
            return Ok(0);
        }
        let len = into.len().min(left);
        let read = transport.read(self.source, &mut into[..len])?;
        self.shorten(read);
        Ok(read)
    }

    /// Consumes `len` bytes of the open frame.
    pub(super) fn consume_span(&mut self, transport: &mut dyn Transport, len: usize) {
        transport.consume(self.source, len);
        self.shorten(len);
    }

    fn shorten(&mut self, len: usize) {
        self.span = self.span.map(|(kind, left)| (kind, left - len)).filter(|&(_, left)| left > 0);
    }

    /// Reads the beginning of an element of `size` bytes if the transport's memory ends within it. Returns true if it read any.
    pub(super) fn carry(&mut self, transport: &mut dyn Transport, size: usize) -> Result<bool, Lost> {
        let arrived = self.span(transport, FrameKind::Contribution).len();
        if self.carried == size || arrived == 0 || self.carried == 0 && arrived >= size {
            return Ok(false);
        }
        let mut carry = self.carry;
        let read = self.read_span(transport, FrameKind::Contribution, &mut carry[self.carried..size])?;
        self.carry = carry;
        self.carried += read;
        Ok(read > 0)
    }

    /// The next contributions that are whole elements of `size` bytes and contiguous.
    pub(super) fn contribution<'a>(&'a self, transport: &'a dyn Transport, size: usize) -> &'a [u8] {
        match self.carried {
            0 => self.span(transport, FrameKind::Contribution),
            carried if carried == size => &self.carry[..size],
            _ => &[],
        }
    }

    /// Consumes contributions.
    pub(super) fn consume_contribution(&mut self, transport: &mut dyn Transport, len: usize) {
        if self.carried > 0 {
            self.carried = 0;
        } else {
            self.consume_span(transport, len);
        }
    }

    /// Forgets everything that belongs to operations.
    pub(super) fn drain(&mut self) {
        self.drains = true;
        self.carried = 0;
        if self.payload_read == self.payload.len() {
            self.take_call();
        }
    }
}

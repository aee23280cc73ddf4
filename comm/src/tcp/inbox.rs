//! Receiving half of a stream: gathers records from the socket and checks them before anything of them is delivered.

use super::outbox::lost;
use super::record::{HEADER, RECORD, RecordHeader, checksum};
use crate::p2p::transport::LostWhy;
use crate::rendezvous::Cipher;
use std::io::{ErrorKind, IoSliceMut, Read};
use std::ops::Range;

/// Payloads from this length on are worth a receive of their own, into the caller's memory.
const BULK: usize = 16 << 10;
/// Bytes received with a long payload, from behind it: the next header, or a short record and the header behind that.
const TAIL: usize = 64;
/// Unchecked bytes up to this length are moved to the front of the memory.
const SHORT: usize = 4 << 10;
/// Memory of an inbox: a record in use, and the next one behind it.
const CAPACITY: usize = 2 * (HEADER + RECORD + TAIL) + SHORT;

/// Records of one direction, as they arrive.
#[derive(Debug)]
pub(super) struct RecordInbox {
    cipher: Option<Cipher>,
    sequence: u32,
    /// Bytes from the socket; those of `raw[begin..end]` are in no checked record yet.
    raw: Box<[u8]>,
    begin: usize,
    end: usize,
    /// Header of the record at `begin`.
    header: Option<RecordHeader>,
    /// Opened payload of a sealed record.
    plain: Box<[u8]>,
    /// Checked bytes that the caller has not consumed, in `raw` or in `plain`.
    checked: Range<usize>,
    goodbye: bool,
    failed: Option<LostWhy>,
    /// True if the caller takes long payloads by [`read`](Self::read).
    direct: bool,
    /// True if [`waits`](Self::waits) has announced the record at `begin`.
    announced: bool,
}

/// Result of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// Some bytes arrived.
    Moved,
    /// The socket has none.
    Nothing,
    /// The buffer has no room before the caller consumes.
    Full,
}

impl RecordInbox {
    /// `first` are bytes that arrived before.
    pub(super) fn new(cipher: Option<Cipher>, first: &[u8]) -> Self {
        let mut raw = vec![0; CAPACITY.max(first.len())].into_boxed_slice();
        raw[..first.len()].copy_from_slice(first);
        let plain = vec![0; if cipher.is_some() { Cipher::MAX } else { 0 }].into_boxed_slice();
        let mut inbox = RecordInbox {
            cipher,
            sequence: 0,
            raw,
            begin: 0,
            end: first.len(),
            header: None,
            plain,
            checked: 0..0,
            goodbye: false,
            failed: None,
            direct: false,
            announced: false,
        };
        inbox.advance();
        inbox
    }

    /// Checked bytes that have not been consumed.
    pub(super) fn arrived(&self) -> &[u8] {
        let memory = if self.cipher.is_some() { &self.plain } else { &self.raw };
        &memory[self.checked.clone()]
    }

    /// Consumes checked bytes.
    pub(super) fn consume(&mut self, len: usize) {
        let arrived = self.checked.len();
        assert!(len <= arrived, "{len} of {arrived} bytes consumed");
        self.direct &= len < BULK;
        self.take(len);
    }

    /// True if the peer has said goodbye and everything before it was consumed.
    pub(super) fn is_done(&self) -> bool {
        self.goodbye && self.checked.is_empty()
    }

    /// Reason for which no further record is delivered.
    pub(super) fn failed(&self) -> Option<&LostWhy> {
        self.failed.as_ref()
    }

    /// Receives into the inbox's own memory.
    pub(super) fn receive(&mut self, socket: &mut impl Read) -> Result<Received, LostWhy> {
        if self.goodbye || self.failed.is_some() {
            return Ok(Received::Nothing);
        }
        self.make_room();
        let limit = self.limit();
        if self.end >= limit {
            return Ok(Received::Full);
        }
        let result = socket.read(&mut self.raw[self.end..limit]);
        let Some(len) = self.moved(result)? else { return Ok(Received::Nothing) };
        self.end += len;
        self.advance();
        Ok(Received::Moved)
    }

    /// Returns the number of bytes that the socket must have before [`read`](Self::read) takes the next record directly, if the
    /// caller reads directly. Returns it once for a record: without a read, [`receive`](Self::receive) takes the record later.
    pub(super) fn waits(&self) -> Option<usize> {
        let header = self.header.filter(|_| self.direct && !self.announced && self.checked.is_empty())?;
        (self.cipher.is_none() && header.len >= BULK).then(|| self.missing(&header))
    }

    /// Notes that the caller has been invited to read the next record.
    pub(super) fn announce(&mut self) {
        self.announced = true;
    }

    /// Moves checked bytes into `into`, then whole records from the socket, of which `available(socket)` bytes have arrived.
    pub(super) fn read<S: Read>(
        &mut self,
        socket: &mut S,
        into: &mut [u8],
        available: impl Fn(&S) -> usize,
    ) -> Result<usize, LostWhy> {
        let mut done = 0;
        self.direct |= into.len() >= BULK;
        loop {
            done += self.copy(&mut into[done..]);
            match self.header.filter(|header| self.takes_directly(header, into.len() - done)) {
                Some(header) if available(socket) >= self.missing(&header) => {
                    let len = self.receive_into(socket, header, &mut into[done..][..header.len])?;
                    done += len;
                    if len == 0 {
                        return Ok(done);
                    }
                }
                _ if self.checked.is_empty() || done == into.len() => return Ok(done),
                _ => {}
            }
        }
    }

    fn takes_directly(&self, header: &RecordHeader, room: usize) -> bool {
        let bulk = header.len >= BULK && header.len <= room;
        bulk && self.cipher.is_none() && self.checked.is_empty() && self.failed.is_none()
    }

    /// Bytes of the record at `begin` that have not been received.
    fn missing(&self, header: &RecordHeader) -> usize {
        (HEADER + header.len).saturating_sub(self.end - self.begin)
    }

    fn copy(&mut self, into: &mut [u8]) -> usize {
        let arrived = self.arrived();
        let len = arrived.len().min(into.len());
        into[..len].copy_from_slice(&arrived[..len]);
        self.take(len);
        len
    }

    fn take(&mut self, len: usize) {
        self.checked.start += len;
        if self.checked.is_empty() {
            self.advance();
        }
    }

    /// Receives the payload of the record at `begin` into `into`, and a few bytes behind it. Returns 0 if the system gave less
    /// than it had announced; the bytes are then in the inbox.
    fn receive_into(
        &mut self,
        socket: &mut impl Read,
        header: RecordHeader,
        into: &mut [u8],
    ) -> Result<usize, LostWhy> {
        let have = self.end - self.begin - HEADER;
        into[..have].copy_from_slice(&self.raw[self.begin + HEADER..self.end]);
        let mut next = [0; TAIL];
        let mut parts = [IoSliceMut::new(&mut into[have..]), IoSliceMut::new(&mut next)];
        let result = socket.read_vectored(&mut parts);
        let Some(len) = self.moved(result)? else { return Ok(0) };
        let Some(more) = (have + len).checked_sub(header.len) else {
            self.make_room();
            self.raw[self.end..self.end + len].copy_from_slice(&into[have..have + len]);
            self.end += len;
            return Ok(0);
        };
        if checksum(into, header.sequence) != header.checksum {
            return Err(self.fail(LostWhy::Altered));
        }
        self.raw[..more].copy_from_slice(&next[..more]);
        (self.begin, self.end) = (0, more);
        self.next_record();
        self.advance();
        Ok(header.len)
    }

    /// Checks the record at `begin` if it is there and the one before it is consumed.
    fn advance(&mut self) {
        while self.checked.is_empty() && !self.goodbye && self.failed.is_none() {
            if let Err(why) = self.read_header() {
                self.fail(why);
                return;
            }
            let Some(header) = self.header.filter(|header| self.missing(header) == 0) else { return };
            if let Err(why) = self.check(header) {
                self.fail(why);
            }
        }
    }

    fn read_header(&mut self) -> Result<(), LostWhy> {
        let here = &self.raw[self.begin..self.end];
        let Some(bytes) = here.first_chunk::<HEADER>().filter(|_| self.header.is_none()) else {
            return Ok(());
        };
        let header = RecordHeader::decode(bytes).filter(|header| header.sequence == self.sequence);
        self.header = Some(header.ok_or(LostWhy::Altered)?);
        Ok(())
    }

    /// Checks a whole record, and delivers its payload.
    fn check(&mut self, header: RecordHeader) -> Result<(), LostWhy> {
        let payload = self.begin + HEADER..self.begin + HEADER + header.len;
        let bytes = &self.raw[payload.clone()];
        self.checked = match &mut self.cipher {
            Some(_) if bytes.len() > self.plain.len() + Cipher::TAG => return Err(LostWhy::Altered),
            Some(cipher) => 0..cipher.open_into(bytes, &mut self.plain).map_err(|_| LostWhy::Altered)?,
            None if checksum(bytes, header.sequence) != header.checksum => return Err(LostWhy::Altered),
            None => payload.clone(),
        };
        self.begin = payload.end;
        self.goodbye = self.checked.is_empty();
        self.next_record();
        Ok(())
    }

    fn next_record(&mut self) {
        self.sequence = self.sequence.wrapping_add(1);
        (self.header, self.announced) = (None, false);
    }

    /// Moves unchecked bytes to the front if they are few, or if the record at `begin` does not fit there.
    fn make_room(&mut self) {
        let in_use = self.cipher.is_none() && !self.checked.is_empty();
        let needed = HEADER + self.header.map_or(0, |header| header.len) + TAIL;
        let few = self.end - self.begin <= SHORT;
        if !in_use && self.begin > 0 && (few || self.raw.len() - self.begin < needed) {
            self.raw.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
        }
    }

    /// End of the next receive: behind a long payload only few bytes, so that nothing long has to be moved; if the caller takes
    /// payloads directly, behind a short one too.
    fn limit(&self) -> usize {
        let end = match self.header {
            Some(header) if self.direct || (self.cipher.is_none() && header.len >= BULK) => {
                self.begin + HEADER + header.len + TAIL
            }
            None if self.direct => self.begin + TAIL,
            _ => self.raw.len(),
        };
        end.min(self.raw.len())
    }

    /// Returns the number of bytes of a receive; `None` if the socket has none.
    fn moved(&mut self, result: std::io::Result<usize>) -> Result<Option<usize>, LostWhy> {
        match result {
            Ok(0) => Err(self.fail(LostWhy::Closed)),
            Ok(len) => Ok(Some(len)),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
            Err(error) => Err(self.fail(lost("receiving", &error))),
        }
    }

    fn fail(&mut self, why: LostWhy) -> LostWhy {
        self.failed.get_or_insert(why).clone()
    }
}

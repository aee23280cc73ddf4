//! Framing of a connection: lengths and payloads, then lengths and sealed records.
//!
//! A length above the limit is rejected before any allocation. After the handshake a message is cut into records of at most 65,535
//! bytes; the first byte of a record's plaintext says if another one follows.

use super::cipher::{Cipher, Forged};

/// Longest frame before a peer has proven that it knows the token.
const MAX_GREETING: usize = 1024;
/// Longest frame after that: a Noise message.
const MAX_RECORD: usize = u16::MAX as usize;
/// Longest message after that.
pub(in crate::rendezvous) const MAX_MESSAGE: usize = 32 << 20;
/// Bytes of a length.
const LENGTH: usize = 4;
/// First byte of a record's plaintext.
const LAST: u8 = 0;
const MORE: u8 = 1;

/// Framing error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rendezvous) enum FrameError {
    TooLong { len: usize, max: usize },
    Forged,
}

impl From<Forged> for FrameError {
    fn from(_: Forged) -> Self {
        FrameError::Forged
    }
}

/// Appends the frames of `message` to `out`: one frame without a cipher, else as many records as it needs.
pub(in crate::rendezvous) fn write(message: &[u8], cipher: Option<&mut Cipher>, out: &mut Vec<u8>) {
    let Some(cipher) = cipher else {
        assert!(message.len() <= MAX_GREETING, "a greeting of {} bytes does not fit a frame", message.len());
        out.extend_from_slice(&(message.len() as u32).to_le_bytes());
        return out.extend_from_slice(message);
    };
    assert!(message.len() <= MAX_MESSAGE, "a message of {} bytes is too long", message.len());
    let mut rest = message;
    loop {
        let (part, after) = rest.split_at(rest.len().min(Cipher::MAX - 1));
        write_record(part, if after.is_empty() { LAST } else { MORE }, cipher, out);
        rest = after;
        if rest.is_empty() {
            return;
        }
    }
}

fn write_record(part: &[u8], flag: u8, cipher: &mut Cipher, out: &mut Vec<u8>) {
    let mut plain = Vec::with_capacity(1 + part.len());
    plain.push(flag);
    plain.extend_from_slice(part);
    let from = out.len();
    out.extend_from_slice(&[0; LENGTH]);
    cipher.seal(&plain, out);
    let len = (out.len() - from - LENGTH) as u32;
    out[from..from + LENGTH].copy_from_slice(&len.to_le_bytes());
}

/// Splits incoming bytes into messages.
#[derive(Debug, Default)]
pub(in crate::rendezvous) struct Frames {
    bytes: Vec<u8>,
    /// Bytes at the beginning that are used up.
    used: usize,
    cipher: Option<Cipher>,
    trusted: bool,
    /// Parts of a message, until its last record has arrived.
    parts: Vec<u8>,
    failed: Option<FrameError>,
}

impl Frames {
    /// Requires every later frame to be a record of this cipher.
    pub(in crate::rendezvous) fn expect_records(&mut self, cipher: Cipher) {
        self.cipher = Some(cipher);
    }

    /// Allows long messages: the peer has proven that it knows the token.
    pub(in crate::rendezvous) fn trust(&mut self) {
        self.trusted = true;
    }

    /// Returns the bytes that no message has used, and the cipher of later ones.
    pub(in crate::rendezvous) fn into_raw(mut self) -> (Vec<u8>, Option<Cipher>) {
        (self.bytes.split_off(self.used), self.cipher)
    }

    pub(in crate::rendezvous) fn feed(&mut self, bytes: &[u8]) {
        if self.used > 0 {
            self.bytes.drain(..self.used);
            self.used = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next message if it has arrived completely. After an error the connection has no more frames.
    pub(in crate::rendezvous) fn next(&mut self) -> Result<Option<Vec<u8>>, FrameError> {
        let next = self.failed.map_or_else(|| self.read(), Err);
        self.failed = next.as_ref().err().copied();
        next
    }

    fn read(&mut self) -> Result<Option<Vec<u8>>, FrameError> {
        while let Some(range) = self.frame()? {
            let Some(cipher) = &mut self.cipher else { return Ok(Some(self.bytes[range].to_vec())) };
            let plain = cipher.open(&self.bytes[range])?;
            if let Some(message) = self.join(&plain)? {
                return Ok(Some(message));
            }
        }
        Ok(None)
    }

    /// Returns the place of the next complete frame and marks it as used.
    fn frame(&mut self) -> Result<Option<std::ops::Range<usize>>, FrameError> {
        let Some((length, _)) = self.bytes[self.used..].split_first_chunk::<LENGTH>() else {
            return Ok(None);
        };
        let len = u32::from_le_bytes(*length) as usize;
        let max = if self.trusted { MAX_RECORD } else { MAX_GREETING };
        if len > max {
            return Err(FrameError::TooLong { len, max });
        }
        let (begin, end) = (self.used + LENGTH, self.used + LENGTH + len);
        if self.bytes.len() < end {
            return Ok(None);
        }
        self.used = end;
        Ok(Some(begin..end))
    }

    /// Adds a record to its message; returns the message with its last record.
    fn join(&mut self, plain: &[u8]) -> Result<Option<Vec<u8>>, FrameError> {
        let (flag, part) = plain.split_first().ok_or(FrameError::Forged)?;
        let len = self.parts.len() + part.len();
        let max = if self.trusted { MAX_MESSAGE } else { MAX_GREETING };
        if len > max {
            return Err(FrameError::TooLong { len, max });
        }
        self.parts.extend_from_slice(part);
        match *flag {
            LAST => Ok(Some(std::mem::take(&mut self.parts))),
            MORE => Ok(None),
            _ => Err(FrameError::Forged),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn cipher() -> Cipher {
        Cipher::new(&[7; 32]).unwrap()
    }

    fn trusted() -> Frames {
        let mut frames = Frames::default();
        frames.expect_records(cipher());
        frames.trust();
        frames
    }

    fn drain(frames: &mut Frames) -> Result<Vec<Vec<u8>>, FrameError> {
        let mut payloads = Vec::new();
        while let Some(payload) = frames.next()? {
            payloads.push(payload);
        }
        Ok(payloads)
    }

    #[test]
    fn a_length_above_the_limit_is_refused_before_its_bytes_come() {
        let mut unproven = Frames::default();
        unproven.expect_records(cipher());
        for mut frames in [Frames::default(), unproven] {
            frames.feed(&(MAX_GREETING as u32 + 1).to_le_bytes());
            let error = FrameError::TooLong { len: MAX_GREETING + 1, max: MAX_GREETING };
            assert_eq!(frames.next(), Err(error));
        }
        let mut sealed = trusted();
        sealed.feed(&u32::MAX.to_le_bytes());
        let error = FrameError::TooLong { len: u32::MAX as usize, max: MAX_RECORD };
        assert_eq!(sealed.next(), Err(error));
    }

    #[test]
    fn a_message_longer_than_a_record_is_cut_and_joined() {
        for len in [0, 1, Cipher::MAX - 2, Cipher::MAX - 1, Cipher::MAX, 3 * Cipher::MAX, MAX_MESSAGE] {
            let message: Vec<u8> = (0..len).map(|i| (i / 3) as u8).collect();
            let (mut bytes, mut frames) = (Vec::new(), trusted());
            write(&message, Some(&mut cipher()), &mut bytes);
            frames.feed(&bytes);
            assert!(frames.next() == Ok(Some(message)) && frames.next() == Ok(None), "{len}");
            let records = len.max(1).div_ceil(Cipher::MAX - 1);
            assert_eq!(bytes.len(), len + records * (LENGTH + 1 + 16), "{len}");
        }
    }

    #[test]
    fn records_without_an_end_are_bounded() {
        let (mut sender, mut frames) = (cipher(), trusted());
        let part = vec![0; Cipher::MAX - 1];
        let error = loop {
            let mut bytes = Vec::new();
            write_record(&part, MORE, &mut sender, &mut bytes);
            frames.feed(&bytes);
            match frames.next() {
                Ok(None) => assert!(frames.parts.len() <= MAX_MESSAGE),
                other => break other,
            }
        };
        assert!(matches!(error, Err(FrameError::TooLong { max: MAX_MESSAGE, .. })), "{error:?}");
    }

    #[test]
    fn a_frame_that_is_repeated_left_out_or_swapped_is_forged() {
        let mut sender = cipher();
        let sealed: Vec<Vec<u8>> = (0..3)
            .map(|i| {
                let mut bytes = Vec::new();
                write(&[i; 5], Some(&mut sender), &mut bytes);
                bytes
            })
            .collect();
        for (order, expected) in
            [(vec![0, 1, 2], 3), (vec![0, 0], 1), (vec![0, 2], 1), (vec![1, 0], 0), (vec![2], 0)]
        {
            let mut frames = trusted();
            order.iter().for_each(|&i: &usize| frames.feed(&sealed[i]));
            let results: Vec<_> = order.iter().map(|_| frames.next()).collect();
            let opened = results.iter().take_while(|result| matches!(result, Ok(Some(_)))).count();
            assert_eq!(opened, expected, "{order:?}");
            // No frame follows a forged one.
            assert!(results[opened..].iter().all(|result| *result == Err(FrameError::Forged)), "{order:?}");
        }
    }

    proptest! {
        /// For any split of the bytes, the payloads equal those written.
        #[test]
        fn cuts_do_not_matter(
            payloads in vec(vec(any::<u8>(), 0..200), 0..6),
            cuts in vec(1usize..40, 1..50),
            sealed in any::<bool>(),
        ) {
            let (mut sender, mut bytes) = (sealed.then(cipher), Vec::new());
            payloads.iter().for_each(|payload| write(payload, sender.as_mut(), &mut bytes));
            let mut frames = if sealed { trusted() } else { Frames::default() };
            let (mut rest, mut arrived) = (&bytes[..], Vec::new());
            for cut in cuts.iter().cycle() {
                let (piece, after) = rest.split_at((*cut).min(rest.len()));
                frames.feed(piece);
                arrived.extend(drain(&mut frames).unwrap());
                rest = after;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(arrived, payloads);
        }

        /// Arbitrary bytes give payloads within the limit or an error, and never a panic.
        #[test]
        fn any_bytes_are_frames_or_an_error(bytes in vec(any::<u8>(), 0..2000), small in any::<bool>(), sealed in any::<bool>()) {
            let mut frames = if sealed { trusted() } else { Frames::default() };
            let small_lengths = |(i, byte): (usize, &u8)| if small && i % 8 > 1 { 0 } else { *byte };
            frames.feed(&bytes.iter().enumerate().map(small_lengths).collect::<Vec<_>>());
            if let Ok(payloads) = drain(&mut frames) {
                prop_assert!(payloads.iter().all(|payload| payload.len() <= MAX_GREETING));
            }
        }

        /// A sealed frame with one changed bit gives no payload.
        #[test]
        fn a_changed_bit_is_noticed(payload in vec(any::<u8>(), 0..60), at in any::<prop::sample::Index>(), bit in 0u8..8) {
            let mut bytes = Vec::new();
            write(&payload, Some(&mut cipher()), &mut bytes);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            let mut frames = trusted();
            frames.feed(&bytes);
            prop_assert!(!matches!(frames.next(), Ok(Some(_))));
        }
    }
}

//! Framing of a connection: a length, a payload and, after the handshake, a seal.
//!
//! A seal is HMAC-SHA256 over the frame's number on this connection in this direction, its length and its payload, under a key of
//! this connection and direction. A length above the limit is rejected before any allocation.

use super::proof::{Key, SEAL};

/// Longest payload before a peer has proven that it knows the token.
pub(super) const MAX_GREETING: usize = 512;
/// Longest payload after that.
pub(super) const MAX_PAYLOAD: usize = 32 * 1024;
/// Bytes of a length.
const LENGTH: usize = 4;

/// Framing error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameError {
    TooLong { len: usize, max: usize },
    Forged,
}

/// Key of one direction, and the number of frames sealed or opened with it.
#[derive(Debug)]
pub(super) struct Seals {
    key: Key,
    count: u64,
}

impl Seals {
    pub(super) fn new(key: Key) -> Self {
        Seals { key, count: 0 }
    }

    fn seal(&mut self, length_and_payload: &[u8]) -> [u8; SEAL] {
        let seal = self.key.seal(&[&self.count.to_le_bytes(), length_and_payload]);
        self.count += 1;
        seal
    }

    fn opens(&mut self, length_and_payload: &[u8], seal: &[u8]) -> bool {
        let opens = self.key.opens(&[&self.count.to_le_bytes(), length_and_payload], seal);
        self.count += u64::from(opens);
        opens
    }
}

/// Appends the frame of `payload` to `out`.
pub(super) fn write(payload: &[u8], seals: Option<&mut Seals>, out: &mut Vec<u8>) {
    assert!(payload.len() <= MAX_PAYLOAD, "a message of {} bytes does not fit a frame", payload.len());
    let from = out.len();
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    out.extend_from_slice(payload);
    if let Some(seals) = seals {
        let seal = seals.seal(&out[from..]);
        out.extend_from_slice(&seal);
    }
}

/// Splits incoming bytes into payloads.
#[derive(Debug, Default)]
pub(super) struct Frames {
    bytes: Vec<u8>,
    seals: Option<Seals>,
}

impl Frames {
    /// Requires a seal on every later frame, which may then be longer.
    pub(super) fn expect_seals(&mut self, seals: Seals) {
        self.seals = Some(seals);
    }

    pub(super) fn feed(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next payload if it has arrived completely. After an error the connection has no more frames.
    pub(super) fn next(&mut self) -> Result<Option<Vec<u8>>, FrameError> {
        let Some((length, _)) = self.bytes.split_first_chunk::<LENGTH>() else { return Ok(None) };
        let len = u32::from_le_bytes(*length) as usize;
        let (max, seal) = if self.seals.is_some() { (MAX_PAYLOAD, SEAL) } else { (MAX_GREETING, 0) };
        if len > max {
            return Err(FrameError::TooLong { len, max });
        }
        let end = LENGTH + len;
        if self.bytes.len() < end + seal {
            return Ok(None);
        }
        if let Some(seals) = &mut self.seals
            && !seals.opens(&self.bytes[..end], &self.bytes[end..end + seal])
        {
            return Err(FrameError::Forged);
        }
        let payload = self.bytes[LENGTH..end].to_vec();
        self.bytes.drain(..end + seal);
        Ok(Some(payload))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn seals() -> Seals {
        Seals::new(Key::of_token(&[7; 16]))
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
        let mut greeting = Frames::default();
        greeting.feed(&(MAX_GREETING as u32 + 1).to_le_bytes());
        let error = FrameError::TooLong { len: MAX_GREETING + 1, max: MAX_GREETING };
        assert_eq!(greeting.next(), Err(error));
        let mut sealed = Frames::default();
        sealed.expect_seals(seals());
        sealed.feed(&u32::MAX.to_le_bytes());
        let error = FrameError::TooLong { len: u32::MAX as usize, max: MAX_PAYLOAD };
        assert_eq!(sealed.next(), Err(error));
    }

    #[test]
    fn a_frame_that_is_repeated_left_out_or_swapped_is_forged() {
        let mut sender = seals();
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
            let mut frames = Frames::default();
            frames.expect_seals(seals());
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
            let (mut sender, mut bytes, mut frames) = (sealed.then(seals), Vec::new(), Frames::default());
            payloads.iter().for_each(|payload| write(payload, sender.as_mut(), &mut bytes));
            if sealed {
                frames.expect_seals(seals());
            }
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
        fn any_bytes_are_frames_or_an_error(bytes in vec(any::<u8>(), 0..2000), small in any::<bool>()) {
            let mut frames = Frames::default();
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
            write(&payload, Some(&mut seals()), &mut bytes);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            let mut frames = Frames::default();
            frames.expect_seals(seals());
            frames.feed(&bytes);
            prop_assert!(!matches!(frames.next(), Ok(Some(_))));
        }
    }
}

//! Records between an outbox and an inbox, over a socket in memory that takes and gives bytes in small pieces.

use crate::p2p::transport::LostWhy;
use crate::tcp::inbox::{Received, RecordInbox};
use crate::tcp::outbox::Outbox;
use crate::tcp::record::{HEADER, RECORD};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};

/// Socket with room for a number of bytes, of which a receive returns at most `piece`.
#[derive(Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    room: usize,
    piece: usize,
    closed: bool,
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = bytes.len().min(self.room - self.bytes.len());
        self.bytes.extend(&bytes[..len]);
        if len == 0 && !bytes.is_empty() { Err(ErrorKind::WouldBlock.into()) } else { Ok(len) }
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let bytes: Vec<u8> = parts.iter().flat_map(|part| part.to_vec()).collect();
        self.write(&bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Pipe {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let len = self.bytes.len().min(self.piece).min(into.len());
        if len == 0 && !self.closed {
            return Err(ErrorKind::WouldBlock.into());
        }
        self.bytes.drain(..len).zip(into).for_each(|(byte, place)| *place = byte);
        Ok(len)
    }

    fn read_vectored(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut bytes = vec![0; parts.iter().map(|part| part.len()).sum()];
        let len = self.read(&mut bytes)?;
        let mut rest = &bytes[..len];
        for part in parts {
            let (now, later) = rest.split_at(rest.len().min(part.len()));
            part[..now.len()].copy_from_slice(now);
            rest = later;
        }
        Ok(len)
    }
}

fn available(pipe: &Pipe) -> usize {
    pipe.bytes.len()
}

fn numbers(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 3 + i / 1000) as u8).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(meshstep_cases::cases(60, 2000)))]

    /// Bytes arrive in order for any room, pieces, lengths of writes, and mixture of reads.
    #[test]
    fn bytes_come_through(
        room in prop_oneof![1usize..100, 1000usize..400_000],
        piece in prop_oneof![20usize..100, 1000usize..400_000],
        writes in prop::collection::vec(prop_oneof![1usize..60, 900usize..1200, 10_000usize..300_000], 1..12),
        choices in any::<u64>(),
    ) {
        // Small rooms and pieces need many turns for each byte.
        let shrink = if room.min(piece) < 100 { 50 } else { 1 };
        let bytes = numbers(writes.iter().map(|len| len / shrink + 1).sum());
        let mut pipe = Pipe { room, piece, ..Pipe::default() };
        let (mut outbox, mut inbox) = (Outbox::new(None), RecordInbox::new(None, &[]));
        let (mut written, mut arrived, mut turn) = (0, Vec::<u8>::new(), 0u32);
        while arrived.len() < bytes.len() {
            turn += 1;
            prop_assert!(turn < 1_000_000, "{written} written, {} arrived", arrived.len());
            let ends = writes.iter().scan(0, |end, len| { *end += len / shrink + 1; Some(*end) });
            let end = ends.into_iter().find(|end| *end > written).unwrap_or(written);
            written += outbox.write(&mut pipe, &bytes[written..end]).unwrap();
            if written == bytes.len() {
                outbox.flush(&mut pipe).unwrap();
            }
            if choices.rotate_left(turn) & 1 == 0 && inbox.waits().is_none() {
                inbox.receive(&mut pipe).unwrap();
            } else {
                inbox.announce();
            }
            if choices.rotate_left(turn * 7) & 1 == 0 {
                let mut into = vec![0; (bytes.len() - arrived.len()).min(1 << (turn % 20))];
                let len = inbox.read(&mut pipe, &mut into, available).unwrap();
                arrived.extend(&into[..len]);
            } else {
                let some = inbox.arrived().len().min(1 << (turn % 18));
                arrived.extend(&inbox.arrived()[..some]);
                inbox.consume(some);
            }
        }
        prop_assert!(arrived == bytes);
    }
}

/// Returns the records of writes.
fn records(writes: &[&[u8]]) -> Vec<u8> {
    let mut pipe = Pipe { room: usize::MAX, piece: usize::MAX, ..Pipe::default() };
    let mut outbox = Outbox::new(None);
    for bytes in writes {
        assert_eq!(outbox.write(&mut pipe, bytes), Ok(bytes.len()));
    }
    assert_eq!(outbox.flush(&mut pipe), Ok(true));
    pipe.bytes.into()
}

fn wire(bytes: &[u8]) -> Vec<u8> {
    records(&[bytes])
}

#[test]
fn short_writes_share_a_call_with_the_next_long_one() {
    let mut pipe = Pipe { room: usize::MAX, piece: usize::MAX, ..Pipe::default() };
    let mut outbox = Outbox::new(None);
    assert_eq!(outbox.write(&mut pipe, &[1; 8]), Ok(8));
    assert!(pipe.bytes.is_empty() && outbox.keeps());
    assert_eq!(outbox.write(&mut pipe, &[2; 5000]), Ok(5000));
    assert!(pipe.bytes.len() == 2 * HEADER + 5008 && !outbox.keeps());
}

#[test]
fn a_record_taken_in_part_goes_on_with_the_rest_of_its_payload() {
    let bytes = numbers(5000);
    // The system takes the header and a part of the payload, or a part of the header.
    for (room, first) in [(3000, 3000 - HEADER), (HEADER, 0), (HEADER - 4, 0)] {
        let mut pipe = Pipe { room, piece: usize::MAX, ..Pipe::default() };
        let mut outbox = Outbox::new(None);
        assert_eq!(outbox.write(&mut pipe, &bytes), Ok(first), "{room}");
        assert_eq!(outbox.write(&mut pipe, &bytes[first..]), Ok(0), "{room}");
        pipe.room = usize::MAX;
        assert_eq!(outbox.write(&mut pipe, &bytes[first..]), Ok(5000 - first), "{room}");
        assert_eq!(Vec::from(pipe.bytes), wire(&bytes), "{room}");
    }
}

#[test]
fn no_goodbye_is_sent_within_a_record() {
    let mut pipe = Pipe { room: 3000, piece: usize::MAX, ..Pipe::default() };
    let (mut outbox, bytes) = (Outbox::new(None), numbers(5000));
    outbox.write(&mut pipe, &bytes).unwrap();
    pipe.room = usize::MAX;
    assert_eq!(outbox.goodbye(&mut pipe), Ok(false));
    assert_eq!(Vec::from(pipe.bytes), wire(&bytes)[..3000]);
}

#[test]
fn long_payloads_go_straight_into_the_callers_memory() {
    let bytes = numbers(3 * RECORD);
    let mut pipe = Pipe { room: usize::MAX, piece: usize::MAX, bytes: wire(&bytes).into(), closed: false };
    let (mut inbox, mut into) = (RecordInbox::new(None, &[]), vec![0; bytes.len()]);
    assert_eq!(inbox.read(&mut pipe, &mut into, available), Ok(0));
    // The first receive is for a header, as the caller has asked for a long read.
    assert_eq!(inbox.receive(&mut pipe), Ok(Received::Moved));
    assert!(pipe.bytes.len() > 3 * (HEADER + RECORD) - RECORD / 100, "{}", pipe.bytes.len());
    assert_eq!(inbox.read(&mut pipe, &mut into, available), Ok(bytes.len()));
    assert!(into == bytes);
}

#[test]
fn a_damaged_payload_in_the_callers_memory_is_not_reported() {
    let bytes = numbers(RECORD);
    let mut wire = wire(&bytes);
    wire[HEADER + RECORD / 2] ^= 4;
    let mut pipe = Pipe { room: usize::MAX, piece: usize::MAX, bytes: wire.into(), closed: false };
    let (mut inbox, mut into) = (RecordInbox::new(None, &[]), vec![0; bytes.len()]);
    assert_eq!(inbox.read(&mut pipe, &mut into, available), Ok(0));
    assert_eq!(inbox.receive(&mut pipe), Ok(Received::Moved));
    assert_eq!(inbox.read(&mut pipe, &mut into, available), Err(LostWhy::Altered));
    assert_eq!(inbox.failed(), Some(&LostWhy::Altered));
    assert_eq!(inbox.read(&mut pipe, &mut into, available), Ok(0));
}

#[test]
fn bytes_before_the_end_of_a_stream_stay_readable() {
    for cut in [HEADER + 5000, HEADER + 5000 + 10, 2 * HEADER + 5000 + 10] {
        let mut wire = records(&[&numbers(5000), &numbers(5000)]);
        wire.truncate(cut);
        let mut pipe = Pipe { room: 0, piece: usize::MAX, bytes: wire.into(), closed: true };
        let mut inbox = RecordInbox::new(None, &[]);
        let end = (0..3).find_map(|_| inbox.receive(&mut pipe).err());
        assert_eq!(end, Some(LostWhy::Closed), "{cut}");
        assert_eq!(inbox.arrived(), numbers(5000), "{cut}");
    }
}

#[test]
fn a_record_that_is_repeated_left_out_or_swapped_is_altered() {
    let bytes = records(&[&numbers(2000), &numbers(2000), &numbers(2000)]);
    let record = |number: usize| &bytes[number * (HEADER + 2000)..][..HEADER + 2000];
    for (order, expected) in [(vec![0, 1, 2], 3), (vec![0, 0], 1), (vec![0, 2], 1), (vec![1, 0], 0)] {
        let wire: Vec<u8> = order.iter().flat_map(|number| record(*number)).copied().collect();
        let mut pipe = Pipe { room: 0, piece: usize::MAX, bytes: wire.into(), closed: false };
        let (mut inbox, mut opened) = (RecordInbox::new(None, &[]), 0);
        inbox.receive(&mut pipe).unwrap();
        while !inbox.arrived().is_empty() {
            inbox.consume(2000);
            opened += 1;
        }
        assert_eq!(opened, expected, "{order:?}");
        assert_eq!(inbox.failed().is_some(), expected < order.len(), "{order:?}");
    }
}

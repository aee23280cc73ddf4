//! Causes of a group's failure, their order, and the other notes between ranks, as frames.

use super::codec::{self, FrameKind, FrameReader, frame, put_called, put_u64};
use crate::{Called, Error};

/// A failure as one rank found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cause {
    /// Number of the operation in which the rank found it.
    pub(super) op_number: u64,
    /// Rank that found the failure.
    pub(super) rank: usize,
    /// The error that all ranks return.
    pub(super) error: Error,
}

impl Cause {
    /// Returns the order of causes, of which all ranks adopt the smallest: aborts before all others.
    fn order(&self) -> (bool, u64, usize) {
        (!matches!(self.error, Error::Aborted { .. }), self.op_number, self.rank)
    }

    /// Returns the cause that ranks adopt if they know of both.
    pub(super) fn earlier(self, other: Cause) -> Cause {
        if other.order() < self.order() { other } else { self }
    }

    /// Appends it to the body of a frame.
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        put_u64(out, self.op_number);
        put_u64(out, self.rank as u64);
        codec::put_error(out, &self.error);
    }

    /// Reads the rest of a frame's body.
    pub(super) fn read(body: &[u8]) -> Option<Self> {
        let mut reader = FrameReader(body);
        let (op_number, rank) = (reader.u64()?, reader.index()?);
        let error = codec::read_error(&mut reader, rank)?;
        Some(Cause { op_number, rank, error })
    }
}

/// A call as it travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WireCall {
    pub(super) called: Called,
    /// Number of collectives that the rank had begun before.
    pub(super) collectives: u64,
    /// Bytes of the buffer behind the frame.
    pub(super) payload: usize,
    /// Place of the buffer in registered memory, if the others may read it there.
    pub(super) window: Option<OpWindow>,
    /// True if the rank writes its chunk while the others read it there.
    pub(super) writes: bool,
}

impl WireCall {
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        frame(out, FrameKind::Call, |out| {
            put_u64(out, self.collectives);
            put_u64(out, self.payload as u64);
            let source = self.window.is_some_and(|window| window.source.is_some());
            out.push(u8::from(self.window.is_some()) | u8::from(self.writes) << 1 | u8::from(source) << 2);
            let ranges = self.window.into_iter().flat_map(|window| [Some(window.buffer), window.source]);
            for WindowRange { id, offset } in ranges.flatten() {
                put_u64(out, id);
                put_u64(out, offset);
            }
            put_called(out, &self.called);
        });
    }

    pub(super) fn read(body: &[u8]) -> Option<Self> {
        let mut reader = FrameReader(body);
        let (collectives, payload) = (reader.u64()?, reader.index()?);
        let flags = reader.u8()?;
        let mut range = || Some(WindowRange { id: reader.u64()?, offset: reader.u64()? });
        let window = match flags & 1 {
            0 => None,
            _ => {
                Some(OpWindow { buffer: range()?, source: if flags & 4 > 0 { Some(range()?) } else { None } })
            }
        };
        let writes = flags & 2 > 0;
        Some(WireCall { called: reader.called()?, collectives, payload, window, writes })
    }
}

/// Places of an operation's buffers in registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OpWindow {
    pub(super) buffer: WindowRange,
    /// Place of the values to reduce, if they are in another buffer.
    pub(super) source: Option<WindowRange>,
}

/// Place of a buffer in registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WindowRange {
    /// Number of the registration.
    pub(super) id: u64,
    /// First byte.
    pub(super) offset: u64,
}

/// Progress of another rank in the operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// Bytes of its chunk that are reduced or written.
    pub(super) ready: usize,
    /// True if it reads no more.
    pub(super) done: bool,
}

impl Progress {
    pub(super) fn put(self, out: &mut Vec<u8>) {
        frame(out, FrameKind::Progress, |out| {
            put_u64(out, self.ready as u64);
            out.push(u8::from(self.done));
        });
    }

    pub(super) fn read(body: &[u8]) -> Option<Self> {
        let mut reader = FrameReader(body);
        Some(Progress { ready: reader.index()?, done: reader.u8()? == 1 })
    }
}

/// Departure of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Departure {
    /// Number of the first operation without the rank.
    pub(super) op_number: u64,
    /// Collectives that the rank has begun.
    pub(super) collectives: u64,
}

impl Departure {
    pub(super) fn put(self, out: &mut Vec<u8>) {
        frame(out, FrameKind::Left, |out| {
            put_u64(out, self.op_number);
            put_u64(out, self.collectives);
        });
    }

    pub(super) fn read(body: &[u8]) -> Option<Self> {
        let mut reader = FrameReader(body);
        Some(Departure { op_number: reader.u64()?, collectives: reader.u64()? })
    }
}

/// Call of rank `of`, which waits, at one or more removes, for the rank that relays it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Relay {
    /// Number of the relaying rank's operation: the relay holds while that waits.
    pub(super) within: u64,
    /// The rank that waits.
    pub(super) of: usize,
    pub(super) called: Called,
}

impl Relay {
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        frame(out, FrameKind::Relay, |out| {
            put_u64(out, self.within);
            put_u64(out, self.of as u64);
            put_called(out, &self.called);
        });
    }

    pub(super) fn read(body: &[u8]) -> Option<Self> {
        let mut reader = FrameReader(body);
        Some(Relay { within: reader.u64()?, of: reader.index()?, called: reader.called()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Action, Reduction};
    use codec::PREFIX;
    use meshstep_tensor::DType;
    use std::time::Duration;

    fn calls() -> Vec<Called> {
        let by = |factor| Reduction::PreMulSum { factor };
        let actions = [
            Action::AllReduce(by(f64::NAN)),
            Action::ReduceScatter(Reduction::Min),
            Action::AllReduce(Reduction::Mean),
            Action::AllGather,
            Action::ReduceAndGather(Reduction::Mean),
            Action::AllToAll,
            Action::Broadcast { root: 3 },
            Action::Send { to: 1 },
            Action::Recv { from: 700 },
            Action::Barrier,
            Action::Split { color: None, key: i64::MIN },
            Action::Split { color: Some(u32::MAX), key: -1 },
        ];
        let call = |(i, action)| Called {
            op_number: i as u64,
            action,
            len: 5 * i,
            dtype: DType::BF16,
            by: (i % 2 == 1).then_some("train"),
        };
        actions.into_iter().enumerate().map(call).collect()
    }

    #[test]
    fn every_frame_is_read_as_it_was_written() {
        let mut out = Vec::new();
        for (i, called) in calls().into_iter().enumerate() {
            out.clear();
            let range = |id| WindowRange { id, offset: i as u64 };
            let source = (i % 4 == 0).then(|| range(5));
            let window = (i % 2 == 0).then(|| OpWindow { buffer: range(3), source });
            let call = WireCall { called, collectives: 9, payload: i, window, writes: i % 3 == 0 };
            call.put(&mut out);
            assert_eq!(WireCall::read(&out[PREFIX..]), Some(call));
            out.clear();
            let relay = Relay { within: 4, of: 2, called };
            relay.put(&mut out);
            assert_eq!(Relay::read(&out[PREFIX..]), Some(relay));
            let prefix = codec::read_prefix(out[..PREFIX].try_into().unwrap());
            assert_eq!(prefix, Some((FrameKind::Relay, out.len() - PREFIX)));
        }
        out.clear();
        let departure = Departure { op_number: u64::MAX, collectives: 3 };
        departure.put(&mut out);
        assert_eq!(Departure::read(&out[PREFIX..]), Some(departure));
        out.clear();
        let progress = Progress { ready: 1 << 40, done: true };
        progress.put(&mut out);
        assert_eq!(Progress::read(&out[PREFIX..]), Some(progress));
        assert_eq!(Progress::read(&out[PREFIX..out.len() - 1]), None);
    }

    fn errors() -> Vec<Error> {
        let calls = calls();
        vec![
            Error::Mismatch { op_number: 8, calls: calls.iter().copied().map(Some).chain([None]).collect() },
            Error::Timeout {
                op_number: 5,
                called: Box::new(calls[1]),
                arrived: vec![0, 2],
                missing: vec![],
                after: Duration::MAX,
            },
            Error::Left { rank: 1, op_number: 2 },
            Error::Panicked { rank: 3, message: "é".to_owned() },
            Error::Aborted { rank: 0 },
            Error::Lost { rank: 2, why: "closed".to_owned() },
            Error::Remote { rank: 2, message: String::new() },
        ]
    }

    #[test]
    fn every_error_is_read_as_it_was_written_and_no_part_of_one() {
        for error in errors() {
            let cause = Cause { op_number: 7, rank: 1, error };
            let mut out = Vec::new();
            cause.put(&mut out);
            assert_eq!(Cause::read(&out), Some(cause));
            for end in 0..out.len() {
                assert_eq!(Cause::read(&out[..end]), None);
            }
        }
        let mut out = Vec::new();
        Cause { op_number: 0, rank: 4, error: Error::ZeroRanks }.put(&mut out);
        let message = Error::ZeroRanks.to_string();
        assert_eq!(Cause::read(&out).unwrap().error, Error::Remote { rank: 4, message });
    }

    #[test]
    fn a_long_message_is_cut_between_two_letters() {
        let message = "é".repeat(1 << 20);
        let mut out = Vec::new();
        Cause { op_number: 0, rank: 0, error: Error::Panicked { rank: 0, message: format!("a{message}") } }
            .put(&mut out);
        let Some(Cause { error: Error::Panicked { message: cut, .. }, .. }) = Cause::read(&out) else {
            panic!()
        };
        assert_eq!(cut, format!("a{}", &message[..(16 << 10) - 2]));
    }

    #[test]
    fn all_ranks_adopt_the_same_cause_in_any_order_of_arrival() {
        let cause = |op_number, rank, error| Cause { op_number, rank, error };
        let aborted = cause(9, 2, Error::Aborted { rank: 2 });
        let early = cause(3, 1, Error::ZeroRanks);
        let late = cause(3, 2, Error::ZeroRanks);
        for (a, b, first) in [(&early, &late, &early), (&aborted, &early, &aborted)] {
            assert_eq!(&a.clone().earlier(b.clone()), first);
            assert_eq!(&b.clone().earlier(a.clone()), first);
        }
    }
}

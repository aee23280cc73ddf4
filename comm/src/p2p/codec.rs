//! Frames between ranks as bytes: calls, errors, and the prefix of each frame.

use super::names;
use crate::{Action, Called, Error, Reduction};
use meshstep_tensor::DType;
use std::time::Duration;

/// Bytes of a frame's prefix.
pub(super) const PREFIX: usize = 8;
/// Longest body of a frame, in bytes; a longer one was not written by a rank.
pub(super) const LONGEST_BODY: usize = 1 << 20;
/// Longest text of an error, in bytes.
const MOST_TEXT: usize = 16 << 10;
/// Begins every prefix, so that bytes that are no frame are noticed.
const MARK: [u8; 2] = *b"ms";

/// FrameKind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// Call of an operation, with a small operation's bytes behind it.
    Call,
    /// Bytes of a buffer that are sent to be reduced.
    Contribution,
    /// Bytes of a buffer that are final.
    Final,
    /// The rank has left.
    Left,
    /// The group has failed.
    Failed,
    /// Call of another rank that waits for the sender of the frame.
    Relay,
    /// Progress of the rank in an operation in place.
    Progress,
}

const KINDS: [FrameKind; 7] = [
    FrameKind::Call,
    FrameKind::Contribution,
    FrameKind::Final,
    FrameKind::Left,
    FrameKind::Failed,
    FrameKind::Relay,
    FrameKind::Progress,
];
const DTYPES: [DType; 6] = [DType::F32, DType::F64, DType::BF16, DType::F16, DType::U16, DType::U64];

/// Returns the prefix of a frame with `len` bytes behind it.
pub(super) fn prefix(kind: FrameKind, len: usize) -> [u8; PREFIX] {
    let [a, b, c, d] = (len as u32).to_le_bytes();
    [MARK[0], MARK[1], kind as u8, 0, a, b, c, d]
}

/// Reads a prefix; `None` for other bytes.
pub(super) fn read_prefix(bytes: [u8; PREFIX]) -> Option<(FrameKind, usize)> {
    let [m, s, kind, 0, a, b, c, d] = bytes else { return None };
    let kind = KINDS.get(usize::from(kind)).copied().filter(|_| [m, s] == MARK)?;
    Some((kind, u32::from_le_bytes([a, b, c, d]) as usize))
}

/// Appends a frame; `write` appends the body.
pub(super) fn frame(out: &mut Vec<u8>, kind: FrameKind, write: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&prefix(kind, 0));
    write(out);
    let len = out.len() - start - PREFIX;
    out[start..start + PREFIX].copy_from_slice(&prefix(kind, len));
}

pub(super) fn put_u64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_le_bytes());
}

/// Appends a text, or its first 16 KiB: a rank that fails must have room for its cause.
pub(super) fn put_text(out: &mut Vec<u8>, text: &str) {
    let text = &text[..text.floor_char_boundary(MOST_TEXT)];
    put_u64(out, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

pub(super) fn put_duration(out: &mut Vec<u8>, duration: Duration) {
    put_u64(out, duration.as_secs());
    put_u64(out, duration.subsec_nanos().into());
}

/// Appends a call.
pub(super) fn put_called(out: &mut Vec<u8>, called: &Called) {
    let (tag, a, b) = action_words(called.action);
    let dtype = DTYPES.iter().position(|dtype| *dtype == called.dtype).unwrap_or(DTYPES.len());
    out.extend_from_slice(&[tag, dtype as u8, u8::from(called.by.is_some())]);
    for word in [called.op_number, a, b, called.len as u64] {
        put_u64(out, word);
    }
    if let Some(name) = called.by {
        put_text(out, names::cut(name));
    }
}

fn action_words(action: Action) -> (u8, u64, u64) {
    match action {
        Action::AllReduce(reduction) => (0, reduction_tag(reduction), reduction.detail()),
        Action::ReduceScatter(reduction) => (1, reduction_tag(reduction), reduction.detail()),
        Action::AllGather => (2, 0, 0),
        Action::ReduceAndGather(reduction) => (10, reduction_tag(reduction), reduction.detail()),
        Action::AllToAll => (3, 0, 0),
        Action::Broadcast { root } => (4, root as u64, 0),
        Action::Send { to } => (5, to as u64, 0),
        Action::Recv { from } => (6, from as u64, 0),
        Action::Barrier => (7, 0, 0),
        Action::Split { color: None, key } => (8, 0, key.cast_unsigned()),
        Action::Split { color: Some(color), key } => (9, color.into(), key.cast_unsigned()),
    }
}

fn reduction_tag(reduction: Reduction) -> u64 {
    match reduction {
        Reduction::Sum => 0,
        Reduction::Mean => 1,
        Reduction::PreMulSum { .. } => 2,
        Reduction::Max => 3,
        Reduction::Min => 4,
        Reduction::SumThenMax { .. } => 5,
        Reduction::Pairwise => 6,
    }
}

/// Bytes that are read from the front. Each method returns `None` for bytes of another form.
#[derive(Clone, Copy, Debug)]
pub(super) struct FrameReader<'a>(pub(super) &'a [u8]);

impl<'a> FrameReader<'a> {
    pub(super) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (now, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(now)
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        Some(self.bytes(1)?[0])
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.bytes(8)?.try_into().ok()?))
    }

    pub(super) fn index(&mut self) -> Option<usize> {
        usize::try_from(self.u64()?).ok()
    }

    pub(super) fn text(&mut self) -> Option<&'a str> {
        let len = self.index()?;
        std::str::from_utf8(self.bytes(len)?).ok()
    }

    pub(super) fn duration(&mut self) -> Option<Duration> {
        let (seconds, nanos) = (self.u64()?, u32::try_from(self.u64()?).ok()?);
        (nanos < 1_000_000_000).then(|| Duration::new(seconds, nanos))
    }

    pub(super) fn called(&mut self) -> Option<Called> {
        let (tag, dtype, named) = (self.u8()?, self.u8()?, self.u8()?);
        let (op_number, a, b, len) = (self.u64()?, self.u64()?, self.u64()?, self.index()?);
        let dtype = *DTYPES.get(usize::from(dtype))?;
        let by = if named == 0 { None } else { names::intern(self.text()?) };
        Some(Called { op_number, action: action(tag, a, b)?, len, dtype, by })
    }
}

fn action(tag: u8, a: u64, b: u64) -> Option<Action> {
    let rank = usize::try_from(a).ok()?;
    let key = b.cast_signed();
    Some(match tag {
        0 => Action::AllReduce(reduction(a, b)?),
        1 => Action::ReduceScatter(reduction(a, b)?),
        2 => Action::AllGather,
        3 => Action::AllToAll,
        4 => Action::Broadcast { root: rank },
        5 => Action::Send { to: rank },
        6 => Action::Recv { from: rank },
        7 => Action::Barrier,
        8 => Action::Split { color: None, key },
        9 => Action::Split { color: Some(u32::try_from(a).ok()?), key },
        10 => Action::ReduceAndGather(reduction(a, b)?),
        _ => return None,
    })
}

fn reduction(tag: u64, detail: u64) -> Option<Reduction> {
    Some(match tag {
        0 => Reduction::Sum,
        1 => Reduction::Mean,
        2 => Reduction::PreMulSum { factor: f64::from_bits(detail) },
        3 => Reduction::Max,
        4 => Reduction::Min,
        5 => Reduction::SumThenMax { sums: usize::try_from(detail).ok()? },
        6 => Reduction::Pairwise,
        _ => return None,
    })
}

/// Appends an error that every rank repeats. An error of another kind travels as its text.
pub(super) fn put_error(out: &mut Vec<u8>, error: &Error) {
    match error {
        Error::Mismatch { op_number, calls } => put_mismatch(out, *op_number, calls),
        Error::Timeout { op_number, called, arrived, missing, after } => {
            out.push(1);
            put_u64(out, *op_number);
            put_called(out, called);
            put_ranks(out, arrived);
            put_ranks(out, missing);
            put_duration(out, *after);
        }
        Error::Left { rank, op_number } => put_ranked(out, 2, *rank, |out| put_u64(out, *op_number)),
        Error::Panicked { rank, message } => put_ranked(out, 3, *rank, |out| put_text(out, message)),
        Error::Aborted { rank } => put_ranked(out, 4, *rank, |_| {}),
        Error::Lost { rank, why } => put_ranked(out, 5, *rank, |out| put_text(out, why)),
        Error::Remote { rank, message } => put_ranked(out, 6, *rank, |out| put_text(out, message)),
        other => {
            out.push(7);
            put_text(out, &other.to_string());
        }
    }
}

fn put_ranked(out: &mut Vec<u8>, tag: u8, rank: usize, rest: impl FnOnce(&mut Vec<u8>)) {
    out.push(tag);
    put_u64(out, rank as u64);
    rest(out);
}

fn put_mismatch(out: &mut Vec<u8>, op_number: u64, calls: &[Option<Called>]) {
    out.push(0);
    put_u64(out, op_number);
    put_u64(out, calls.len() as u64);
    for call in calls {
        out.push(u8::from(call.is_some()));
        if let Some(call) = call {
            put_called(out, call);
        }
    }
}

fn put_ranks(out: &mut Vec<u8>, ranks: &[usize]) {
    put_u64(out, ranks.len() as u64);
    ranks.iter().for_each(|rank| put_u64(out, *rank as u64));
}

/// Reads an error that rank `from` found.
pub(super) fn read_error(reader: &mut FrameReader<'_>, from: usize) -> Option<Error> {
    Some(match reader.u8()? {
        0 => read_mismatch(reader)?,
        1 => Error::Timeout {
            op_number: reader.u64()?,
            called: Box::new(reader.called()?),
            arrived: read_ranks(reader)?,
            missing: read_ranks(reader)?,
            after: reader.duration()?,
        },
        2 => Error::Left { rank: reader.index()?, op_number: reader.u64()? },
        3 => Error::Panicked { rank: reader.index()?, message: reader.text()?.to_owned() },
        4 => Error::Aborted { rank: reader.index()? },
        5 => Error::Lost { rank: reader.index()?, why: reader.text()?.to_owned() },
        6 => Error::Remote { rank: reader.index()?, message: reader.text()?.to_owned() },
        7 => Error::Remote { rank: from, message: reader.text()?.to_owned() },
        _ => return None,
    })
}

fn read_mismatch(reader: &mut FrameReader<'_>) -> Option<Error> {
    let (op_number, count) = (reader.u64()?, reader.index()?);
    let mut calls = Vec::new();
    for _ in 0..count {
        calls.push(if reader.u8()? == 0 { None } else { Some(reader.called()?) });
    }
    Some(Error::Mismatch { op_number, calls })
}

fn read_ranks(reader: &mut FrameReader<'_>) -> Option<Vec<usize>> {
    let count = reader.index()?;
    let mut ranks = Vec::new();
    for _ in 0..count {
        ranks.push(reader.index()?);
    }
    Some(ranks)
}

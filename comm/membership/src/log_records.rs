//! Byte format of a log: records one after the other, of which the last one is valid.
//!
//! A record is its length and that length's complement, a checksum, the bytes, and an end mark that is not zero. Records are only
//! ever appended, and the arbiter sends nothing of a record before all of it is on the disk. So a record that is cut short, or ends
//! in zeros because the system had already allocated the space, was never sent to a worker and is left out. Any other damaged
//! record is an error: skipping it would revive the record before it, which contradicts messages already sent.

use crate::LogError;
use twox_hash::XxHash3_64;

/// The beginning of every log, with its version.
pub(super) const MAGIC: &[u8; 16] = b"meshstep members";
const VERSION: u64 = 2;
const HEAD: usize = 16;
const END: u8 = 0xa5;

/// Appends a record that begins at byte `at` of its log.
pub(super) fn put(payload: &[u8], at: usize, out: &mut Vec<u8>) {
    let len = payload.len() as u32;
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(&(!len).to_le_bytes());
    out.extend_from_slice(&sum(payload, at).to_le_bytes());
    out.extend_from_slice(payload);
    out.push(END);
}

fn sum(payload: &[u8], at: usize) -> u64 {
    XxHash3_64::oneshot_with_seed(VERSION << 48 ^ at as u64, payload)
}

/// The last whole record, and the end of the whole records: the bytes after it are to be cut off.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Read<'a> {
    pub(super) last: Option<&'a [u8]>,
    pub(super) end: usize,
}

/// Reads a log.
pub(super) fn read(log: &[u8]) -> Result<Read<'_>, LogError> {
    let Some(records) = log.strip_prefix(MAGIC) else {
        // The machine stopped while the first bytes were being written.
        let written = log.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        let begun = MAGIC.starts_with(&log[..written]);
        return if begun { Ok(Read { last: None, end: 0 }) } else { Err(LogError::NotALog) };
    };
    let mut read = Read { last: None, end: MAGIC.len() };
    let mut rest = records;
    while let Some((payload, after)) = record(rest, read.end)? {
        read = Read { last: Some(payload), end: log.len() - after.len() };
        rest = after;
    }
    Ok(read)
}

/// A record's payload, and the bytes after the record.
type Record<'a> = (&'a [u8], &'a [u8]);

/// Returns the first record; `None` if it is incomplete.
fn record(bytes: &[u8], at: usize) -> Result<Option<Record<'_>>, LogError> {
    let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() else { return Ok(None) };
    let word = |i: usize| u32::from_le_bytes([head[i], head[i + 1], head[i + 2], head[i + 3]]);
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    if word(0) != !word(4) {
        let torn = rest.iter().all(|byte| *byte == 0) && head[HEAD - 1] == 0;
        return if torn { Ok(None) } else { Err(LogError::Changed { at }) };
    }
    let Some((payload, after)) = rest.split_at_checked(word(0) as usize) else { return Ok(None) };
    let Some((end, after)) = after.split_first() else { return Ok(None) };
    let whole = *end == END && sum(payload, at).to_le_bytes() == head[8..];
    match (whole, end) {
        (true, _) => Ok(Some((payload, after))),
        (false, 0) if after.iter().all(|byte| *byte == 0) => Ok(None),
        (false, _) => Err(LogError::Changed { at }),
    }
}

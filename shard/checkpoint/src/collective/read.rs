//! One rank's reads of a checkpoint: its own elements, from windows that are checked as a whole.

use crate::error::CheckpointError;
use crate::format::catalog::{PieceRef, SlotRef};
use crate::format::local_pieces::Part;
use crate::format::manifest::{Type, WINDOW};
use crate::format::piece::Run;
use crate::store::direct_io::SLACK;
use crate::store::reader::{Saved, SavedFile, unreadable};
use crate::tensors::SavedTensor;
use meshstep_shard::extend::VectorKind as Slot;
use meshstep_tensor::{Buffer, Category, DType, Meter, SliceMut, cast};
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Request of this rank for elements of one vector, with the memory for them.
#[derive(Debug)]
pub(crate) struct Want<'a> {
    pub(crate) param: usize,
    pub(crate) slot: Slot,
    pub(crate) content: &'a SavedTensor,
    pub(crate) from: SlotRef<'a>,
    /// Elements of the local part of the parameter.
    pub(crate) range: Range<usize>,
    /// True if no other rank reads the same elements.
    pub(crate) once: bool,
    /// Name of the vector for errors.
    pub(crate) what: String,
    pub(crate) into: Buffer,
}

/// Share of a request: elements `range` of the local part.
struct Share<'w> {
    content: &'w SavedTensor,
    from: SlotRef<'w>,
    range: Range<usize>,
    once: bool,
    what: &'w str,
    into: SliceMut<'w>,
}

/// Number of concurrent readers: enough to keep a disk busy while some readers check and copy.
const READERS: usize = 8;

/// Bytes that one reader requests at once. Together the readers go through a file from its beginning to its end, the access pattern that
/// disks and the layers below them serve best.
const READ: u64 = 4 * WINDOW;

/// Reads all requests, several shares at a time.
pub(crate) fn read_all(saved: &Saved, wants: &mut [Want<'_>], meter: &Meter) -> Result<(), CheckpointError> {
    let bytes: usize = wants.iter().map(|want| want.into.len() * want.into.dtype().size()).sum();
    let pieces = wants.iter().flat_map(|want| want.from.pieces());
    let longest = pieces.map(|piece| piece.stored.bytes).max().unwrap_or(0);
    let mut shares = Vec::new();
    for want in wants {
        want.divide(&mut shares)?;
    }
    // Each reader has memory of its own, so there are no more readers than there is work for.
    let readers = READERS.min(shares.len()).min(bytes.div_ceil(READ as usize));
    let shares = Mutex::new(shares.into_iter().enumerate());
    let read = |mut reading: Reading<'_>| {
        loop {
            let next = shares.lock().unwrap_or_else(PoisonError::into_inner).next();
            let (i, share) = next?;
            if let Err(error) = reading.share(share, meter) {
                // Drop the remaining shares. Shares are handed out in order, so all earlier ones are done or in progress, and the first
                // error is found.
                shares.lock().unwrap_or_else(PoisonError::into_inner).by_ref().for_each(drop);
                return Some((i, error));
            }
        }
    };
    let reading = || Reading::of(saved, bytes as u64, longest, meter);
    let own = reading()?;
    let first = thread::scope(|scope| {
        let name = |_| thread::Builder::new().name("meshstep-read".to_owned());
        // If the system has no thread or memory left, there are fewer readers.
        let other = || reading().ok().and_then(read);
        let others: Vec<_> =
            (1..readers).map(name).filter_map(|new| new.spawn_scoped(scope, other).ok()).collect();
        let own = read(own);
        let others = others
            .into_iter()
            .filter_map(|reader| reader.join().unwrap_or_else(|panic| resume_unwind(panic)));
        others.chain(own).min_by_key(|(i, _)| *i)
    });
    first.map_or(Ok(()), |(_, error)| Err(error))
}

impl Want<'_> {
    /// Appends the shares of the request in order.
    fn divide<'w>(&'w mut self, shares: &mut Vec<Share<'w>>) -> Result<(), CheckpointError> {
        let Want { content, from, range, once, what, into, .. } = self;
        let (mut range, mut rest) = (range.clone(), into.as_mut());
        while !range.is_empty() {
            let end = cut(content, *from, &range);
            let (into, behind) = rest.split_at(end - range.start).map_err(CheckpointError::memory)?;
            shares.push(Share { content, from: *from, range: range.start..end, once: *once, what, into });
            (range.start, rest) = (end, behind);
        }
        Ok(())
    }
}

/// Returns the end of the share that begins where `range` does.
fn cut(content: &SavedTensor, from: SlotRef<'_>, range: &Range<usize>) -> usize {
    let size = from.dtype.size();
    let most = |reads: usize| range.end.min(range.start.saturating_add((READ / size) as usize * reads));
    let end = most(1);
    if end == range.end {
        return end;
    }
    let held = content.held();
    let mut pieces = Vec::new();
    for Part { global, local } in content.holding.parts(range.start as u64..end as u64) {
        let places: Vec<Run> = local.runs(&held).collect();
        let runs = from.pieces().map(|piece| join(piece.piece().runs(&global), &places));
        pieces.extend(runs.filter(|runs| !runs.is_empty()));
    }
    pieces.sort_by_key(|runs| runs.first().map(|run| run.to));
    let beside = |a: &Vec<Run>, b: &Vec<Run>| match (a.last(), b.first()) {
        (Some(last), Some(first)) => last.to + last.len > first.to,
        _ => false,
    };
    // Runs of several pieces interleave, as with columns: a longer share then reads equally much of each piece.
    if pieces.windows(2).any(|pair| beside(&pair[0], &pair[1])) {
        return most(pieces.len());
    }
    // The next share begins at a window of the last piece, so that no window is read for both shares.
    let Some((runs, last)) = pieces.last().and_then(|runs| Some((runs, runs.last()?))) else { return end };
    let window = (last.from + last.len) * size / WINDOW * WINDOW / size;
    let next = runs.iter().find(|run| run.from + run.len > window);
    let at = next.map(|run| (run.to + window.saturating_sub(run.from)) as usize);
    at.filter(|&at| at > range.start).unwrap_or(end)
}

/// Reader of shares, with memory for one request.
#[derive(Debug)]
struct Reading<'s> {
    saved: &'s Saved,
    room: Buffer,
    /// File that was read last.
    file: Option<((usize, bool), SavedFile)>,
}

impl<'s> Reading<'s> {
    /// Makes a reader for requests of `bytes` in total, from pieces of at most `longest` bytes. No window is longer than its piece.
    fn of(saved: &'s Saved, bytes: u64, longest: u64, meter: &Meter) -> Result<Self, CheckpointError> {
        let room = if longest < WINDOW { longest } else { bytes.next_multiple_of(WINDOW).min(READ) };
        let words = (room as usize + SLACK).div_ceil(size_of::<u64>());
        let room = Buffer::zeroed(words, DType::U64, meter, Category::Staging);
        Ok(Reading { saved, room: room.map_err(CheckpointError::memory)?, file: None })
    }

    fn share(&mut self, share: Share<'_>, meter: &Meter) -> Result<(), CheckpointError> {
        let Share { content, from: slot, range, once, what, into } = share;
        let mut to = Target::new(into, range.start as u64, slot.dtype, meter)?;
        let held = content.held();
        for Part { global, local } in content.holding.parts(range.start as u64..range.end as u64) {
            // The same elements in the whole local part.
            let places: Vec<Run> = local.runs(&held).collect();
            for piece in slot.pieces() {
                let runs = join(piece.piece().runs(&global), &places);
                self.piece((&piece, once), slot.dtype.size(), &runs, what, &mut to)?;
            }
        }
        Ok(())
    }

    /// Reads runs of one piece; runs near each other are read at once.
    fn piece(
        &mut self,
        (entry, once): (&PieceRef<'_>, bool),
        size: u64,
        runs: &[Run],
        what: &str,
        to: &mut Target<'_>,
    ) -> Result<(), CheckpointError> {
        for runs in runs.chunk_by(near(size)) {
            let (Some(first), Some(last)) = (runs.first(), runs.last()) else { continue };
            let (start, end) = (first.from * size, (last.from + last.len) * size);
            let (file, mut room) = self.file(entry.stored.file, once, what)?;
            let room = room.bytes_mut().map_err(CheckpointError::memory)?;
            let mut rest = runs;
            file.read_part(&entry.stored, (start, end), room, what, |at, part| {
                rest = to.scatter(rest, at / size, size, part)?;
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Returns file `index`, for a read of `what`.
    fn file(
        &mut self,
        index: usize,
        once: bool,
        what: &str,
    ) -> Result<(&SavedFile, SliceMut<'_>), CheckpointError> {
        if self.file.as_ref().is_none_or(|(open, _)| *open != (index, once)) {
            let file = self.saved.file(index).map_err(|error| unreadable(what, error))?;
            self.file = Some(((index, once), file.once(once)));
        }
        let (_, file) = self.file.as_ref().unwrap_or_else(|| unreachable!("opened above"));
        Ok((file, self.room.as_mut()))
    }
}

/// Returns true for two runs that are better read at once than one after the other; `size` is that of an element.
pub(crate) fn near(size: u64) -> impl Fn(&Run, &Run) -> bool {
    move |a, b| (b.from - (a.from + a.len)) * size < WINDOW
}

/// Memory that elements are copied to.
#[derive(Debug)]
pub(crate) struct Target<'a> {
    into: SliceMut<'a>,
    /// Index of its first element in the local part.
    first: u64,
    /// Buffer to convert from, if the types differ.
    room: Option<Buffer>,
}

impl<'a> Target<'a> {
    /// Makes a target from `into`, which begins at element `first` of the local part, for elements of type `saved`.
    pub(crate) fn new(
        into: SliceMut<'a>,
        first: u64,
        saved: Type,
        meter: &Meter,
    ) -> Result<Self, CheckpointError> {
        let dtype = saved.dtype().ok_or_else(|| CheckpointError::memory("bytes are no numbers"))?;
        if into.dtype() == dtype {
            return Ok(Target { into, first, room: None });
        }
        let most = into.len().min(READ as usize / dtype.size());
        let room = Buffer::zeroed(most, dtype, meter, Category::Staging);
        Ok(Target { into, first, room: Some(room.map_err(CheckpointError::memory)?) })
    }

    /// Copies the elements of `runs` that lie in `bytes`, the piece's elements from `at` on; returns the runs that go on behind them.
    pub(crate) fn scatter<'r>(
        &mut self,
        runs: &'r [Run],
        at: u64,
        size: u64,
        bytes: &[u8],
    ) -> Result<&'r [Run], CheckpointError> {
        let end = at + bytes.len() as u64 / size;
        for (i, run) in runs.iter().enumerate() {
            let (from, until) = (run.from.max(at), (run.from + run.len).min(end));
            if from < until {
                let part = &bytes[((from - at) * size) as usize..((until - at) * size) as usize];
                self.put(run.to + (from - run.from) - self.first, (until - from) as usize, part)?;
            }
            if run.from + run.len > end {
                return Ok(&runs[i..]);
            }
        }
        Ok(&[])
    }

    fn put(&mut self, at: u64, len: usize, bytes: &[u8]) -> Result<(), CheckpointError> {
        let memory = CheckpointError::memory::<meshstep_tensor::Error>;
        let mut into = self.into.reborrow().slice(at as usize..at as usize + len).map_err(memory)?;
        match &mut self.room {
            None => into.bytes_mut().map_err(memory)?.copy_from_slice(bytes),
            Some(room) => {
                let mut values = room.as_mut().slice(0..len).map_err(memory)?;
                values.bytes_mut().map_err(memory)?.copy_from_slice(bytes);
                cast(values.as_slice(), into).map_err(memory)?;
            }
        }
        Ok(())
    }
}

/// Composes runs from a piece to a part with runs from that part to the local tensor. Both ascend in the part.
pub(crate) fn join(into_part: impl Iterator<Item = Run>, places: &[Run]) -> Vec<Run> {
    let mut joined = Vec::new();
    for run in into_part {
        let first = places.partition_point(|place| place.from + place.len <= run.to);
        for place in places[first..].iter().take_while(|place| place.from < run.to + run.len) {
            let (start, end) = (run.to.max(place.from), (run.to + run.len).min(place.from + place.len));
            joined.push(Run {
                from: run.from + (start - run.to),
                to: place.to + (start - place.from),
                len: end - start,
            });
        }
    }
    joined
}

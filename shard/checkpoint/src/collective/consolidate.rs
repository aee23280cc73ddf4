//! Whole vectors on one rank, one window at a time, from all ranks that have elements of them.

use super::ranks::Ranks;
use super::read::join;
use super::writer_election;
use super::writer_election::{claims, parts};
use crate::contents::Saveable;
use crate::error::CheckpointError;
use crate::failure::Error;
use crate::format::coverage;
use crate::format::local_pieces::Part;
use crate::format::manifest::Type;
use crate::format::piece::{Piece, Region, Run};
use crate::format::placement::ModelPlacement;
use crate::parts::{SavedParts, compare_counters};
use crate::tensors::{Named, SavedTensor};
use meshstep_comm::Op;
use meshstep_shard::extend::OptimizerShard;
use meshstep_shard::extend::host_words;
use meshstep_tensor::{Buffer, Category, DType, Slice};
use std::collections::BTreeMap;

/// Elements of a window: 16 MiB of the widest type.
const WINDOW: u64 = 2 << 20;

/// Word behind valid elements in a message; a sender that failed writes zero instead.
const SENT: u64 = u64::from_le_bytes(*b"elements");

/// Elements of a whole vector that are contiguous in row-major order.
///
/// [`consolidate`] has an example with one sink; this one counts elements by vector:
///
/// ```
/// use meshstep_checkpoint::{Window, consolidate};
/// use meshstep_shard::prelude::*;
///
/// loopback::spawn(1, |comm| -> Result<(), meshstep_checkpoint::Error> {
///     let layout = Layout::builder().param("w", &[3], DType::F32).build()?;
///     let mut opt = Optimizer::new(comm, layout, Sgd::default(), |_, _| Ok(()), Options::default())?;
///     let mut elements = 0;
///     consolidate(&mut opt, 0, &mut |Window { values, .. }| {
///         elements += values.len();
///         Ok(())
///     })?;
///     assert_eq!(elements, 3);
///     Ok(())
/// })?.into_iter().collect::<Result<(), _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Window<'a> {
    /// Name of the parameter.
    pub param: &'a str,
    /// Name of the vector: `param`, `master`, `remainder`, or the rule's name for it.
    pub slot: &'a str,
    /// Shape of the whole parameter.
    pub shape: &'a [u64],
    /// Type of the values.
    pub dtype: Type,
    /// Index of the first element.
    pub at: u64,
    /// Values in host memory.
    pub values: Slice<'a>,
}

/// Receiver of windows. An error from it ends the call on every rank.
pub type Sink<'a> = &'a mut dyn FnMut(Window<'_>) -> Result<(), CheckpointError>;

/// Passes parameters and state to `sink` on rank `to`, as if there were one rank: parameter by parameter, vector by vector, windows in
/// ascending order. On other ranks `sink` is not called. Collective over the ranks of one group, between two steps; each group of a
/// [`CrossShard`](meshstep_shard::CrossShard), and each worker, has a rank `to` of its own.
///
/// Beside the memory of `sink`, rank `to` needs two windows of at most 16 MiB, and other ranks need one. An error is the same on every
/// rank, and changes nothing here.
///
/// ```
/// # use meshstep_optim::AdamW;
/// # use meshstep_checkpoint::{CheckpointError, Error, consolidate};
/// # use meshstep_shard::{Optimizer, Options, Stage};
/// # use meshstep_tensor::{DType, Layout};
/// let whole = meshstep_comm::loopback::spawn(3, |comm| -> Result<Vec<String>, Error> {
///     # let layout = Layout::builder().param("w", &[3, 5], DType::F32).build()?;
///     let options = Options { stage: Stage::Zero2, ..Options::default() };
///     let mut opt = Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), options)?;
///     let mut seen = Vec::new();
///     consolidate(&mut opt, 1, &mut |window| {
///         let values: &[f32] = window.values.typed().map_err(|error| CheckpointError::Memory { message: error.to_string() })?;
///         seen.push(format!("{}:{} has {}", window.param, window.slot, values.len()));
///         Ok(())
///     })?;
///     Ok(seen)
/// })?;
/// let whole = whole.into_iter().collect::<Result<Vec<_>, _>>()?;
/// assert!(whole[0].is_empty() && whole[2].is_empty());
/// assert_eq!(whole[1], ["w:param has 15", "w:m has 15", "w:v has 15"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn consolidate<T: Saveable + ?Sized>(thing: &mut T, to: usize, sink: Sink<'_>) -> Result<(), Error> {
    let mut contents = thing.contents();
    let (parts, placing) = contents.of_group();
    let mut sources = Sources::of(parts, &format!("consolidate to rank {to}"), to, &*placing)?;
    parts.apart(|parts| {
        for param in 0..sources.contents.len() {
            for vector in sources.contents[param].vectors.clone() {
                sources.hand_over(parts, param, &vector, sink)?;
            }
        }
        Ok(())
    })
}

/// Sources of all elements.
#[derive(Debug)]
pub(crate) struct Sources {
    pub(crate) ranks: Ranks,
    pub(crate) contents: Vec<SavedTensor>,
    /// Pieces that cover each parameter, with the rank that each comes from.
    pieces: Vec<Vec<(Piece, usize)>>,
    /// This rank's pieces of each parameter, with their places in the local part.
    own: Vec<Vec<(Piece, Vec<Run>)>>,
    to: usize,
    /// Message buffer, in words of 8 bytes, which hold any type. The last word says if the message is valid.
    room: Buffer,
    /// Window that is being assembled, on rank `to`.
    window: Option<Buffer>,
}

impl Sources {
    /// Elects the senders. Collective.
    pub(crate) fn of(
        parts: &mut dyn SavedParts,
        call: &str,
        to: usize,
        placing: &dyn ModelPlacement,
    ) -> Result<Self, Error> {
        let opt = parts.optimizer();
        opt.healthy()?;
        let ready = opt.between_two_steps();
        opt.call_together(call, ready)?;
        let world_size = opt.comm().world_size();
        if to >= world_size {
            let error = meshstep_comm::Error::InvalidRank { rank: to, world_size };
            return Err(error.into());
        }
        parts.apart(|parts| {
            compare_counters(parts.optimizer())?;
            Sources::new(parts.group(), parts.tensors(placing), to)
        })
    }

    fn new(
        ranks: Ranks,
        contents: Result<Vec<SavedTensor>, CheckpointError>,
        to: usize,
    ) -> Result<Self, Error> {
        let contents = ranks.agree(contents)?;
        let parts = parts(&contents);
        let claims = ranks.gather(&serde_json::to_vec(&claims(&contents, &parts)).unwrap_or_default())?;
        let (queue, meter) = ranks.memory();
        let words = contents.iter().map(SavedTensor::elements).max().unwrap_or(0).min(WINDOW) as usize + 1;
        let room = Buffer::zeroed_on(queue, words, DType::U64, meter, Category::Staging);
        let made = elect(&contents, &claims, to)
            .and_then(|pieces| Ok((pieces, room.map_err(CheckpointError::memory)?)));
        let (pieces, room) = ranks.agree(made)?;
        let mut own = vec![Vec::new(); contents.len()];
        for (i, Part { global, local }) in parts {
            let places = local.runs(&contents[i].held()).collect();
            own[i].push((global, places));
        }
        Ok(Sources { ranks, contents, pieces, own, to, room, window: None })
    }

    fn receives(&self) -> bool {
        self.ranks.rank() == self.to
    }

    /// Passes one vector to `sink`. Collective; the first error of `sink` is every rank's.
    pub(crate) fn hand_over(
        &mut self,
        from: &mut dyn SavedParts,
        param: usize,
        vector: &Named,
        sink: Sink<'_>,
    ) -> Result<(), Error> {
        let mut so_far = if self.receives() { self.make_window(vector) } else { Ok(()) };
        let (len, shape) = (self.contents[param].elements(), self.contents[param].holding.shape.clone());
        let (mut at, mut sent) = (0, true);
        while at < len {
            let range = at..len.min(at + WINDOW);
            let window = Piece { region: Region::whole(&shape), range: range.clone() };
            for i in 0..self.pieces[param].len() {
                match self.piece(from, (param, i), vector, &window)? {
                    Ok(whole) => sent &= whole,
                    Err(error) => so_far = so_far.and(Err(error)),
                }
            }
            // After missing elements `sink` gets none; the error comes from their sender.
            if self.receives() && sent {
                so_far = so_far.and_then(|()| self.give(param, vector, range.clone(), sink));
            }
            at = range.end;
        }
        self.ranks.agree(so_far)
    }

    fn make_window(&mut self, vector: &Named) -> Result<(), CheckpointError> {
        let dtype = vector.dtype.dtype().ok_or_else(|| CheckpointError::memory("bytes are no numbers"))?;
        if self.window.as_ref().is_none_or(|window| window.dtype() != dtype) {
            // Free the old window first.
            self.window = None;
            let (_, meter) = self.ranks.memory();
            let made = Buffer::zeroed(self.room.len() - 1, dtype, meter, Category::Staging);
            self.window = Some(made.map_err(CheckpointError::memory)?);
        }
        Ok(())
    }

    /// Brings a piece's elements of the window to rank `to`; returns true if they are there. An outer error ends the communicator; after an
    /// inner error the exchange goes on, so that no rank waits for another.
    fn piece(
        &mut self,
        from: &mut dyn SavedParts,
        (param, i): (usize, usize),
        vector: &Named,
        window: &Piece,
    ) -> Result<Result<bool, CheckpointError>, meshstep_shard::Error> {
        let (piece, rank) = &self.pieces[param][i];
        let runs: Vec<Run> = window.runs(piece).collect();
        let (elements, sender) = (runs.iter().map(|run| run.len).sum::<u64>(), *rank);
        let sends = self.ranks.rank() == sender;
        if elements == 0 || !(sends || self.receives()) {
            return Ok(Ok(true));
        }
        let mut moved = Ok(true);
        let places = if sends { self.places(param, piece.clone(), window) } else { Vec::new() };
        if sends && self.receives() {
            return Ok(self.copy(from, param, vector, &places).map(|()| true));
        }
        let words = (elements * vector.dtype.size()).div_ceil(8) as usize + 1;
        let rest = self.room.split_off(words)?;
        if sends {
            moved = self.pack(from, param, vector, &places).map(|()| true);
            if moved.is_err() {
                self.seal(words - 1, 0)?;
            }
        }
        let op = if sends { Op::send(self.to) } else { Op::recv(sender) };
        let travelled = self.ranks.travel(op, &mut self.room);
        if travelled.is_ok() && !sends {
            moved = self.unpack(&runs, vector.dtype.size() as usize);
        }
        self.room = self.room.take().join(rest).unwrap_or_else(|_| unreachable!("joined where it was cut"));
        travelled.map(|()| moved)
    }

    /// Returns runs from the intersection of `window` and one of this rank's pieces to the local part.
    fn places(&self, param: usize, piece: Piece, window: &Piece) -> Vec<Run> {
        let same = |(own, _): &&(Piece, Vec<Run>)| *own == piece;
        let own = self.own[param].iter().find(same);
        own.map_or(Vec::new(), |(piece, places)| join(window.runs(piece), places))
    }

    /// Copies elements from this rank to its own window.
    fn copy(
        &mut self,
        from: &mut dyn SavedParts,
        param: usize,
        vector: &Named,
        places: &[Run],
    ) -> Result<(), CheckpointError> {
        let Some(window) = &mut self.window else { return Ok(()) };
        let (queue, _) = self.ranks.memory();
        let (first, values) = from.vector(param, vector.slot).map_err(CheckpointError::memory)?;
        for run in places {
            let (start, into) = (run.to as usize - first, run.from as usize);
            let len = run.len as usize;
            let part = values.slice(start..start + len).map_err(CheckpointError::memory)?;
            let into = window.as_mut().slice(into..into + len).map_err(CheckpointError::memory)?;
            queue.download(part, into).map_err(CheckpointError::memory)?;
        }
        Ok(())
    }

    /// Writes word `at` of a message, which says if the message is valid.
    fn seal(&mut self, at: usize, word: u64) -> Result<(), meshstep_shard::Error> {
        let (queue, _) = self.ranks.memory();
        Ok(queue.upload((&[word][..]).into(), self.room.as_mut().slice(at..at + 1)?)?)
    }

    /// Packs the runs end to end into the message, followed by the word for a valid message.
    fn pack(
        &mut self,
        from: &mut dyn SavedParts,
        param: usize,
        vector: &Named,
        places: &[Run],
    ) -> Result<(), CheckpointError> {
        let (queue, meter) = self.ranks.memory();
        let (first, values) = from.vector(param, vector.slot).map_err(CheckpointError::memory)?;
        let packed = host_words::fill(queue, meter, self.room.as_mut(), |mut room| {
            let (room, mut at) = (room.bytes_mut()?, 0);
            for run in places {
                let start = run.to as usize - first;
                let part = values.slice(start..start + run.len as usize)?;
                host_words::read(queue, meter, part, |part| {
                    let bytes = part.bytes()?;
                    room[at..at + bytes.len()].copy_from_slice(bytes);
                    at += bytes.len();
                    Ok(())
                })?;
            }
            let end = room.len() - 8;
            room[end..].copy_from_slice(&SENT.to_le_bytes());
            Ok(())
        });
        packed.map_err(CheckpointError::memory)
    }

    /// Unpacks the message into the window; returns false for a message that is not valid.
    fn unpack(&mut self, runs: &[Run], size: usize) -> Result<bool, CheckpointError> {
        let Some(window) = &mut self.window else { return Ok(false) };
        let (queue, meter) = self.ranks.memory();
        let unpacked = host_words::read(queue, meter, self.room.as_slice(), |room| {
            let (room, mut into, mut at) = (room.bytes()?, window.as_mut(), 0);
            if !room.ends_with(&SENT.to_le_bytes()) {
                return Ok(false);
            }
            let into = into.bytes_mut()?;
            for run in runs {
                let (start, bytes) = (run.from as usize * size, run.len as usize * size);
                into[start..start + bytes].copy_from_slice(&room[at..at + bytes]);
                at += bytes;
            }
            Ok(true)
        });
        unpacked.map_err(CheckpointError::memory)
    }

    fn give(
        &self,
        param: usize,
        vector: &Named,
        range: std::ops::Range<u64>,
        sink: Sink<'_>,
    ) -> Result<(), CheckpointError> {
        let Some(window) = &self.window else { return Ok(()) };
        let SavedTensor { name, holding, .. } = &self.contents[param];
        let len = (range.end - range.start) as usize;
        let values = window.as_slice().slice(0..len).map_err(CheckpointError::memory)?;
        let (slot, dtype) = (&*vector.name, vector.dtype);
        sink(Window { param: name, slot, shape: &holding.shape, dtype, at: range.start, values })
    }
}

/// Elects the rank that each piece comes from: `to` if it has the piece, else the first rank that has it.
fn elect(
    contents: &[SavedTensor],
    claims: &[Vec<u8>],
    to: usize,
) -> Result<Vec<Vec<(Piece, usize)>>, CheckpointError> {
    let mut first: Vec<BTreeMap<(Region, u64), (Piece, usize)>> = vec![BTreeMap::new(); contents.len()];
    let order = std::iter::once(to).chain((0..claims.len()).filter(|&rank| rank != to));
    for rank in order {
        let claims: Vec<writer_election::WriterClaim> =
            serde_json::from_slice(&claims[rank]).map_err(CheckpointError::memory)?;
        for (param, piece, _) in claims {
            let Some(of) = first.get_mut(param) else { continue };
            of.entry((piece.region.clone(), piece.range.start)).or_insert((piece, rank));
        }
    }
    let whole = |(content, pieces): (&SavedTensor, BTreeMap<_, (Piece, usize)>)| {
        let pieces: Vec<(Piece, usize)> = pieces.into_values().collect();
        let covered = coverage::check(&content.holding.shape, pieces.iter().map(|(piece, _)| piece));
        let (tensor, slot) = (content.name.clone(), crate::tensors::PARAM.to_owned());
        covered.map_err(|source| CheckpointError::Cover { tensor, slot, source })?;
        Ok(pieces)
    };
    contents.iter().zip(first).map(whole).collect()
}

#[cfg(test)]
mod tests;

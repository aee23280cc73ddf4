//! One rank's parameters and state as bytes in memory, for the same rank of the same layout.
//!
//! ```text
//! "MESHSTEP", length of the header (8 bytes), header (JSON), vectors end to end, BLAKE3 hash of everything before (32 bytes)
//! ```

use super::compatibility::MOST_UPDATES;
use super::load::take_in;
use crate::bytes_error::BytesError;
use crate::contents::Saveable;
use crate::error::CheckpointError;
use crate::failure::Error;
use crate::format::manifest::Type;
use crate::format::mismatch::Mismatch;
use crate::format::piece::Region;
use crate::format::placement::ModelPlacement;
use crate::format::run_id::random;
use crate::format::settings::Settings;
use crate::parts::{CheckpointCall, SavedParts, compare_counters};
use crate::tensors::{Named, SavedTensor};
use meshstep_shard::Options;
use meshstep_shard::extend::host_words;
use meshstep_shard::extend::{OptimizerShard, VectorKind as Slot};
use meshstep_tensor::{Buffer, Category, Slice};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

const MAGIC: &[u8; 8] = b"MESHSTEP";
const FORMAT: u32 = 1;
const HASH: usize = 32;

/// Maximum number of bytes fetched at once.
const WINDOW: usize = 16 << 20;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    format: u32,
    /// Random word shared by the bytes of ranks that serialized together.
    moment: u64,
    mesh: String,
    rank: usize,
    ranks: usize,
    settings: BTreeMap<String, Value>,
    t: Vec<u64>,
    vectors: Vec<HeldVector>,
}

/// Local part of a vector.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeldVector {
    param: String,
    slot: String,
    dtype: Type,
    /// Shape of the whole parameter, and the boxes of it that the rank holds.
    shape: Vec<u64>,
    boxes: Vec<(Region, Region)>,
    /// Elements of the local part.
    range: [usize; 2],
}

/// Returns this rank's parameters, state and progress as bytes: for a later return to this moment, or for the same rank of another group
/// of the same layout. Ranks, stage and buckets must be the same there; another layout needs a [`save`](super::save::save), which can also
/// go to memory through a [`Disk`](crate::Disk) that all ranks share. Collective over the ranks of one group, between two
/// steps, so that all ranks' bytes are of one moment; an error is the same on every rank. Workers are
/// [not supported](CheckpointError::Unsupported).
pub fn serialize<T: Saveable + ?Sized>(thing: &mut T) -> Result<Vec<u8>, Error> {
    let mut contents = thing.contents();
    let (parts, placing) = contents.for_group(CheckpointCall::Serialize)?;
    let opt = parts.optimizer();
    opt.healthy()?;
    let ready = opt.between_two_steps();
    opt.call_together("serialize", ready)?;
    let ranks = parts.group();
    parts.apart(|parts| {
        compare_counters(parts.optimizer())?;
        let moment = ranks.first_word(random())?;
        ranks.agree(to_bytes(parts, moment, &*placing))
    })
}

/// Takes in bytes that [`serialize`] made on the same rank of the same layout; later steps are the same as without the interruption.
/// Collective over the ranks of one group, between two steps: all ranks take in bytes of one moment, or the same error is returned on every
/// rank and nothing has changed on any. Needs additional memory of the size of the bytes.
pub fn deserialize<T: Saveable + ?Sized>(thing: &mut T, bytes: &[u8]) -> Result<(), Error> {
    let mut contents = thing.contents();
    let (parts, placing) = contents.for_group(CheckpointCall::Deserialize)?;
    let opt = parts.optimizer();
    opt.healthy()?;
    let ready = opt.between_two_steps();
    opt.call_together("deserialize", ready)?;
    let ranks = parts.group();
    parts.apart(|parts| {
        let Staged { moment, vectors, t, settings } = ranks.agree(stage(parts, bytes, &*placing))?;
        let (text, opt) = (format!("moment of the bytes = {moment:016x}\n"), parts.optimizer());
        meshstep_shard::same_everywhere(&**opt.comm(), opt.options(), &text)?;
        take_in(parts, &vectors, &t, &settings)
    })
}

fn to_bytes(
    parts: &mut dyn SavedParts,
    moment: u64,
    placing: &dyn ModelPlacement,
) -> Result<Vec<u8>, CheckpointError> {
    let contents = parts.tensors(placing)?;
    let settings = parts.all_settings(placing).members().clone();
    let header = Header::new(parts, moment, placing, &contents, settings)?;
    let text = serde_json::to_vec(&header).map_err(CheckpointError::memory)?;
    let data = header.vectors.iter().map(HeldVector::bytes).sum::<usize>();
    let mut bytes = Vec::new();
    let all = MAGIC.len() + 8 + text.len() + data + HASH;
    bytes.try_reserve_exact(all).map_err(CheckpointError::memory)?;
    bytes.extend(MAGIC);
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text);
    for (param, content) in contents.iter().enumerate() {
        for vector in &content.vectors {
            append(parts, param, vector, &mut bytes)?;
        }
    }
    bytes.extend(blake3::hash(&bytes).as_bytes());
    Ok(bytes)
}

fn append(
    parts: &mut dyn SavedParts,
    param: usize,
    vector: &Named,
    to: &mut Vec<u8>,
) -> Result<(), CheckpointError> {
    let Options { queue, meter, .. } = parts.optimizer().options().clone();
    let (_, values) = parts.vector(param, vector.slot).map_err(CheckpointError::memory)?;
    let at_once = WINDOW / values.dtype().size();
    let mut fetch = |from: usize| {
        let part = values.slice(from..values.len().min(from + at_once))?;
        host_words::read(&queue, &meter, part, |part: Slice<'_>| {
            to.extend(part.bytes()?);
            Ok(())
        })
    };
    (0..values.len()).step_by(at_once).try_for_each(&mut fetch).map_err(CheckpointError::memory)
}

/// Everything that is taken in once all ranks have read.
struct Staged {
    moment: u64,
    vectors: Vec<(usize, Slot, Buffer)>,
    t: Vec<Option<u64>>,
    settings: Settings,
}

fn stage(
    parts: &mut dyn SavedParts,
    bytes: &[u8],
    placing: &dyn ModelPlacement,
) -> Result<Staged, CheckpointError> {
    let (header, mut data) = read(bytes)?;
    let contents = parts.tensors(placing)?;
    let here = Header::new(parts, header.moment, placing, &contents, BTreeMap::new())?;
    header.check(&here, data.len())?;
    let settings = Settings::new(header.settings);
    parts.compare_settings(&settings, &parts.all_settings(placing)).map_err(other_setting)?;
    parts.check(&settings)?;
    let meter = parts.optimizer().options().meter.clone();
    let mut vectors = Vec::new();
    let mut held = header.vectors.iter();
    for (param, content) in contents.iter().enumerate() {
        for (vector, held) in content.vectors.iter().zip(&mut held) {
            let (own, rest) = data.split_at(held.bytes());
            data = rest;
            let (_, values) = parts.vector(param, vector.slot).map_err(CheckpointError::memory)?;
            let room = Buffer::zeroed(values.len(), values.dtype(), &meter, Category::Staging);
            let mut room = room.map_err(CheckpointError::memory)?;
            room.as_mut().bytes_mut().map_err(CheckpointError::memory)?.copy_from_slice(own);
            vectors.push((param, vector.slot, room));
        }
    }
    let t = header.t.into_iter().map(Some).collect();
    Ok(Staged { moment: header.moment, vectors, t, settings })
}

impl HeldVector {
    fn bytes(&self) -> usize {
        (self.range[1] - self.range[0]) * self.dtype.size() as usize
    }
}

impl Header {
    fn new(
        parts: &mut dyn SavedParts,
        moment: u64,
        placing: &dyn ModelPlacement,
        contents: &[SavedTensor],
        settings: BTreeMap<String, Value>,
    ) -> Result<Self, CheckpointError> {
        let mut vectors = Vec::new();
        for (param, SavedTensor { name, holding, vectors: named, .. }) in contents.iter().enumerate() {
            for vector in named {
                let (first, values) = parts.vector(param, vector.slot).map_err(CheckpointError::memory)?;
                vectors.push(HeldVector {
                    param: name.clone(),
                    slot: vector.name.clone(),
                    dtype: vector.dtype,
                    shape: holding.shape.clone(),
                    boxes: holding.boxes.clone(),
                    range: [first, first + values.len()],
                });
            }
        }
        let comm = parts.optimizer().comm();
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let t = contents.iter().map(|content| content.t).collect();
        Ok(Header { format: FORMAT, moment, mesh: placing.mesh(), rank, ranks, settings, t, vectors })
    }

    /// Checks that the bytes were made by the same rank of the same layout as `here`.
    fn check(&self, here: &Header, data: usize) -> Result<(), BytesError> {
        let same = |what: &str, there: String, here: String| match there == here {
            true => Ok(()),
            false => Err(BytesError::Other { what: what.to_owned(), there, here }),
        };
        same("the format", self.format.to_string(), here.format.to_string())?;
        let place = |header: &Header| format!("{} of {} on {}", header.rank, header.ranks, header.mesh);
        same("the rank", place(self), place(here))?;
        for (a, b) in self.vectors.iter().zip(&here.vectors) {
            let show = |held: &HeldVector| {
                let HeldVector { param, slot, dtype, shape, boxes, range } = held;
                format!("{slot:?} of {param:?}, {dtype:?} {shape:?} in {} boxes, {range:?}", boxes.len())
            };
            if a != b {
                let what = "a vector".to_owned();
                return Err(BytesError::Other { what, there: show(a), here: show(b) });
            }
        }
        if let Some(t) = self.t.iter().find(|&&t| t >= MOST_UPDATES) {
            return Err(damaged(format!("{t} is no count of updates")));
        }
        let count = |header: &Header| format!("{} of {} tensors", header.vectors.len(), header.t.len());
        same("the number of vectors", count(self), count(here))?;
        match here.vectors.iter().map(HeldVector::bytes).sum::<usize>() == data {
            true => Ok(()),
            false => Err(damaged(format!("{data} bytes of vectors"))),
        }
    }
}

/// Returns the header and the bytes of the vectors.
fn read(bytes: &[u8]) -> Result<(Header, &[u8]), BytesError> {
    let short = || damaged(format!("there are {} bytes, too few", bytes.len()));
    let body = bytes.len().checked_sub(HASH).ok_or_else(short)?;
    let (body, hash) = bytes.split_at(body);
    if blake3::hash(body).as_bytes() != hash {
        return Err(damaged("their hash does not match".to_owned()));
    }
    let rest = body.strip_prefix(MAGIC).ok_or_else(|| damaged("their magic differs".to_owned()))?;
    let (len, rest) = rest.split_first_chunk::<8>().ok_or_else(short)?;
    let len = usize::try_from(u64::from_le_bytes(*len)).ok().filter(|&len| len <= rest.len());
    let (text, data) = rest.split_at(len.ok_or_else(short)?);
    let header = serde_json::from_slice(text).map_err(|error| damaged(error.to_string()))?;
    Ok((header, data))
}

fn damaged(reason: String) -> BytesError {
    BytesError::Damaged { reason }
}

fn other_setting(error: CheckpointError) -> CheckpointError {
    match error {
        CheckpointError::Mismatch(Mismatch::Setting { what, saved, here }) => {
            BytesError::Other { what, there: saved, here }.into()
        }
        other => other,
    }
}

//! File that is read in hashed grains, which shows if all ranks have read the same file.

use super::error::PyTorchError;
use crate::collective::ranks::Ranks;
use crate::error::{CheckpointError, io};
use crate::failure::Error;
use crate::store::disk::Reader;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use twox_hash::XxHash3_64;

/// Number of bytes that share one hash and are read together.
pub(super) const GRAIN: u64 = 256 << 10;

/// Number of grains that rank 0 reads at once while it hashes the whole file.
const AT_ONCE: u64 = 4;

/// Number of grains with hashes in one exchange; rank 0 reads them while other ranks wait.
const TOGETHER: u64 = 4096;

/// File, and the grains read of it.
#[derive(Debug)]
pub(super) struct Grains {
    file: Box<dyn Reader>,
    pub(super) path: PathBuf,
    bytes: u64,
    /// Hash of each grain that was read.
    hashes: BTreeMap<u64, u64>,
    /// Grains in `room`: the ones read last.
    here: Range<u64>,
    room: Vec<u8>,
}

impl Grains {
    pub(super) fn new(file: Box<dyn Reader>, path: PathBuf, bytes: u64) -> Self {
        Grains { file, path, bytes, hashes: BTreeMap::new(), here: 0..0, room: Vec::new() }
    }

    /// Returns bytes of the file.
    pub(super) fn read(&mut self, at: u64, len: u64) -> Result<&[u8], CheckpointError> {
        if len == 0 {
            return Ok(&[]);
        }
        self.load(at / GRAIN..(at + len).div_ceil(GRAIN))?;
        let start = (at - self.here.start * GRAIN) as usize;
        Ok(&self.room[start..start + len as usize])
    }

    /// Checks that the bytes read by all ranks are in rank 0's file. Collective.
    ///
    /// Rank 0 reads the grains that it has not read yet, so it reads the whole file once; other ranks read nothing. The exchange carries 8
    /// bytes for each grain.
    pub(super) fn agree(&mut self, ranks: &Ranks) -> Result<(), Error> {
        if ranks.world_size() == 1 {
            return Ok(());
        }
        let (all, mut same) = (self.bytes.div_ceil(GRAIN), Ok(()));
        for first in (0..all).step_by(TOGETHER as usize) {
            let grains = first..all.min(first + TOGETHER);
            let hashes = match ranks.rank() {
                0 => self.hash(grains.clone()),
                _ => Ok(vec![0; (grains.end - first) as usize]),
            };
            let mut hashes = ranks.agree(same.and(hashes))?;
            ranks.first_words(&mut hashes)?;
            same = self.compare(grains, &hashes);
        }
        ranks.agree(same)
    }

    fn hash(&mut self, grains: Range<u64>) -> Result<Vec<u64>, CheckpointError> {
        let end = grains.end;
        let hash = |grain| {
            if !self.hashes.contains_key(&grain) {
                self.load(grain..end.min(grain + AT_ONCE))?;
            }
            Ok(self.hashes.get(&grain).copied().unwrap_or_default())
        };
        grains.map(hash).collect()
    }

    /// Checks that the grains read on this rank have these hashes.
    fn compare(&self, grains: Range<u64>, hashes: &[u64]) -> Result<(), CheckpointError> {
        let first = grains.start;
        let mut read = self.hashes.range(grains);
        match read.find(|&(&grain, &hash)| hash != hashes[(grain - first) as usize]) {
            Some((&grain, _)) => Err(self.apart(grain)),
            None => Ok(()),
        }
    }

    /// Reads grains to memory, without reading the ones again that are there already.
    fn load(&mut self, grains: Range<u64>) -> Result<(), CheckpointError> {
        let kept = if self.here.contains(&grains.start) {
            grains.start..self.here.end
        } else {
            grains.start..grains.start
        };
        if kept.end >= grains.end {
            return Ok(());
        }
        let (from, until) = (kept.end * GRAIN, self.bytes.min(grains.end * GRAIN));
        let old = (kept.start.saturating_sub(self.here.start) * GRAIN) as usize;
        let (len, kept_len) =
            ((until - grains.start * GRAIN) as usize, ((kept.end - kept.start) * GRAIN) as usize);
        self.here = 0..0;
        if kept_len > 0 {
            self.room.copy_within(old..old + kept_len, 0);
        }
        self.room.resize(len, 0);
        let new = &mut self.room[kept_len..];
        self.file.read_at(from, new).map_err(io("reading", &self.path))?;
        for (grain, bytes) in (kept.end..).zip(new.chunks(GRAIN as usize)) {
            let hash = XxHash3_64::oneshot(bytes);
            if *self.hashes.entry(grain).or_insert(hash) != hash {
                return Err(self.apart(grain));
            }
        }
        self.here = grains;
        Ok(())
    }

    fn apart(&self, grain: u64) -> CheckpointError {
        let bytes = [grain * GRAIN, self.bytes.min((grain + 1) * GRAIN)];
        PyTorchError::Apart { path: self.path.clone(), bytes }.into()
    }
}

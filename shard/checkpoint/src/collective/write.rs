//! One rank's file, written through one window of memory.

use crate::error::CheckpointError;
use crate::format::local_pieces::Part;
use crate::format::manifest::{FileEntry, PieceEntry, Stored, Type};
use crate::store::draft::Folder;
use crate::store::shard_file::{ShardWriter, Vector};
use crate::tensors::{PARAM, ReadSource, SavedTensor, Wanted};
use meshstep_shard::extend::VectorKind as Slot;
use meshstep_tensor::{Buffer, Category, Meter, Place, Queue, Slice};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Maximum memory in bytes that a save needs beside the saved values.
pub const STAGING: usize = 16 << 20;

/// Length in bytes from which host memory is written without a copy to the window.
const DIRECT: usize = 64 << 10;

/// One rank's contribution to the manifest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Written {
    pub(crate) file: FileEntry,
    /// Parameter, slot, piece.
    pub(crate) pieces: Vec<(usize, String, PieceEntry)>,
    pub(crate) blobs: Vec<(String, Stored)>,
}

/// Work of one rank.
#[derive(Clone, Debug)]
pub(crate) struct WriteJob<'a> {
    pub(crate) rank: usize,
    pub(crate) contents: &'a [SavedTensor],
    /// SavedParts of parameters, by the parameter's index.
    pub(crate) parts: &'a [(usize, Part)],
    /// The caller's bytes.
    pub(crate) blobs: &'a [(String, Vec<u8>)],
    pub(crate) meter: &'a Meter,
}

/// Part of one vector.
struct Task<'a> {
    param: usize,
    slot: Slot,
    name: &'a str,
    dtype: Type,
    index: usize,
    part: &'a Part,
    key: String,
}

/// Callback with the bytes written so far and the total.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(u64, u64);

impl WriteJob<'_> {
    /// Writes the file. On return the file and its name survive a crash.
    pub(crate) fn write(
        &self,
        folder: &Folder,
        from: &mut dyn ReadSource,
        progress: Progress<'_>,
    ) -> Result<Written, CheckpointError> {
        let mut keys = BTreeSet::from(["__metadata__".to_owned()]);
        let tasks = self.tasks(&mut keys);
        let mut vectors: Vec<Vector> = tasks.iter().map(Task::vector).collect();
        for (name, bytes) in self.blobs {
            let key = unique(format!("blob:{name}"), &mut keys);
            vectors.push(Vector { key, dtype: Type::U8, shape: vec![bytes.len() as u64] });
        }
        let name = format!("rank-{:05}.safetensors", self.rank);
        let mut to = Out {
            writer: folder.file(self.rank, &name, &vectors)?,
            window: None,
            done: 0,
            total: vectors.iter().map(|v| v.shape.iter().product::<u64>() * v.dtype.size()).sum(),
            progress,
        };
        for task in &tasks {
            to.writer.begin();
            self.write_part(task, from, &mut to)?;
        }
        for (_, bytes) in self.blobs {
            to.writer.begin();
            to.direct(bytes)?;
        }
        let (file, stored) = to.writer.finish()?;
        folder.sync()?;
        let mut stored = stored.into_iter();
        let pieces = tasks.into_iter().zip(&mut stored).map(|(task, stored)| task.entry(stored)).collect();
        let blobs = self.blobs.iter().map(|(name, _)| name.clone()).zip(stored).collect();
        Ok(Written { file, pieces, blobs })
    }

    /// Orders tasks by element size, so that the window changes its type as seldom as possible.
    fn tasks(&self, keys: &mut BTreeSet<String>) -> Vec<Task<'_>> {
        let mut tasks = Vec::new();
        for (index, (param, part)) in self.parts.iter().enumerate() {
            let content = &self.contents[*param];
            for vector in &content.vectors {
                let slot = if vector.name == PARAM { String::new() } else { format!(":{}", vector.name) };
                let whole = part.global.len() == content.elements();
                let at = if whole { String::new() } else { format!("#{}", place(part)) };
                let key = unique(format!("{}{slot}{at}", content.name), keys);
                let (slot, name, dtype) = (vector.slot, &*vector.name, vector.dtype);
                tasks.push(Task { param: *param, slot, name, dtype, index, part, key });
            }
        }
        tasks.sort_by_key(|task| task.dtype.size());
        tasks
    }

    fn write_part(
        &self,
        task: &Task<'_>,
        from: &mut dyn ReadSource,
        to: &mut Out<'_>,
    ) -> Result<(), CheckpointError> {
        let held = self.contents[task.param].held();
        let Task { param, slot, index, part, .. } = *task;
        let queue = from.place();
        from.values(&Wanted { param, slot, index, part, held: &held }, &mut |run| {
            to.take(run, &queue, self.meter)
        })?;
        to.flush()
    }
}

/// Returns the place of a part for a key: the first indices of its box, and its first element in the box.
fn place(part: &Part) -> String {
    let offsets: Vec<String> = part.global.region.offsets.iter().map(u64::to_string).collect();
    format!("{}+{}", offsets.join(","), part.global.range.start)
}

/// Returns `key` with as many underscores appended as make it unique.
fn unique(mut key: String, keys: &mut BTreeSet<String>) -> String {
    while !keys.insert(key.clone()) {
        key.push('_');
    }
    key
}

impl Task<'_> {
    fn vector(&self) -> Vector {
        let piece = &self.part.global;
        let all = Some(piece.len()) == piece.region.elements();
        let shape = if all { piece.region.extents.clone() } else { vec![piece.len()] };
        Vector { key: self.key.clone(), dtype: self.dtype, shape }
    }

    fn entry(self, stored: Stored) -> (usize, String, PieceEntry) {
        let piece = self.part.global.clone();
        let range = [piece.range.start, piece.range.end];
        let (offsets, extents) = (piece.region.offsets, piece.region.extents);
        (self.param, self.name.to_owned(), PieceEntry { offsets, extents, range, key: self.key, stored })
    }
}

/// File with a window in front of it.
struct Out<'a> {
    writer: ShardWriter,
    /// Window, and the number of elements in it.
    window: Option<(Buffer, usize)>,
    done: u64,
    total: u64,
    progress: Progress<'a>,
}

impl Out<'_> {
    /// Appends the values of a run.
    fn take(&mut self, mut run: Slice<'_>, queue: &Queue, meter: &Meter) -> Result<(), CheckpointError> {
        let memory = CheckpointError::memory::<meshstep_tensor::Error>;
        if run.place() == Place::Cpu && run.size() >= DIRECT {
            self.flush()?;
            return self.direct(run.bytes().map_err(memory)?);
        }
        while !run.is_empty() {
            let (window, filled) = self.window(run.dtype(), meter).map_err(memory)?;
            let now = run.len().min(window.len() - *filled);
            let into = window.as_mut().slice(*filled..*filled + now).map_err(memory)?;
            queue.download(run.slice(0..now).map_err(memory)?, into).map_err(memory)?;
            *filled += now;
            run = run.slice(now..run.len()).map_err(memory)?;
            if *filled == window.len() {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn direct(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        for bytes in bytes.chunks(STAGING) {
            self.writer.write(bytes)?;
            self.done += bytes.len() as u64;
            (self.progress)(self.done, self.total);
        }
        Ok(())
    }

    fn window(
        &mut self,
        dtype: meshstep_tensor::DType,
        meter: &Meter,
    ) -> Result<&mut (Buffer, usize), meshstep_tensor::Error> {
        if self.window.as_ref().is_none_or(|(window, _)| window.dtype() != dtype) {
            // Free the old window first.
            self.window = None;
            let len = (self.total as usize).min(STAGING).div_ceil(dtype.size());
            self.window = Some((Buffer::zeroed(len, dtype, meter, Category::Staging)?, 0));
        }
        Ok(self.window.as_mut().unwrap_or_else(|| unreachable!("made above")))
    }

    /// Writes the contents of the window.
    fn flush(&mut self) -> Result<(), CheckpointError> {
        let Some((window, filled)) = self.window.take() else { return Ok(()) };
        let bytes = window.as_slice().slice(0..filled).and_then(|values| values.bytes());
        let written = bytes.map_err(CheckpointError::memory).and_then(|bytes| self.direct(bytes));
        self.window = Some((window, 0));
        written
    }
}

//! Single file that is written beside its place, and moved there when it is complete.

use crate::error::{CheckpointError, io};
use crate::store::disk::{Disk, Os};
use crate::store::shard_file::{ShardWriter, Vector};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Safetensors file with PyTorch's names.
#[derive(Clone, Debug)]
pub struct PyTorchFile {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) path: PathBuf,
}

impl PyTorchFile {
    /// Names the file at `path`, in a folder that exists.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self::on(Arc::new(Os), path)
    }

    /// Same as [`new`](Self::new) on another disk.
    pub fn on(disk: Arc<dyn Disk>, path: impl Into<PathBuf>) -> Self {
        PyTorchFile { disk, path: path.into() }
    }

    /// Begins to write the file; removes the remains of an earlier attempt.
    pub(super) fn begin(&self, vectors: &[Vector]) -> Result<ShardWriter, CheckpointError> {
        let next = self.next();
        match self.disk.open(&next) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            // Only a plain file is removed.
            opened => opened.and_then(|_| self.disk.remove(&next)).map_err(io("removing", &next))?,
        }
        let file = self.disk.create(&next).map_err(io("creating", &next))?;
        ShardWriter::described(file, &next, 0, vectors, &[("format", "pt")])
    }

    /// Moves the written file to its place.
    pub(super) fn publish(&self, writer: ShardWriter) -> Result<(), CheckpointError> {
        writer.finish()?;
        let next = self.next();
        self.disk.rename(&next, &self.path).map_err(io("renaming", &next))?;
        let parent = match self.path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        self.disk.sync_dir(parent).map_err(io("syncing", parent))
    }

    /// Discards a file that was begun, as far as the disk allows.
    pub(super) fn discard(&self) {
        let _ = self.disk.remove(&self.next());
    }

    fn next(&self) -> PathBuf {
        let mut name = self.path.as_os_str().to_owned();
        name.push(".tmp");
        name.into()
    }
}

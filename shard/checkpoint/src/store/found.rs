//! Step that a rank has found, before any rank has read its manifest.

use super::disk::Disk;
use super::reader::{Saved, gone, read_catalog, refuse_link};
use super::{Latest, MANIFEST, MANIFEST_MOST, SAVED, Store, name, same_run};
use crate::error::{CheckpointError, io};
use crate::format::catalog::Catalog;
use crate::format::run_id::RunId;
use crate::format::text::{TAIL, own_hash};
use std::path::PathBuf;
use std::sync::Arc;

/// Folder of a step, and the end of its manifest, by which ranks compare what they have found.
#[derive(Debug)]
pub(crate) struct FoundStep {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    step: u64,
    /// Hash of the manifest and its run, if LATEST has named them.
    latest: Option<(String, Option<RunId>)>,
    /// Length of the manifest in bytes.
    len: u64,
    /// Hash of the manifest's other members, as its end has it.
    own_hash: Option<String>,
}

impl Store {
    /// Finds the step that was saved as `step`, or the newest one. Reads LATEST and the last bytes of the manifest.
    pub(crate) fn find(&self, step: Option<u64>) -> Result<FoundStep, CheckpointError> {
        let (step, latest) = match step {
            Some(step) => (step, None),
            None => {
                let Latest { step, manifest, run } = self.announced()?;
                (step, Some((manifest, run)))
            }
        };
        let (disk, dir) = (Arc::clone(&self.disk), self.dir.join(name(SAVED, step)));
        refuse_link(&*disk, &dir)?;
        let path = dir.join(MANIFEST);
        let file = disk.open(&path).map_err(|error| gone(io("opening", &path)(error)))?;
        let len = file.len().map_err(io("measuring", &path))?;
        if len > MANIFEST_MOST {
            return Err(CheckpointError::TooLarge { path, most: MANIFEST_MOST, found: len });
        }
        let mut tail = vec![0; len.min(TAIL as u64) as usize];
        file.read_at(len - tail.len() as u64, &mut tail).map_err(io("reading", &path))?;
        let own_hash = own_hash(&tail).map(|digits| String::from_utf8_lossy(digits).into_owned());
        Ok(FoundStep { disk, dir, step, latest, len, own_hash })
    }
}

impl FoundStep {
    /// Returns a line that differs between different steps, for ranks to compare.
    pub(crate) fn line(&self) -> String {
        let FoundStep { step, len, own_hash, .. } = self;
        let hash = own_hash.as_deref().unwrap_or("a manifest without a hash");
        format!("checkpoint to load = {hash} of step {step}, {len} bytes\n")
    }

    /// Reads and checks the manifest; returns its contents and its hash.
    pub(crate) fn read(&self) -> Result<(Catalog, String), CheckpointError> {
        let (hash, run) = self.latest.as_ref().map_or((None, None), |(hash, run)| (Some(&**hash), *run));
        let read = read_catalog(&*self.disk, &self.dir, hash)?;
        same_run(run, read.0.run())?;
        Ok(read)
    }

    /// Returns the step, whose manifest this or another rank has read.
    pub(crate) fn opened(self, (catalog, hash): (Catalog, String)) -> Saved {
        Saved::of(self.disk, &self.dir, catalog, hash)
    }
}

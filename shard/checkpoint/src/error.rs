//! Errors of checkpoints, and of writing one.

use super::bytes_error::BytesError;
use super::format::coverage::CoverError;
use super::format::mismatch::Mismatch;
use super::format::run_id::RunId;
use super::io_error::{self, Word};
use super::pytorch::PyTorchError;
use super::store::job_lock::{Holder, held_by};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};

/// Reason why a checkpoint was not saved or not loaded. Nothing was changed.
///
/// ```
/// use meshstep_checkpoint::pytorch::{Import, Imported, PyTorchError, PyTorchFile};
/// use meshstep_checkpoint::{BytesError, Cast, CheckpointError, Failed, Load, Loaded, Mismatch, Moved, Save, Saver, Saving, Stall, Store};
/// use meshstep_checkpoint::{Error, deserialize, export_pytorch, import_pytorch, load, reshard, save_async};
/// use meshstep_shard::prelude::*;
///
/// /// Returns the cause on the rank that failed.
/// fn cause<T>(result: Result<T, Error>) -> Option<CheckpointError> {
///     match result {
///         Err(Error::Failed(failed)) => {
///             let Failed { rank: _, error } = *failed;
///             Some(error)
///         }
///         _ => None,
///     }
/// }
///
/// # let dir = std::env::temp_dir().join(format!("meshstep-errors-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&dir)?;
/// let store = Store::new(&dir);
/// loopback::spawn(1, |comm| -> Result<(), Error> {
///     let make = |dtype, rule: Groups| {
///         let layout = Layout::builder().param("w", &[4], dtype).build()?;
///         Optimizer::new(comm.clone(), layout, rule, |_, _| Ok(()), Options::default())
///     };
///     let mut opt = make(DType::F32, AdamW::default().into())?;
///     let mut saver = Saver::default();
///     let saving: Saving = save_async(&mut opt, &mut saver, &store, Save::default())?;
///     let Stall { bytes, .. } = saving.stall();
///     assert_eq!((bytes, saving.join()?), (48, 0));
///
///     // Other hyperparameters, or another type, are refused; `Load` says which differences are meant.
///     let mut other = make(DType::F32, AdamW { beta1: 0.8, ..AdamW::default() }.into())?;
///     let refused = cause(load(&mut other, &store, Load::default()));
///     assert!(matches!(refused, Some(CheckpointError::Mismatch(Mismatch::Setting { .. }))));
///     let mut wide = make(DType::F64, AdamW::default().into())?;
///     let Loaded { cast, .. } = load(&mut wide, &store, Load { partial: true, ..Load::default() })?;
///     let Cast { tensor, saved, here, .. } = &cast[0];
///     assert_eq!(format!("{tensor} {saved:?} {here:?}"), "w F32 F64");
///
///     let refused = cause(deserialize(&mut opt, b"no such bytes"));
///     assert!(matches!(refused, Some(CheckpointError::Bytes(BytesError::Damaged { .. }))));
///     let file = PyTorchFile::new(dir.join("model.safetensors"));
///     export_pytorch(&mut opt, &file, 0)?;
///     let Imported { fresh, .. } = import_pytorch(&mut opt, &file, Import { fresh: true, ..Import::default() })?;
///     assert_eq!(fresh, ["w"]); // no step yet, so no state
///     let mut lion = make(DType::F32, Lion::default().into())?;
///     let refused = cause(export_pytorch(&mut lion, &file, 0));
///     assert!(matches!(refused, Some(CheckpointError::PyTorch(PyTorchError::Rule { .. }))));
///
///     let mut next = make(DType::F32, AdamW::default().into())?;
///     let Moved { sent, kept, .. } = reshard(&comm, Some(&mut opt), Some(&mut next))?;
///     assert_eq!((sent, kept), (0, 48));
///     Ok(())
/// })?.into_iter().collect::<Result<(), Error>>()?;
/// # std::fs::remove_dir_all(&dir)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A disk operation failed.
    #[error("{doing} {}: {message}", .path.display())]
    Io {
        /// Operation, such as `reading`.
        #[serde(deserialize_with = "io_error::read_doing")]
        doing: Word,
        /// Path of the operation.
        path: PathBuf,
        /// Kind of the system's error.
        #[serde(serialize_with = "io_error::write_kind", deserialize_with = "io_error::read_kind")]
        kind: io::ErrorKind,
        /// Text of the system's error.
        message: String,
    },
    /// The folder does not exist.
    #[error("{} does not exist: create the folder that all ranks share", .dir.display())]
    NoFolder {
        /// The folder.
        dir: PathBuf,
    },
    /// The folder has no newest step: no save has ended there.
    #[error("{} holds no checkpoint: save one, name another folder, or load a step by its number", .dir.display())]
    Nothing {
        /// The folder.
        dir: PathBuf,
    },
    /// Another save of this job to the same folder is in progress.
    #[error("another save to {} is in progress: pass its `Saver` as `Save::after`, or use another folder", .dir.display())]
    Locked {
        /// The folder.
        dir: PathBuf,
    },
    /// Another job holds the folder.
    #[error("{} is held by {}, or save to another folder", .dir.display(), held_by(.holder.as_ref()))]
    Held {
        /// The folder.
        dir: PathBuf,
        /// Process of rank 0 of that job; `None` if the file LOCK does not name it.
        holder: Option<Holder>,
    },
    /// A job of another host has held the folder, and has not released it.
    #[error(
        "{} is held by {holder}, or was by the time that process died; if that job has ended, call `Store::taking_over`", .dir.display()
    )]
    Abandoned {
        /// The folder.
        dir: PathBuf,
        /// Process of rank 0 of that job.
        holder: Holder,
    },
    /// The file LOCK of this job's folder was removed or replaced, or another host's job has written its name there.
    #[error(
        "{} was removed or replaced while this job held it, so another job may save there: end one of the two, then open a new `Store`", .path.display()
    )]
    LostLock {
        /// Path of the file.
        path: PathBuf,
    },
    /// The folder's checkpoints are of another run.
    #[error(
        "{} holds checkpoints of {}, and this job continues {}: load one of a numbered run with this `Store`, or call `Store::adopting`, or save to another folder",
        .dir.display(), shown_run(*.found), shown_run(*.own)
    )]
    OtherRun {
        /// The folder.
        dir: PathBuf,
        /// Run of the newest checkpoint there; `None` if an earlier version saved it.
        found: Option<RunId>,
        /// Run of this job; `None` if it has neither saved nor loaded a checkpoint of a numbered run with this store.
        own: Option<RunId>,
    },
    /// The step exists already.
    #[error("{} exists: a checkpoint is never written over; remove it first, or save a later step", .path.display())]
    Exists {
        /// Folder of the step.
        path: PathBuf,
    },
    /// The newest step of the folder is a later one.
    #[error("the newest checkpoint in {} is of step {latest}: {step} cannot come behind it; load it, or call `Store::roll_back` first, or save to another folder", .dir.display())]
    Behind {
        /// The folder.
        dir: PathBuf,
        /// Step that was to be saved.
        step: u64,
        /// Step that LATEST names.
        latest: u64,
    },
    /// Bytes differ from those that were written.
    #[error("{} is damaged: {what} have hash {found}, not {expected}; load an earlier step", .path.display())]
    Hash {
        /// The file.
        path: PathBuf,
        /// Bytes that are damaged.
        what: String,
        /// Hash of the bytes written.
        expected: String,
        /// Hash of the bytes found.
        found: String,
    },
    /// A file is shorter or longer than when it was written.
    #[error("{} has {found} bytes, not {expected}: it was cut short or replaced; load an earlier step", .path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// Length that was written.
        expected: u64,
        /// Length found.
        found: u64,
    },
    /// A manifest, or LATEST, cannot be parsed.
    #[error("{} cannot be read: {reason}; load another step by its number, or call `Store::roll_back`", .path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Place and reason of the failure.
        reason: String,
    },
    /// The checkpoint was written by another version.
    #[error("the checkpoint has format {found}; this program reads format {known}")]
    Format {
        /// Format version of the checkpoint.
        found: u32,
        /// Format version of this program.
        known: u32,
    },
    /// The manifest is of another version, or is inconsistent.
    #[error("{}: {source}", .path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// Reason; it is part of the text above, and therefore not the error's source.
        r#source: Box<CheckpointError>,
    },
    /// A saved entry is inconsistent.
    #[error("invalid entry for {what}: {reason}")]
    Contradiction {
        /// Owner of the entry: a file, a tensor and its slot, or a setting.
        what: String,
        /// Inconsistency.
        reason: String,
    },
    /// Pieces do not cover their tensor exactly once.
    #[error("slot {slot:?} of tensor {tensor:?}: {source}")]
    Cover {
        /// The tensor.
        tensor: String,
        /// Name of the vector.
        slot: String,
        /// Reason; it is part of the text above, and therefore not the error's source.
        r#source: CoverError,
    },
    /// A file that is read as a whole is longer than any that is written.
    #[error("{} has {found} bytes, more than the {most} such a file may have: it was replaced; load an earlier step", .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Maximum length in bytes.
        most: u64,
        /// Length found.
        found: u64,
    },
    /// The settings are larger than any that are saved.
    #[error("the settings take {found} bytes {what}, {most} are the most; pass large data as a blob")]
    Settings {
        /// `as text`, or `as values in memory`, which is an estimate.
        what: String,
        /// Maximum in bytes.
        most: u64,
        /// Size found.
        found: u64,
    },
    /// The checkpoint has no vector of this name.
    #[error("the checkpoint has no slot {slot:?} of tensor {tensor:?}")]
    Unknown {
        /// The tensor.
        tensor: String,
        /// Name of the vector.
        slot: String,
    },
    /// A file's header describes a vector differently than the manifest.
    #[error("the header of {} does not describe {what} as the manifest does: {reason}", .path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Tensor and slot.
        what: String,
        /// Difference.
        reason: String,
    },
    /// Bytes cannot be read.
    #[error("{what} cannot be read: {source}")]
    Unreadable {
        /// Owner of the bytes: a tensor and its slot, or several.
        what: String,
        /// Reason; it is part of the text above, and therefore not the error's source.
        r#source: Box<CheckpointError>,
    },
    /// The step has been removed, or was never saved.
    #[error(
        "{} is gone: the step was removed, as by a job that keeps only the newest, or never saved; load the newest", .path.display()
    )]
    Gone {
        /// Path that was not found.
        path: PathBuf,
    },
    /// A step's folder, or the file LOCK, is a symbolic link.
    #[error("{} is a symbolic link, which is not followed: move the step or the file itself there", .path.display())]
    Link {
        /// The link.
        path: PathBuf,
    },
    /// A step's folder has the name of another step.
    #[error("{} holds step {step}: give it that step's name, or load another step", .path.display())]
    Renamed {
        /// The folder.
        path: PathBuf,
        /// Step of its manifest.
        step: u64,
    },
    /// The checkpoint does not fit the optimizer.
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    /// Bytes made by `serialize` are refused.
    #[error(transparent)]
    Bytes(#[from] BytesError),
    /// A file with PyTorch's names is refused.
    #[error(transparent)]
    PyTorch(#[from] PyTorchError),
    /// A rank's folder is not that of rank 0.
    #[error(
        "{} is not the folder that rank 0 saves to: give every rank one folder that all of them share", .dir.display()
    )]
    Elsewhere {
        /// Folder of this rank.
        dir: PathBuf,
    },
    /// A blob's name is refused.
    #[error("blob name {name:?} is refused: {reason}")]
    Blob {
        /// Name of the blob.
        name: String,
        /// Reason for the refusal.
        reason: String,
    },
    /// A background save was given a progress hook.
    #[error("a background save calls no hook: leave `Save::progress` out, and ask `Saving::progress`")]
    Progress,
    /// The ranks of a background save lost their communicator.
    #[error("the save of step {step} did not complete: {message}; earlier checkpoints are intact")]
    Lost {
        /// Step that was to be saved.
        step: u64,
        /// Text of the communicator's error.
        message: String,
    },
    /// An exchange in flight between workers has failed.
    #[error(
        "an exchange in flight between workers has failed: {message}; save after the step at which it is due"
    )]
    OnItsWay {
        /// Text of the exchange's error.
        message: String,
    },
    /// The checkpoint has diverged groups, and another number of them than this run.
    #[error(
        "the checkpoint has {saved} diverged groups, and this run has {here}; load into {saved}, or synchronize the groups before saving"
    )]
    Groups {
        /// Number of groups in the checkpoint.
        saved: usize,
        /// Number of groups here.
        here: usize,
    },
    /// No rank passed an optimizer on one side of a reshard.
    #[error("no rank passed an optimizer to move {direction}; pass it on each rank that has one")]
    NoSide {
        /// `from`, or `to`.
        direction: String,
    },
    /// Ranks passed optimizers that differ.
    #[error("ranks {} and {} disagree on {what}; reshard between two steps, from one optimizer to one", .ranks[0], .ranks[1])]
    Apart {
        /// Difference.
        what: String,
        /// Two ranks that disagree.
        ranks: [usize; 2],
    },
    /// The call is not defined for this type.
    #[error("{call} does not work on {of}; {works}")]
    Unsupported {
        /// Name of the function.
        call: String,
        /// The type.
        of: String,
        /// A call that works.
        works: String,
    },
    /// An allocation or a copy failed.
    #[error("{message}")]
    Memory {
        /// Text of the error.
        message: String,
    },
}

meshstep_tensor::debug_is_display!(CheckpointError);

impl CheckpointError {
    /// Returns an error of this rank's memory.
    pub fn memory<E: ToString>(error: E) -> Self {
        CheckpointError::Memory { message: error.to_string() }
    }
}

pub(super) fn shown_run(run: Option<RunId>) -> String {
    run.map_or_else(|| "no numbered run".to_owned(), |run| format!("run {run}"))
}

/// Returns a function for `map_err` that adds the operation and the path.
pub(super) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |error| CheckpointError::Io { doing, path, kind: error.kind(), message: error.to_string() }
}

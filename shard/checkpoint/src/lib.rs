//! Checkpoints: one folder per step, with plain safetensors files and a manifest that lists which elements of which tensor lie where in
//! them.
//!
//! Each serves every [`Saveable`] type and returns [`Error`]: `Optimizer`, `ShardedLbfgs` and `CrossShard` of `meshstep-shard`, and the
//! types of other crates through [`extend`]. All ranks save a step together, and any number of ranks load it, at any stage:
//!
//! ```
//! use meshstep_checkpoint::{self as checkpoint, Load, Save, Store};
//! use meshstep_optim::AdamW;
//! use meshstep_shard::{Optimizer, Options, Stage};
//! use meshstep_tensor::{DType, Layout};
//!
//! # let dir = std::env::temp_dir().join(format!("meshstep-lib-doc-{}", std::process::id()));
//! # std::fs::create_dir_all(&dir)?;
//! let store = Store::new(&dir); // a folder that all ranks share
//! let make = |comm, stage| -> Result<Optimizer, meshstep_shard::Error> {
//!     let layout = Layout::builder().param("w", &[3, 5], DType::F32).build()?;
//!     Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), Options { stage, ..Options::default() })
//! };
//! let saved = meshstep_comm::loopback::spawn(4, |comm| {
//!     let save = Save { keep: Some(2), blobs: vec![("loader", b"sample 4711")], ..Save::default() };
//!     checkpoint::save(&mut make(comm, Stage::Zero3)?, &store, save)
//! })?;
//! saved.into_iter().collect::<Result<Vec<u64>, checkpoint::Error>>()?;
//! let loaded = meshstep_comm::loopback::spawn(3, |comm| {
//!     checkpoint::load(&mut make(comm, Stage::Zero1)?, &store, Load::default())
//! })?;
//! for rank in loaded {
//!     assert_eq!(rank?.blobs["loader"], b"sample 4711");
//! }
//! # std::fs::remove_dir_all(&dir)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | function | purpose |
//! |---|---|
//! | [`claim`], [`save`], [`save_async`], [`load`] | folders: from any ranks to any others |
//! | [`serialize`], [`deserialize`] | bytes in memory, for the same rank of the same layout |
//! | [`reshard`] | moves to other ranks without files |
//! | [`consolidate`] | whole vectors on one rank |
//! | [`export_pytorch`], [`import_pytorch`] | one file with PyTorch's names |
//!
//! # Files
//!
//! | folder of the source | contents |
//! |---|---|
//! | format | pieces of tensors, `manifest.json`, safetensors headers, sections of settings; knows no ranks |
//! | store | folder of checkpoints: how a step becomes the newest one; one rank's file; readers, and checks of every byte |
//! | collective | saves, loads, resharding and background saves of all ranks; checkpoints in memory |
//! | saveable | the saved parts of an optimizer, of L-BFGS, and of replicas in groups |
//! | pytorch | export to and import from one file with PyTorch's names |
//!
//! # Limits
//! - All ranks share one folder, such as a network file system with atomic renames.
//! - On GPUs a background save becomes the newest checkpoint only when the ranks join it or save again, because its control words must
//!   not come between training's collectives.
//! - Bytes of [`serialize`] fit the same rank of the same layout only.
//! - PyTorch's names are defined for optimizers, not for L-BFGS and replicas in groups.

mod bytes_error;
mod collective;
mod contents;
mod error;
pub mod extend;
mod failure;
mod format;
mod io_error;
mod parts;
pub mod pytorch;
mod saveable;
mod store;
mod tensors;

pub use bytes_error::BytesError;
pub use collective::background::{Saver, Saving, Stall, save_async};
pub use collective::claim::claim;
pub use collective::compatibility::Cast;
pub use collective::consolidate::{Sink, Window, consolidate};
pub use collective::in_memory::{deserialize, serialize};
pub use collective::load::{Loaded, load};
pub use collective::load_options::Load;
pub use collective::reshard::{Moved, reshard};
pub use collective::save::{Save, save};
pub use contents::{Contents, Saveable};
pub use error::CheckpointError;
pub use failure::{Error, Failed};
pub use format::coverage::{CoverError, check as check_cover};
pub use format::dims::MOST_DIMS;
pub use format::local_pieces::{LocalPieces, Part, writers};
pub use format::manifest::{
    FORMAT, FileEntry, Manifest, PieceEntry, SlotEntry, Stored, TensorEntry, Type, WINDOW, Whose,
};
pub use format::mismatch::Mismatch;
pub use format::piece::{Piece, Region, Run};
pub use format::placement::{ModelPlacement, Unsharded};
pub use format::run_id::RunId;
pub use pytorch::{export_pytorch, import_pytorch};
pub use store::Store;
pub use store::disk::{Disk, LockedFile, Os, Reader, Writer};
pub use store::draft::{Draft, Folder};
pub use store::job_lock::Holder;
pub use store::reader::{Saved, SavedFile};
pub use store::shard_file::{ShardWriter, Vector};
pub use store::tensor_reader::SavedVectors;
pub use store::verify::Checked;

/// Keeps the crate's README.md true.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

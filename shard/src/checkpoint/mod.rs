//! Checkpoints: one folder per step, with plain safetensors files and a manifest that lists which elements of which tensor lie where in
//! them.
//!
//! | function | purpose |
//! |---|---|
//! | [`save`], [`save_async`], [`load`] | folders: from any ranks to any others |
//! | [`serialize`], [`deserialize`] | bytes in memory, for the same rank of the same layout |
//! | [`reshard`] | moves to other ranks without files |
//! | [`consolidate`] | whole vectors on one rank |
//! | [`export_pytorch`], [`import_pytorch`] | one file with PyTorch's names |
//!
//! Each serves every [`Saveable`] type and returns [`Error`].
//!
//! | folder | contents |
//! |---|---|
//! | format | pieces of tensors, `manifest.json`, one rank's file, safetensors headers, sections of settings; knows no ranks |
//! | store | folder of checkpoints: how a step becomes the newest one; readers, and checks of every byte |
//! | saveable.rs, parts.rs, tensors.rs | the saved parts of an optimizer, the interface to those of other types, their vectors |
//! | collective | saves, loads, resharding and background saves of all ranks; checkpoints in memory |
//! | pytorch | export to and import from one file with PyTorch's names |

mod bytes_error;
mod collective;
mod error;
pub mod extend;
mod failure;
mod format;
mod parts;
pub mod pytorch;
mod saveable;
mod store;
mod tensors;

pub use bytes_error::BytesError;
pub use collective::background::{Saver, Saving, Stall, save_async};
pub use collective::compatibility::Cast;
pub(crate) use collective::compatibility::Fitting;
pub use collective::consolidate::{Sink, Window, consolidate};
pub use collective::in_memory::{deserialize, serialize};
pub(crate) use collective::load::read_own;
pub use collective::load::{Loaded, load};
pub use collective::load_options::Load;
pub use collective::reshard::{Moved, reshard};
pub use collective::save::{Save, save};
pub use error::CheckpointError;
pub use failure::{Error, Failed};
pub use format::coverage::{CoverError, check as check_cover};
pub use format::local_pieces::{LocalPieces, Part, writers};
pub use format::manifest::{
    FORMAT, FileEntry, MOST_DIMS, Manifest, PieceEntry, SlotEntry, Stored, TensorEntry, Type, WINDOW, Whose,
};
pub use format::mismatch::Mismatch;
pub use format::piece::{Piece, Region, Run};
pub(crate) use format::placement::Copies;
pub use format::placement::{ModelPlacement, Unsharded};
pub(crate) use format::progress::SavedProgress;
pub(crate) use format::settings::Settings;
pub use format::shard_file::{ShardWriter, Vector};
pub(crate) use parts::{CheckpointCall, SavedParts};
pub use pytorch::{export_pytorch, import_pytorch};
pub use saveable::{Contents, Saveable};
pub use store::disk::{Disk, Os, Reader, Writer};
pub use store::reader::{Saved, SavedFile};
pub use store::tensor_reader::SavedVectors;
pub use store::verify::Checked;
pub use store::{Draft, Folder, Store};
pub(crate) use tensors::{Named, Read, SavedTensor};

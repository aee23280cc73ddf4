//! Checkpoints: one folder per step, with plain safetensors files and a manifest that lists which elements of which tensor lie where in
//! them.
//!
//! | folder | contents |
//! |---|---|
//! | format | pieces of tensors, `manifest.json`, one rank's file, safetensors headers; knows no ranks |
//! | store | folder of checkpoints: how a step becomes the newest one; readers, and checks of every byte |
//! | saveable.rs | the saved parts of an optimizer |
//! | collective | saves, loads, resharding and background saves of all ranks; checkpoints in memory |
//! | pytorch | export to and import from one file with PyTorch's names |

mod collective;
mod error;
mod format;
pub mod pytorch;
mod saveable;
mod store;

pub(crate) use collective::background::{Background, save_all_async};
pub use collective::background::{Saving, Stall};
pub use collective::compatibility::Cast;
pub(crate) use collective::compatibility::Fitting;
pub(crate) use collective::consolidate::consolidate_all;
pub use collective::consolidate::{Sink, Window};
pub use collective::in_memory::BytesError;
pub(crate) use collective::in_memory::{deserialize_all, serialize_all};
pub use collective::load::{Load, Loaded};
pub(crate) use collective::load::{Read, load_all, read_own, read_same};
pub use collective::ranks::Failed;
pub(crate) use collective::ranks::Ranks;
pub(crate) use collective::reshard::reshard_all;
pub use collective::reshard::{Moved, Placed, reshard, reshard_placed};
pub use collective::save::Save;
pub(crate) use collective::save::save_all;
pub(crate) use collective::write::STAGING;
pub use error::CheckpointError;
pub use format::coverage::{CoverError, check as check_cover};
pub use format::local_pieces::{LocalPieces, Part, writers};
pub use format::manifest::{
    FORMAT, FileEntry, MOST_DIMS, Manifest, PieceEntry, SlotEntry, Stored, TensorEntry, Type, WINDOW, Whose,
};
pub use format::mismatch::Mismatch;
pub use format::piece::{Piece, Region, Run};
pub use format::placement::ModelPlacement;
pub(crate) use format::placement::Unsharded;
pub(crate) use format::settings::{Scale, Settings};
pub use format::shard_file::{ShardWriter, Vector};
pub(crate) use saveable::{MASTER, Named, PARAM, Saveable, SavedTensor, Vectors};
pub use store::disk::{Disk, Os, Reader, Writer};
pub use store::reader::{Saved, SavedFile};
pub use store::tensor_reader::SavedVectors;
pub use store::verify::Checked;
pub use store::{Draft, Folder, Store};

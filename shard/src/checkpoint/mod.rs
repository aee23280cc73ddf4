//! Checkpoints: a folder for each step, with plain safetensors files and a manifest that says which elements of which tensor are
//! where in them.
//!
//! | file | what it is |
//! |---|---|
//! | piece.rs | boxes and ranges of tensors, and what two have in common |
//! | holding.rs | what a rank has of a tensor, as pieces of the whole; who writes it |
//! | cover.rs | whether pieces are a whole tensor |
//! | manifest.rs | `manifest.json` |
//! | once.rs | whether JSON has a member twice |
//! | shard_file.rs | one rank's file, hashed while it is written |
//! | store.rs | the folder: how a step becomes the newest one |
//! | saved.rs | a complete step, to read from |
//! | vectors.rs | its vectors, whole or in part, from wherever their pieces are |
//! | verify.rs | every byte of it, against every hash |
//! | header.rs | what its files say of themselves |
//! | disk.rs | what all that asks of a disk |
//! | contents.rs, settings.rs, placing.rs | what there is of an optimizer |
//! | ranks.rs | what all ranks know together |
//! | owner.rs, write.rs, save.rs | who writes what; one rank's file; a save of all ranks |
//! | snapshot.rs, background.rs | a copy of one moment; a save of it in the background |
//! | consolidate.rs, pytorch | whole vectors on one rank; one file in PyTorch's names, to and from there |
//! | bytes.rs | what one rank holds, as bytes in memory |
//! | fits.rs, read.rs, load.rs | whether what was saved fits; what a rank reads of it; a load of all ranks |
//! | moves.rs, parcel.rs, reshard.rs | what goes from which rank to which; its bytes on the way; a move without files |

mod background;
mod bytes;
mod consolidate;
mod contents;
mod cover;
mod disk;
mod error;
mod fits;
mod header;
mod holding;
mod load;
mod manifest;
mod mismatch;
mod moves;
mod once;
mod owner;
mod parcel;
mod past_cache;
mod piece;
mod placing;
pub mod pytorch;
mod ranks;
mod read;
mod reshard;
mod save;
mod saved;
mod settings;
mod shard_file;
mod snapshot;
mod store;
mod vectors;
mod verify;
mod write;

pub(crate) use background::{Background, save_all_async};
pub use background::{Saving, Stall};
pub use bytes::BytesError;
pub(crate) use bytes::{deserialize_all, serialize_all};
pub(crate) use consolidate::consolidate_all;
pub use consolidate::{Sink, Window};
pub(crate) use contents::{Content, Keeper, MASTER, Named, PARAM, Vectors};
pub use cover::{CoverError, check as check_cover};
pub use disk::{Disk, Os, Reader, Writer};
pub use error::CheckpointError;
pub use fits::Cast;
pub(crate) use fits::Fitting;
pub use holding::{Holding, Part, writers};
pub use load::{Load, Loaded};
pub(crate) use load::{Read, load_all, read_own, read_same};
pub use manifest::{
    FORMAT, FileEntry, MOST_DIMS, Manifest, PieceEntry, SlotEntry, Stored, TensorEntry, Type, WINDOW, Whose,
};
pub use mismatch::Mismatch;
pub use piece::{Piece, Region, Run};
pub(crate) use placing::Alike;
pub use placing::Placing;
pub use ranks::Failed;
pub(crate) use ranks::Ranks;
pub(crate) use reshard::reshard_all;
pub use reshard::{Moved, Placed, reshard, reshard_placed};
pub use save::Save;
pub(crate) use save::save_all;
pub use saved::{Saved, SavedFile};
pub(crate) use settings::{Scale, Settings};
pub use shard_file::{ShardWriter, Vector};
pub use store::{Draft, Folder, Store};
pub use vectors::SavedVectors;
pub use verify::Checked;
pub(crate) use write::STAGING;

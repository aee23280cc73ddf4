//! Checkpoints: one folder per step, with plain safetensors files and a manifest that lists which elements of which tensor lie where in
//! them.
//!
//! | file | contents |
//! |---|---|
//! | piece.rs | boxes and ranges of tensors, and the intersection of two |
//! | holding.rs | the local part of a tensor as pieces of the whole; election of writers |
//! | cover.rs | check that pieces cover a whole tensor |
//! | manifest.rs | `manifest.json` |
//! | once.rs | check that no JSON object has a member twice |
//! | shard_file.rs | one rank's file, hashed while it is written |
//! | store.rs | the folder of checkpoints: how a step becomes the newest one |
//! | saved.rs | a complete step, opened for reading |
//! | vectors.rs | its vectors, whole or in part, assembled from their pieces |
//! | verify.rs | a check of every byte against every hash |
//! | header.rs | safetensors headers of its files |
//! | disk.rs | disk operations behind a trait |
//! | contents.rs, settings.rs, placing.rs | the saved parts of an optimizer |
//! | ranks.rs | agreement among all ranks |
//! | owner.rs, write.rs, save.rs | division of the writes among ranks; one rank's file; a save by all ranks |
//! | snapshot.rs, background.rs | a copy of one moment; a save of it in the background |
//! | consolidate.rs, pytorch | whole vectors on one rank; export to and import from one file with PyTorch's names |
//! | bytes.rs | one rank's parameters and state as bytes in memory |
//! | fits.rs, read.rs, load.rs | compatibility of a saved step; one rank's reads; a load by all ranks |
//! | moves.rs, parcel.rs, reshard.rs | plan of transfers between ranks; their bytes in transit; resharding without files |

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
pub(crate) use contents::{MASTER, Named, PARAM, Saveable, SavedTensor, Vectors};
pub use cover::{CoverError, check as check_cover};
pub use disk::{Disk, Os, Reader, Writer};
pub use error::CheckpointError;
pub use fits::Cast;
pub(crate) use fits::Fitting;
pub use holding::{LocalPieces, Part, writers};
pub use load::{Load, Loaded};
pub(crate) use load::{Read, load_all, read_own, read_same};
pub use manifest::{
    FORMAT, FileEntry, MOST_DIMS, Manifest, PieceEntry, SlotEntry, Stored, TensorEntry, Type, WINDOW, Whose,
};
pub use mismatch::Mismatch;
pub use piece::{Piece, Region, Run};
pub use placing::ModelPlacement;
pub(crate) use placing::Unsharded;
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

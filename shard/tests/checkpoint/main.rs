//! Checkpoints: pieces, the manifest, and a disk that forgets.

mod crash;
mod damage;
mod pieces;
mod sim;

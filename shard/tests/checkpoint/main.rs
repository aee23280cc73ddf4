//! Checkpoints: pieces, the manifest, and a disk that forgets.

mod crash;
mod damage;
mod holdings;
mod os;
mod pieces;
mod sim;

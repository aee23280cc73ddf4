//! Checkpoints saved on one mesh and loaded onto another.

mod meshes;

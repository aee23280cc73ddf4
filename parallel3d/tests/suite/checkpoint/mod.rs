//! What is saved on one mesh is loaded onto another.

mod meshes;

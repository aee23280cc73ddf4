//! Compresses the kernels into what `src/cuda/texts.rs` includes.

#![allow(clippy::print_stdout, reason = "what a build script prints is said to cargo")]

#[cfg(feature = "cuda")]
mod pack;

fn main() {
    println!("cargo::rerun-if-changed=build");
    #[cfg(feature = "cuda")]
    if let Err(problem) = pack::pack() {
        println!("cargo::error={problem}");
    }
}

//! Build script: compresses the kernels for `src/cuda/texts.rs`.

#![allow(clippy::print_stdout, reason = "a build script prints instructions to cargo")]

#[cfg(feature = "cuda")]
mod pack;

fn main() {
    println!("cargo::rerun-if-changed=build");
    #[cfg(feature = "cuda")]
    if let Err(problem) = pack::pack() {
        println!("cargo::error={problem}");
    }
}

//! The GPU's cases: the first step of each is compared with the CPU's, bit for bit; then the case and the device's copy of
//! memory take turns.

mod cases;
mod casts;
mod check;
mod figures;
mod job;
mod kernel;
pub mod lbfgs;
pub mod machine;
mod measure;
mod passes;
mod race;
mod rows;
mod slots;
pub mod stages;
mod variants;
mod vectors;

pub use cases::{Case, Recipe, cases, segmented};
pub use figures::{figures, median};
pub use measure::{fitting, measure};
pub use race::{Copy, Launch, Measured, Times, Waits, launch};
pub use rows::{Row, SMOKE, Work, rows, smoke};
pub use variants::{Variant, variants};

/// Any failure ends the case.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

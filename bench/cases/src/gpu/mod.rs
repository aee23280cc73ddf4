//! Cases on a GPU. The first step of each case is compared with the CPU, bit for bit; then the case and the device's own
//! memory copy take turns.

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
mod vectors;

pub use cases::{Case, Recipe, cases, segmented};
pub use figures::figures;
pub use measure::{fitting, measure};
pub use race::{Copy, Launch, Measured, Times, Waits, launch, median};
pub use rows::{Row, SMOKE, Work, rows, smoke};

/// Result of a case; any failure ends the case.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

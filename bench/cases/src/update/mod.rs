//! Every rule and recipe, the memory of one update, iterations of L-BFGS, and steps of Muon.

mod case;
pub mod lbfgs;
mod memory;
pub mod muon;
mod rows;

pub use case::{Case, case};
pub use memory::Memory;
pub use rows::{Recipe, Row, rows};

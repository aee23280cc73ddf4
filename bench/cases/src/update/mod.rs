//! Every rule and recipe, and the memory that one update of it touches.

mod memory;
mod rows;

pub use memory::Memory;
pub use rows::{Recipe, Row, rows};

//! Every rule and recipe, and the memory that one update of it touches.

mod case;
mod memory;
mod rows;

pub use case::{Case, case};
pub use memory::Memory;
pub use rows::{Recipe, Row, rows};

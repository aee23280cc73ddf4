//! Every rule and recipe, and the memory of one update.

mod case;
mod memory;
mod rows;

pub use case::{Case, case};
pub use memory::Memory;
pub use rows::{Recipe, Row, rows};

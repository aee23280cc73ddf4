//! Every rule and recipe, the memory of one update, and iterations of L-BFGS.

mod case;
pub mod lbfgs;
mod memory;
mod rows;

pub use case::{Case, case};
pub use memory::Memory;
pub use rows::{Recipe, Row, rows};

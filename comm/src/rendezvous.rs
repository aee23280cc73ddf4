//! How processes find each other.

mod environment;
mod environment_error;
mod token;

pub use environment::Environment;
pub use environment_error::EnvironmentError;
pub use token::Token;

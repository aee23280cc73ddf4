//! Where memory is.

use crate::Error;
use std::fmt;

/// Where memory is, and who can read and write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Memory of the process.
    Cpu,
    /// Memory of the GPU with this ordinal.
    Cuda(usize),
}

impl Place {
    /// An error unless memory here is memory `expected`.
    pub fn check(self, expected: Place) -> Result<(), Error> {
        if self == expected { Ok(()) } else { Err(Error::Place { given: self, expected }) }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Cpu => f.pad("the CPU"),
            Place::Cuda(ordinal) => write!(f, "GPU {ordinal}"),
        }
    }
}

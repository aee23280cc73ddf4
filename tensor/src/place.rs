//! Location of memory: the CPU or a GPU.

use crate::Error;
use std::fmt;

/// Location of memory, which decides which processor can read and write it.
///
/// ```
/// use meshstep_tensor::{Place, Queue};
///
/// assert_eq!(Queue::cpu().place(), Place::Cpu);
/// let refused = Place::Cuda(1).check(Place::Cpu).unwrap_err();
/// assert!(refused.to_string().contains("GPU 1"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Memory of the process.
    Cpu,
    /// Memory of the GPU with this ordinal.
    Cuda(usize),
}

impl Place {
    /// Returns an error unless this place is `expected`.
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

//! Types that most programs name, for a glob import. It exports no `Error`: that of this crate is `meshstep_comm::Error`.

pub use crate::loopback;
#[cfg(feature = "nccl")]
pub use crate::nccl;
pub use crate::rendezvous::{Environment, EnvironmentError};
#[cfg(unix)]
pub use crate::tcp;
pub use crate::{Communicator, Reduction};

//! Types that most programs name, for a glob import. It exports no `Error`: that of this crate is `meshstep_comm::Error`.

pub use crate::Communicator;
pub use crate::loopback;
#[cfg(feature = "nccl")]
pub use crate::nccl;

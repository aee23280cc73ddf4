//! Options of the world.

use super::ThreadLevel;
use std::time::Duration;

/// Options of the world, and of all groups that are split from it.
#[derive(Clone, Debug)]
pub struct Options {
    /// Limit for joining and, if no operation has failed, for the wait for the other ranks at the end; default deadline of each
    /// operation: ten minutes.
    pub deadline: Duration,
    /// Limit for the wait for the other ranks at the end, after a failure of the world: two seconds. They get their errors in this
    /// time; then MPI_Abort ends the job.
    pub abort_within: Duration,
    /// Arithmetic of reductions: this crate's. Every rank sets the same value.
    pub reductions: Reductions,
    /// Level of thread support to ask the library for. A library that gives [`Serialized`](ThreadLevel::Serialized) is called
    /// under a lock, and one that gives less is refused. Without meaning if the program has initialised MPI itself.
    pub threads: ThreadLevel,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            deadline: Duration::from_secs(600),
            abort_within: Duration::from_secs(2),
            reductions: Reductions::Ours,
            threads: ThreadLevel::Multiple,
        }
    }
}

/// Arithmetic of reductions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reductions {
    /// This crate's, with loopback's bits. MPI moves bytes only.
    #[default]
    Ours,
    /// The library's MPI_Iallreduce and MPI_Ireduce_scatter_block, for its tuned algorithms and the network's reductions. The bits are
    /// the library's: they may depend on the number of ranks, their places, the length and the library's settings. The
    /// sign and the payload of a NaN in a sum are the library's too, and may differ between ranks.
    ///
    /// It takes sums and means of f32 and f64 and sums of u64, on buffers above 32 KiB (less with more than four ranks). Other
    /// operations stay this crate's: smaller buffers, as their bytes travel with the calls; f16 and bf16, which MPI does not know;
    /// maxima and minima, as the order of the ranks decides between NaNs and between zeros in MPI libraries, so ranks could differ;
    /// [`PreMulSum`](crate::Reduction::PreMulSum).
    ///
    /// Buffers are copied in blocks of 4 MiB, so no count comes near 2^31. A block that the library has not reduced by the deadline
    /// is given up, and the error counts all other ranks as missing, as the library does not tell which is late. The block cannot be
    /// cancelled: at its end the job is ended by MPI_Abort. Each group of ranks that reduces has a
    /// communicator of MPI until the end of the job, made at its first reduction. Needs
    /// [`ThreadLevel::Multiple`](ThreadLevel::Multiple), because that call blocks.
    Library,
}

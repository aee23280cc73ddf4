//! Command line of `launch`.

use std::ffi::OsString;

use clap::ValueEnum;

/// Backends between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// Sockets and shared memory; ranks get torchrun's variables
    Tcp,
    /// The system's MPI library; mpirun starts the ranks
    Mpi,
}

/// Options of `launch`.
#[derive(Debug, clap::Args)]
pub(crate) struct Launch {
    /// Number of processes
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) ranks: u16,
    /// Backend between the processes
    #[arg(long, value_enum, default_value_t = Backend::Tcp)]
    pub(crate) backend: Backend,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    pub(crate) command: Vec<OsString>,
}

/// Arguments of a process that becomes a rank.
#[derive(Debug, clap::Args)]
pub(crate) struct LaunchedRank {
    /// Process number of the launcher
    pub(crate) launcher: i32,
    /// Program and its arguments
    #[arg(last = true, required = true)]
    pub(crate) command: Vec<OsString>,
}

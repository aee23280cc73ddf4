//! Command line of `arbiter`.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use crate::args::train::Train;
use crate::args::within;

/// Port on which the arbiter listens by default.
const PORT: u16 = 29_400;

/// Options of `arbiter`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Arbiter {
    /// File that keeps the arbiter's state; an arbiter that is started again with the same file continues
    #[arg(long, value_name = "FILE")]
    pub(crate) log: PathBuf,
    /// Keep a copy of the log of the arbiter at this address, and serve nobody: a standby. After that arbiter has ended, end this
    /// command, and start it again with --promote in place of --follow
    #[arg(long, value_name = "ADDR", value_delimiter = ',', conflicts_with = "promote")]
    pub(crate) follow: Vec<SocketAddr>,
    /// Serve in place of the arbiter of which the log is a copy: workers refuse that one from now on
    #[arg(long)]
    pub(crate) promote: bool,
    /// Address on which the arbiter listens; beyond loopback it needs the token of MESHSTEP_TOKEN or MESHSTEP_TOKEN_FILE
    #[arg(long, value_name = "ADDR", default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT)))]
    pub(crate) addr: SocketAddr,
    /// Seconds without a message after which a worker is no member any more
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = within::<1, 86_400>)]
    pub(crate) silence: usize,
    /// Longest time in seconds that workers wait for each other at an exchange
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = within::<1, 86_400>)]
    pub(crate) patience: usize,
    /// Smallest number of workers with which the run continues
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within::<1, 64>)]
    pub(crate) min_workers: usize,
    /// The workers' options: the arbiter refuses workers of another method
    #[command(flatten)]
    pub(crate) train: Train,
}

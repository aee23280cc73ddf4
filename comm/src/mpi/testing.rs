//! Streams of bytes for the tests of this backend, which are programs under `mpirun`. Not part of the interface.

use super::transport::MpiTransport;
use super::{Error, Options, start};
use crate::p2p::transport::{Source, Target, Transport};
use std::fmt::Display;
use std::time::Duration;

/// Transport of one group.
#[derive(Debug)]
pub struct Streams(Box<dyn Transport>);

/// Returns the transport of all ranks.
pub fn streams(options: &Options) -> Result<Streams, Error> {
    start::transport(options).map(|transport: MpiTransport| Streams(Box::new(transport)))
}

fn text(error: impl Display) -> String {
    error.to_string()
}

impl Streams {
    /// Index of this rank.
    pub fn rank(&self) -> usize {
        self.0.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.0.world_size()
    }

    /// Writes as many bytes as fit.
    pub fn write(&mut self, to: usize, bytes: &[u8]) -> Result<usize, String> {
        self.0.write(Target::Rank(to), bytes).map_err(text)
    }

    /// Reads as many bytes as have arrived.
    pub fn read(&mut self, from: usize, into: &mut [u8]) -> Result<usize, String> {
        self.0.read(Source::Rank(from), into).map_err(text)
    }

    /// Number of bytes that lie in place.
    pub fn arrived(&self, from: usize) -> usize {
        self.0.arrived(Source::Rank(from)).len()
    }

    /// Sends and receives; true if anything moved.
    pub fn progress(&mut self) -> Result<bool, String> {
        self.0.progress().map_err(text)
    }

    /// Waits until anything has moved.
    pub fn wait(&mut self, at_most: Duration) -> Result<(), String> {
        self.0.wait(at_most).map_err(text)
    }

    /// Returns a function that ends a wait.
    pub fn waker(&self) -> impl Fn() + Send + 'static {
        let waker = self.0.waker();
        move || waker.wake()
    }

    /// Returns the transport of a group.
    pub fn split(&mut self, members: &[usize], channel: u64) -> Result<Streams, String> {
        self.0.split(members, channel).map(Streams).map_err(text)
    }
}

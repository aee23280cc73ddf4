//! TestStreams of bytes for the tests of this backend, which are programs under `mpirun`. Not part of the interface.

use super::job::MpiJob;
use super::{Error, Options, start};
use crate::p2p::transport::{Source, Target, Transport};
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

/// Transport of one group.
#[derive(Debug)]
pub struct TestStreams {
    transport: Box<dyn Transport>,
    job: Arc<MpiJob>,
}

/// Returns the transport of all ranks.
pub fn streams(options: &Options) -> Result<TestStreams, Error> {
    let transport = start::transport(options)?;
    let job = transport.job();
    Ok(TestStreams { transport: Box::new(transport), job })
}

fn text(error: impl Display) -> String {
    error.to_string()
}

impl TestStreams {
    /// Index of this rank.
    pub fn rank(&self) -> usize {
        self.transport.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.transport.world_size()
    }

    /// Writes as many bytes as fit.
    pub fn write(&mut self, to: usize, bytes: &[u8]) -> Result<usize, String> {
        self.transport.write(Target::Rank(to), bytes).map_err(text)
    }

    /// Reads as many bytes as have arrived.
    pub fn read(&mut self, from: usize, into: &mut [u8]) -> Result<usize, String> {
        self.transport.read(Source::Rank(from), into).map_err(text)
    }

    /// Number of bytes that lie in place.
    pub fn arrived(&self, from: usize) -> usize {
        self.transport.arrived(Source::Rank(from)).len()
    }

    /// Sends and receives; true if anything moved.
    pub fn progress(&mut self) -> Result<bool, String> {
        self.transport.progress().map_err(text)
    }

    /// Waits until anything has moved.
    pub fn wait(&mut self, at_most: Duration) -> Result<(), String> {
        self.transport.wait(at_most).map_err(text)
    }

    /// Returns a function that ends a wait.
    pub fn waker(&self) -> impl Fn() + Send + 'static {
        let waker = self.transport.waker();
        move || waker.wake()
    }

    /// Returns the transport of a group.
    pub fn split(&mut self, members: &[usize], channel: u64) -> Result<TestStreams, String> {
        let transport = self.transport.split(members, channel).map_err(text)?;
        Ok(TestStreams { transport, job: Arc::clone(&self.job) })
    }

    /// Marks the world as failed.
    pub fn fail(&self, cause: &str) {
        self.job.fail(&cause);
    }
}

//! Ranks as threads, each with a run on its own GPU or CPU queue.

use super::devices;
use crate::common::Run;
use meshstep_comm::{Communicator, loopback, nccl};
use meshstep_shard::Options;
use meshstep_tensor::Queue;
use meshstep_tensor::cuda::Stream;
use std::sync::Arc;

/// Runs `body` on a GPU for each rank.
pub(super) fn on_ranks<T: Send>(run: &Run, body: impl Fn(Arc<dyn Communicator>, &Run) -> T + Sync) -> Vec<T> {
    let devices: Vec<usize> = (0..run.ranks).map(|rank| rank % devices()).collect();
    let options = nccl::Options { check: false, ..nccl::Options::default() };
    let ranks = nccl::spawn(&devices, options, |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let run = Run { options: Options { queue, ..run.options.clone() }, ..run.clone() };
        body(comm, &run)
    });
    ranks.unwrap()
}

/// Runs `body` on GPUs or on the CPU.
pub(super) fn on<T: Send>(
    gpus: bool,
    run: &Run,
    body: impl Fn(Arc<dyn Communicator>, &Run) -> T + Sync,
) -> Vec<T> {
    if gpus { on_ranks(run, body) } else { loopback::spawn(run.ranks, |comm| body(comm, run)).unwrap() }
}

//! Communicator handle of a rank, and its drop.

use super::core::Core;
use super::watchdog::{self, Scope};
use crate::{Communicator, Error, InFlight, Op, Stats};
use meshstep_tensor::cuda::Device;
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Queue};
use std::sync::Arc;

/// Rank of a group on NCCL.
///
/// Dropping it waits for its started operations and leaves the group, each within its deadline. A drop while the thread unwinds
/// ends the group's ranks in this process instead.
#[derive(Debug)]
pub struct Nccl {
    core: Arc<Core>,
}

impl Nccl {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Nccl { core }
    }

    pub(super) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Device of its buffers.
    pub fn device(&self) -> &Device {
        self.core.device()
    }

    /// Starts several operations, all or none, that NCCL puts on the stream together: fewer launches, and a `send` and a `recv`
    /// between the same two ranks do not wait for each other. Every rank groups the same calls.
    pub fn start_group<const N: usize>(
        &self,
        calls: [(Op, Buffer); N],
        after: &Queue,
    ) -> Result<[InFlight; N], ([Buffer; N], Error)> {
        self.core.start_group(calls, after)
    }

    /// Returns the last thousand operations, one per line: the call, and the times of its launch, begin and end.
    pub fn flight_record(&self) -> String {
        self.core.ledger().record()
    }

    /// Ends the group's ranks in this process after a panic of this one.
    pub(super) fn panicked(core: &Core, message: String) {
        watchdog::trouble(core, Error::Panicked { rank: core.rank, message }, Scope::Group);
    }
}

impl Communicator for Nccl {
    fn rank(&self) -> usize {
        self.core.rank
    }

    fn world_size(&self) -> usize {
        self.core.world_size
    }

    fn start(&self, op: Op, buffer: Buffer, after: &Queue) -> Result<InFlight, (Buffer, Error)> {
        self.core.start(op, buffer, after)
    }

    fn zeroed_on(
        &self,
        queue: &Queue,
        len: usize,
        dtype: DType,
        (meter, category): (&Meter, Category),
        _apart: &[usize],
    ) -> Result<Buffer, meshstep_tensor::Error> {
        if self.core.options.windows && len > 0 && queue.place() == Place::Cuda(self.device().ordinal()) {
            return self.core.window_memory(queue, (len, dtype), (meter, category));
        }
        Buffer::zeroed_on(queue, len, dtype, meter, category)
    }

    fn register(&self, buffer: &Buffer) -> Result<bool, Error> {
        if self.core.options.windows { self.core.register(buffer) } else { Ok(false) }
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let child = self.core.split(color, key)?;
        Ok(child.map(|core| Arc::new(Nccl { core }) as _))
    }

    /// Ends the ranks of this process, and informs other processes if there is an [`Exchange`](super::Exchange); without one they
    /// fail at their deadlines.
    fn abort(&self) {
        watchdog::trouble(&self.core, Error::Aborted { rank: self.core.rank }, Scope::Subgroups);
    }

    fn sound(&self) -> Result<(), Error> {
        self.core.ledger().refuse()
    }

    fn stats(&self) -> Stats {
        self.core.ledger().stats()
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let message = "its communicator was dropped while its thread unwound".to_owned();
            Nccl::panicked(&self.core, message);
        }
        self.core.close();
    }
}

//! Creation of communicators.

use super::communicator::Nccl;
use super::core::{Core, device_error};
use super::id::UniqueId;
use super::options::{Exchange, Options};
use super::raw::Raw;
use super::table::Table;
use super::{watchdog, with_deadline};
use crate::Error;
use crate::sync::real::{Mutex, on_threads};
use meshstep_tensor::cuda::Device;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// Poll interval while ranks join.
const POLL: Duration = Duration::from_micros(200);

/// Creates the communicator of rank `rank` of `world_size` with this id, on a device that no other rank uses. Returns when all
/// ranks have joined, or with [`Error::NotJoined`] at the deadline.
pub fn init(
    id: &UniqueId,
    rank: usize,
    world_size: usize,
    device: &Device,
    options: Options,
) -> Result<Nccl, Error> {
    if world_size == 0 {
        return Err(Error::ZeroRanks);
    }
    if rank >= world_size {
        return Err(Error::InvalidRank { rank, world_size });
    }
    let raw = joined(*id, (rank, world_size), device, &options)?;
    Core::new(raw, (rank, world_size, id.group()), Vec::new(), device, options).map(Nccl::new)
}

/// Like [`init`], with an id that rank 0 creates and `exchange` distributes. After a failure all ranks join again with the next
/// `generation`.
pub fn join(
    exchange: Arc<dyn Exchange>,
    generation: u64,
    rank: usize,
    world_size: usize,
    device: &Device,
    options: Options,
) -> Result<Nccl, Error> {
    let key = format!("nccl/{generation}");
    let id = if rank == 0 {
        let id = UniqueId::new()?;
        exchange.set(&key, id.as_bytes())?;
        id
    } else {
        let bytes = exchange.get(&key, options.deadline)?;
        let wrong = |bytes: Vec<u8>| Error::BadId { given: bytes.len(), needed: UniqueId::LEN };
        UniqueId::from_bytes(bytes.try_into().map_err(wrong)?)
    };
    init(&id, rank, world_size, device, Options { exchange: Some(exchange), ..options })
}

/// Runs `body` on ranks that are threads of this process, one for each of `devices` (their ordinals), and returns the results by
/// rank. If one rank panics, the operations of the others fail with [`Error::Panicked`], and so does this call once all have
/// ended.
pub fn spawn<T: Send>(
    devices: &[usize],
    options: Options,
    body: impl Fn(Arc<Nccl>) -> T + Sync,
) -> Result<Vec<T>, Error> {
    let (id, world_size) = (UniqueId::new()?, devices.len());
    let first_panic = Mutex::new(None);
    let run = |(rank, ordinal): (usize, usize)| -> Result<Option<T>, Error> {
        let device = Device::open(ordinal).map_err(device_error)?;
        let comm = Arc::new(init(&id, rank, world_size, &device, options.clone())?);
        match catch_unwind(AssertUnwindSafe(|| body(comm))) {
            Ok(value) => Ok(Some(value)),
            Err(payload) => {
                let message = said(payload.as_ref());
                first_panic.lock().get_or_insert(Error::Panicked { rank, message });
                Ok(None)
            }
        }
    };
    let results = on_threads(devices.iter().copied().enumerate().collect(), run);
    if let Some(error) = first_panic.lock().take() {
        return Err(error);
    }
    let result = |(rank, result): (usize, std::io::Result<Result<Option<T>, Error>>)| {
        let value = result.map_err(|error| Error::NoThread { rank, message: error.to_string() })??;
        value.ok_or_else(|| Error::Panicked { rank, message: said(&()) })
    };
    results.into_iter().enumerate().map(result).collect()
}

fn said(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").to_owned()
}

/// Creates NCCL's communicator; returns once all ranks have joined.
pub(super) fn joined(
    id: UniqueId,
    (rank, world_size): (usize, usize),
    device: &Device,
    options: &Options,
) -> Result<Raw, Error> {
    let table = Table::get()?;
    if options.windows {
        table.memory().and(table.windows())?;
    }
    watchdog::wait_for_ends();
    let (clock, after) = (&options.clock, options.deadline);
    let end = clock.now().saturating_add(after);
    let late = || Error::NotJoined { rank, world_size, after };
    let of = device.clone();
    // Runs on its own thread, as an old library does not return before all ranks have joined.
    let ask = move || {
        of.make_current().map_err(device_error)?;
        Raw::init(table, &id, rank, world_size)
    };
    let raw = with_deadline::run(clock, after, vec![ask]).pop().ok_or_else(late)??;
    loop {
        let error = match raw.state() {
            Ok(true) => return Ok(raw),
            Ok(false) if clock.now() < end => {
                std::thread::sleep(POLL);
                continue;
            }
            Ok(false) => late(),
            Err(error) => error,
        };
        if with_deadline::run(clock, options.abort_within, vec![move || raw.abort()]).is_empty() {
            options.last_resort.call(&error);
        }
        return Err(error);
    }
}

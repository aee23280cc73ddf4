//! Registration of buffers that the ranks of one host read in place.

use super::group::P2pGroup;
use super::transport::{WindowPlace, Windows};
use crate::{Communicator, Error, Reduction};
use meshstep_tensor::{Buffer, Category, DType, Meter};

/// Shortest buffer worth a mapping in every other rank, in bytes. Shorter ones are registered without effect.
const LEAST: usize = 64 << 10;

/// Allocates zeros that can be registered; `None` if they are too few, or there is no such memory.
pub(super) fn zeroed(
    group: &P2pGroup,
    len: usize,
    dtype: DType,
    (meter, category): (&Meter, Category),
    apart: &[usize],
) -> Option<Result<Buffer, meshstep_tensor::Error>> {
    let bytes = len.checked_mul(dtype.size()).filter(|bytes| *bytes >= LEAST)?;
    let memory = group.windows.as_ref()?.allocate(bytes, apart)?;
    let keep = (memory.owner, meter.claim(category, bytes as u64));
    // SAFETY: the owner has allocated these bytes as zeros, and this buffer alone uses them. Other ranks read them during operations on
    // the buffer.
    Some(unsafe { Buffer::from_raw(memory.start, len, dtype, keep) })
}

/// Registers `buffer`. Returns true if all ranks can read all ranks' memory; otherwise its bytes travel.
///
/// All ranks have the places of all windows before one offers its own, and take what was offered, mapped or not, before the next
/// registration. So no offer stays in the sockets.
pub(super) fn register(group: &P2pGroup, comm: &dyn Communicator, buffer: &Buffer) -> Result<bool, Error> {
    if group.windows.is_none() {
        return Ok(false);
    }
    let id = {
        let mut registered = group.registered.lock();
        *registered += 1;
        *registered
    };
    let (start, bytes) = (buffer.as_ptr(), buffer.bytes() as u64);
    let whole = |place: &WindowPlace| place.bytes == bytes;
    let own = with_windows(group, |windows| windows.place(start)).flatten();
    let places = gather(comm, own.filter(whole).unwrap_or_default(), bytes)?;
    if buffer.bytes() < LEAST || !places.iter().all(whole) {
        return Ok(false);
    }
    let offered = with_windows(group, |windows| windows.offer(start, id)).unwrap_or_default();
    let offered = on_all(comm, offered)?;
    let places = offered.then_some(&*places);
    let mapped = with_windows(group, |windows| windows.accept(id, places)).unwrap_or_default();
    let in_place = on_all(comm, mapped)?;
    if !in_place {
        with_windows(group, |windows| windows.forget(id));
    }
    tracing::debug!(rank = group.rank, bytes, in_place, "a buffer was registered");
    Ok(in_place)
}

/// Gathers the places of all ranks' windows. Ranks that register buffers of different lengths get an error.
fn gather(comm: &dyn Communicator, own: WindowPlace, bytes: u64) -> Result<Vec<WindowPlace>, Error> {
    const WORDS: usize = 3;
    let mut words = vec![0; WORDS * comm.world_size()];
    let mine = comm.rank() * WORDS;
    words[mine..mine + WORDS].copy_from_slice(&[bytes, own.bytes, own.first]);
    let mut words = Buffer::from_slice(&words, &Meter::new(), Category::Staging)?;
    comm.all_gather(&mut words)?;
    let ranks = words.typed::<u64>()?.as_chunks::<WORDS>().0;
    if ranks.iter().any(|[theirs, ..]| *theirs != bytes) {
        return Err(Error::UnlikeMemory { bytes: ranks.iter().map(|[bytes, ..]| *bytes).collect() });
    }
    Ok(ranks.iter().map(|&[_, bytes, first]| WindowPlace { bytes, first }).collect())
}

/// Returns true if `mine` is true on all ranks.
fn on_all(comm: &dyn Communicator, mine: bool) -> Result<bool, Error> {
    let mut all = Buffer::from_slice(&[u64::from(mine)], &Meter::new(), Category::Staging)?;
    comm.all_reduce(&mut all, Reduction::Min)?;
    Ok(all.typed::<u64>()? == [1])
}

fn with_windows<T>(group: &P2pGroup, f: impl FnOnce(&mut dyn Windows) -> T) -> Option<T> {
    group.engine.lock().links.transport.windows().map(f)
}

//! Registration of buffers that the ranks of one host read in place.

use super::group::P2pGroup;
use super::transport::WindowPlace;
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
    let bytes = len.checked_mul(dtype.size()).filter(|bytes| group.windows && *bytes >= LEAST)?;
    let memory = group.engine.lock().links.transport.windows()?.allocate(bytes, apart)?;
    let keep = (memory.owner, meter.claim(category, bytes as u64));
    // SAFETY: the owner has allocated these bytes as zeros, and this buffer alone uses them. Other ranks read them during operations on
    // the buffer.
    Some(unsafe { Buffer::from_raw(memory.start, len, dtype, keep) })
}

/// Registers `buffer`. Returns true if all ranks can read all ranks' memory; otherwise its bytes travel.
pub(super) fn register(group: &P2pGroup, comm: &dyn Communicator, buffer: &Buffer) -> Result<bool, Error> {
    if !group.windows || buffer.bytes() < LEAST {
        return Ok(false);
    }
    let id = {
        let mut registered = group.registered.lock();
        *registered += 1;
        *registered
    };
    let whole = |place: &WindowPlace| place.bytes == buffer.bytes() as u64;
    let own = with_windows(group, |windows| windows.offer(buffer.as_ptr(), id)).flatten();
    let places = gather(comm, own.filter(whole).unwrap_or_default(), buffer.bytes() as u64)?;
    let mapped = places.iter().all(whole)
        && with_windows(group, |windows| windows.accept(id, &places)).unwrap_or_default();
    let all = Buffer::from_slice(&[u64::from(mapped)], &Meter::new(), Category::Staging);
    let mut all = all.map_err(Error::from)?;
    comm.all_reduce(&mut all, Reduction::Min)?;
    let in_place = all.typed::<u64>()? == [1];
    if !in_place {
        with_windows(group, |windows| windows.forget(id));
    }
    tracing::debug!(rank = group.rank, bytes = buffer.bytes(), in_place, "a buffer was registered");
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

fn with_windows<T>(group: &P2pGroup, f: impl FnOnce(&mut dyn super::transport::Windows) -> T) -> Option<T> {
    group.engine.lock().links.transport.windows().map(f)
}

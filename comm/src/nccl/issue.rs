//! How an operation is told to NCCL. The one place where memory is handed to it.

use super::raw::Raw;
use super::table::{Handle, Table};
use crate::{Action, Error, Reduction};
use meshstep_tensor::DType;
use std::ffi::{c_int, c_void};

/// An operation on memory of the communicator's device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Issue {
    pub(super) action: Action,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// Where the buffer begins.
    pub(super) address: usize,
    pub(super) len: usize,
    pub(super) dtype: DType,
    /// Where a copy of the buffer begins, for `all_to_all`; where one u64 is, for a barrier.
    pub(super) aside: usize,
}

/// Puts operations on a stream, several as one group. Whether NCCL is done with that.
///
/// # Safety
/// - Each buffer, its copy and the barrier's element are live memory of the communicator's device, of the length and type
///   given, until the stream has done the work.
/// - Whatever else touches them is ordered before or after that work.
/// - `stream` is a live stream of that device.
pub(super) unsafe fn issue(raw: &Raw, issues: &[Issue], stream: *mut c_void) -> Result<bool, Error> {
    raw.with(|table, comm| {
        let call = Call { table, comm, stream };
        let grouped = issues.len() > 1 || issues.iter().any(|issue| issue.action == Action::AllToAll);
        if !grouped {
            // SAFETY: as this function's.
            return issues.iter().try_fold(true, |_, issue| unsafe { call.one(issue) });
        }
        // SAFETY: no more than the calls in between.
        call.told("ncclGroupStart", unsafe { (table.group_start)() })?;
        // SAFETY: as this function's.
        let issued = issues.iter().try_for_each(|issue| unsafe { call.one(issue).map(drop) });
        // A group that was begun is ended, also one that failed.
        // SAFETY: a group was begun on this thread.
        let ended = call.told("ncclGroupEnd", unsafe { (table.group_end)() });
        issued.and(ended)
    })
}

struct Call {
    table: &'static Table,
    comm: Handle,
    stream: *mut c_void,
}

impl Call {
    /// # Safety
    /// As for [`issue`].
    unsafe fn one(&self, issue: &Issue) -> Result<bool, Error> {
        let Issue { action, len, dtype, .. } = *issue;
        if action.moves_data() && len == 0 {
            return Ok(true);
        }
        let (table, comm, stream) = (self.table, self.comm, self.stream);
        let (kind, whole, part) = (number(dtype)?, issue.at(0), len / issue.world_size);
        let mine = issue.at(issue.rank * part);
        // SAFETY: every range is within the buffer: the whole of it, or the `part` elements from a chunk's beginning.
        unsafe {
            match action {
                Action::AllReduce(how) => {
                    let code = (table.all_reduce)(whole, whole, len, kind, reduction(how), comm, stream);
                    self.told("ncclAllReduce", code)
                }
                Action::ReduceScatter(how) => {
                    let code = (table.reduce_scatter)(whole, mine, part, kind, reduction(how), comm, stream);
                    self.told("ncclReduceScatter", code)
                }
                Action::AllGather => {
                    self.told("ncclAllGather", (table.all_gather)(mine, whole, part, kind, comm, stream))
                }
                Action::Broadcast { root } => {
                    let code = (table.broadcast)(whole, whole, len, kind, small(root), comm, stream);
                    self.told("ncclBroadcast", code)
                }
                Action::Send { to } => self.send(whole, len, kind, to),
                Action::Recv { from } => self.recv(whole, len, kind, from),
                Action::AllToAll => self.all_to_all(issue, part, kind),
                // A group is formed by `split` alone; here it is as good as any wait for all.
                Action::Barrier | Action::Split { .. } => {
                    let one = issue.aside as *mut c_void;
                    let (kind, sum) = (number(DType::U64)?, reduction(Reduction::Sum));
                    self.told("ncclAllReduce", (table.all_reduce)(one, one, 1, kind, sum, comm, stream))
                }
            }
        }
    }

    /// Chunks leave from the copy, so that none is overwritten before it has left.
    ///
    /// # Safety
    /// As for [`issue`].
    unsafe fn all_to_all(&self, issue: &Issue, part: usize, kind: c_int) -> Result<bool, Error> {
        for other in (0..issue.world_size).filter(|&other| other != issue.rank) {
            let from = issue.aside + other * part * issue.dtype.size();
            // SAFETY: chunk `other` of the copy, and of the buffer.
            unsafe {
                self.send(from as *mut c_void, part, kind, other)?;
                self.recv(issue.at(other * part), part, kind, other)?;
            }
        }
        Ok(true)
    }

    /// # Safety
    /// `len` elements from `from` on are as [`issue`] says.
    unsafe fn send(&self, from: *mut c_void, len: usize, kind: c_int, to: usize) -> Result<bool, Error> {
        // SAFETY: as this function's.
        self.told("ncclSend", unsafe {
            (self.table.send)(from, len, kind, small(to), self.comm, self.stream)
        })
    }

    /// # Safety
    /// `len` elements from `to` on are as [`issue`] says.
    unsafe fn recv(&self, to: *mut c_void, len: usize, kind: c_int, from: usize) -> Result<bool, Error> {
        // SAFETY: as this function's.
        self.told("ncclRecv", unsafe {
            (self.table.recv)(to, len, kind, small(from), self.comm, self.stream)
        })
    }

    fn told(&self, function: &'static str, code: c_int) -> Result<bool, Error> {
        self.table.told(function, code, self.comm)
    }
}

impl Issue {
    /// Where element `index` is.
    fn at(&self, index: usize) -> *mut c_void {
        (self.address + index * self.dtype.size()) as *mut c_void
    }
}

/// NCCL's number for a type.
fn number(dtype: DType) -> Result<c_int, Error> {
    match dtype {
        DType::U64 => Ok(5),
        DType::F16 => Ok(6),
        DType::F32 => Ok(7),
        DType::F64 => Ok(8),
        DType::BF16 => Ok(9),
        _ => Err(Error::UnsupportedDType { dtype }),
    }
}

/// NCCL's number for a reduction.
fn reduction(how: Reduction) -> c_int {
    match how {
        Reduction::Sum => 0,
        Reduction::Max => 2,
        Reduction::Min => 3,
        Reduction::Mean => 4,
    }
}

/// A rank, which was below the world size when the communicator was made, and so has room.
fn small(rank: usize) -> c_int {
    rank as c_int
}

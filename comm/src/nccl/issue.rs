//! How an operation is told to NCCL. The one place where memory is handed to it.

use super::raw::Raw;
use super::table::{DropReduction, Handle, Table};
use crate::{Action, Error, Reduction};
use meshstep_tensor::{DType, narrow};
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
        // Dropped when their calls have returned.
        let operators = issues.iter().map(|issue| call.operator(issue)).collect::<Result<Vec<_>, _>>()?;
        let mut each = issues.iter().zip(&operators);
        let grouped = issues.len() > 1 || issues.iter().any(|issue| issue.action == Action::AllToAll);
        if !grouped {
            // SAFETY: as this function's.
            return each.try_fold(true, |_, (issue, operator)| unsafe { call.one(issue, operator) });
        }
        // SAFETY: no more than the calls in between.
        call.told("ncclGroupStart", unsafe { (table.group_start)() })?;
        // SAFETY: as this function's.
        let issued = each.try_for_each(|(issue, operator)| unsafe { call.one(issue, operator).map(drop) });
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

/// How an operation reduces, as NCCL knows it: a number of its own, or one that was made for a factor.
struct Operator<'a> {
    number: c_int,
    made: Option<(DropReduction, &'a Call)>,
}

impl Drop for Operator<'_> {
    fn drop(&mut self) {
        if let Some((drop, call)) = self.made {
            // SAFETY: it was made for this communicator, which has not ended: `Raw::with` keeps it. NCCL needs it until the calls
            // that are given it have returned.
            let code = unsafe { drop(self.number, call.comm) };
            tracing::debug!(code, "a reduction of NCCL has been dropped");
        }
    }
}

impl Call {
    /// How `issue` reduces, if it does.
    fn operator(&self, issue: &Issue) -> Result<Operator<'_>, Error> {
        let how = issue.action.reduction().unwrap_or(Reduction::Sum);
        let Reduction::PreMulSum { factor } = how else {
            return Ok(Operator { number: reduction(how), made: None });
        };
        let (make, drop) = self.table.factors()?;
        let (mut number, mut factor) = (0, as_element(factor, issue.dtype)?);
        let (place, kind) = ((&raw mut factor).cast(), self::number(issue.dtype)?);
        // SAFETY: NCCL reads a factor of that type from the host before it returns, and writes the number.
        let code = unsafe { make(&mut number, place, kind, FROM_HOST, self.comm) };
        self.told("ncclRedOpCreatePreMulSum", code)?;
        Ok(Operator { number, made: Some((drop, self)) })
    }

    /// # Safety
    /// As for [`issue`].
    unsafe fn one(&self, issue: &Issue, operator: &Operator<'_>) -> Result<bool, Error> {
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
                Action::AllReduce(_) => {
                    let code = (table.all_reduce)(whole, whole, len, kind, operator.number, comm, stream);
                    self.told("ncclAllReduce", code)
                }
                Action::ReduceScatter(_) => {
                    let code = (table.reduce_scatter)(whole, mine, part, kind, operator.number, comm, stream);
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
                    let kind = number(DType::U64)?;
                    let code = (table.all_reduce)(one, one, 1, kind, operator.number, comm, stream);
                    self.told("ncclAllReduce", code)
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

/// NCCL's word for a factor that it reads from the host at once.
const FROM_HOST: c_int = 1;

/// A factor as the first bytes of what NCCL reads, in the type that travels.
fn as_element(factor: f64, dtype: DType) -> Result<u64, Error> {
    let single = factor as f32;
    Ok(match dtype {
        DType::F64 => factor.to_bits(),
        DType::F32 => first_bytes(&single.to_ne_bytes()),
        DType::BF16 => first_bytes(&narrow::to_bf16(single).to_bits().to_ne_bytes()),
        DType::F16 => first_bytes(&narrow::to_f16(single).to_bits().to_ne_bytes()),
        _ => return Err(Error::FactorsOfIntegers { dtype }),
    })
}

fn first_bytes(bytes: &[u8]) -> u64 {
    let mut all = [0; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    u64::from_ne_bytes(all)
}

/// NCCL's number for a reduction without a factor.
fn reduction(how: Reduction) -> c_int {
    match how {
        Reduction::Sum | Reduction::PreMulSum { .. } => 0,
        Reduction::Max => 2,
        Reduction::Min => 3,
        Reduction::Mean => 4,
    }
}

/// A rank, which was below the world size when the communicator was made, and so has room.
fn small(rank: usize) -> c_int {
    rank as c_int
}

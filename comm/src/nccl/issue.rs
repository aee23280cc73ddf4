//! Calls of NCCL's collectives: the only place that passes memory to NCCL.

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
    /// Address of the buffer.
    pub(super) address: usize,
    pub(super) len: usize,
    pub(super) dtype: DType,
    /// Address of the buffer's copy, for `all_to_all`; of one u64, for a barrier.
    pub(super) aside: usize,
}

/// Puts operations on a stream, several as one group. Returns true if NCCL is done with that.
///
/// # Safety
/// - Each buffer, its copy and the barrier's element are live memory of the communicator's device, of the length and type
///   given, until the stream has done the work.
/// - Every other access to them is ordered before or after that work.
/// - `stream` is a live stream of that device.
pub(super) unsafe fn issue(raw: &Raw, issues: &[Issue], stream: *mut c_void) -> Result<bool, Error> {
    raw.with(|table, comm| {
        let call = Call { table, comm, stream };
        // The operators are dropped after their calls have returned.
        let operators = issues.iter().map(|issue| call.operator(issue)).collect::<Result<Vec<_>, _>>()?;
        let mut each = issues.iter().zip(&operators);
        let grouped = issues.len() > 1 || issues.iter().any(|issue| issue.has_parts());
        if !grouped {
            // SAFETY: the caller's guarantee.
            return each.try_fold(true, |_, (issue, operator)| unsafe { call.one(issue, operator) });
        }
        // SAFETY: the group contains only the calls in between.
        call.told("ncclGroupStart", unsafe { (table.group_start)() })?;
        // SAFETY: the caller's guarantee.
        let issued = each.try_for_each(|(issue, operator)| unsafe { call.one(issue, operator).map(drop) });
        // A group is ended even if one of its calls failed.
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

/// Reduction of an operation as NCCL knows it: a built-in number, or one created for a factor.
struct Operator<'a> {
    number: c_int,
    made: Option<(DropReduction, &'a Call)>,
}

impl Drop for Operator<'_> {
    fn drop(&mut self) {
        if let Some((drop, call)) = self.made {
            // SAFETY: the number was created for this communicator, which `Raw::with` keeps from ending. NCCL needs it only until
            // the calls that use it have returned.
            let code = unsafe { drop(self.number, call.comm) };
            tracing::debug!(code, "a reduction of NCCL has been dropped");
        }
    }
}

impl Call {
    /// Returns the reduction of `issue`, if it has one.
    fn operator(&self, issue: &Issue) -> Result<Operator<'_>, Error> {
        let how = issue.action.reduction().unwrap_or(Reduction::Sum);
        let Reduction::PreMulSum { factor } = how else {
            return Ok(Operator { number: reduction(how), made: None });
        };
        let (make, drop) = self.table.factors()?;
        let (mut number, mut factor) = (0, as_element(factor, issue.dtype)?);
        let (place, kind) = ((&raw mut factor).cast(), self::number(issue.dtype)?);
        // SAFETY: NCCL reads a factor of that type from host memory before it returns, and writes the number.
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
                Action::AllReduce(Reduction::SumThenMax { sums }) => self.sum_then_max(issue, sums, kind),
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
                Action::ReduceAndGather(_) => Err(Error::NeedsWriter),
                // A split creates its groups elsewhere; here it is a barrier.
                Action::Barrier | Action::Split { .. } => {
                    let one = issue.aside as *mut c_void;
                    let kind = number(DType::U64)?;
                    let code = (table.all_reduce)(one, one, 1, kind, operator.number, comm, stream);
                    self.told("ncclAllReduce", code)
                }
            }
        }
    }

    /// Reduces the two parts of the buffer by a call each.
    ///
    /// # Safety
    /// As for [`issue`].
    unsafe fn sum_then_max(&self, issue: &Issue, sums: usize, kind: c_int) -> Result<bool, Error> {
        let sums = sums.min(issue.len);
        for (at, len, how) in [(0, sums, Reduction::Sum), (sums, issue.len - sums, Reduction::Max)] {
            let (part, number) = (issue.at(at), reduction(how));
            if len > 0 {
                // SAFETY: `len` elements from `at` on are within the buffer.
                let code =
                    unsafe { (self.table.all_reduce)(part, part, len, kind, number, self.comm, self.stream) };
                self.told("ncclAllReduce", code)?;
            }
        }
        Ok(true)
    }

    /// Sends chunks from the copy, so that none is overwritten before it has been sent.
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
        // SAFETY: the caller's guarantee.
        self.told("ncclSend", unsafe {
            (self.table.send)(from, len, kind, small(to), self.comm, self.stream)
        })
    }

    /// # Safety
    /// `len` elements from `to` on are as [`issue`] says.
    unsafe fn recv(&self, to: *mut c_void, len: usize, kind: c_int, from: usize) -> Result<bool, Error> {
        // SAFETY: the caller's guarantee.
        self.told("ncclRecv", unsafe {
            (self.table.recv)(to, len, kind, small(from), self.comm, self.stream)
        })
    }

    fn told(&self, function: &'static str, code: c_int) -> Result<bool, Error> {
        self.table.told(function, code, self.comm)
    }
}

impl Issue {
    /// Returns true if the operation takes several calls of NCCL.
    fn has_parts(&self) -> bool {
        matches!(self.action, Action::AllToAll | Action::AllReduce(Reduction::SumThenMax { .. }))
    }

    /// Address of element `index`.
    fn at(&self, index: usize) -> *mut c_void {
        (self.address + index * self.dtype.size()) as *mut c_void
    }
}

/// Returns NCCL's number for a type.
pub(super) fn number(dtype: DType) -> Result<c_int, Error> {
    match dtype {
        DType::U64 => Ok(5),
        DType::F16 => Ok(6),
        DType::F32 => Ok(7),
        DType::F64 => Ok(8),
        DType::BF16 => Ok(9),
        _ => Err(Error::UnsupportedDType { dtype }),
    }
}

/// NCCL's constant for a factor that it reads from host memory at once.
pub(super) const FROM_HOST: c_int = 1;

/// Returns the factor in the buffer's type, as the first bytes of the value that NCCL reads.
fn as_element(factor: f64, dtype: DType) -> Result<u64, Error> {
    let single = odd(factor);
    Ok(match dtype {
        DType::F64 => factor.to_bits(),
        DType::F32 => first_bytes(&(factor as f32).to_ne_bytes()),
        DType::BF16 => first_bytes(&narrow::to_bf16(single).to_bits().to_ne_bytes()),
        DType::F16 => first_bytes(&narrow::to_f16(single).to_bits().to_ne_bytes()),
        _ => return Err(Error::FactorsOfIntegers { dtype }),
    })
}

/// Rounds a factor to the odd one of its two f32 neighbours, or converts it exactly: rounding the result to 16 bits then equals a
/// single rounding of the factor.
fn odd(factor: f64) -> f32 {
    let single = factor as f32;
    let (bits, wide) = (single.to_bits(), f64::from(single));
    if wide == factor || factor.is_nan() || bits % 2 == 1 {
        return single;
    }
    f32::from_bits(if factor.abs() > wide.abs() { bits + 1 } else { bits - 1 })
}

fn first_bytes(bytes: &[u8]) -> u64 {
    let mut all = [0; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    u64::from_ne_bytes(all)
}

/// Returns NCCL's number for a reduction without a factor.
pub(super) fn reduction(how: Reduction) -> c_int {
    match how {
        // A pairwise sum is refused before.
        Reduction::Sum | Reduction::Pairwise | Reduction::PreMulSum { .. } | Reduction::SumThenMax { .. } => {
            0
        }
        Reduction::Max => 2,
        Reduction::Min => 3,
        Reduction::Mean => 4,
    }
}

/// Converts a rank, which fits because it was below the world size when the communicator was created.
fn small(rank: usize) -> c_int {
    rank as c_int
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshstep_tensor::{bf16, f16};

    fn sixteen(factor: f64, dtype: DType) -> u16 {
        let [low, high, ..] = as_element(factor, dtype).unwrap().to_ne_bytes();
        u16::from_ne_bytes([low, high])
    }

    /// Checks all numbers of a type, their neighbours in f64, and the midpoints between them.
    fn check(dtype: DType, infinity: u16, wide: impl Fn(u16) -> f64) {
        let same = |factor: f64, bits: u16| {
            assert_eq!(sixteen(factor, dtype), bits, "{factor:e} as {dtype}");
            assert_eq!(sixteen(-factor, dtype), bits | 0x8000, "{:e} as {dtype}", -factor);
        };
        for bits in 0..infinity {
            let (next, number) = (bits + 1, wide(bits));
            let above = if next < infinity { wide(next) } else { 2.0 * number - wide(bits - 1) };
            let middle = (number + above) / 2.0;
            same(number, bits);
            same(number.next_up(), bits);
            same(middle.next_down(), bits);
            same(middle, if bits % 2 == 0 { bits } else { next });
            same(middle.next_up(), next);
            // The midpoint is an f32 as well; its f32 neighbours are one unit away.
            let single = middle as f32;
            same(f64::from(single.next_down()).next_up(), bits);
            same(f64::from(single.next_up()).next_down(), next);
            same(above.next_down(), next);
        }
        same(f64::MAX, infinity);
        same(f64::INFINITY, infinity);
        assert!(wide(sixteen(f64::NAN, dtype)).is_nan());
    }

    #[test]
    fn factors_are_rounded_once() {
        let almost_a_tie = 1.0 + 2f64.powi(-8) + 2f64.powi(-40);
        assert_eq!(bf16::from_bits(sixteen(almost_a_tie, DType::BF16)), bf16::from_f32(1.0 + 2f32.powi(-7)));
        check(DType::BF16, 0x7F80, |bits| bf16::from_bits(bits).to_f64());
        check(DType::F16, 0x7C00, |bits| f16::from_bits(bits).to_f64());
        let single = as_element(0.3, DType::F32).unwrap().to_ne_bytes();
        assert_eq!(single[..4], 0.3f32.to_ne_bytes());
        assert_eq!(as_element(0.1, DType::F64), Ok(0.1f64.to_bits()));
        assert_eq!(as_element(2.0, DType::U64), Err(Error::FactorsOfIntegers { dtype: DType::U64 }));
    }
}

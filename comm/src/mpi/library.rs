//! Reductions of one group by the MPI library, block by block, in memory of this backend.

use super::calls::{CallFault, Calls, Requests, check};
use crate::p2p::transport::{LostWhy, SystemReduction};
use crate::{Action, Called, Reduction};
use ::mpi::ffi;
use meshstep_tensor::DType;
use std::ffi::c_int;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;

/// Reductions of one group. Dropped with a block under way it leaks the block's memory, as MPI may still access it.
#[derive(Debug)]
pub(super) struct LibraryReductions {
    /// Ranks in the job of the group's ranks.
    members: Vec<c_int>,
    comm: GroupComm,
    /// One slot, for the block.
    request: Requests,
    input: Words,
    /// Bytes in the input.
    input_len: usize,
    output: Words,
    /// Block that has begun and not ended.
    block: Option<Block>,
    /// Bytes in the output.
    result: Option<Result<usize, CallFault>>,
}

/// One block.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// Bytes of the input.
    len: usize,
    reduction: Reduction,
    dtype: DType,
    scatters: bool,
    /// True once MPI has it.
    is_posted: bool,
}

/// Tag of the creation of a group's communicator, once the group's rank 0 has announced it.
type CreationTag = Result<Option<c_int>, CallFault>;

/// The group's communicator, which a thread makes, as that waits for the other ranks.
#[derive(Debug)]
enum GroupComm {
    Unmade,
    Making(Receiver<Result<Handle, CallFault>>),
    Made(Handle),
}

#[derive(Clone, Copy, Debug)]
struct Handle(ffi::MPI_Comm);

// SAFETY: as for `Calls`: MPI_THREAD_MULTIPLE, which the option of the library's reductions needs.
unsafe impl Send for Handle {}

/// Bytes, aligned for every element type.
#[derive(Debug, Default)]
struct Words(Vec<u64>);

impl LibraryReductions {
    /// Reductions of a group of `members`, ranks of the job.
    pub(super) fn new(members: impl Iterator<Item = usize>) -> Self {
        let mut request = Requests::default();
        request.grow(1);
        LibraryReductions {
            members: members.map(|rank| rank as c_int).collect(),
            comm: GroupComm::Unmade,
            request,
            input: Words::default(),
            input_len: 0,
            output: Words::default(),
            block: None,
            result: None,
        }
    }

    /// Returns true if the library runs `called`; every rank with an equal call gets the same answer.
    pub(super) fn take(called: &Called) -> bool {
        let (Action::AllReduce(reduction) | Action::ReduceScatter(reduction)) = called.action else {
            return false;
        };
        operation(reduction).is_some() && datatype(called.dtype).is_some()
    }

    /// Returns true if a block has begun and not ended, or MPI still has its memory after an error.
    pub(super) fn is_under_way(&self) -> bool {
        self.block.is_some() || !self.request.are_free()
    }

    /// Moves the block; returns true if it has ended. `tag` is that of the creation of the group's communicator, once it is known.
    pub(super) fn poll(&mut self, calls: &Calls, tag: CreationTag) -> bool {
        let Some(block) = self.block else { return false };
        let ended = self.advance(calls, tag, block).transpose();
        if let Some(result) = ended {
            self.block = None;
            self.result = Some(result.map(|()| self.finish(block)));
            return true;
        }
        false
    }

    fn advance(&mut self, calls: &Calls, tag: CreationTag, block: Block) -> Result<Option<()>, CallFault> {
        if !block.is_posted {
            let Some(comm) = self.comm.made(&self.members, tag)? else { return Ok(None) };
            self.post(comm, block)?;
            self.block = Some(Block { is_posted: true, ..block });
        }
        let mut ended = None;
        calls.test(&mut self.request, |request| ended = Some(request.result))?;
        ended.transpose()
    }

    /// Gives the block to MPI.
    fn post(&mut self, comm: ffi::MPI_Comm, block: Block) -> Result<(), CallFault> {
        let parts = if block.scatters { self.members.len() } else { 1 };
        let (Some(dtype), Some(op)) = (datatype(block.dtype), operation(block.reduction)) else {
            unreachable!("`take` has looked at the call")
        };
        let count = (block.len / parts / block.dtype.size()) as c_int;
        self.output.grow(block.len / parts);
        let (from, into) = (self.input.0.as_ptr().cast(), self.output.0.as_mut_ptr().cast());
        let request = &mut self.request.all[0];
        // SAFETY: the input has `parts` times `count` elements and the output `count`; nobody accesses either until the request has
        // ended, and they are leaked if it has not (`input`, `output`, `Drop`).
        let (call, code) = unsafe {
            if block.scatters {
                let code = ffi::MPI_Ireduce_scatter_block(from, into, count, dtype, op, comm, request);
                ("MPI_Ireduce_scatter_block", code)
            } else {
                ("MPI_Iallreduce", ffi::MPI_Iallreduce(from, into, count, dtype, op, comm, request))
            }
        };
        check(call, code)
    }

    /// Divides the sums of a mean; returns the length of the result.
    fn finish(&mut self, block: Block) -> usize {
        let ranks = self.members.len();
        let len = if block.scatters { block.len / ranks } else { block.len };
        if block.reduction == Reduction::Mean {
            let bytes = self.output.bytes_mut(len);
            match block.dtype {
                DType::F32 => {
                    each(bytes, |value| (f32::from_ne_bytes(value) / ranks as f32).to_ne_bytes());
                }
                _ => each(bytes, |value| (f64::from_ne_bytes(value) / ranks as f64).to_ne_bytes()),
            }
        }
        len
    }
}

impl SystemReduction for LibraryReductions {
    fn input(&mut self, len: usize) -> &mut [u8] {
        assert!(!self.is_under_way(), "MPI reads the input of a block that has not ended");
        self.input_len = len;
        self.input.grow(len);
        self.input.bytes_mut(len)
    }

    fn begin(&mut self, called: &Called) {
        let (Action::AllReduce(reduction) | Action::ReduceScatter(reduction)) = called.action else {
            unreachable!("`take` has looked at the call")
        };
        let scatters = matches!(called.action, Action::ReduceScatter(_));
        let len = self.input_len;
        self.result = None;
        self.block = Some(Block { len, reduction, dtype: called.dtype, scatters, is_posted: false });
    }

    fn output(&self) -> Result<Option<&[u8]>, LostWhy> {
        match &self.result {
            None => Ok(None),
            Some(Ok(len)) => Ok(Some(self.output.bytes(*len))),
            Some(Err(fault)) => Err(fault.clone().into()),
        }
    }
}

impl Drop for LibraryReductions {
    fn drop(&mut self) {
        if self.is_under_way() {
            std::mem::forget((std::mem::take(&mut self.input), std::mem::take(&mut self.output)));
        }
    }
}

impl GroupComm {
    /// Returns the communicator once it is made.
    fn made(&mut self, members: &[c_int], tag: CreationTag) -> Result<Option<ffi::MPI_Comm>, CallFault> {
        let made = match self {
            GroupComm::Made(comm) => *comm,
            GroupComm::Unmade => {
                if let Some(tag) = tag? {
                    *self = GroupComm::Making(make(members.to_vec(), tag)?);
                }
                return Ok(None);
            }
            GroupComm::Making(made) => match made.try_recv() {
                Ok(made) => made?,
                Err(TryRecvError::Empty) => return Ok(None),
                Err(TryRecvError::Disconnected) => {
                    return Err(CallFault {
                        call: "MPI_Comm_create_group",
                        message: "its thread ended".to_owned(),
                    });
                }
            },
        };
        *self = GroupComm::Made(made);
        Ok(Some(made.0))
    }
}

/// Makes the communicator of a group on a thread of its own.
fn make(members: Vec<c_int>, tag: c_int) -> Result<Receiver<Result<Handle, CallFault>>, CallFault> {
    let (sender, made) = channel();
    let make = move || {
        // The receiver is gone if the group has failed meanwhile.
        let _ = sender.send(create(&members, tag));
    };
    let thread = thread::Builder::new().name("meshstep-mpi-group".to_owned()).spawn(make);
    match thread {
        Ok(_) => Ok(made),
        Err(error) => Err(CallFault { call: "starting a thread", message: error.to_string() }),
    }
}

/// Creates it from the communicator of all ranks, in which no stream has tags.
fn create(members: &[c_int], tag: c_int) -> Result<Handle, CallFault> {
    // SAFETY: MPI is initialised, the list is of ranks of the job, and the handles are ours. Other threads may call MPI meanwhile at
    // MPI_THREAD_MULTIPLE.
    unsafe {
        let job = ffi::RSMPI_COMM_WORLD;
        let (mut all, mut group, mut comm) =
            (ffi::RSMPI_GROUP_NULL, ffi::RSMPI_GROUP_NULL, ffi::RSMPI_COMM_NULL);
        check("MPI_Comm_group", ffi::MPI_Comm_group(job, &mut all))?;
        let len = members.len() as c_int;
        check("MPI_Group_incl", ffi::MPI_Group_incl(all, len, members.as_ptr(), &mut group))?;
        check("MPI_Comm_create_group", ffi::MPI_Comm_create_group(job, group, tag, &mut comm))?;
        check("MPI_Comm_set_errhandler", ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN))?;
        check("MPI_Group_free", ffi::MPI_Group_free(&mut group))?;
        check("MPI_Group_free", ffi::MPI_Group_free(&mut all))?;
        Ok(Handle(comm))
    }
}

/// Returns the library's operation; a mean is a sum that is divided afterwards.
fn operation(reduction: Reduction) -> Option<ffi::MPI_Op> {
    // SAFETY: the constants are initialised when the program is loaded.
    unsafe {
        match reduction {
            Reduction::Sum | Reduction::Mean => Some(ffi::RSMPI_SUM),
            // A tree over the ranks has an order of its own.
            Reduction::Pairwise => None,
            // Maxima and minima of NaNs or of zeros depend on the order of the ranks in MPI libraries, so ranks could differ. MPICH
            // 4.0.2 also compares unsigned integers as signed ones.
            Reduction::Max | Reduction::Min | Reduction::PreMulSum { .. } | Reduction::SumThenMax { .. } => {
                None
            }
        }
    }
}

fn datatype(dtype: DType) -> Option<ffi::MPI_Datatype> {
    // SAFETY: as above.
    unsafe {
        match dtype {
            DType::F32 => Some(ffi::RSMPI_FLOAT),
            DType::F64 => Some(ffi::RSMPI_DOUBLE),
            DType::U64 => Some(ffi::RSMPI_UINT64_T),
            _ => None,
        }
    }
}

fn each<const SIZE: usize>(bytes: &mut [u8], change: impl Fn([u8; SIZE]) -> [u8; SIZE]) {
    bytes.as_chunks_mut::<SIZE>().0.iter_mut().for_each(|value| *value = change(*value));
}

impl Words {
    /// Makes room for `len` bytes.
    fn grow(&mut self, len: usize) {
        self.0.resize(len.div_ceil(size_of::<u64>()), 0);
    }

    fn bytes(&self, len: usize) -> &[u8] {
        assert!(len <= self.0.len() * size_of::<u64>());
        // SAFETY: the words have `len` initialised bytes.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), len) }
    }

    fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= self.0.len() * size_of::<u64>());
        // SAFETY: as above, and `self` is borrowed exclusively; every bit pattern is a word.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len) }
    }
}

//! Calls of the MPI library: non-blocking messages, their tests, and error codes as values.

use super::threads::Serial;
use ::mpi::ffi;
use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;

/// The library's functions on one communicator that covers the whole job. No call blocks.
#[derive(Debug)]
pub(super) struct Calls {
    comm: ffi::MPI_Comm,
    serial: Serial,
}

// SAFETY: an MPI handle may be used from any thread at MPI_THREAD_MULTIPLE. At MPI_THREAD_SERIALIZED every call holds the lock of
// `Serial`. A lower level does not get as far as a `Calls`.
unsafe impl Send for Calls {}
// SAFETY: as above.
unsafe impl Sync for Calls {}

/// A call that the library refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {message}")]
pub(super) struct CallFault {
    pub(super) call: &'static str,
    pub(super) message: String,
}

/// A request that has ended.
#[derive(Debug)]
pub(super) struct Ended {
    /// Index among the tested requests.
    pub(super) slot: usize,
    /// Rank in the job that sent the message; without meaning for a send.
    pub(super) source: usize,
    /// Bytes received; without meaning for a send.
    pub(super) len: usize,
    /// Error of the request.
    pub(super) result: Result<(), CallFault>,
}

/// Requests with the memory that their test needs, so that a test allocates nothing.
#[derive(Debug, Default)]
pub(super) struct Requests {
    /// The requests; a null request is a free slot.
    pub(super) all: Vec<ffi::MPI_Request>,
    indices: Vec<c_int>,
    statuses: Vec<MaybeUninit<ffi::MPI_Status>>,
}

// SAFETY: a request may be tested by another thread than the one that began it; `Calls` says at which thread levels.
unsafe impl Send for Requests {}

impl Requests {
    /// Adds `count` free slots and returns the index of the first.
    pub(super) fn grow(&mut self, count: usize) -> usize {
        let first = self.all.len();
        self.all.resize(first + count, null());
        self.indices.resize(first + count, 0);
        self.statuses.resize(first + count, MaybeUninit::uninit());
        first
    }

    /// Returns true if no message is under way in `slot`.
    pub(super) fn is_free(&self, slot: usize) -> bool {
        self.all[slot] == null()
    }

    /// Returns true if no message is under way in any slot.
    pub(super) fn are_free(&self) -> bool {
        self.all.iter().all(|request| *request == null())
    }
}

impl Calls {
    pub(super) fn new(comm: ffi::MPI_Comm, serial: Serial) -> Self {
        Calls { comm, serial }
    }

    /// Begins to send to rank `to` of the job. The request ends when the other rank has begun to receive, so a sender cannot fill
    /// the other rank's memory.
    ///
    /// # Safety
    /// `bytes` is valid for reads and no one writes it until the request in `slot` has ended.
    pub(super) unsafe fn send(
        &self,
        bytes: *const [u8],
        (to, tag): (usize, c_int),
        requests: &mut Requests,
        slot: usize,
    ) -> Result<(), CallFault> {
        let (len, request) = (count(bytes.len()), &mut requests.all[slot]);
        // SAFETY: the caller keeps the bytes unchanged until the request ends; the request's memory is exclusive to this call.
        let code = self.serial.run(|| unsafe {
            ffi::MPI_Issend(bytes.cast(), len, ffi::RSMPI_UINT8_T, to as c_int, tag, self.comm, request)
        });
        check("MPI_Issend", code)
    }

    /// Begins to receive from rank `from` of the job, or from any.
    ///
    /// # Safety
    /// `into` is valid for writes and no one accesses it until the request in `slot` has ended.
    pub(super) unsafe fn receive(
        &self,
        into: *mut [u8],
        (from, tag): (Option<usize>, c_int),
        requests: &mut Requests,
        slot: usize,
    ) -> Result<(), CallFault> {
        let (len, request) = (count(into.len()), &mut requests.all[slot]);
        // SAFETY: the constant is initialised when the program is loaded.
        let from = from.map_or(unsafe { ffi::RSMPI_ANY_SOURCE }, |from| from as c_int);
        // SAFETY: the caller leaves the memory to MPI until the request ends; the request's memory is exclusive to this call.
        let code = self.serial.run(|| unsafe {
            ffi::MPI_Irecv(into.cast(), len, ffi::RSMPI_UINT8_T, from, tag, self.comm, request)
        });
        check("MPI_Irecv", code)
    }

    /// Begins a barrier of all ranks of the job.
    pub(super) fn barrier(&self, requests: &mut Requests, slot: usize) -> Result<(), CallFault> {
        // SAFETY: the communicator is valid, and the request's memory is exclusive to this call.
        let code = self.serial.run(|| unsafe { ffi::MPI_Ibarrier(self.comm, &mut requests.all[slot]) });
        check("MPI_Ibarrier", code)
    }

    /// Tests all requests, frees the slots of those that have ended, and calls `on_end` for each.
    pub(super) fn test(
        &self,
        requests: &mut Requests,
        mut on_end: impl FnMut(Ended),
    ) -> Result<bool, CallFault> {
        let Requests { all, indices, statuses } = requests;
        let mut ended = 0;
        // SAFETY: the three arrays have one entry for each request, and MPI writes them in this call alone.
        let code = self.serial.run(|| unsafe {
            let (indices, statuses) = (indices.as_mut_ptr(), statuses.as_mut_ptr().cast());
            ffi::MPI_Testsome(all.len() as c_int, all.as_mut_ptr(), &mut ended, indices, statuses)
        });
        let in_status = code == ffi::MPI_ERR_IN_STATUS as c_int;
        if !in_status {
            check("MPI_Testsome", code)?;
        }
        // The number is MPI_UNDEFINED, which is negative, if all slots are free.
        let ended = usize::try_from(ended).unwrap_or(0);
        for (&slot, status) in indices.iter().zip(statuses).take(ended) {
            // SAFETY: MPI_Testsome has written the status of each request that it reports as ended.
            on_end(unsafe { read(slot as usize, status.assume_init_ref(), in_status) });
        }
        Ok(ended > 0)
    }

    /// Asks for the end of a receive that has not matched a message. The request still has to be tested.
    pub(super) fn cancel(&self, requests: &mut Requests, slot: usize) -> Result<(), CallFault> {
        if requests.is_free(slot) {
            return Ok(());
        }
        // SAFETY: the request is under way, and the call does not free it.
        let code = self.serial.run(|| unsafe { ffi::MPI_Cancel(&mut requests.all[slot]) });
        check("MPI_Cancel", code)
    }

    /// Frees the communicator, once all ranks have met and no request is under way.
    pub(super) fn free(&self) -> Result<(), CallFault> {
        let mut comm = self.comm;
        // SAFETY: the communicator is our own duplicate, and the caller's last use of it.
        check("MPI_Comm_free", self.serial.run(|| unsafe { ffi::MPI_Comm_free(&mut comm) }))
    }
}

/// Returns the ended request in `slot`.
///
/// # Safety
/// `status` was written by MPI for this request.
unsafe fn read(slot: usize, status: &ffi::MPI_Status, in_status: bool) -> Ended {
    let code = if in_status { status.MPI_ERROR } else { ffi::MPI_SUCCESS as c_int };
    let mut len: c_int = 0;
    // SAFETY: MPI has written the status, and the count is ours.
    let counted = unsafe { ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, &mut len) };
    let result = check("message", code).and_then(|()| check("MPI_Get_count", counted));
    let source = usize::try_from(status.MPI_SOURCE).unwrap_or(0);
    Ended { slot, source, len: usize::try_from(len).unwrap_or(0), result }
}

/// Turns an error code into a value with the library's text.
pub(super) fn check(call: &'static str, code: c_int) -> Result<(), CallFault> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    // SAFETY: the text has the room that MPI asks for, and the function may be called at any time and by any thread.
    let message = text::<{ ffi::MPI_MAX_ERROR_STRING as usize }>(|text, len| unsafe {
        ffi::MPI_Error_string(code, text, len);
    });
    Err(CallFault { call, message: if message.is_empty() { format!("code {code}") } else { message } })
}

/// Returns the text that `fill` writes, with at most `ROOM` bytes.
pub(super) fn text<const ROOM: usize>(fill: impl FnOnce(*mut c_char, *mut c_int)) -> String {
    let mut bytes = [0u8; ROOM];
    let mut len = 0;
    fill(bytes.as_mut_ptr().cast(), &mut len);
    let len = usize::try_from(len).unwrap_or(0).min(ROOM);
    String::from_utf8_lossy(&bytes[..len]).trim_end_matches(['\0', '\n']).to_owned()
}

/// Returns the request that stands for none.
pub(super) fn null() -> ffi::MPI_Request {
    // SAFETY: the constant is initialised when the program is loaded.
    unsafe { ffi::RSMPI_REQUEST_NULL }
}

/// Returns a length as MPI counts; tiles are far shorter than its limit of 2^31 - 1.
fn count(len: usize) -> c_int {
    debug_assert!(c_int::try_from(len).is_ok(), "a message of {len} bytes is longer than MPI counts");
    len as c_int
}

/// Returns the value of one of the job's attributes.
pub(super) fn attribute(comm: ffi::MPI_Comm, key: c_int) -> Option<c_int> {
    let mut value: *mut c_void = std::ptr::null_mut();
    let mut found = 0;
    // SAFETY: MPI writes a pointer to its own integer, which lives as long as the communicator.
    unsafe {
        let code = ffi::MPI_Comm_get_attr(comm, key, (&raw mut value).cast(), &mut found);
        (code == ffi::MPI_SUCCESS as c_int && found != 0).then(|| *value.cast::<c_int>())
    }
}

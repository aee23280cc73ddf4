//! Start of the world: MPI, a communicator of our own, and the transport of all ranks.

use super::announcements::Announcements;
use super::calls::{CallFault, Calls, attribute, check, null, text};
use super::identity::GroupId;
use super::job::MpiJob;
use super::pause::Pause;
use super::process::{self, MainThread};
use super::streams::GroupStreams;
use super::threads::{Serial, ThreadLevel};
use super::transport::MpiTransport;
use super::{Error, Options, Reductions, launcher};
use ::mpi::ffi;
use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

/// Highest tag that the MPI standard promises.
const LEAST_TAGS: c_int = 32_767;

/// Starts MPI if the program has not, and returns the transport of all ranks.
pub(super) fn transport(options: &Options) -> Result<MpiTransport, Error> {
    process::begin()?;
    let job = start(options).inspect_err(|error| process::ended(Some(error.to_string())))?;
    let streams = GroupStreams::new(GroupId::WORLD, 0..job.world_size);
    let rank = job.rank;
    Ok(MpiTransport::new(Arc::new(job), streams, rank))
}

fn start(options: &Options) -> Result<MpiJob, Error> {
    let deadline = options.deadline;
    let (main, level) = if process::is_initialized()? {
        (None, process::thread_level()?)
    } else {
        let (main, level) = MainThread::initialize(options.threads, deadline)?;
        (Some(main), level)
    };
    match world(options, level) {
        Ok((calls, announcements, place)) => Ok(MpiJob::new(calls, announcements, place, main, options)),
        Err(error) => {
            // All ranks meet the same error and finalise; if one does not, the process ends without.
            main.map_or(Ok(true), |main| main.finalize(options.abort_within))?;
            Err(error)
        }
    }
}

/// Returns the calls on a communicator of our own, and this process's rank and the number of ranks.
fn world(options: &Options, level: ThreadLevel) -> Result<(Calls, Announcements, [usize; 2]), Error> {
    let library = library();
    let serial = serial(level, options.threads, &library)?;
    if options.reductions == Reductions::Library && level < ThreadLevel::Multiple {
        return Err(Error::LibraryReductions { given: level, library });
    }
    // SAFETY: the constant is initialised when the program is loaded.
    let world = unsafe { ffi::RSMPI_COMM_WORLD };
    let place = serial.run(|| place(world))?;
    launcher::check(|name| std::env::var(name).ok(), place, &library)?;
    let last_tag = serial.run(|| attribute(world, ffi::MPI_TAG_UB as c_int)).unwrap_or(LEAST_TAGS);
    let calls = Calls::new(duplicate(world, serial, options.deadline)?, serial);
    let announcements = Announcements::new(&calls, place, last_tag, options.reductions)?;
    Ok((calls, announcements, place))
}

fn serial(given: ThreadLevel, wanted: ThreadLevel, library: &str) -> Result<Serial, Error> {
    let advice = if given >= wanted {
        "ask for a higher level with mpi::Options::threads, or in the program's own MPI_Init_thread"
    } else {
        "use a build of the library with thread support"
    };
    Serial::of(given).ok_or_else(|| Error::ThreadLevel { given, advice, library: library.to_owned() })
}

/// Returns the rank of this process and the number of ranks, and makes errors of the communicator return.
fn place(world: ffi::MPI_Comm) -> Result<[usize; 2], CallFault> {
    let (mut rank, mut world_size) = (0, 0);
    // SAFETY: MPI is initialised, the communicator is that of all ranks, and the two integers are ours.
    unsafe {
        check("MPI_Comm_set_errhandler", ffi::MPI_Comm_set_errhandler(world, ffi::RSMPI_ERRORS_RETURN))?;
        check("MPI_Comm_rank", ffi::MPI_Comm_rank(world, &mut rank))?;
        check("MPI_Comm_size", ffi::MPI_Comm_size(world, &mut world_size))?;
    }
    Ok([rank, world_size].map(|number| usize::try_from(number).unwrap_or(0)))
}

/// Returns a communicator of all ranks; no other part of the program receives its messages.
fn duplicate(world: ffi::MPI_Comm, serial: Serial, deadline: Duration) -> Result<ffi::MPI_Comm, Error> {
    // MPI writes the handle when the request ends, so it does not live on a stack that may be gone.
    // SAFETY: the constant is initialised when the program is loaded.
    let comm = Box::into_raw(Box::new(unsafe { ffi::RSMPI_COMM_NULL }));
    let mut request = null();
    // SAFETY: the handle's memory is leaked until the request has ended.
    check("MPI_Comm_idup", serial.run(|| unsafe { ffi::MPI_Comm_idup(world, comm, &mut request) }))?;
    let pause = Pause::begin();
    let mut ended = 0;
    while ended == 0 {
        // SAFETY: the request is ours, and its status is not asked for.
        let code =
            serial.run(|| unsafe { ffi::MPI_Test(&mut request, &mut ended, ffi::RSMPI_STATUS_IGNORE) });
        check("MPI_Test", code)?;
        if ended == 0 && !pause.once(deadline) {
            return Err(Error::Late { call: "MPI_Comm_idup", after: deadline });
        }
    }
    // SAFETY: the request has ended, so MPI does not access the handle any more; the box is the one made above.
    let comm = *unsafe { Box::from_raw(comm) };
    // SAFETY: the communicator is valid.
    let code = serial.run(|| unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) });
    check("MPI_Comm_set_errhandler", code)?;
    Ok(comm)
}

/// Returns the first line of the library's name and version.
fn library() -> String {
    // SAFETY: the text has the room that MPI asks for, and the function may be called at any time and by any thread.
    let text = text::<{ ffi::MPI_MAX_LIBRARY_VERSION_STRING as usize }>(|text, len| unsafe {
        ffi::MPI_Get_library_version(text, len);
    });
    text.lines().next().unwrap_or_default().to_owned()
}

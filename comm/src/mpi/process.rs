//! MPI in this process: it begins once, ends once, and has one thread for both.

use super::Error;
use super::calls::{CallFault, check};
use super::threads::ThreadLevel;
use ::mpi::ffi;
use std::fmt::Display;
use std::io::Write as _;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Time for the launcher to read the last line before the job ends.
const FORWARDED_WITHIN: Duration = Duration::from_millis(100);

/// State of the world in this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// There is no world.
    Free,
    /// There is one.
    Running,
    /// The world has ended, by this failure if any.
    Ended(Option<String>),
}

static PHASE: Mutex<Phase> = Mutex::new(Phase::Free);

/// Begins a world, or says why this process cannot have one.
pub(super) fn begin() -> Result<(), Error> {
    let mut phase = phase();
    match &*phase {
        Phase::Running => return Err(Error::SecondWorld),
        Phase::Ended(Some(failure)) => return Err(Error::AfterFailure { failure: failure.clone() }),
        Phase::Free | Phase::Ended(None) => {}
    }
    if is_finalized()? {
        return Err(Error::Finalized);
    }
    *phase = Phase::Running;
    Ok(())
}

/// Notes that the world has ended.
pub(super) fn ended(failure: Option<String>) {
    *phase() = Phase::Ended(failure);
}

/// Ends all processes of the job.
pub(super) fn abort(cause: &dyn Display) -> ! {
    // An error of this write has no reader.
    let _ = writeln!(std::io::stderr(), "meshstep: MPI_Abort ends the job: {cause}");
    // MPICH's launcher drops output that it has not read when the job ends.
    thread::sleep(FORWARDED_WITHIN);
    // SAFETY: MPI is initialised and not finalised while there is a job. The call takes no lock of ours, so that it also runs
    // beside a call that hangs.
    unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, 1) };
    // MPI_Abort returns where the library cannot reach the launcher, which sees the end of this process.
    std::process::abort();
}

/// Returns true if MPI was initialised, by this backend or by the program.
pub(super) fn is_initialized() -> Result<bool, CallFault> {
    let mut flag = 0;
    // SAFETY: the function may be called at any time and by any thread.
    check("MPI_Initialized", unsafe { ffi::MPI_Initialized(&mut flag) })?;
    Ok(flag != 0)
}

fn is_finalized() -> Result<bool, CallFault> {
    let mut flag = 0;
    // SAFETY: the function may be called at any time and by any thread.
    check("MPI_Finalized", unsafe { ffi::MPI_Finalized(&mut flag) })?;
    Ok(flag != 0)
}

/// Returns the thread level at which the program has initialised MPI.
pub(super) fn thread_level() -> Result<ThreadLevel, CallFault> {
    let mut level = 0;
    // SAFETY: MPI is initialised, and the function may be called by any thread.
    check("MPI_Query_thread", unsafe { ffi::MPI_Query_thread(&mut level) })?;
    Ok(ThreadLevel::of(level))
}

/// The thread that initialised MPI, which alone may finalise it.
#[derive(Debug)]
pub(super) struct MainThread {
    orders: Sender<()>,
    finalized: Mutex<Receiver<Result<(), CallFault>>>,
}

impl MainThread {
    /// Initialises MPI and returns the thread level that it has. MPI waits for all ranks of the job, this call `at_most` so long.
    pub(super) fn initialize(wanted: ThreadLevel, at_most: Duration) -> Result<(Self, ThreadLevel), Error> {
        let (orders, ordered) = channel();
        let (tell_level, level) = channel();
        let (tell_end, end) = channel();
        let run = move || {
            let _ = tell_level.send(initialize(wanted));
            // Without an order the world never began, and the process ends without MPI_Finalize.
            if ordered.recv().is_ok() {
                // SAFETY: this thread has initialised MPI, and no call of another thread is under way.
                let _ = tell_end.send(check("MPI_Finalize", unsafe { ffi::MPI_Finalize() }));
            }
        };
        let spawned = thread::Builder::new().name("meshstep-mpi".to_owned()).spawn(run);
        spawned.map_err(|error| Error::NoThread { message: error.to_string() })?;
        let late = |_| Error::Late { call: "MPI_Init_thread", after: at_most };
        let level = level.recv_timeout(at_most).map_err(late)??;
        Ok((MainThread { orders, finalized: Mutex::new(end) }, level))
    }

    /// Finalises MPI; false if that takes longer than `at_most`.
    pub(super) fn finalize(self, at_most: Duration) -> Result<bool, CallFault> {
        let finalized = self.finalized.into_inner().unwrap_or_else(PoisonError::into_inner);
        if self.orders.send(()).is_err() {
            return Ok(false);
        }
        finalized.recv_timeout(at_most).map_or(Ok(false), |result| result.map(|()| true))
    }
}

fn initialize(wanted: ThreadLevel) -> Result<ThreadLevel, CallFault> {
    let mut level = 0;
    let (argc, argv) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: MPI was not initialised before (`begin`, `is_initialized`); null arguments are allowed.
    let code = unsafe { ffi::MPI_Init_thread(argc, argv, wanted.number(), &mut level) };
    check("MPI_Init_thread", code)?;
    Ok(ThreadLevel::of(level))
}

/// Returns the phase, also after a panic (decision 119): it is one value.
fn phase() -> MutexGuard<'static, Phase> {
    PHASE.lock().unwrap_or_else(PoisonError::into_inner)
}

//! Standby of an arbiter: a process that keeps a copy of the arbiter's log.

use super::dial::{Dialled, dial};
use super::protocol::{FromService, ToService};
use crate::log::Log;
use crate::wire::Wire;
use crate::{ConnectionError, Error, State};
use meshstep_comm::rendezvous::{Incoming, Outgoing, Token, Why};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Pause between two attempts to reach the arbiter.
const PAUSE: Duration = Duration::from_millis(50);
/// Interval between two messages to the arbiter.
const BEAT: Duration = Duration::from_secs(1);

/// Copy of the log of an active arbiter. While it follows, the arbiter sends no message before its state is on this disk too.
///
/// A standby decides nothing. After the arbiter has ended, it is promoted by hand: drop it, call
/// [`Log::promote`](crate::Log::promote) and start a [`Service`](crate::Service) on its log.
#[derive(Debug)]
pub struct Standby {
    shared: Arc<StandbyShared>,
    thread: Option<JoinHandle<()>>,
}

/// State of a standby's copy of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StandbyCopy {
    /// True while it is connected to the arbiter.
    pub follows: bool,
    /// Number of records that it has written.
    pub records: u64,
    /// Term of the last record; 0 before the first.
    pub term: u64,
}

#[derive(Debug)]
struct StandbyShared {
    addrs: Vec<SocketAddr>,
    token: Option<Token>,
    run: String,
    inside: Mutex<StandbyState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct StandbyState {
    kept: StandbyCopy,
    failed: Option<Error>,
    outgoing: Option<Outgoing>,
    closing: bool,
}

impl Standby {
    /// Follows the arbiter of `run` at one of `addrs`, and keeps its log in the file `log`.
    ///
    /// # Errors
    /// [`Error::Connection`] without an address, [`Error::Log`], [`Error::NoThread`].
    pub fn start(addrs: &[SocketAddr], token: Option<&Token>, run: &str, log: &Path) -> Result<Self, Error> {
        if addrs.is_empty() {
            return Err(ConnectionError::NoAddress.into());
        }
        let (log, last) = Log::open(log)?;
        let kept =
            StandbyCopy { term: last.as_ref().map_or(0, |state| state.term), ..StandbyCopy::default() };
        let inside = Mutex::new(StandbyState { kept, ..StandbyState::default() });
        let (addrs, token, run) = (addrs.to_vec(), token.cloned(), run.to_owned());
        let shared = Arc::new(StandbyShared { addrs, token, run, inside, changed: Condvar::new() });
        let for_thread = Arc::clone(&shared);
        let thread = Builder::new().name("standby".to_owned()).spawn(move || for_thread.keep(log, last));
        let thread = thread.map_err(|error| Error::NoThread { message: error.to_string() })?;
        Ok(Standby { shared, thread: Some(thread) })
    }

    /// Returns what the standby has.
    pub fn kept(&self) -> StandbyCopy {
        self.shared.lock().kept
    }

    /// Returns why the standby has stopped: the copy cannot be written or knows more than the arbiter ([`Error::OldRecord`]), another
    /// standby follows, or the arbiter is of another run. While no arbiter of the copy's term or a later one answers, the standby
    /// calls again, and [`kept`](Self::kept) says that it does not follow.
    pub fn failed(&self) -> Option<Error> {
        self.shared.lock().failed.clone()
    }
}

impl Drop for Standby {
    fn drop(&mut self) {
        let mut inside = self.shared.lock();
        inside.closing = true;
        inside.outgoing.iter().for_each(Outgoing::cut);
        drop(inside);
        self.shared.changed.notify_all();
        // The thread does not panic; a drop could not report a panic.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl StandbyShared {
    /// Returns the state, also after a panic (decision 119): a record is in the copy before it counts.
    fn lock(&self) -> MutexGuard<'_, StandbyState> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows until the standby is dropped, or meets an error that another attempt would not change.
    fn keep(&self, mut log: Log, mut last: Option<State>) {
        while !self.is_over() {
            let known = self.lock().kept.term;
            let ended = match dial(&self.addrs, self.token.as_ref(), &self.run, known) {
                Ok(line) => self.follow(line, &mut log, &mut last),
                Err(error) if error.may_change() => Ok(()),
                Err(error) => Err(error.into()),
            };
            let mut inside = self.lock();
            (inside.kept.follows, inside.outgoing) = (false, None);
            inside.failed = ended.err();
            if !inside.closing && inside.failed.is_none() {
                drop(self.changed.wait_timeout(inside, PAUSE));
            }
        }
    }

    fn is_over(&self) -> bool {
        let inside = self.lock();
        inside.closing || inside.failed.is_some()
    }

    /// Runs one connection to its end.
    fn follow(&self, line: Dialled, log: &mut Log, last: &mut Option<State>) -> Result<(), Error> {
        let Dialled { mut incoming, outgoing, .. } = line;
        let term = {
            let mut inside = self.lock();
            inside.outgoing = Some(outgoing);
            inside.kept.term
        };
        let mut sent = self.send(&ToService::Follow { term });
        let mut number = 0;
        while sent {
            match next(&mut incoming) {
                Ok(FromService::Record { number: record, state }) => {
                    write(log, last, &state)?;
                    number = record;
                    let mut inside = self.lock();
                    let records = inside.kept.records + 1;
                    inside.kept = StandbyCopy { follows: true, records, term: state.term };
                }
                Ok(FromService::Replaced {}) => return Err(Error::Replaced),
                Ok(FromService::Term { .. } | FromService::Say { .. }) | Err(Why::Silent { .. }) => {}
                Err(_) => return Ok(()),
            }
            sent = self.send(&ToService::Kept { number });
        }
        Ok(())
    }

    /// Sends a message; returns false if the connection has ended.
    fn send(&self, message: &ToService) -> bool {
        let mut inside = self.lock();
        let closing = inside.closing;
        let sent = inside.outgoing.as_mut().map(|outgoing| outgoing.send(&message.encode()).is_ok());
        !closing && sent == Some(true)
    }
}

fn next(incoming: &mut Incoming) -> Result<FromService, Why> {
    let payload = incoming.next(Instant::now() + BEAT)?;
    FromService::decode(&payload).ok_or(Why::NotUnderstood)
}

/// Writes a record to the copy, which is of one run. A record of an arbiter that has lost its log would end what the copy knows.
fn write(log: &mut Log, last: &mut Option<State>, state: &State) -> Result<(), Error> {
    if last.as_ref().is_some_and(|last| last.digest.is_some() && last.digest != state.digest) {
        return Err(crate::ConfigError::OtherRun.into());
    }
    if let Some(last) = last.as_ref().filter(|last| last.knows_more_than(state)) {
        let State { term, epoch, round, .. } = *state;
        let (copy_term, copy_epoch, copy_round) = (last.term, last.epoch, last.round);
        return Err(Error::OldRecord { term, epoch, round, copy_term, copy_epoch, copy_round });
    }
    log.append(state)?;
    *last = Some(state.clone());
    Ok(())
}

impl ConnectionError {
    /// Returns true if another attempt may succeed.
    pub(super) fn may_change(&self) -> bool {
        use meshstep_comm::rendezvous::Error::Unreachable;
        matches!(self, ConnectionError::Other(Unreachable { .. }) | ConnectionError::OldTerm { .. })
    }
}
